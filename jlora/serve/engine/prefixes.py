"""Choice of the row of a sequence, and of another row that holds the beginning of its prompt. Pure host code.

The row of a sequence that has ended keeps its positions. Steps write each free row at the position of its next token,
which is above all of them.
"""

import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from jlora.serve.engine.sequence import Sequence, Source


@dataclass
class _Held:
    """The content of a row.

    Attributes:
      key: `Sequence.key` of its sequence.
      tokens: Token ids of its first positions.
      prompt: Number of them that are the prompt.
      logits: Logits [1, V] after the prompt.
      filled: `time.monotonic()` at which the prompt was computed or copied.
      used: `time.monotonic()` of the last use.
    """

    key: Hashable
    tokens: Int[np.ndarray, "N"]
    prompt: int
    logits: Any
    filled: float
    used: float


class Prefixes:
    """The content of the rows that sequences have run in.

    A prompt that is equal to one in a row is copied whole, if it waited while the other was computed. With `caching`
    it need not have waited, and the longest equal beginning of any row is copied if this makes the steps fewer or
    smaller.

    Args:
      rows: Number of rows.
      caching: See `EngineOptions.enable_prefix_caching`.
      padded: Returns the tokens, with padding, of the steps that prefill a prompt of a length from a start.
    """

    def __init__(self, rows: int, caching: bool, padded: Callable[[int, int], int]):
        self._held: list[_Held | None] = [None] * rows
        self._caching = caching
        self._padded = padded

    def place(self, one: Sequence, free: Collection[int]) -> tuple[int, Source | None]:
        """Choose one of the free rows, whose content is lost, and the source of the beginning of the prompt.

        The order of free rows is: the source, if the new prompt continues its whole prompt; those that hold nothing;
        the least recently used; the source otherwise.
        """
        prompt, source = np.array(one.prompt, np.int32), None
        shared = [0 if held is None else self._shared(held, one, prompt) for held in self._held]
        count = max(shared)
        donor, held = shared.index(count), self._held[shared.index(count)]
        whole = count == len(prompt)
        if held is not None and (whole or self._padded(count, len(prompt)) < self._padded(0, len(prompt))):
            source = Source(donor, count, held.logits if whole else None)
            held.used = time.monotonic()

        def order(row: int) -> tuple[int, float]:
            own = self._held[row]
            if own is None:
                return 1, 0.0
            if source is not None and row == source.row:
                return (0 if own.prompt <= count else 3), 0.0
            return 2, own.used

        row = min(free, key=order)
        self._held[row] = None
        return row, source

    def _shared(self, held: _Held, one: Sequence, prompt: Int[np.ndarray, "P"]) -> int:
        """Return the number of first tokens of a prompt that can be copied from a row."""
        if held.key != one.key or not (self._caching or one.arrived <= held.filled):
            return 0
        if np.array_equal(held.tokens[: held.prompt], prompt):
            return len(prompt)
        if not self._caching:
            return 0
        most = min(len(held.tokens), len(prompt) - 1)  # the last token is computed, for its logits
        return int(np.cumprod(held.tokens[:most] == prompt[:most]).sum())

    def hold(self, one: Sequence, logits: Any) -> None:
        """Record that the row of a sequence holds its prompt, with the logits [1, V] after it."""
        now = time.monotonic()
        self._held[one.row] = _Held(one.key, np.array(one.prompt, np.int32), len(one.prompt), logits, now, now)

    def ended(self, one: Sequence) -> None:
        """Record the tokens of a sequence that leaves its row. The last one may not be in the cache."""
        held = self._held[one.row]
        if held is not None and self._caching:
            held.tokens = np.array([*one.prompt, *one.tokens[:-1]], np.int32)
            held.used = time.monotonic()

    def forget(self, row: int) -> None:
        """Record that the content of a row must not be copied."""
        self._held[row] = None
