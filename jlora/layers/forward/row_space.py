"""`RowSpace`: the adapters of a set of rows, such as those of the sequences of a batch or of its images.

`jlora.layers.forward.make_batch` fills the spaces of a batch on the host. A layer reads the space of its rows
(`jlora.layers.forward.row_layout`).
"""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax

from jlora._compat import to_device
from jlora.layers.site import ModelSites
from jlora.sharding.put import put

_static = functools.partial(field, metadata={"static": True})


class RowSlots(NamedTuple):
    """The adapters of entries or rows.

    Attributes:
      slots: for each adapter of an entry, int32 [entries], its slot; `max_loras` for entries without it.
      scales: for each adapter of an entry, float32 [entries], its factor; None if the manager serves no factors.
    """

    slots: tuple[Any, ...]
    scales: tuple[Any, ...] | None = None

    @property
    def size(self) -> int:
        """Number of entries, 1 under `vmap` over them."""
        return self.slots[0].size


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSpace:
    """The adapters of a set of rows, and the layout of the rows: a pytree.

    An entry is a sequence, an item such as an image, or a single row. Entries are the first axis of every array, since
    `vmap` and `shard_map` map it. Under `vmap` over the entries, arrays of entries are scalars.

    Attributes:
      entries: the adapters of each entry.
      rows: the adapters of each packed row; None if rows are not packed, or `one_each`.
      stamps: for each adapter of an entry, int32 [entries], the number of the write that put it into its slot, 0 for no
        check; None for no checks.
      first: int32 [entries], the first of the `length` rows of each entry that takes its adapters; None if all rows do,
        and for packed rows, whose slots hold it.
      length: rows of each entry, if declared.
      differ: True if rows of one entry may take different adapters, so that layers must distinguish them.
      one_each: True if row b is the only row of entry b, so that [T, features] and [B, features] of one shape are the
        same rows.
    """

    entries: RowSlots
    rows: RowSlots | None = None
    stamps: tuple[Any, ...] | None = None
    first: Any = None
    length: int | None = _static(default=None)
    differ: bool = _static(default=False)
    one_each: bool = _static(default=False)

    @property
    def is_mapped(self) -> bool:
        """True under `vmap` over the entries."""
        return self.entries.slots[0].ndim == 0

    @property
    def packed(self) -> RowSlots | None:
        """The adapters of each packed row; None if rows are not packed."""
        return self.entries if self.one_each else self.rows


def put_tree(tree: Any, sites: ModelSites) -> Any:
    """Return a tree of arrays on the device, or replicated over the mesh, so that each shard slices its own rows."""
    arrays, structure = cast("tuple[list[Any], Any]", jax.tree.flatten(tree))
    if sites.sharding is None:
        arrays = [to_device(array, sites.device) for array in arrays]
    else:
        arrays = put(arrays, [sites.sharding.whole] * len(arrays))
    return jax.tree.unflatten(structure, arrays)
