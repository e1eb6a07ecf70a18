"""Make a batch from the slots of its sequences."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from jlora.layers.forward.batch import Layout, LoRABatch
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.fill import fill_spaces
from jlora.layers.forward.lease import Lease
from jlora.layers.forward.row_space import placed
from jlora.layers.site import ModelSites, Site


def make_batch(
    slots: Sequence[int] | Int[np.ndarray, "B k"],
    shape: BatchShape,
    sites: ModelSites,
    lease: Lease,
    *,
    none: int,
    unserved: frozenset[Site],
    stamps: Int[np.ndarray, "B k"] | None = None,
    scales: Float[np.ndarray, "B k"] | None = None,
    absent: bool = False,
) -> LoRABatch:
    """Return a batch with its arrays on the device or the mesh.

    Args:
      slots: the slot of each sequence, or [B, k] those of its k adapters, at most `sites.adapters`.
      shape: the shape of the batch.
      sites: the sites of the model.
      lease: the lease of the adapters in these slots.
      none: the slot of rows without an adapter.
      unserved: the sites that serve no adapter.
      stamps: the stamp of each of `slots`. None: every copy of the model is accepted.
      scales: the factor of each of `slots`. None: all are 1.
      absent: True if sequences lack their adapter.
    """
    of_slots = _by_adapter(slots, none, sites.adapters, np.int32)
    of_stamps = np.zeros_like(of_slots) if stamps is None else _by_adapter(stamps, 0, sites.adapters, np.int32)
    of_scales = None
    if sites.scaled:
        of_scales = _by_adapter(np.ones(len(of_slots.T)) if scales is None else scales, 1, sites.adapters, np.float32)
    spaces = fill_spaces(shape, of_slots, of_stamps, of_scales, none=none, one_each=not sites.rows_declared)
    layout = Layout(
        sites,
        shape.num_sequences,
        unserved,
        absent=absent,
        undecided=shape.active_from is None and any(each.invocation_tokens for each in lease.adapters),
        lease=weakref.ref(lease),
    )
    return LoRABatch(placed(spaces, sites), layout, lease)


def _by_adapter(values: Any, other: int, adapters: int, dtype: type[np.generic]) -> Shaped[np.ndarray, "adapters B"]:
    """Return a row of values for each adapter of a sequence, from `values` [B] or [B, k] and `other` past the k."""
    given = np.asarray(values, dtype)
    given = given.reshape(len(given), -1).T
    if len(given) == adapters:
        return np.ascontiguousarray(given)
    return np.concatenate([given, np.full((adapters - len(given), given.shape[1]), other, dtype)])


def renewed(batch: LoRABatch, lease: Lease) -> LoRABatch:
    """Return a batch with the arrays of `batch` under another lease of the same adapters."""
    old = batch.layout
    # `dataclasses.replace` takes 3 us, a tenth of a `prepare` of a known batch.
    layout = Layout(old.sites, old.num_sequences, old.unserved, old.absent, old.undecided, lease=weakref.ref(lease))
    return LoRABatch(batch.spaces, layout, lease)
