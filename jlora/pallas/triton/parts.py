"""Shared parts of the Triton kernels: loads and stores, dots, and the search for units of work.

No other file imports Pallas' Triton module.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jlora.pallas.tiles import matrix_rows
from jlora.pallas.xla import dot_dtype

_SPAN = 32  # parts that one expression adds
WAIT_FOR_RANK = 16  # up to this rank all of a and b is read, because waiting for the true rank takes longer


def h_dtype(x, a, b):
    """Return the dtype to which partial sums of h are rounded between shrink and expand.

    For bfloat16 it is bfloat16, which halves the bytes to read back; the matrix unit of the expand takes bfloat16
    anyway. float16 lacks the range that h may have.
    """
    return jnp.dtype(jnp.bfloat16 if dot_dtype(x, a, b) == jnp.bfloat16 else jnp.float32)


def add_in_order(parts):
    """Add parts [P, ...] of a sum in a fixed order. XLA's own sum may take another order for other shapes.

    They are added from the first to the last, or in spans of `_SPAN` whose sums are added likewise: one expression of
    the 501 parts of a vocabulary takes XLA a minute to compile.
    """
    if (spans := len(parts) // _SPAN) < 2:
        return reduce(jnp.add, [parts[i] for i in range(len(parts))])
    whole = parts[: spans * _SPAN].reshape(spans, _SPAN, *parts.shape[1:])
    sums = reduce(jnp.add, [whole[:, i] for i in range(_SPAN)])
    left = parts[spans * _SPAN :]
    return add_in_order(jnp.concatenate([sums, add_in_order(left)[None]]) if len(left) else sums)


def tiles_used(used_ref, group_ref):
    """Return the number of used tiles.

    A single tile counts as used without reading the number. If it is empty, masks keep it harmless.
    """
    return jnp.int32(1) if group_ref.shape[0] == 1 else used_ref[0]


def share_out(units, run, carry):
    """Run the units p, p + programs, ... in program p, passing `carry` from one to the next."""
    p, programs = pl.program_id(0), pl.num_programs(0)
    jax.lax.fori_loop(0, (units - p + programs - 1) // programs, lambda s, c: run(p + s * programs, c), carry)


def find_tile(tile, group_ref, rows_ref, tile_m: int):
    """Return a tile's group and the indices of its rows, padded to the size of a dot; padding is past M."""
    place = jnp.arange(matrix_rows(tile_m), dtype=jnp.int32)
    rows = load(rows_ref, (tile * tile_m + place,), place < tile_m, other=2**30)
    return scalar(group_ref, tile), rows


def both(mask, other):
    """Return the conjunction of two masks, the second of which may be None."""
    return mask if other is None else mask & other


def find_chunk(chunk, counts, slice_sizes):
    """Return a chunk's slice, its first block of columns in it, the stride between its blocks, and the slice's columns.

    The columns are [begin, end).
    """
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
    """Compute lhs @ rhs (contract 0) or lhs @ rhsᵀ (contract 1), summed in float32.

    h may exceed the range of float16. A float16 dot of h therefore runs in TF32, which has the range of float32 and as
    many mantissa bits as float16.
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
    """Load one element."""
    return plt.load(ref.at[index])


def rank_of(ranks_ref, group, i):
    """Load the true rank of a group and slice as int32."""
    return scalar(ranks_ref, group, i, jnp.int32(0)).astype(jnp.int32)


def group_scale(ranks_ref, group, i, r):
    """Load the scale of a group and slice: a scalar, or with int8 factors those of the ranks r."""
    if ranks_ref.shape[2] == 2:
        return scalar(ranks_ref, group, i, jnp.int32(1))
    return load(ranks_ref, (group, i, 1 + r), r < ranks_ref.shape[2] - 1)


def scales_of(ranks_ref, group, i, blocks, row_scales_ref, rows):
    """Return the scales of a group and slice for each block of ranks, times those of the rows unless the ref is None.

    Each is a scalar, or broadcasts to [tile_m, block].
    """
    one = ranks_ref.shape[2] == 2
    scales = [group_scale(ranks_ref, group, i, r) for r in (blocks[:1] if one else blocks)]
    scales = scales if one else [scale[None, :] for scale in scales]
    if row_scales_ref is not None:
        of_rows = load(row_scales_ref, (rows,), rows < row_scales_ref.shape[0])[:, None]
        scales = [scale * of_rows for scale in scales]
    return scales * (len(blocks) // len(scales))


def sum_parts(h_ref, first, rows, r, live, rank: int, true_rank, scale):
    """Add the partial sums of h in order, times one of `scales_of` -> [tile_m, block_r] float32, zero from the rank on.

    Entries from the true rank on were never written. They are dropped after the load, because a mask on the load would
    prevent wide loads.
    """
    mask = live & (r < rank)[None, :] if rank % len(r) else live
    columns = (first + r)[None, :]
    parts = [load(h_ref, (jnp.int32(p), rows[:, None], columns), mask) for p in range(h_ref.shape[0])]
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total += part.astype(jnp.float32)
    return jnp.where((r < true_rank)[None, :], total * scale, 0)


def load(ref, index, mask, other=0):
    """Load ref[index] where the mask, broadcast to the shape of the index, is True, and `other` elsewhere."""
    shape = jnp.broadcast_shapes(*(jnp.shape(part) for part in index))
    return plt.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=other)


def store(ref, index, value, mask):
    """Store `value`, cast to the dtype of `ref`, where the mask is True."""
    plt.store(ref.at[index], value.astype(ref.dtype), mask=jnp.broadcast_to(mask, value.shape))


def compiler_params(warps: int, stages: int = 1) -> plt.CompilerParams:
    """Return Triton's compiler parameters."""
    return plt.CompilerParams(num_warps=warps, num_stages=stages)
