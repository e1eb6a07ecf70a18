"""Tokens to text as they come: no half characters, and nothing that a stop string could take back."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

_HALF = "\ufffd"  # what a decoder makes of bytes that are no whole character yet
_AT_ONCE = 16  # tokens without whole characters that are decoded again with each new one: no character has as many


class Detokenizer:
    """The text of one answer. What it gives is, put together, `tokenizer.decode` of all of its tokens.

    Decoders look at a token's neighbours (spaces between words, bytes that make up one character), so the last few
    tokens are decoded again with each new one. Bytes that never become characters have no end to begin anew from: a
    long run of them is decoded whenever it has grown by an eighth, so that it costs no more than it is long.

    Args:
      tokenizer: a `tokenizers.Tokenizer`; None for no text at all.
      stop: the text ends before the first of these strings to be complete.
      silent: tokens that are no part of any text, as `silent_tokens` finds them.

    Attributes:
      length: of the text that is certain but for stop strings, given out or not.
      stopped: whether a stop string has ended it.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = (), silent: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._stop = [(one, _shorter(one)) for one in stop]
        self._begun = [0] * len(self._stop)  # how much of each the text ends with
        self._silent = silent
        self._tokens: list[int] = []
        self._from = 0  # the first token that is decoded again, as a neighbour of those from `_shown` on
        self._shown = 0  # tokens whose text has been taken into `_kept` or given out
        self._again = 0  # how many tokens without text, where they are more than `_AT_ONCE`, are decoded again next
        self._kept = ""  # text that a stop string may take back
        self.length = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that one more token makes certain."""
        if self._tokenizer is None or self.stopped or token in self._silent:
            return ""
        self._tokens.append(token)
        waiting = len(self._tokens) - self._shown
        if _AT_ONCE < waiting < self._again:
            return ""
        before = self._decode(self._tokens[self._from : self._shown])
        text = self._decode(self._tokens[self._from :])
        if len(text) <= len(before) or text.endswith(_HALF):
            self._again = waiting + 1 + waiting // 8
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return self._give(text[len(before) :])

    def finish(self) -> str:
        """What is left at the end of the answer."""
        if self._tokenizer is None or self.stopped:
            return ""
        rest = self._decode(self._tokens)[self.length :]
        text = self._give(rest)
        if not self.stopped:
            text, self._kept = text + self._kept, ""
        return text

    def _give(self, new: str) -> str:
        self.length += len(new)
        text = self._kept + new
        found = [len(self._kept) + at for i in range(len(self._stop)) if (at := self._find(i, new)) is not None]
        if found:
            self.stopped = True
            return text[: min(found)]
        held = max(self._begun, default=0)
        self._kept = text[len(text) - held :]
        return text[: len(text) - held]

    def _find(self, i: int, new: str) -> int | None:
        """Where the i-th stop string begins that these characters complete, counted from the first of them.

        By Knuth, Morris and Pratt: what is kept is not looked at again, however long it is.
        """
        (stop, shorter), size = self._stop[i], self._begun[i]
        for end, letter in enumerate(new, 1):
            while size and stop[size] != letter:
                size = shorter[size - 1]
            size += stop[size] == letter
            if size == len(stop):
                return end - size
        self._begun[i] = size
        return None

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens and self._tokenizer is not None else ""


def silent_tokens(tokenizer: Any | None, vocab: int) -> frozenset[int]:
    """Of the ids below `vocab` those that `tokenizer.decode` leaves out: special tokens, and what it does not know.

    A model may repeat one for ever: kept until text comes, they would be decoded again with each new one.
    """
    if tokenizer is None:
        return frozenset()
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return frozenset(special.union(token for token in range(vocab) if tokenizer.id_to_token(token) is None))


@lru_cache(maxsize=1024)  # all answers of a request have the same
def _shorter(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of the longest shorter one that it ends with."""
    found, size = [0], 0
    for letter in stop[1:]:
        while size and stop[size] != letter:
            size = found[size - 1]
        size += stop[size] == letter
        found.append(size)
    return found
