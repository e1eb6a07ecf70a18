"""What the Triton kernels share: their loads and stores, their dot, how they find and share out their work.

Nothing outside this file knows of Pallas' Triton.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jlora.pallas.tiles import matrix_rows

WAIT_FOR_RANK = 16  # up to this rank all of a and b is read: to wait for the true rank takes longer than it saves


def dot_dtype(x, a, b):
    with jax.numpy_dtype_promotion("standard"):  # operands of two dtypes are served, whatever the caller's setting
        return jnp.promote_types(jnp.promote_types(x.dtype, a.dtype), b.dtype)


def h_dtype(x, a, b):
    """What h is rounded to on its way to the expand, whose matrix unit takes bfloat16 anyway: then half the bytes are
    read back sooner. float16 lacks the range that h may have."""
    return jnp.dtype(jnp.bfloat16 if dot_dtype(x, a, b) == jnp.bfloat16 else jnp.float32)


def all_ranks(groups: int, n: int, rank: int):
    return jnp.full((groups, n), rank, jnp.int32)


def tiles_used(used_ref, group_ref):
    """A single tile is taken as used without waiting to read that: masks keep it harmless if it is empty."""
    return jnp.int32(1) if group_ref.shape[0] == 1 else used_ref[0]


def share_out(units, run, carry, among=None):
    """Runs unit p, p + programs, ... in program p, passing `carry` on. `among`: (p, programs) if not all take part."""
    p, programs = among or (pl.program_id(0), pl.num_programs(0))
    jax.lax.fori_loop(0, (units - p + programs - 1) // programs, lambda s, c: run(p + s * programs, c), carry)


def find_tile(tile, group_ref, rows_ref, tile_m: int):
    """The tile's group and its rows, as many as a dot takes: a power of two from 16 on. Past M where there is none."""
    place = jnp.arange(matrix_rows(tile_m), dtype=jnp.int32)
    rows = load(rows_ref, (tile * tile_m + place,), place < tile_m, other=2**30)
    return scalar(group_ref, tile), rows


def both(mask, other):
    return mask if other is None else mask & other


def find_chunk(chunk, counts, slice_sizes):
    """Chunk number -> its slice, its first column block there, the step to the next, the columns [begin, end)."""
    offsets = [sum(slice_sizes[:i]) for i in range(len(slice_sizes) + 1)]
    found = jnp.int32(0), chunk, counts[0], jnp.int32(0), jnp.int32(offsets[1])
    start = counts[0]
    for i in range(1, len(slice_sizes)):
        here = chunk >= start
        this = i, chunk - start, counts[i], offsets[i], offsets[i + 1]
        found = tuple(jnp.where(here, new, old) for new, old in zip(this, found, strict=True))
        start = start + counts[i]
    i, first, stride, begin, end = found
    if len(slice_sizes) > 1:
        align = max(d for d in (1, 2, 4, 8, 16) if all(offset % d == 0 for offset in offsets))
        begin, end = pl.multiple_of(begin, align), pl.multiple_of(end, align)
    return i, first, stride, begin, end


def dot(lhs, rhs, dtype, contract: int):
    """lhs @ rhs (contract 0) or rhsᵀ (1), summed in float32.

    h may exceed float16's range, so a float16 dot of it runs in TF32: float32's range, and as many bits as float16 has.
    """
    if dtype == jnp.float16 and lhs.dtype == jnp.float32:
        dtype, precision = jnp.float32, jax.lax.Precision.HIGH
    else:
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jax.lax.dot_general(
        lhs.astype(dtype), rhs.astype(dtype), (((1,), (contract,)), ((), ())),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip


def scalar(ref, *index):
    return plt.load(ref.at[index])


def load(ref, index, mask, other=0):
    """ref[index] where the mask allows, which is broadcast as the index is."""
    shape = jnp.broadcast_shapes(*(jnp.shape(part) for part in index))
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=other)


def store(ref, index, value, mask):
    plt.store(ref.at[index], value.astype(ref.dtype), mask=jnp.broadcast_to(mask, value.shape))


def compiler_params(warps: int, stages: int = 1) -> plt.CompilerParams:
    return plt.CompilerParams(num_warps=warps, num_stages=stages)
