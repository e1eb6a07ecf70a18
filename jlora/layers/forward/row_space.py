"""`RowSpace`: the adapters of a set of rows, such as those of the sequences of a batch or of its images.

`fill_spaces` fills the spaces of a batch on the host, from sums of adapters, factors, first active rows, packed rows
and items. A layer reads the space of its rows (`jlora.layers.forward.row_layout`).
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from jlora._compat import to_device
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.row_groups import SEQUENCES
from jlora.layers.site import ModelSites
from jlora.sharding.put import put

_static = functools.partial(field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSpace:
    """The adapters of a set of rows, and the layout of the rows: a pytree.

    An entry is a sequence, an item such as an image, or a single row. Entries are the first axis of every array, since
    `vmap` and `shard_map` map it. Under `vmap` over the entries, arrays of entries are scalars.

    Attributes:
      slots: for each adapter of an entry, int32 [B], its slot; `max_loras` for entries without it.
      scales: for each adapter of an entry, float32 [B], its factor; None if the manager serves no factors.
      stamps: for each adapter of an entry, int32 [B], the number of the write that put it into its slot, 0 for no
        check; None for no checks.
      first: int32 [B], the first of the `length` rows of each entry that takes its adapters; None if all rows do, and
        for packed rows, whose slots hold it.
      row_slots: for each adapter, int32 [T], its slot in each row of packed tokens; None if rows are not packed or
        `one_each`.
      row_scales: for each adapter, float32 [T], its factor in each row, likewise.
      length: rows of each entry, if declared.
      differ: True if rows of one entry may take different adapters, so that layers must tell them apart.
      one_each: True if row b is the only row of entry b, so that [T, features] and [B, features] of one shape are the
        same rows.
    """

    slots: tuple[Any, ...]
    scales: tuple[Any, ...] | None = None
    stamps: tuple[Any, ...] | None = None
    first: Any = None
    row_slots: tuple[Any, ...] | None = None
    row_scales: tuple[Any, ...] | None = None
    length: int | None = _static(default=None)
    differ: bool = _static(default=False)
    one_each: bool = _static(default=False)

    @property
    def size(self) -> int:
        """Number of entries, 1 under `vmap` over them."""
        return self.slots[0].size

    @property
    def is_mapped(self) -> bool:
        """True under `vmap` over the entries."""
        return self.slots[0].ndim == 0

    @property
    def by_row(self) -> tuple[Any, ...] | None:
        """The slots of packed rows; None if rows are not packed."""
        return self.slots if self.one_each else self.row_slots


def fill_spaces(
    shape: BatchShape,
    slots: Int[np.ndarray, "k B"],
    stamps: Int[np.ndarray, "k B"],
    scales: Float[np.ndarray, "k B"] | None,
    *,
    none: int,
    one_each: bool,
) -> dict[str, RowSpace]:
    """Return the space of the sequences and of each row group of a batch, as NumPy arrays.

    Args:
      shape: the shape of the batch.
      slots: the slots of the k adapters of each sequence.
      stamps: their stamps.
      scales: their factors; None if the manager serves no factors.
      none: the slot of rows without an adapter.
      one_each: True if a packed batch with one row of each sequence has no other rows.
    """

    def rows_of(owners: Int[np.ndarray, "rows"]) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
        """Return slots and factors of rows that belong to these sequences, or to none if -1."""
        return _taken(slots, owners, none), None if scales is None else _taken(scales, owners, 1)

    spaces: dict[str, RowSpace] = {}
    for group, items in shape.items:
        spaces[group] = RowSpace(*rows_of(items.row_owners()), one_each=items.counts is not None)
    packed, first, owners = shape.token_counts is not None, shape.active_from, shape.row_owners()
    row_slots = row_scales = None
    if owners is not None:
        counts = np.array(shape.token_counts)
        if first is not None:
            start = np.array(first)
            position = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
            owners = np.where(position < start[owners], -1, owners)
        one_each = one_each and shape.one_each
        if not one_each:
            row_slots, row_scales = rows_of(owners)
        if first is not None:  # the slot of a sequence is that of its last row
            slots, stamps = np.where(start < counts, slots, none), np.where(start < counts, stamps, 0)
    spaces[SEQUENCES] = RowSpace(
        tuple(slots),
        None if scales is None else tuple(scales),
        tuple(stamps),
        None if packed or first is None else np.array(first, np.int32),
        row_slots,
        row_scales,
        shape.length,
        differ=first is not None,
        one_each=packed and one_each,
    )
    return spaces


def _taken(table: np.ndarray, owners: Int[np.ndarray, "rows"], other: float) -> tuple[np.ndarray, ...]:
    """Return `table[:, owners]`, and `other` for the owner -1."""
    return tuple(np.where(owners < 0, table.dtype.type(other), table[:, owners]))


def placed(tree: Any, sites: ModelSites) -> Any:
    """Return a tree of arrays on the device, or replicated over the mesh, so that each shard slices its own rows."""
    arrays, structure = jax.tree.flatten(tree)
    if sites.sharding is None:
        arrays = [to_device(array, sites.device) for array in arrays]
    else:
        arrays = put(arrays, [sites.sharding.whole] * len(arrays))
    return jax.tree.unflatten(structure, arrays)
