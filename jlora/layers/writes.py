"""What a write of slot arrays computes: blocks of an adapter put into one slot of many layers."""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jlora.layers.site import SlotSpec


def write_block(
    spec: SlotSpec,
    all_a: Sequence[Float[Array, "..."]],
    all_b: Sequence[Float[Array, "..."]],
    block_a: Float[Array, "rows n step K"],
    block_b: Float[Array, "rows step N"],
    where: Int[Array, "3"],
) -> tuple[Float[Array, "..."], ...]:
    """All A and then all B, with a block written into one slot of each.

    Args:
      spec: of the sites whose arrays these are.
      all_a, all_b: the arrays of as many sites as the block has rows; of one site where it has several rows itself,
        those of a stack of layers, or of experts of one layer.
      block_a, block_b: factors of some ranks.
      where: [slot of the model, first row, first rank].
    """
    slot, row, start = where
    slot -= spec.first_slot
    zero = jnp.zeros((), jnp.int32)
    if spec.experts is None:
        lead = (slot,) if spec.layers is None else (row, slot)
    else:
        lead = (*(() if spec.layers is None else (row // spec.experts,)), slot, row % spec.experts)
    written: list[jax.Array] = []
    for arrays, block, tail in ((all_a, block_a, (zero, start, zero)), (all_b, block_b, (start, zero))):
        for i, array in enumerate(arrays):
            if spec.experts is not None:
                update = block.reshape((1,) * (len(lead) - 1) + block.shape)
            else:
                update = block[i][None] if spec.layers is None else block[:, None]
            written.append(lax.dynamic_update_slice(array, update, (*lead, *tail)))
    return tuple(written)


def write_ranks(
    specs: Sequence[SlotSpec], arrays: Sequence[Int[Array, "..."]], ranks: Int[Array, "ranks"], slot: Int[Array, ""]
) -> tuple[Int[Array, "..."], ...]:
    """The ranks of every site, with those of one slot written: `ranks` holds them one site after the other.

    Sites that do not have this slot stay as they are.
    """
    start, written = 0, list[jax.Array]()
    for spec, array in zip(specs, arrays, strict=True):
        shape = (*spec.rows, spec.slices)
        size = int(np.prod(shape))
        block = lax.slice(ranks, (start,), (start + size,)).reshape(shape)
        own = slot - spec.first_slot
        new = cast("jax.Array", lax.dynamic_update_index_in_dim(array, block, own, axis=len(spec.stack)))
        written.append(jnp.where((own >= 0) & (own < spec.num_slots), new, array))
        start += size
    return tuple(written)
