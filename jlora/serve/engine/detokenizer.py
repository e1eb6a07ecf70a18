"""Incremental detokenization: emit only whole characters, and no text that a stop string may still cut."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

_HALF = "\ufffd"  # replacement character, decoded from an incomplete UTF-8 sequence
_AT_ONCE = 16  # longest run of undecodable tokens that is decoded again with each new token


class Detokenizer:
    """Incremental text of one completion.

    The concatenated outputs equal `tokenizer.decode` of all tokens. Decoders depend on a token's neighbors (spaces
    between words, bytes of one character), so the last few tokens are decoded again with each new one. Bytes that never
    form a character give no point to restart from. A long run of them is decoded again only after it has grown by an
    eighth, which keeps the total cost linear in its length.

    Args:
      tokenizer: A `tokenizers.Tokenizer`, or None to produce no text.
      stop: The text ends before the first of these strings to be complete.
      silent: Token ids that produce no text, from `silent_tokens`.

    Attributes:
      length: Number of characters decoded so far, including text held back for a stop string.
      stopped: True if a stop string has ended the text.
    """

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = (), silent: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._stop = [(one, _shorter(one)) for one in stop]
        self._begun = [0] * len(self._stop)  # characters of each stop string that the text ends with
        self._silent = silent
        self._tokens: list[int] = []
        self._from = 0  # first token of the decoding window; context for those after `_shown`
        self._shown = 0  # number of tokens whose text is in `_kept` or emitted
        self._again = 0  # above `_AT_ONCE`, number of tokens without text at which to decode again
        self._kept = ""  # text held back because it may begin a stop string
        self.length = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token. Returns the text that has become final."""
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
        """Return the remaining text at the end of the completion."""
        if self._tokenizer is None or self.stopped:
            return ""
        rest = self._decode(self._tokens)[self.length :]
        text = self._give(rest)
        if not self.stopped:
            text, self._kept = text + self._kept, ""
        return text

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Return `length` before each of these tokens in a text of their own."""
        own, found = Detokenizer(self._tokenizer, (), self._silent), list[int]()
        for token in tokens:
            found.append(own.length)
            own.add(token)
        return found

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
        """Return the start of the i-th stop string if `new` completes it, relative to the start of `new`; else None.

        Uses Knuth-Morris-Pratt, so held-back text is never scanned again.
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
    """Return the ids below `vocab` that `tokenizer.decode` skips: special tokens and unknown ids.

    A model may repeat such a token without end. Kept in the window, all of them would be decoded again with each new
    one.
    """
    if tokenizer is None:
        return frozenset()
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return frozenset(special.union(token for token in range(vocab) if tokenizer.id_to_token(token) is None))


@lru_cache(maxsize=1024)  # all completions of a request share their stop strings
def _shorter(stop: str) -> list[int]:
    """Return the KMP failure function: for each prefix of `stop`, the length of its longest proper border."""
    found, size = [0], 0
    for letter in stop[1:]:
        while size and stop[size] != letter:
            size = found[size - 1]
        size += stop[size] == letter
        found.append(size)
    return found
