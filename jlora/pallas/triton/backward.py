"""The backward pass on NVIDIA GPUs: one kernel for each factor, which reads the rows once.

With h = x aᵀ and out = base + s h b, the kernel of b reads the rows of dout, and that of a the rows of x:

    expand   db[g] = sum over the rows of g of (s h)ᵀ dout     dh = s dout bᵀ, a partial sum for each block of columns
    shrink   da[g] = sum over the rows of g of dhᵀ x           dx = dh a

A program has a block of columns and a segment, which is consecutive rows of one group in the order of the plan. It
keeps its block of the factor and of the factor's gradient, and goes through the rows once, for both products. A group
of many rows has several segments. Their sums are written apart, and a second kernel adds them in order. A group without
rows has an empty segment, which writes zeros. There are no atomics.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Int, Real

from jlora.pallas.gpus import GPU, current_gpu
from jlora.pallas.plan import Plan, segments
from jlora.pallas.tiles import matrix_rows, rank_block
from jlora.pallas.triton.parts import (
    add_in_order,
    compiler_params,
    dot,
    find_chunk,
    h_dtype,
    load,
    rank_of,
    scalar,
    scales_of,
    store,
    sum_parts,
)
from jlora.pallas.xla import all_ranks, dot_dtype, sum_by_source

MOST_RANKS = 64  # ranks whose sums a program keeps in registers
_PIECE = 2048  # elements of the partial sums that one program adds


@dataclass(frozen=True)
class Blocks:
    """Sizes of a program: rows of a step, columns, rows of a segment, warps, and steps whose rows are in flight."""

    rows: int
    columns: int
    segment: int
    warps: int = 4
    stages: int = 3


def choose(rows: int, columns: int, ranks: int, itemsize: int, gpu: GPU | None, widest: int) -> Blocks:
    """Return the sizes for M rows of so many columns, and the ranks of a program.

    Blocks have up to `widest` columns; a program of the shrink, which keeps a block of dx too, spills with more.
    They are narrowed until a batch of eight groups has programs for all multiprocessors.
    """
    gpu = current_gpu() if gpu is None else gpu
    segment = max(512, -(-rows // 8 // 64) * 64)
    step = min(32 if itemsize == 4 else 64, matrix_rows(rows))
    block = 64 if itemsize == 4 or ranks > 32 else 128 if ranks > 16 else widest
    while block > 64 and max(1, rows // segment) * pl.cdiv(columns, block) < 3 * gpu.multiprocessors // 2:
        block //= 2
    stages = 3
    while stages > 1 and (stages + 1) * step * block * itemsize > gpu.shared_memory // 2:
        stages -= 1
    return Blocks(step, block, segment, 8 if itemsize == 4 else 4, stages)


@partial(jax.jit, static_argnames=("slice_sizes", "blocks", "gpu", "interpret"))
def expand_grads(
    h: Float[jax.Array, "P M nR"],
    dout: Float[jax.Array, "M N"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    ranks: Float[jax.Array, "G n s"] | None,
    slice_sizes: tuple[int, ...],
    *,
    blocks: Blocks | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "M nR"], Real[jax.Array, "G R N"]]:
    """Return dh and db, as `xla.expand_grads`. Rows without a group, and entries past the rank, of dh are undefined."""
    rank, n = b.shape[1], len(slice_sizes)
    size = rank_block(rank)
    count = pl.cdiv(rank, size)
    chunks = next(c for c in range(1, count + 1) if count % c == 0 and count // c * size <= MOST_RANKS)
    width = count // chunks * size
    blocks = blocks or choose(plan.num_rows, dout.shape[1], width, dot_dtype(dout, b, b).itemsize, gpu, 256)
    counts = [pl.cdiv(columns, blocks.columns) for columns in slice_sizes]
    parts = jax.ShapeDtypeStruct((max(counts), plan.num_rows, n * rank), h_dtype(dout, b, b))
    ranks = all_ranks(b.shape[0], n, rank) if ranks is None else ranks
    work = _Work(rank, slice_sizes, None, tuple(range(0, width, size)), size, blocks)
    db, parts = _call(work, h, dout, b, plan, ranks, None, plan.row_scales, parts, chunks=chunks, interpret=interpret)
    dh = [
        add_in_order(parts[:count, :, i * rank : (i + 1) * rank].astype(jnp.float32)) for i, count in enumerate(counts)
    ]
    return jnp.concatenate(dh, axis=1), db


@partial(jax.jit, static_argnames=("blocks", "gpu", "interpret"))
def shrink_grads(
    dh: Float[jax.Array, "M nR"],
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    plan: Plan,
    ranks: Float[jax.Array, "G n s"] | None,
    x_rows: Int[jax.Array, "M"] | None,
    *,
    blocks: Blocks | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "T K"], Real[jax.Array, "G n R K"]]:
    """Return dx and da, as `xla.shrink_grads`.

    A launch takes up to `MOST_RANKS` ranks of all slices together. With more, the next launch adds to dx.
    """
    groups, n, rank, k = a.shape
    size = rank_block(rank)
    all_blocks = [(i, r) for i in range(n) for r in range(0, rank, size)]
    most = MOST_RANKS // size
    launches = [all_blocks[i : i + most] for i in range(0, len(all_blocks), most)]
    blocks = blocks or choose(plan.num_rows, k, len(launches[0]) * size, dot_dtype(x, a, a).itemsize, gpu, 128)
    ranks = all_ranks(groups, n, rank) if ranks is None else ranks
    flat = a.reshape(groups, n * rank, k)
    dx = jax.ShapeDtypeStruct((plan.num_rows, k), x.dtype if len(launches) == 1 else jnp.float32)
    before: tuple[Any, ...] = ()
    for pairs in launches:
        work = _Work(rank, (k,), tuple(i for i, _ in pairs), tuple(r for _, r in pairs), size, blocks)
        before = _call(work, dh[None], x, flat, plan, ranks, x_rows, None, dx, before=before, interpret=interpret)
    da, dx = before
    dx = dx if x_rows is None else sum_by_source(dx, x_rows, plan, len(x))
    return dx.astype(x.dtype), da.reshape(a.shape)


@dataclass(frozen=True)
class _Work:
    """Static sizes of a launch.

    Attributes:
      rank: R.
      sizes: Columns of each slice of the rows; the columns of a program are in one slice.
      slices: Slice of each block of ranks, which all have the columns, or None for the slice of the columns.
      first, size: First rank of each block, and ranks of a block.
      blocks: See `Blocks`.
    """

    rank: int
    sizes: tuple[int, ...]
    slices: tuple[int, ...] | None
    first: tuple[int, ...]
    size: int
    blocks: Blocks


def _call(work: _Work, w, rows, factor, plan, ranks, index, row_scales, out, *, chunks=1, before=(), interpret):
    """Return the gradient of the factor and `out`. This launch adds to `before`, results of an earlier one."""
    table = segments(plan, work.blocks.segment)
    count = table.pieces.shape[1]
    per_segment = sum(pl.cdiv(size, work.blocks.columns) for size in work.sizes)
    shapes = [jax.ShapeDtypeStruct(factor.shape, factor.dtype), out]
    if table.slots:
        shapes.append(jax.ShapeDtypeStruct((table.slots, *factor.shape[1:]), jnp.float32))
    operands = [table.pieces, table.order, ranks, w, rows, factor, index, row_scales, *before]
    given = sum(v is not None for v in operands) - len(before)
    grad, out, *partial_sums = pl.pallas_call(
        partial(_kernel, work=work, added=len(before)),
        grid=(count * per_segment, chunks),
        out_shape=shapes,
        input_output_aliases={given + i: i for i in range(len(before))},
        compiler_params=compiler_params(work.blocks.warps, work.blocks.stages),
        interpret=interpret,
        name="lora_outer",
    )(*operands)
    if partial_sums:
        grad = _add_pieces(grad, partial_sums[0], table.long, work, interpret)
    return grad, out


def _kernel(
    pieces_ref, order_ref, ranks_ref, w_ref, rows_ref, factor_ref, index_ref, row_scales_ref, *refs, work: _Work,
    added: int,
):  # fmt: skip
    """Compute the sum over a segment's rows of wᵀ rows, and w factor or rows factorᵀ, for a block of columns.

    `w_ref` [P, M, n * R] holds partial sums. `index_ref` is None or an index by which row m of the plan is
    rows[index[m]]. `refs` are `added` results of an earlier launch, the gradient of the factor, the other result, and
    the sums of pieces of groups.
    """
    grad_ref, out_ref, *sums_refs = refs[added:]
    step, block = work.blocks.rows, work.blocks.columns
    counts = [pl.cdiv(size, block) for size in work.sizes]
    unit, chunk = pl.program_id(0), pl.program_id(1)
    piece = unit // sum(counts)
    group, first, last, slot = (scalar(pieces_ref, jnp.int32(i), piece) for i in range(4))
    real = group < factor_ref.shape[0]  # the last group is that of rows without one
    group = jnp.minimum(group, factor_ref.shape[0] - 1)
    i, part, _, begin, end = find_chunk(unit % sum(counts), counts, work.sizes)
    col = begin + part * block + jnp.arange(block, dtype=jnp.int32)
    inside = (col < end)[None, :]
    expand = work.slices is None

    of_ranks = []  # of each block of ranks: slice, ranks, true rank, their rows of the factor, the factor
    for own, r0 in zip(work.slices or (i,) * len(work.first), work.first, strict=True):
        r = chunk * len(work.first) * work.size + r0 + jnp.arange(work.size, dtype=jnp.int32)
        own = jnp.int32(own)
        true_rank = jnp.where(real, rank_of(ranks_ref, group, own), 0)
        at = r if expand else own * work.rank + r
        factor = load(factor_ref, (group, at[:, None], col[None, :]), (r < true_rank)[:, None] & inside)
        of_ranks.append((own, r, true_rank, at, factor))

    def go(j, sums):
        place = first + j * step + jnp.arange(step, dtype=jnp.int32)
        row = load(order_ref, (place,), place < last, other=2**30)
        live = (place < last)[:, None]
        source = row if index_ref is None else load(index_ref, (row,), (place < last) & real, other=2**30)
        values = load(rows_ref, (source[:, None], col[None, :]), live & real & inside)
        dtype = dot_dtype(values, factor_ref)
        new, total = [], jnp.zeros((step, block), jnp.float32)
        for (own, r, true_rank, _, factor), before in zip(of_ranks, sums, strict=True):
            scale = scales_of(ranks_ref, group, own, [r], row_scales_ref, row)[0] if expand else 1.0
            w = sum_parts(w_ref, own * work.rank, row, r, live, work.rank, true_rank, scale)
            new.append(before + dot(w.T, values, dtype, 0))
            if expand:
                dh = dot(values, factor, dtype, 1) * scale
                at = (part, row[:, None], (own * work.rank + r)[None, :])
                store(out_ref, at, dh, live & (r < true_rank)[None, :])
            else:
                total += dot(w, factor, dtype, 0)
        if not expand:
            before = load(out_ref, (row[:, None], col[None, :]), live & inside) if added else 0
            store(out_ref, (row[:, None], col[None, :]), before + total, live & inside)
        return tuple(new)

    zeros = tuple(jnp.zeros((work.size, block), jnp.float32) for _ in of_ranks)
    steps = jnp.where(real, pl.cdiv(last - first, step), 0) if expand else pl.cdiv(last - first, step)
    sums = jax.lax.fori_loop(0, steps, go, zeros)
    for (_, r, _, at, _), total in zip(of_ranks, sums, strict=True):
        mask = (r < work.rank)[:, None] & inside
        store(grad_ref, (group, at[:, None], col[None, :]), total, mask & real & (slot < 0))
        if sums_refs:
            store(sums_refs[0], (jnp.maximum(slot, 0), at[:, None], col[None, :]), total, mask & (slot >= 0))


def _add_pieces(grad, sums, long, work: _Work, interpret: bool):
    """Add the sums of the pieces of long groups [slots, W, C], in order, into the gradient [G, W, C]."""
    length = grad.shape[1] * grad.shape[2]
    total = pl.pallas_call(
        partial(_add_pieces_kernel, work=work, columns=grad.shape[2]),
        grid=(long.shape[1] * pl.cdiv(length, _PIECE),),
        out_shape=jax.ShapeDtypeStruct((grad.shape[0], length), grad.dtype),
        input_output_aliases={2: 0},
        compiler_params=compiler_params(4),
        interpret=interpret,
        name="lora_outer_sum",
    )(long, sums.reshape(-1, length), grad.reshape(-1, length))
    return total.reshape(grad.shape)


def _add_pieces_kernel(long_ref, sums_ref, _, grad_ref, *, work: _Work, columns: int):
    length = grad_ref.shape[1]
    pieces = pl.cdiv(length, _PIECE)
    unit = pl.program_id(0)
    group, slot, count = (scalar(long_ref, jnp.int32(i), unit // pieces) for i in range(3))
    at = unit % pieces * _PIECE + jnp.arange(_PIECE, dtype=jnp.int32)
    inside = (at < length) & (group < grad_ref.shape[0])
    if work.slices is not None:  # other launches add the other ranks
        row, first = at // columns, work.slices[0] * work.rank + work.first[0]
        inside &= (row >= first) & (row < work.slices[-1] * work.rank + min(work.first[-1] + work.size, work.rank))

    def add(j, total):
        return total + load(sums_ref, (slot + j, at), inside)

    total = jax.lax.fori_loop(0, count, add, jnp.zeros(_PIECE, jnp.float32))
    store(grad_ref, (jnp.minimum(group, grad_ref.shape[0] - 1), at), total, inside)
