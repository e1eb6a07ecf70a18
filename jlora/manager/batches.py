"""What `prepare` is asked for, and the int32 arrays that say it to the device."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from jlora.errors import LoRAError


@dataclass(frozen=True)
class Asked:
    """The checked arguments of `prepare`.

    Attributes:
      names: the adapter of each sequence; None for the base model.
      counts: packed rows of each sequence, or None where rows are not packed.
      rows: packed rows with padding; 0 where they are not packed.
    """

    names: tuple[str | None, ...]
    counts: tuple[int, ...] | None
    rows: int

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """The different adapters, in the order in which they are named first."""
        return tuple(dict.fromkeys(name for name in self.names if name is not None))


def read_arguments(names: Sequence[str | None], token_counts: Sequence[int] | None, pad_to: int | None) -> Asked:
    """Check the arguments of `prepare`.

    Raises:
      LoRAError: they are of the wrong kind, or disagree.
    """
    if isinstance(names, str):
        raise LoRAError(f"prepare takes one name a sequence in a list, got the string {names!r}")
    try:
        counts = None if token_counts is None else tuple(map(operator.index, token_counts))
        pad_to = None if pad_to is None else operator.index(pad_to)
    except TypeError as error:
        raise LoRAError(f"prepare: token_counts and pad_to must be integers ({error})") from None
    names = tuple(names)
    for name in names:
        if name is not None and not isinstance(name, str):
            raise LoRAError(f"prepare takes adapter names and None, got {name!r}")
    return Asked(names, counts, _packed_rows(len(names), counts, pad_to))


def _packed_rows(sequences: int, counts: tuple[int, ...] | None, pad_to: int | None) -> int:
    if not sequences:
        raise LoRAError("prepare needs at least one sequence")
    if counts is None:
        if pad_to is not None:
            raise LoRAError("prepare: pad_to is the number of packed rows; it needs token_counts")
        return 0
    if len(counts) != sequences:
        raise LoRAError(f"prepare: {len(counts)} token_counts for {sequences} sequences")
    if min(counts) < 0:
        raise LoRAError(f"prepare: token_counts must not be negative, got {min(counts)}")
    total = sum(counts)
    rows = total if pad_to is None else pad_to
    if rows < total or rows == 0:
        raise LoRAError(f"prepare: token_counts sum to {total}, and there are {rows} packed rows (pad_to)")
    if rows == sequences and counts != (1,) * sequences:
        raise LoRAError(
            f"prepare: {rows} packed rows for {rows} sequences cannot be told from one row a sequence; choose another "
            "pad_to"
        )
    return rows


def slot_arrays(
    asked: Asked, slot_of: Mapping[str, int], none: int
) -> tuple[Int[np.ndarray, "B"], Int[np.ndarray, "T"] | None]:
    """The slot of each sequence, and of each packed row; `none` for those that take no adapter."""
    slots = np.array([none if name is None else slot_of[name] for name in asked.names], np.int32)
    if asked.counts is None:
        return slots, None
    token_slots = np.full(asked.rows, none, np.int32)
    token_slots[: sum(asked.counts)] = np.repeat(slots, asked.counts)
    return slots, token_slots
