"""What `prepare` is asked for, and the int32 arrays that say it to the device."""

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from jlora.config import LoRARequest
from jlora.errors import LoRAUsageError
from jlora.manager.leases import AdapterHandle

Name = str | LoRARequest | AdapterHandle


@dataclass(frozen=True)
class Asked:
    """The checked arguments of `prepare`.

    Attributes:
      names: the adapter of each sequence; None for the base model.
      counts: packed rows of each sequence, or None where rows are not packed.
      rows: packed rows with padding; 0 where they are not packed.
      length: rows a sequence, where declared.
    """

    names: tuple[Name | None, ...]
    counts: tuple[int, ...] | None
    rows: int
    length: int | None

    @cached_property
    def adapters(self) -> tuple[Name, ...]:
        """The different adapters, in the order in which they are named first."""
        return tuple(dict.fromkeys(name for name in self.names if name is not None))

    @cached_property
    def key(self) -> Hashable:
        """Equal for calls that ask for the same. Handles stand for their contents, so that they can be collected."""
        # A handle that another thread closes meanwhile is no name for the base model.
        names = tuple(name.content or name if isinstance(name, AdapterHandle) else name for name in self.names)
        return names, self.counts, self.rows, self.length


def read_arguments(
    names: Sequence[Name | None],
    token_counts: Sequence[int] | None,
    pad_to: int | None,
    length: int | None,
) -> Asked:
    """Check the arguments of `prepare`.

    Raises:
      LoRAUsageError: they are of the wrong kind, or disagree.
    """
    # A set has no order, a generator no second reading, and a string would be taken letter by letter.
    if isinstance(names, str | bytes) or not isinstance(names, Sequence | np.ndarray):
        raise LoRAUsageError(f"prepare takes one name a sequence in a list, got {type(names).__name__} {names!r:.100}")
    for name in names:
        if not (name is None or isinstance(name, Name)):
            raise LoRAUsageError(f"prepare takes adapter names, LoRARequests, handles and None, got {name!r:.100}")
        if isinstance(name, AdapterHandle) and name.content is None:
            raise LoRAUsageError(f"prepare: {name!r} is closed")
    if not len(names):
        raise LoRAUsageError("prepare needs at least one sequence")
    try:
        counts = None if token_counts is None else tuple(_integer("token_counts", count) for count in token_counts)
    except TypeError:
        raise LoRAUsageError(f"prepare: token_counts must be integers, got {token_counts!r:.100}") from None
    rows = None if pad_to is None else _integer("pad_to", pad_to)
    if length is not None and (length := _integer("length", length)) < 1:
        raise LoRAUsageError(f"prepare: length must be positive, got {length}")
    if length is not None and counts is not None:
        raise LoRAUsageError("prepare: length is for rows [batch * length, features]; packed rows have token_counts")
    return Asked(tuple(names), counts, _packed_rows(len(names), counts, rows), length)


def _integer(what: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise LoRAUsageError(f"prepare: {what} must be integers, got {type(value).__name__}") from None


def _packed_rows(sequences: int, counts: tuple[int, ...] | None, pad_to: int | None) -> int:
    if counts is None:
        if pad_to is not None:
            raise LoRAUsageError("prepare: pad_to is the number of packed rows; it needs token_counts")
        return 0
    if len(counts) != sequences:
        raise LoRAUsageError(f"prepare: {len(counts)} token_counts for {sequences} sequences")
    if min(counts) < 0:
        raise LoRAUsageError(f"prepare: token_counts must not be negative, got {min(counts)}")
    total = sum(counts)
    rows = total if pad_to is None else pad_to
    if rows < total or rows == 0:
        raise LoRAUsageError(f"prepare: token_counts sum to {total}, and there are {rows} packed rows (pad_to)")
    return rows


def slot_arrays(
    asked: Asked, slot_of: Mapping[Name, int], none: int
) -> tuple[Int[np.ndarray, "B"], Int[np.ndarray, "T"] | None]:
    """The slot of each sequence, and of each packed row; `none` for those that take no adapter, or have none yet."""
    slots = np.array([none if name is None else slot_of.get(name, none) for name in asked.names], np.int32)
    if asked.counts is None:
        return slots, None
    token_slots = np.full(asked.rows, none, np.int32)
    token_slots[: sum(asked.counts)] = np.repeat(slots, asked.counts)
    return slots, token_slots
