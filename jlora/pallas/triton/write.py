"""Write slots on NVIDIA GPUs: copy a block's rows into the slot arrays of many layers, in one launch.

XLA starts a copy for each array. The 256 arrays of a Llama-3-8B are one CUDA graph, whose addresses change with every
adapter. Updating and launching that graph takes the host 2 of the 3 ms of a swap (H200). Here each program copies one
piece of the block, and selects its array by the piece's number.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int, Real

from jlora.pallas.triton.parts import compiler_params, load, store

PIECE = 8192  # elements that one program copies
WARPS = 8
MOST_ARRAYS = 128  # a kernel takes 4 KiB of arguments, and each array needs two


def suits(shape: tuple[int, ...], count: int) -> bool:
    """Return True if the kernel can write `count` arrays of a shape; its indices are 32 bits wide."""
    return count <= MOST_ARRAYS and math.prod(shape) < 2**31


def write_rows(
    arrays: Sequence[Real[Array, "S *mid R F"]],
    block: Real[Array, "rows *mid step F"],
    slot: Int[Array, ""],
    start: Int[Array, ""],
    *,
    interpret: bool = False,
) -> list[Real[Array, "S *mid R F"]]:
    """Set `arrays[i][slot, .., start : start + step]` to `block[i]`, in place.

    Args:
      arrays: Slot arrays of one shape.
      block: One row for each array.
      slot: Slot to write, which must be in range.
      start: First rank to write. start + step must be at most R; the block is not clipped.
      interpret: Run in the Pallas interpreter, for tests.

    Returns:
      The arrays, in the same memory.
    """
    slots, *mid, ranks, features = arrays[0].shape
    step, slices = block.shape[-2], math.prod(mid)
    kernel = partial(_kernel, slices=slices, ranks=ranks, step=step, features=features)
    pieces = len(arrays) * slices * pl.cdiv(step * features, PIECE)
    flat = jax.ShapeDtypeStruct((slots * slices * ranks * features,), arrays[0].dtype)
    written = pl.pallas_call(
        kernel,
        grid=(pieces,),
        out_shape=[flat] * len(arrays),
        input_output_aliases={2 + i: i for i in range(len(arrays))},
        compiler_params=compiler_params(WARPS),
        interpret=interpret,
        name="lora_write",
    )(jnp.stack([slot, start]), block.reshape(-1), *(array.reshape(-1) for array in arrays))
    return [array.reshape(arrays[0].shape) for array in written]


def _kernel(where_ref, block_ref, *refs, slices: int, ranks: int, step: int, features: int):
    """Compute out_i[slot, slice, start + r, f] = block[i, slice, r, f].

    The units of work are the arrays times the slices times pieces of step * F elements, which are contiguous in both.
    `refs` holds the arrays as inputs and then as outputs, in the same memory.
    """
    outs = refs[len(refs) // 2 :]
    length = step * features
    pieces = pl.cdiv(length, PIECE)
    unit = pl.program_id(0)
    row, piece = unit // pieces, unit % pieces
    array, i = row // slices, row % slices
    at = piece * PIECE + jnp.arange(PIECE, dtype=jnp.int32)
    inside = at < length
    values = load(block_ref, (row * length + at,), inside)
    into = ((where_ref[0] * slices + i) * ranks + where_ref[1]) * features + at
    for j, out_ref in enumerate(outs):
        pl.when(array == j)(partial(store, out_ref, (into,), values, inside))
