"""What a write of slot arrays computes: blocks of an adapter put into one slot of many layers."""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jlora._compat import gpu_compute_capability
from jlora.layers.site import SlotSpec
from jlora.pallas.gpus import MIN_CAPABILITY


def write_block(
    spec: SlotSpec,
    arrays: Sequence[Sequence[Float[Array, "..."]]],
    blocks: Sequence[Float[Array, "rows ..."]],
    where: Int[Array, "4"],
    ranks_over: tuple[str, ...] = (),
    rows_over: tuple[str, ...] = (),
    *,
    one_launch: bool = False,
) -> tuple[Float[Array, "..."], ...]:
    """All A and then all B, of those that the sites hold, with a block written into one slot of each.

    Args:
      spec: of the sites whose arrays these are.
      arrays: all A and all B, or one of them (`spec.factors`), of as many sites as the block has rows; of one site
        where it has several rows itself, those of a stack of layers, or of experts of one layer.
      blocks: for each of them the factors of some ranks: A [rows, n, step, K] and B [rows, step, N].
      where: [slot of the model, first row, first rank, shard of experts that has a row which comes alone].
      ranks_over, rows_over: axes of the mesh that the ranks of A, and rows that come alone, are split over, where these
        are the arrays of a shard.
      one_launch: by a Triton kernel, where that can: see `takes_kernels`.
    """
    slot, row, start, owner = where
    slot -= spec.first_slot
    zero = jnp.zeros((), jnp.int32)
    if spec.experts is None:
        lead = (slot,) if spec.layers is None else (row, slot)
    else:
        experts = arrays[0][0].shape[len(spec.stack) + 1]  # that a shard has
        lead = (*(() if spec.layers is None else (row // experts,)), slot, row % experts)
    written: list[jax.Array] = []
    tails = (zero, start, zero), (start, zero)
    for j, held, block in zip(spec.factors, arrays, blocks, strict=True):
        tail = tails[j]
        if one_launch and not spec.rows and not (ranks_over and j == 0):
            from jlora.pallas.triton import write  # of Pallas' Triton, whose import is slow

            if write.suits(held[0].shape, len(held)):
                written += write.write_rows(held, block, slot, start)
                continue
        for i, array in enumerate(held):
            if spec.experts is not None:
                update = block.reshape((1,) * (len(lead) - 1) + block.shape)
            else:
                update = block[i][None] if spec.layers is None else block[:, None]
            if ranks_over and j == 0:
                update = _own_ranks(array, update, lead, start, ranks_over)
                tail = (zero, zero, zero)
            if rows_over:
                now = lax.dynamic_slice(array, (*lead, *tail), update.shape)
                update = jnp.where(lax.axis_index(rows_over) == owner, update, now)
            written.append(lax.dynamic_update_slice(array, update, (*lead, *tail)))
    return tuple(written)


def takes_kernels(device: object) -> bool:
    """Whether Triton kernels run there: NVIDIA's GPUs from Ampere on."""
    return (
        getattr(device, "platform", None) in ("gpu", "cuda") and (gpu_compute_capability(device) or 0) >= MIN_CAPABILITY
    )


def _own_ranks(
    array: Float[Array, "..."],
    update: Float[Array, "..."],
    lead: tuple[jax.Array, ...],
    start: Int[Array, ""],
    over: tuple[str, ...],
) -> Float[Array, "..."]:
    """What a shard's ranks of A will hold: of `update`, whose first is `start`, those among them; else as now."""
    count = array.shape[-2]
    zero = jnp.zeros((), jnp.int32)
    now = lax.dynamic_slice(array, (*lead, zero, zero, zero), (*update.shape[:-2], count, update.shape[-1]))
    which = jnp.arange(count, dtype=jnp.int32) + lax.axis_index(over) * count - start
    new = jnp.take(update, jnp.clip(which, 0, update.shape[-2] - 1), axis=-2)
    inside = (which >= 0) & (which < update.shape[-2])
    return jnp.where(inside.reshape((1,) * (update.ndim - 2) + (count, 1)), new, now)


def write_ranks(
    specs: Sequence[SlotSpec],
    arrays: Sequence[Int[Array, "..."]],
    ranks: Int[Array, "ranks"],
    slot: Int[Array, ""],
) -> tuple[Int[Array, "..."], ...]:
    """The ranks of every site, with those of one slot written: `ranks` holds them one site after the other.

    Sites that do not have this slot stay as they are. An array of a shard of experts takes those of its own.
    """
    start, written = 0, list[jax.Array]()
    for spec, array in zip(specs, arrays, strict=True):
        shape = (*spec.rows, spec.slices)
        size = int(np.prod(shape))
        block = lax.slice(ranks, (start,), (start + size,)).reshape(shape)
        axis = len(spec.stack)
        if spec.experts is not None and (count := array.shape[axis + 1]) < spec.experts:
            assert spec.sharding is not None
            first = lax.axis_index(spec.sharding.experts) * count
            block = lax.dynamic_slice_in_dim(block, first, count, axis)
        own = slot - spec.first_slot
        new = cast("jax.Array", lax.dynamic_update_index_in_dim(array, block, own, axis=axis))
        written.append(jnp.where((own >= 0) & (own < spec.num_slots), new, array))
        start += size
    return tuple(written)
