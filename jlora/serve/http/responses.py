"""Response bodies of both APIs: whole responses, and events of a stream."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jlora.serve.engine.request import Piece, TokenLogprob
from jlora.serve.http.tokens import TokenTexts

_LEAST = -9999.0  # JSON has no infinity
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_event(content: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + _encode(content).encode() + b"\n\n"


def _logprob(value: float) -> float:
    return value if value > _LEAST else _LEAST  # also replaces NaN


@dataclass
class Choice:
    """One completion of a request, accumulated so far."""

    text: str = ""
    tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None
    begun: bool = False

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += len(piece.tokens)
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


class ResponseWriter:
    """Formats the responses of one request.

    Args:
      chat: True for the chat API, False for completions.
      model: model name as given by the client.
      texts: texts of tokens.
      logprobs: True if log probabilities were requested.
      include_usage: True if events carry `"usage": null` before a last one with token counts.
    """

    def __init__(self, chat: bool, model: str, texts: TokenTexts, logprobs: bool, include_usage: bool = False):
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self._chat, self._texts, self._logprobs = chat, texts, logprobs
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._event_head = {**self._head, "object": "chat.completion.chunk" if chat else kind}
        # Encoded once, since events (thousands a second) differ only in their choice.
        head, usage = _encode(self._event_head), b',"usage":null' if include_usage else b""
        self._before, self._after = b"data: " + head[:-1].encode() + b',"choices":[', b"]" + usage + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """Return the body of a whole response."""
        return {**self._head, "choices": [self._choice(i, c) for i, c in enumerate(choices)], "usage": usage}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs_of(choice.logprobs)
        end = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._chat:
            return {"index": index, "message": {"role": "assistant", "content": choice.text, "refusal": None}, **end}
        return {"index": index, "text": choice.text, **end}

    def events(self, index: int, choice: Choice, piece: Piece) -> bytes:
        """Return the events for a piece; empty while its text is pending."""
        deltas: list[dict[str, Any]] = []
        if self._chat and not choice.begun:
            deltas.append({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
            choice.begun = True
        if piece.text or piece.finish_reason or (self._logprobs and piece.logprobs):
            end = {"logprobs": self._logprobs_of(piece.logprobs), "finish_reason": piece.finish_reason}
            if self._chat:
                delta = {"content": piece.text} if piece.text or not piece.finish_reason else {}
                deltas.append({"index": index, "delta": delta, **end})
            else:
                deltas.append({"index": index, "text": piece.text, **end})
        return b"".join([self._before + _encode(delta).encode() + self._after for delta in deltas])

    def usage_event(self, usage: dict[str, int]) -> bytes:
        """Return the last event, with token counts."""
        return to_event({**self._event_head, "choices": [], "usage": usage})

    def _logprobs_of(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            return {
                "content": [
                    {
                        **self._entry(one.token, one.logprob),
                        "top_logprobs": [self._entry(token, value) for token, value in one.top],
                    }
                    for one in logprobs
                ],
                "refusal": None,
            }
        return {
            "tokens": [self._texts.key(one.token) for one in logprobs],
            "token_logprobs": [_logprob(one.logprob) for one in logprobs],
            "top_logprobs": [
                {self._texts.key(token): _logprob(value) for token, value in [*one.top, (one.token, one.logprob)]}
                for one in logprobs
            ],
            "text_offset": [one.offset for one in logprobs],
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, raw = self._texts.of(token)
        return {"token": text, "logprob": _logprob(value), "bytes": list(raw)}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the `usage` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
