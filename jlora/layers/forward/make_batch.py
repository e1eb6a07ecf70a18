"""Make a batch: fill its row spaces on the host, from the slots of its sequences, and put them on the device."""

import weakref
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jlora.layers.forward.batch import Layout, LoRABatch
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.lease import Lease
from jlora.layers.forward.row_space import RowSlots, RowSpace, put_tree
from jlora.layers.site import SEQUENCES, ModelSites, Site


def make_batch(
    entries: Sequence[Sequence[tuple[int, int, float]]],
    index: Sequence[int],
    shape: BatchShape,
    sites: ModelSites,
    lease: Lease,
    *,
    none: int,
    unserved: frozenset[Site],
) -> LoRABatch:
    """Return a batch with its arrays on the device or the mesh.

    Args:
      entries: the distinct entries of the batch, each (slot, stamp, factor) of at most `max_adapters_per_sequence`
        adapters. With the stamp 0 every copy of the model is accepted.
      index: the entry of each sequence.
      shape: the shape of the batch.
      sites: the sites of the model.
      lease: the lease of the adapters in these slots.
      none: the slot of rows without an adapter.
      unserved: the sites that serve no adapter.
    """
    most = sites.config.max_adapters_per_sequence
    padded = [[*entry, *[(none, 0, 1.0)] * ((most or 1) - len(entry))] for entry in entries]
    values = np.array(padded).take(index, 0).transpose(2, 1, 0)
    slots, stamps = values[:2].astype(np.int32, "C")
    scales = None if most is None else values[2].astype(np.float32, "C")
    spaces = fill_spaces(shape, slots, stamps, scales, none=none, one_each=not sites.rows_declared)
    own, undecided = weakref.ref(lease), lease.needs_first_rows
    layout = Layout(sites, shape.num_sequences, unserved, undecided=undecided, lease=own)
    return LoRABatch(put_tree(spaces, sites), layout, lease)


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
      one_each: True if a packed batch of one row a sequence needs no slots of rows.
    """
    spaces: dict[str, RowSpace] = {}
    for group, items in shape.items.items():
        spaces[group] = RowSpace(_row_slots(items.row_owners(), slots, scales, none), one_each=items.counts is not None)
    owners, one_each = shape.row_owners(), one_each and shape.one_each
    rows = None if owners is None or one_each else _row_slots(owners, slots, scales, none)
    if (active := shape.last_active()) is not None:  # a packed sequence has the slot of its last row
        slots, stamps = np.where(active, slots, np.int32(none)), np.where(active, stamps, np.int32(0))
    spaces[SEQUENCES] = RowSpace(
        RowSlots(tuple(slots), None if scales is None else tuple(scales)),
        rows,
        tuple(stamps),
        shape.first_rows(),
        shape.length,
        differ=shape.differ,
        one_each=one_each,
    )
    return spaces


def _row_slots(
    owners: Int[np.ndarray, "rows"],
    slots: Int[np.ndarray, "k B"],
    scales: Float[np.ndarray, "k B"] | None,
    none: int,
) -> RowSlots:
    """Return the adapters of rows that belong to these sequences, or to none if -1."""
    of_scales = None if scales is None else tuple(np.where(owners < 0, np.float32(1), scales[:, owners]))
    return RowSlots(tuple(np.where(owners < 0, np.int32(none), slots[:, owners])), of_scales)


def renewed(batch: LoRABatch, lease: Lease) -> LoRABatch:
    """Return a batch with the arrays of `batch` under another lease of the same adapters."""
    old = batch.layout
    # `dataclasses.replace` takes 3 us, a tenth of a `prepare` of a known batch.
    layout = Layout(old.sites, old.num_sequences, old.unserved, old.undecided, lease=weakref.ref(lease))
    return LoRABatch(batch.spaces, layout, lease)
