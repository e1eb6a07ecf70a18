"""One launch that writes a block into the slot arrays of many layers, on NVIDIA GPUs.

XLA makes a kernel of each `dynamic_update_slice`, and a graph of the kernels of a program; that graph is told every
kernel anew whenever a block lies elsewhere than the one before, which costs more than all else. This is one kernel.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from jlora._compat import Device, gpu_compute_capability
from jlora.pallas.triton.kernels import MIN_CAPABILITY

_TILE = 2048  # values that one program of the kernel copies
_LARGEST = 2**31  # Triton counts in int32


def can_write(device: Device, largest: int) -> bool:
    """Whether `write_rows` runs on a `jax.Device`, for arrays of up to `largest` values."""
    gpu = device.platform in ("gpu", "cuda")
    return gpu and (gpu_compute_capability(device) or 0) >= MIN_CAPABILITY and largest + _TILE < _LARGEST


def write_rows(
    all_a: Sequence[Float[Array, "S n R K"]],
    all_b: Sequence[Float[Array, "S R N"]],
    block_a: Float[Array, "rows n step K"],
    block_b: Float[Array, "rows step N"],
    slot: Int[Array, ""],
    start: Int[Array, ""],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "..."], ...]:
    """All A and then all B, with the block written into one slot of each, from rank `start` on.

    In memory that is a copy of one stretch a slice of A and one for B. The arrays are written in place where the caller
    donates them.

    Args:
      all_a, all_b: the slot arrays of as many layers as the block has rows.
      block_a, block_b: the block.
      slot, start: where it goes.
      interpret: run in Pallas' interpreter.
    """
    arrays = (*all_a, *all_b)
    slices, step, _ = block_a.shape[1:]
    longest = step * max(block_a.shape[3], block_b.shape[2])
    written = pl.pallas_call(
        partial(_kernel, slices=slices, ranks=all_b[0].shape[1], step=step),
        grid=(len(all_a) * (slices + 1), pl.cdiv(longest, _TILE)),
        out_shape=[jax.ShapeDtypeStruct((array.size,), array.dtype) for array in arrays],
        input_output_aliases={3 + i: i for i in range(len(arrays))},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="lora_write",
    )(jnp.stack([slot, start]), block_a.reshape(-1), block_b.reshape(-1), *(array.reshape(-1) for array in arrays))
    return tuple(new.reshape(array.shape) for new, array in zip(written, arrays, strict=True))


def _kernel(where_ref, a_ref, b_ref, *refs, slices: int, ranks: int, step: int):
    """Program (unit, tile) copies a tile of one stretch. Units: the slices of every A, then every B.

    A kernel cannot index the arrays that it is given, so each is a branch.
    """
    arrays = refs[len(refs) // 2 :]  # the outputs, which are the inputs too
    rows = len(arrays) // 2
    unit, tile = pl.program_id(0), pl.program_id(1)
    slot, start = (plt.load(where_ref.at[jnp.int32(i)]) for i in range(2))
    width_a, width_b = a_ref.shape[0] // (rows * slices * step), b_ref.shape[0] // (rows * step)
    for i in range(rows):

        @pl.when(unit // slices == i)
        def _(i=i):
            at = (slot * slices + unit % slices) * ranks + start
            _copy(a_ref, arrays[i], unit * step * width_a, at * width_a, step * width_a, tile)

        @pl.when(unit == rows * slices + i)
        def _(i=i):
            _copy(b_ref, arrays[rows + i], i * step * width_b, (slot * ranks + start) * width_b, step * width_b, tile)


def _copy(source_ref, target_ref, source, target, length: int, tile):
    """One tile of a stretch of `length` values, from `source` on to `target` on."""
    inside = tile * _TILE + jnp.arange(_TILE, dtype=jnp.int32)
    mask = inside < length
    values = plt.load(source_ref.at[source + inside], mask=mask, other=0)
    plt.store(target_ref.at[target + inside], values, mask=mask)
