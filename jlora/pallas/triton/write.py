"""Writes of slots on NVIDIA: what a block holds for the slot arrays of many layers, in one launch.

XLA starts a copy for each array. The 256 of a Llama-3-8B are one CUDA graph, whose addresses change with every adapter:
to tell it so and to launch it takes the host 2 of the 3 ms of a swap (H200). Here each program copies one piece of the
block, and asks which array it is for.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jlora.pallas.triton.parts import compiler_params, load, store

PIECE = 8192  # elements that one program copies
WARPS = 8
MOST_ARRAYS = 128  # a kernel takes 4 KiB of arguments, and each array is two


def suits(shape: tuple[int, ...], count: int) -> bool:
    """Whether the kernel can write so many arrays of a shape: its indices are 32 bits wide."""
    return count <= MOST_ARRAYS and math.prod(shape) < 2**31


def write_rows(
    arrays: Sequence[Float[Array, "S *mid R F"]],
    block: Float[Array, "rows *mid step F"],
    slot: Int[Array, ""],
    start: Int[Array, ""],
    *,
    interpret: bool = False,
) -> list[Float[Array, "S *mid R F"]]:
    """`arrays[i]` with `[slot, .., start : start + step]` set to `block[i]`, in their own memory.

    Args:
      arrays: slot arrays of one shape.
      block: a row for each of them.
      slot, start: in range; nothing is cut.
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
    """out_i[slot, slice, start + r, f] = block[i, slice, r, f]

    units: arrays x slices x pieces of step * F elements, which lie side by side in both. refs: the arrays, and then the
    same memory once more, for what is written.
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
