"""The rows of a row group: items such as images, and the sequence of the batch that each of them belongs to."""

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Int

from jlora.errors import LoRAUsageError


@dataclass(frozen=True)
class Items:
    """The items of one row group in a batch, such as its images, and the sequence that each of them belongs to.

    Attributes:
      owners: for each item, the index of its sequence, or None for an item that takes no adapter.
      counts: the number of rows of each item, for layers that get flattened rows [rows, features] or [1, rows,
        features], item after item. None: layers get rows [items, ..., features].
      pad_to: total number of flattened rows, or of items without `counts`, at least those given (the default). Padding
        takes no adapter. Batches of equal sizes after padding run the same compiled step.

    Raises:
      LoRAUsageError: a value is negative or no integer, there is not one count for each item, or `pad_to` is too small.

    Example:
      >>> images = jlora.Items([0, 0, 2], counts=[256, 64, 256], pad_to=1024)
      >>> batch = manager.prepare(["sql", None, "chat"], items={"images": images})
    """

    owners: Sequence[int | None]
    counts: Sequence[int] | None = None
    pad_to: int | None = None

    def __post_init__(self) -> None:
        owners = integers("Items: owners", self.owners, none=True)
        if min((owner for owner in owners if owner is not None), default=0) < 0:
            raise LoRAUsageError(f"Items: owners are sequences, from 0 on, or None, got {list(owners)!r:.100}")
        counts = None if self.counts is None else integers("Items: counts", self.counts)
        if counts is not None and (len(counts) != len(owners) or min(counts, default=0) < 0):
            raise LoRAUsageError(
                f"Items: counts must be one number of rows, from 0 on, for each of the {len(owners)} owners, got "
                f"{list(counts)!r:.100}"
            )
        needed = len(owners) if counts is None else sum(counts)
        pad_to = needed if self.pad_to is None else integer("Items: pad_to", self.pad_to)
        if pad_to < needed:
            what = "items" if counts is None else "rows (the sum of counts)"
            raise LoRAUsageError(f"Items: pad_to is {pad_to}, and there are {needed} {what}; raise it")
        for name, value in (("owners", owners), ("counts", counts), ("pad_to", pad_to)):
            object.__setattr__(self, name, value)

    def row_owners(self) -> Int[np.ndarray, "rows"]:
        """Return the sequence of each row (of each item without counts), -1 for none and for padding."""
        owners = np.array([-1 if owner is None else owner for owner in self.owners], np.intp)
        if self.counts is not None:
            owners = np.repeat(owners, self.counts)
        return np.append(owners, np.full(cast("int", self.pad_to) - len(owners), -1, np.intp))


def checked_items(items: Mapping[str, Items], num_sequences: int) -> Mapping[str, Items]:
    """Return the items of each row group of a batch, in the order of their names.

    Raises:
      LoRAUsageError: a group has no `Items`, or an owner is outside of the batch.
    """
    if not isinstance(items, Mapping):
        raise LoRAUsageError(f"items maps row groups to jlora.Items, got {type(items).__name__}")
    for name, given in items.items():
        if not isinstance(given, Items):
            raise LoRAUsageError(f"items[{name!r}] must be jlora.Items(owners), got {type(given).__name__}")
        for item, owner in enumerate(given.owners):
            if owner is not None and owner >= num_sequences:
                raise LoRAUsageError(
                    f"items[{name!r}] gives item {item} to sequence {owner}, and the batch has {num_sequences} "
                    f"sequences; give 0 to {num_sequences - 1}, or None for an item without an adapter"
                )
    return dict(sorted(items.items()))


def integers(option: str, values: Any, *, none: bool = False) -> tuple[Any, ...]:
    """Return integers from a list or an array outside a trace, and None among them if `none` allows it.

    Raises:
      LoRAUsageError: `values` has no order or holds another type; a mask is no list of integers.
    """
    given = jax.device_get(values) if isinstance(values, jax.Array) else values
    try:
        listed = given.tolist() if isinstance(given, np.ndarray) else list(given)
        if isinstance(given, Set | Mapping) or bool in set(map(type, listed)):
            raise TypeError
        return tuple([None if none and value is None else operator.index(value) for value in listed])
    except TypeError:
        also = " or None" if none else ""
        raise LoRAUsageError(f"{option} must be integers{also}, got {values!r:.100}") from None


def integer(option: str, value: Any) -> int:
    """Return an integer. Raises `LoRAUsageError` for another type, and for a bool."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise LoRAUsageError(f"{option} must be integers, got {type(value).__name__}") from None
