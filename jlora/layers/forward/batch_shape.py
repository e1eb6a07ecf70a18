"""The rows of a batch: the number of sequences, and the rows of each."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from jlora.errors import LoRAUsageError


@dataclass(frozen=True)
class BatchShape:
    """The checked shape of a batch.

    Attributes:
      num_sequences: B.
      token_counts: packed rows of each sequence, in order; None if rows are not packed.
      num_rows: T, packed rows with padding; 0 if rows are not packed.
      length: rows of each sequence, if declared.
    """

    num_sequences: int
    token_counts: tuple[int, ...] | None = None
    num_rows: int = 0
    length: int | None = None

    def token_slots(self, slots: Int[np.ndarray, "B"], none: int) -> Int[np.ndarray, "T"] | None:
        """Return the slot of each packed row, int32 [T], with `none` for padding; None if rows are not packed."""
        if self.token_counts is None:
            return None
        padding = self.num_rows - sum(self.token_counts)
        return np.repeat(np.append(slots, np.int32(none)), (*self.token_counts, padding))


def batch_shape(
    num_sequences: int, token_counts: Sequence[int] | None, pad_to: int | None, length: int | None
) -> BatchShape:
    """Check the shape arguments of `LoRAManager.prepare` and return them as a `BatchShape`.

    Raises:
      LoRAUsageError: a value has the wrong type or sign, or the values disagree.
    """
    if num_sequences < 1:
        raise LoRAUsageError("prepare needs at least one sequence")
    try:
        counts = None if token_counts is None else tuple(_integer("token_counts", count) for count in token_counts)
    except TypeError:
        raise LoRAUsageError(f"prepare: token_counts must be integers, got {token_counts!r:.100}") from None
    num_rows = None if pad_to is None else _integer("pad_to", pad_to)
    if length is not None and (length := _integer("length", length)) < 1:
        raise LoRAUsageError(f"prepare: length must be positive, got {length}")
    if length is not None and counts is not None:
        raise LoRAUsageError("prepare: length is for rows [batch * length, features]; packed rows have token_counts")
    return BatchShape(num_sequences, counts, _packed_rows(num_sequences, counts, num_rows), length)


def _integer(option: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise LoRAUsageError(f"prepare: {option} must be integers, got {type(value).__name__}") from None


def _packed_rows(num_sequences: int, counts: tuple[int, ...] | None, pad_to: int | None) -> int:
    if counts is None:
        if pad_to is not None:
            raise LoRAUsageError("prepare: pad_to is the number of packed rows; it needs token_counts")
        return 0
    if len(counts) != num_sequences:
        raise LoRAUsageError(f"prepare: {len(counts)} token_counts for {num_sequences} sequences")
    if min(counts) < 0:
        raise LoRAUsageError(f"prepare: token_counts must not be negative, got {min(counts)}")
    total = sum(counts)
    num_rows = total if pad_to is None else pad_to
    if num_rows < total or num_rows == 0:
        raise LoRAUsageError(f"prepare: token_counts sum to {total}, and there are {num_rows} packed rows (pad_to)")
    return num_rows
