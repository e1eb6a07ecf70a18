"""What a write of slot arrays computes: blocks of an adapter put into one slot of many layers."""

import math
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jlora._compat import Device
from jlora.layers.site import SlotSpec


def write_block(
    spec: SlotSpec,
    all_a: Sequence[Float[Array, "..."]],
    all_b: Sequence[Float[Array, "..."]],
    block_a: Float[Array, "rows n step K"],
    block_b: Float[Array, "rows step N"],
    where: Int[Array, "3"],
    *,
    device: Device | None,
) -> tuple[Float[Array, "..."], ...]:
    """All A and then all B, with a block written into one slot of each.

    Args:
      spec: of the sites whose arrays these are.
      all_a, all_b: the arrays of as many sites as the block has rows; of one site where it is a stack of layers.
      block_a, block_b: factors of some ranks.
      where: [slot, first layer of a stack, first rank].
      device: the one `jax.Device` that the arrays lie on; None where they lie on several.
    """
    slot, layer, start = where
    if device is not None and len(all_a) > 1 and _one_launch(device, spec):
        from jlora.pallas.triton.write import write_rows  # a slow import, and only GPUs need it

        return write_rows(all_a, all_b, block_a, block_b, slot, start)
    zero = jnp.zeros((), jnp.int32)
    lead = (slot,) if spec.layers is None else (layer, slot)
    written: list[jax.Array] = []
    for arrays, block, tail in ((all_a, block_a, (zero, start, zero)), (all_b, block_b, (start, zero))):
        for i, array in enumerate(arrays):
            update = block[i][None] if spec.layers is None else block[:, None]
            written.append(lax.dynamic_update_slice(array, update, (*lead, *tail)))
    return tuple(written)


def _one_launch(device: Device, spec: SlotSpec) -> bool:
    if device.platform not in ("gpu", "cuda"):
        return False
    from jlora.pallas.triton.write import can_write

    return can_write(device, max(math.prod(shape) for shape in spec.shapes))


def write_ranks(
    specs: Sequence[SlotSpec], arrays: Sequence[Int[Array, "..."]], ranks: Int[Array, "ranks"], slot: Int[Array, ""]
) -> tuple[Int[Array, "..."], ...]:
    """The ranks of every site, with those of one slot written: `ranks` holds them one site after the other."""
    start, written = 0, list[jax.Array]()
    for spec, array in zip(specs, arrays, strict=True):
        shape = (*spec.stack, spec.slices)
        size = int(np.prod(shape))
        block = lax.slice(ranks, (start,), (start + size,)).reshape(shape)
        written.append(cast("jax.Array", lax.dynamic_update_index_in_dim(array, block, slot, axis=len(spec.stack))))
        start += size
    return tuple(written)
