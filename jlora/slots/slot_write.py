"""Write blocks of an adapter into one slot of many layers: the computation of one write."""

import math
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Real

from jlora._compat import gpu_compute_capability, triton_gap
from jlora.layers.site import SlotSpec
from jlora.pallas.gpus import MIN_CAPABILITY


def write_block(
    spec: SlotSpec,
    arrays: Sequence[Sequence[Real[Array, "..."]]],
    blocks: Sequence[Real[Array, "entries ..."]],
    where: Int[Array, "4"],
    ranks_over: tuple[str, ...] = (),
    entries_over: tuple[str, ...] = (),
    *,
    one_launch: bool = False,
) -> tuple[Real[Array, "..."], ...]:
    """Write one block of each factor, and in int8 the scales of its ranks, into one slot of each site.

    Args:
      spec: the spec of the sites that hold the arrays.
      arrays: all A, all B and all ranks, or those of them in `spec.of_blocks`. There is one array for each entry of the
        block, or one array in all if the site itself has several entries: a stack of layers, or the experts of a layer.
      blocks: the values of some ranks for each: A [entries, n, rank_block, K], B [entries, rank_block, N], and scales
        [entries, n, rank_block].
      where: int32 [4]: slot of the model, first entry, first rank, and the shard of experts that owns an entry written
        alone.
      ranks_over: mesh axes that split the ranks of A, if the arrays are those of one shard.
      entries_over: mesh axes that split entries written alone, if the arrays are those of one shard.
      one_launch: use a Triton kernel if it supports the arrays; see `takes_kernels`.

    Returns:
      The updated arrays, in the same order.
    """
    slot, entry, start, owner = where
    slot -= spec.first_slot
    zero = jnp.zeros((), jnp.int32)
    if spec.experts is None:
        lead = (slot,) if spec.layers is None else (entry, slot)
    else:
        experts = arrays[0][0].shape[len(spec.stack) + 1]  # experts of one shard
        lead = (*(() if spec.layers is None else (entry // experts,)), slot, entry % experts)
    written: list[jax.Array] = []
    tails = {"a": (zero, start, zero), "b": (start, zero), "ranks": (zero, start + 1)}
    for of, held, block in zip(spec.of_blocks, arrays, blocks, strict=True):
        tail = tails[of.name]
        if one_launch and not spec.entries and not (ranks_over and of.name == "a"):
            from jlora.pallas.triton import write  # imports Pallas' Triton backend, which is slow

            if write.suits(held[0].shape, len(held)):
                if of.name != "ranks":
                    written += write.write_rows(held, block, slot, start)
                else:  # scales are rows of one feature, after the true rank
                    rows = write.write_rows([array[..., None] for array in held], block[..., None], slot, start + 1)
                    written += [row[..., 0] for row in rows]
                continue
        for i, array in enumerate(held):
            if spec.experts is not None:
                update = block.reshape((1,) * (len(lead) - 1) + block.shape)
            else:
                update = block[i][None] if spec.layers is None else block[:, None]
            if ranks_over and of.name == "a":
                update = _own_ranks(array, update, lead, start, ranks_over)
                tail = (zero, zero, zero)
            if entries_over:
                now = lax.dynamic_slice(array, (*lead, *tail), update.shape)
                update = jnp.where(lax.axis_index(entries_over) == owner, update, now)
            written.append(lax.dynamic_update_slice(array, update, (*lead, *tail)))
    return tuple(written)


def takes_kernels(device: object) -> bool:
    """Return True if Triton kernels run on the device: NVIDIA GPUs from Ampere on, and a JAX with their lowering."""
    return (
        getattr(device, "platform", None) in ("gpu", "cuda")
        and (gpu_compute_capability(device) or 0) >= MIN_CAPABILITY
        and triton_gap() is None
    )


def _own_ranks(
    array: Real[Array, "..."],
    update: Real[Array, "..."],
    lead: tuple[jax.Array, ...],
    start: Int[Array, ""],
    over: tuple[str, ...],
) -> Real[Array, "..."]:
    """Return the new values of the ranks of A that a shard holds.

    Ranks covered by `update`, whose first rank is `start`, are replaced. The others keep their present values.
    """
    count = array.shape[-2]
    zero = jnp.zeros((), jnp.int32)
    now = lax.dynamic_slice(array, (*lead, zero, zero, zero), (*update.shape[:-2], count, update.shape[-1]))
    which = jnp.arange(count, dtype=jnp.int32) + lax.axis_index(over) * count - start
    new = jnp.take(update, jnp.clip(which, 0, update.shape[-2] - 1), axis=-2)
    inside = (which >= 0) & (which < update.shape[-2])
    return jnp.where(inside.reshape((1,) * (update.ndim - 2) + (count, 1)), new, now)


def write_whole(
    name: str,
    specs: Sequence[SlotSpec],
    arrays: Sequence[Float[Array, "..."]],
    values: Float[Array, "values"],
    slot: Int[Array, ""],
    num_slots: int,
) -> tuple[Float[Array, "..."], ...]:
    """Write the ranks and scales, or an extra, of one slot of every site that holds it, and return the updated arrays.

    In int8 the scales stay, because `write_block` writes them. `values` holds those of all sites, one site after the
    other. Sites without this slot keep their values, which can be those with fewer slots than the `num_slots` of the
    model. An array of one shard takes its own shard.
    """
    start, written = 0, list[jax.Array]()
    for spec, array in zip(specs, arrays, strict=True):
        of, axis = spec.arrays[name], len(spec.stack)
        shape = of.slot_shape
        size = math.prod(shape)
        block = lax.slice_in_dim(values, start, start + size).reshape(shape)
        for i, count in enumerate((*array.shape[:axis], *array.shape[axis + 1 :])):
            if count < shape[i]:
                assert of.sharding is not None
                first = lax.axis_index(of.sharding.spec[i + (i >= axis)]) * count
                block = lax.dynamic_slice_in_dim(block, first, count, i)
        own = slot - spec.first_slot
        new = cast("jax.Array", lax.dynamic_update_index_in_dim(array, block, own, axis=axis))
        is_own = (own >= 0) & (own < spec.num_slots)
        written.append(new if spec.num_slots == num_slots else jnp.where(is_own, new, array))
        start += size
    return tuple(written)
