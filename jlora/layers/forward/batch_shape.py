"""The rows of a batch: the number of sequences, and the rows of each."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from jlora.errors import LoRAUsageError
from jlora.layers.forward.group_shape import GroupShape


@dataclass(frozen=True)
class BatchShape:
    """The checked shape of a batch.

    Attributes:
      num_sequences: B.
      token_counts: packed rows of each sequence, in order; None if rows are not packed.
      num_rows: T, packed rows with padding; 0 if rows are not packed.
      length: rows of each sequence, if declared.
      active_from: the first row of each sequence that takes its adapter; None for all rows.
      groups: the rows of layers that see other items than the sequences, such as images.
    """

    num_sequences: int
    token_counts: tuple[int, ...] | None = None
    num_rows: int = 0
    length: int | None = None
    active_from: tuple[int, ...] | None = None
    groups: tuple[GroupShape, ...] = ()

    def by_token(self, values: Shaped[np.ndarray, "B"], padding: Any) -> Shaped[np.ndarray, "T"] | None:
        """Return the value of each packed row's sequence, and `padding` after them; None if rows are not packed."""
        if self.token_counts is None:
            return None
        rest = self.num_rows - sum(self.token_counts)
        return np.repeat(np.append(values, values.dtype.type(padding)), (*self.token_counts, rest))

    def token_slots(self, slots: Int[np.ndarray, "B"], none: int) -> Int[np.ndarray, "T"] | None:
        """Return the slot of each packed row, int32 [T], with `none` for padding and for rows that are not active.

        None if rows are not packed.
        """
        found = self.by_token(slots, none)
        if found is not None and self.active_from is not None:
            assert self.token_counts is not None
            starts = np.cumsum((0, *self.token_counts[:-1]))
            for start, count, first in zip(starts, self.token_counts, self.active_from, strict=True):
                found[start : start + min(first, count)] = none
        return found

    def active_slots(self, slots: Int[np.ndarray, "B"], none: int) -> Int[np.ndarray, "B"]:
        """Return `slots`, with `none` for a packed sequence without an active row."""
        if self.token_counts is None or self.active_from is None:
            return slots
        return np.where(np.array(self.active_from) < np.array(self.token_counts), slots, none).astype(np.int32)

    def first_rows(self) -> Int[np.ndarray, "B"] | None:
        """Return the first active row of each sequence, int32 [B]; None if rows are packed."""
        if self.token_counts is not None:
            return None
        return np.array(self.active_from or (0,) * self.num_sequences, np.int32)


def batch_shape(
    num_sequences: int,
    token_counts: Sequence[int] | None,
    pad_to: int | None,
    length: int | None,
    active_from: Sequence[int] | None = None,
    groups: tuple[GroupShape, ...] = (),
) -> BatchShape:
    """Check the shape arguments of `LoRAManager.prepare` and return them as a `BatchShape`.

    Raises:
      LoRAUsageError: a value has the wrong type or sign, or the values disagree.
    """
    if num_sequences < 1:
        raise LoRAUsageError("prepare needs at least one sequence")
    counts, first = _integers("token_counts", token_counts), _integers("active_from", active_from)
    num_rows = None if pad_to is None else _integer("pad_to", pad_to)
    if length is not None and (length := _integer("length", length)) < 1:
        raise LoRAUsageError(f"prepare: length must be positive, got {length}")
    if length is not None and counts is not None:
        raise LoRAUsageError("prepare: length is for rows [batch * length, features]; packed rows have token_counts")
    if first is not None and (len(first) != num_sequences or min(first) < 0):
        raise LoRAUsageError(
            f"prepare: active_from must be one first row, from 0 on, for each of {num_sequences} sequences, got "
            f"{list(first)!r:.100}"
        )
    first = None if first is None else tuple(min(row, 2**31 - 1) for row in first)
    if first is not None:
        for group in groups:
            _check_active(group, first)
    return BatchShape(num_sequences, counts, _packed_rows(num_sequences, counts, num_rows), length, first, groups)


def _check_active(group: GroupShape, active_from: tuple[int, ...]) -> None:
    for item, owner in enumerate(group.owners):
        if owner >= 0 and active_from[owner]:
            raise LoRAUsageError(
                f"prepare: item {item} of group {group.name!r} belongs to sequence {owner}, whose adapter is active "
                f"from row {active_from[owner]} on, and items have no place among these rows; give None as the "
                "sequence of an item before that row"
            )


def _integers(option: str, values: Sequence[int] | None) -> tuple[int, ...] | None:
    try:
        return None if values is None else tuple(_integer(option, value) for value in values)
    except TypeError:
        raise LoRAUsageError(f"prepare: {option} must be integers, got {values!r:.100}") from None


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
