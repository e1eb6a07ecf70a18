"""The rows of a row group: items such as images, and the sequence of the batch that each of them belongs to."""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from jaxtyping import Shaped

from jlora.errors import LoRAUsageError

Owners: TypeAlias = Mapping[str, Sequence[int | None]] | None
Counts: TypeAlias = Mapping[str, Sequence[int]] | None
Pads: TypeAlias = Mapping[str, int] | None

# The values of `row_groups` for layers whose rows are those of the batch's own sequences. The last two declare the rows
# of packed batches: one of each sequence, or all.
SEQUENCES, LAST, PACKED = "sequences", "last", "packed"
OF_SEQUENCES = frozenset({SEQUENCES, LAST, PACKED})


@dataclass(frozen=True)
class GroupShape:
    """The checked rows of one row group of a batch.

    Attributes:
      name: name of the group.
      owners: the sequence of each item; -1 for an item that takes no adapter.
      counts: rows of each item, for flattened rows; None if the rows are [items, ..., features].
      num_rows: flattened rows with padding, or items with padding if `counts` is None.
    """

    name: str
    owners: tuple[int, ...]
    counts: tuple[int, ...] | None
    num_rows: int

    def by_row(self, values: Shaped[np.ndarray, "B"], padding: Any) -> Shaped[np.ndarray, "rows"]:
        """Return the value of the owner of each row (of each item without counts), and `padding` for no owner."""
        owners = np.array(self.owners, np.intp)
        if self.counts is not None:
            owners = np.repeat(owners, self.counts)
        owners = np.append(owners, np.full(self.num_rows - len(owners), -1, np.intp))
        return np.append(values, values.dtype.type(padding))[owners]


def group_shapes(
    num_sequences: int,
    known: Collection[str],
    groups: Owners,
    counts: Counts,
    pad: Pads,
) -> tuple[GroupShape, ...]:
    """Check the arguments `groups`, `group_counts` and `group_pad` of `LoRAManager.prepare`.

    Args:
      num_sequences: B.
      known: the groups that `LoRAManager(row_groups=)` declares.
      groups: group -> the sequence of each item, or None.
      counts: group -> rows of each item, for groups whose rows are flattened.
      pad: group -> number of its flattened rows, or of its items if they are not flattened, with padding.

    Raises:
      LoRAUsageError: a group is not declared, lengths disagree, or an owner is outside of the batch.
    """
    if groups is None and counts is None and pad is None:
        return ()
    given = {"groups": groups or {}, "group_counts": counts or {}, "group_pad": pad or {}}
    for option, value in given.items():
        if not isinstance(value, Mapping):
            raise LoRAUsageError(f"prepare: {option} is a mapping from names of groups, got {type(value).__name__}")
    for name in given["groups"]:
        if name not in known:
            declared = ", ".join(map(repr, sorted(known))) or "none"
            raise LoRAUsageError(
                f"prepare: groups has {name!r}, and the groups of this manager are {declared}; declare it with "
                f"LoRAManager(..., row_groups={{module: {name!r}}})"
            )
    for option in ("group_counts", "group_pad"):
        for name in given[option]:
            if name not in given["groups"]:
                raise LoRAUsageError(
                    f"prepare: {option} has {name!r}, which groups lacks; give the owners of its items"
                )
    return tuple(
        [
            _group_shape(num_sequences, name, owners, given["group_counts"].get(name), given["group_pad"].get(name))
            for name, owners in sorted(given["groups"].items())
        ]
    )


def _group_shape(num_sequences: int, name: str, owners: Any, counts: Any, pad: Any) -> GroupShape:
    found = tuple([-1 if owner is None else owner for owner in _list(f"groups[{name!r}]", owners, none=True)])
    for item, owner in enumerate(found):
        if owners[item] is not None and not 0 <= owner < num_sequences:
            raise LoRAUsageError(
                f"prepare: groups[{name!r}] gives item {item} to sequence {owner}, and the batch has {num_sequences} "
                f"sequences; give 0 to {num_sequences - 1}, or None for an item that takes no adapter"
            )
    of_items = None
    if counts is not None:
        of_items = tuple([count or 0 for count in _list(f"group_counts[{name!r}]", counts)])
        if len(of_items) != len(found) or min(of_items, default=0) < 0:
            raise LoRAUsageError(
                f"prepare: group_counts[{name!r}] must be one number of rows, from 0 on, for each of the {len(found)} "
                f"items in groups[{name!r}], got {list(of_items)!r:.100}"
            )
    needed = len(found) if of_items is None else sum(of_items)
    (num_rows,) = _list(f"group_pad[{name!r}]", [needed if pad is None else pad])
    assert num_rows is not None
    if num_rows < needed:
        what = "items" if of_items is None else "rows (the sum of group_counts)"
        raise LoRAUsageError(
            f"prepare: group_pad[{name!r}] is {num_rows}, and the group has {needed} {what}; raise it, or split the "
            "batch"
        )
    return GroupShape(name, found, of_items, num_rows)


def _list(option: str, values: Any, *, none: bool = False) -> list[int | None]:
    """Return integers, and None if `none` allows it."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise LoRAUsageError(f"prepare: {option} must be a list of integers, got {type(values).__name__}")
    listed = list(cast("Sequence[Any]", values))
    try:
        return [None if none and value is None else operator.index(value) for value in listed]
    except TypeError:
        also = " or None" if none else ""
        raise LoRAUsageError(f"prepare: {option} must hold integers{also}, got {listed!r:.100}") from None
