"""Tokens to text as they come: no half characters, and nothing that a stop string could take back."""

from collections.abc import Sequence
from typing import Any

_HALF = "\ufffd"  # what a decoder makes of bytes that are no whole character yet


class Decoding:
    """The text of one answer. What it gives is, put together, `tokenizer.decode` of all of its tokens.

    Decoders look at a token's neighbours (spaces between words, bytes that make up one character), so the last few
    tokens are decoded again with each new one.

    Args:
      tokenizer: a `tokenizers.Tokenizer`; None for no text at all.
      stop: the text ends before the first of these strings to be complete.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._from = 0  # the first token that is decoded again, as a neighbour of those from `_shown` on
        self._shown = 0  # tokens whose text has been taken into `_kept` or given out
        self._kept = ""  # text that a stop string may take back
        self._length = 0  # of the text that was given out or is kept
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that one more token makes certain."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._from : self._shown])
        text = self._decode(self._tokens[self._from :])
        if len(text) <= len(before) or text.endswith(_HALF):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return self._give(text[len(before) :])

    def finish(self) -> str:
        """What is left at the end of the answer."""
        if self._tokenizer is None or self.stopped:
            return ""
        rest = self._decode(self._tokens)[self._length :]
        text = self._give(rest)
        if not self.stopped:
            text, self._kept = text + self._kept, ""
        return text

    def _give(self, new: str) -> str:
        self._length += len(new)
        text = self._kept + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._kept = text[len(text) - held :]
        return text[: len(text) - held]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens and self._tokenizer is not None else ""


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of `text` that `stop` begins with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
