"""Response bodies of all APIs: whole responses, and events of a stream."""

import base64
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from uuid import uuid4

import numpy as np

from jlora.serve.engine.request import Piece, TokenLogprob
from jlora.serve.http.protocol import ApiRequest

_LEAST = -9999.0  # JSON has no infinity
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def displayed(path: str) -> str:
    """Return a path as UTF-8 can encode it. Python decodes bytes that are not of the locale to lone surrogates."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def to_event(content: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + _encode(content).encode() + b"\n\n"


def _logprob(value: float) -> float:
    return value if value > _LEAST else _LEAST  # also replaces NaN


def _byte_letters() -> dict[str, int]:
    """Return the alphabet of byte-level tokenizers: printable Latin-1 for itself, other bytes from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenTexts:
    """Texts of single tokens of a `tokenizers.Tokenizer`, including special tokens.

    Attributes:
      longest: Characters of the longest token, as written in the vocabulary.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._letters = _byte_letters()
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.of = lru_cache(maxsize=65536)(self._of)

    def _of(self, token: int) -> tuple[str, bytes]:
        """Return a token's text with its leading space, and its bytes, which may be incomplete characters."""
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        # Some decoders drop the space at the start of a text, so read the second of two tokens.
        text: str = twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once
        name: str = self._tokenizer.id_to_token(token) or ""
        if "\ufffd" not in text or "\ufffd" in name:
            return text, text.encode()
        if found := _BYTE.fullmatch(name):
            return text, bytes([int(found[1], 16)])
        if all(letter in self._letters for letter in name):
            return text, bytes(self._letters[letter] for letter in name)
        return text, text.encode()

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt of token ids, without special tokens."""
        return self._tokenizer.decode(tokens)

    def key(self, token: int) -> str:
        r"""Return the key of a token in `top_logprobs` of completions: its text, or `bytes:\xe2\x80` if incomplete."""
        text, raw = self.of(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw != text.encode() else text


@dataclass
class Choice:
    """One completion of a request, accumulated so far. `prompt` and `tokens` are token ids."""

    prompt: Sequence[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish_reason: str | None = None
    begun: bool = False
    embedding: np.ndarray | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] = ()

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.finish_reason = piece.finish_reason
        self.embedding = piece.embedding


class ResponseWriter:
    """Formats the responses of one request.

    Args:
      api_request: The request. With `include_usage`, events carry `"usage": null` before a last one with token counts.
      texts: Texts of tokens.
      fingerprint: The `system_fingerprint`, also in `headers`.
    """

    def __init__(self, api_request: ApiRequest, texts: TokenTexts, fingerprint: str):
        chat, model, include_usage = api_request.chat, api_request.model, api_request.include_usage
        self.headers = {"x-system-fingerprint": fingerprint}
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self._chat, self._texts, self._logprobs = chat, texts, api_request.params.logprobs is not None
        self._token_ids, self._tokens_as_ids = api_request.token_ids, api_request.tokens_as_ids
        self._echo, self._prompt_logprobs = api_request.echo, api_request.params.prompt_logprobs is not None
        # As in vLLM, a response with ids has those of the prompt, and not its text.
        prompts = api_request.prompts if self._echo and not self._token_ids else ()
        self._echoed = [
            one if isinstance(one, str) else texts.text(one) for one in prompts for _ in range(api_request.n)
        ]
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._head["system_fingerprint"] = fingerprint
        self._event_head = {**self._head, "object": "chat.completion.chunk" if chat else kind}
        # Encoded once, since events (thousands a second) differ only in their choice.
        self._before = b"data: " + _encode(self._event_head)[:-1].encode() + b',"choices":['
        self._usage = b',"usage":null' if include_usage else b""

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a whole response."""
        prompt: dict[str, Any] = {"prompt_token_ids": choices[0].prompt} if self._token_ids and self._chat else {}
        prompt |= {"prompt_logprobs": self._of_prompt(choices[0])} if self._prompt_logprobs and self._chat else {}
        return {**self._head, "choices": [self._choice(i, c) for i, c in enumerate(choices)], "usage": usage, **prompt}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs_of(choice.logprobs, index, choice)
        end: dict[str, Any] = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._token_ids:
            end |= {"token_ids": choice.tokens} | ({} if self._chat else {"prompt_token_ids": choice.prompt})
        if self._chat:
            return {"index": index, "message": {"role": "assistant", "content": choice.text, "refusal": None}, **end}
        end |= {"prompt_logprobs": self._of_prompt(choice)} if self._prompt_logprobs else {}
        return {"index": index, "text": self._echo_of(index) + choice.text, **end}

    def _echo_of(self, index: int) -> str:
        """Return the text of the prompt that the response has before its completion."""
        return self._echoed[index] if self._echoed else ""

    def _of_prompt(self, choice: Choice) -> list[dict[str, Any] | None]:
        """Return log probabilities of a prompt in vLLM's form."""
        return [
            None
            if one is None
            else {
                str(token): {"logprob": _logprob(value), "rank": rank, "decoded_token": self._texts.of(token)[0]}
                for rank, (token, value) in [(one.rank, (one.token, one.logprob)), *enumerate(one.top, 1)]
            }
            for one in choice.prompt_logprobs
        ]

    def events(self, index: int, choice: Choice, piece: Piece, usage: dict[str, Any] | None = None) -> bytes:
        """Return the events for a piece; empty while its text is pending. `usage` are the token counts of each."""
        deltas: list[dict[str, Any]] = []
        prompt = {"prompt_token_ids": choice.prompt} if self._token_ids and not choice.begun else {}
        if self._chat and not choice.begun:
            deltas.append({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        wanted = self._token_ids or (self._logprobs and piece.logprobs)
        if piece.text or piece.finish_reason or (wanted and piece.tokens):
            logprobs = self._logprobs_of(piece.logprobs, index, None if choice.begun else choice)
            end: dict[str, Any] = {"logprobs": logprobs, "finish_reason": piece.finish_reason}
            end |= {"token_ids": piece.tokens} if self._token_ids else {}
            if self._chat:
                delta = {"content": piece.text} if piece.text or not piece.finish_reason else {}
                deltas.append({"index": index, "delta": delta, **end})
            else:
                text = ("" if choice.begun else self._echo_of(index)) + piece.text
                deltas.append({"index": index, "text": text, **end, **prompt})
        choice.begun = choice.begun or bool(deltas)
        counts = self._usage if usage is None else b',"usage":' + _encode(usage).encode()
        after = [b"]" + counts + b"}\n\n"] * len(deltas)
        if self._chat and prompt:  # vLLM has it beside the choices of the first event
            after[0] = b"]," + _encode(prompt)[1:-1].encode() + counts + b"}\n\n"
        return b"".join(
            [self._before + _encode(delta).encode() + end for delta, end in zip(deltas, after, strict=True)]
        )

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the last event, with token counts."""
        return to_event({**self._event_head, "choices": [], "usage": usage})

    def _logprobs_of(
        self, logprobs: Sequence[TokenLogprob], index: int, choice: Choice | None
    ) -> dict[str, Any] | None:
        """Return log probabilities of new tokens, after those of an echoed prompt if they begin `choice`."""
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
        prompt = choice.prompt_logprobs if choice is not None and self._echo else ()
        every, start = [*prompt, *logprobs], len(self._echo_of(index))
        offsets = [one.offset if one else 0 for one in prompt] + [start + one.offset for one in logprobs]
        tokens = [*(choice.prompt if choice is not None and prompt else ()), *(one.token for one in logprobs)]
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [one and _logprob(one.logprob) for one in every],
            "top_logprobs": [
                one and {self._name(token): _logprob(value) for token, value in [*one.top, (one.token, one.logprob)]}
                for one in every
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._tokens_as_ids else self._texts.key(token)

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, raw = self._texts.of(token)
        return {
            "token": self._name(token) if self._tokens_as_ids else text,
            "logprob": _logprob(value),
            "bytes": list(raw),
        }


def embeddings_body(model: str, choices: Sequence[Choice], usage: dict[str, Any], encoding: str) -> bytes:
    """Return the body of a response with embeddings. They are encoded one by one, so that other threads run."""
    items: list[str] = []
    for i, choice in enumerate(choices):
        found = np.asarray(choice.embedding, "<f4")
        value = base64.b64encode(found.tobytes()).decode() if encoding == "base64" else found.tolist()
        items.append(_encode({"object": "embedding", "index": i, "embedding": value}))
    tokens = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
    head = _encode({"object": "list", "model": model, "usage": tokens})
    return f'{head[:-1]},"data":[{",".join(items)}]}}'.encode()


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return the `usage` object. `cached_tokens` of the prompt tokens were copied, not computed."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
