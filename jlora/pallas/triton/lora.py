"""NVIDIA kernels through Pallas' Triton lowering.

There are two kernels, the shrink and the expand. The grid of each is a fixed number of programs, which share out the
units of work that the plan defines:

    shrink   tiles x blocks of ranks x parts of K    -> h [split_k, M, n * R], one partial sum for each part of K
    expand   tiles x chunks of columns               -> out [M, N] = base + (sum of the parts of h) @ b

For few rows the expand writes the delta alone, which XLA adds to the base output. Neither launch then depends on the
base product, and XLA may run them beside it (docs/performance.md, "Kernels side by side").

The work follows the used tiles. The order of every sum depends on static sizes only. A value therefore does not depend
on the program that computes it, nor on the other rows of the batch. There are no atomics.
"""

from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Float, Int, Real

from jlora.pallas.gpus import GPU, MIN_CAPABILITY, current_gpu
from jlora.pallas.plan import Plan
from jlora.pallas.tiles import GPUProblem, GPUTiles, ItemSizes, gpu_tiles, rank_block, too_large
from jlora.pallas.triton import backward as backward
from jlora.pallas.triton import fused
from jlora.pallas.triton.parts import (
    WAIT_FOR_RANK,
    add_in_order,
    both,
    compiler_params,
    dot,
    find_chunk,
    find_tile,
    h_dtype,
    load,
    rank_of,
    scalar,
    scales_of,
    share_out,
    store,
    sum_parts,
    tiles_used,
)  # fmt: skip
from jlora.pallas.xla import H, all_ranks, dot_dtype, float_of, has_group, mask_rows

MAX_RANK = 512
# Most rows for which XLA adds the delta. With more, the delta's bytes cost as much as they save. Qwen2.5-7B on an H100:
# 256 rows cost 10% of a step instead of 15%, but a prefill of 4,096 rows without adapters 3.4% instead of 0.
SEPARATE_ROWS = 256
# The same for pairs of tokens and experts. On an H100, 8 tokens of Qwen3-30B-A3B cost 9% of a step instead of 11%, and
# 64 tokens of gpt-oss-20b's experts 5.4% of their block instead of 8%. GLM-4.5-Air's 2,048 tokens (16,384 pairs) cost
# the same either way.
SEPARATE_PAIRS = 2048
# Most rows for which the shrink of gate and up is launched before their product. After it (`_depends`), a step of eight
# sequences takes 0.3 to 1.2% longer on an H200 (OLMo-2-13B's shape).
EARLY_ROWS = 32
INVARIANT_ROWS = 64  # number of rows for which the tiles of `batch_invariant` calls are chosen


def unsupported_reason(base, x, a, b, *, slice_sizes: tuple[int, ...]) -> str | None:
    """Return why `current_gpu()` cannot run `add_lora` on operands of these shapes and dtypes, or None if it can."""
    gpu = current_gpu()
    if gpu.capability is not None and gpu.capability < MIN_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability 8.0 or newer, which {gpu.kind} is not; use backend='xla'"
    for name, array in (("base", base), ("x", x), ("a", a), ("b", b)):
        of_factor = name in "ab" and array.dtype == jnp.int8
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) and not of_factor:
            return f"takes bfloat16, float16 and float32, but {name} is {array.dtype}; cast it"
    if a.shape[2] > MAX_RANK:
        return f"takes ranks up to {MAX_RANK}, but R is {a.shape[2]}; use backend='xla'"
    rows = base.shape[0]
    return too_large(sizes_of(rows, x, a, b, len(slice_sizes)), gpu) if rows else None


def problem_of(plan: Plan, x, a, b, slices: int, batch_invariant: bool = False) -> GPUProblem:
    """Return the sizes of an `add_lora` with this plan; with `batch_invariant` they have a fixed number of rows."""
    rows = INVARIANT_ROWS if batch_invariant else plan.num_rows
    return sizes_of(rows, x, a, b, slices, plan.tile_m, plan.experts > 1)


def sizes_of(rows: int, x, a, b, slices: int, tile_m: int = 16, experts: bool = False) -> GPUProblem:
    """Return the sizes of an `add_lora` from its operands."""
    sizes = ItemSizes(*(jnp.dtype(dtype).itemsize for dtype in (x.dtype, a.dtype, b.dtype, h_dtype(x, a, b))))
    return GPUProblem(jnp.dtype(x.dtype).name, rows, tile_m, x.shape[1], slices, b.shape[1], sizes, experts)


def shrink(
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Float[jax.Array, "G n s"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
    batch_invariant: bool = False,
    tiles: GPUTiles | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "n M R"]:
    """Implement `jlora.ops.shrink`."""
    groups, n, rank, k = a.shape
    b = jax.ShapeDtypeStruct((groups, rank, k), a.dtype)  # a stand-in with N = K, which only chooses the tiles
    tiles = tiles or gpu_tiles(problem_of(plan, x, a, b, n, batch_invariant), gpu)
    ranks = all_ranks(groups, n, rank) if ranks is None else ranks
    parts = _shrink(x, a, plan, ranks, x_rows, tiles, jnp.dtype(jnp.float32), interpret)
    return mask_rows(jnp.moveaxis(add_in_order(parts).reshape(-1, *a.shape[1:3]), 1, 0), plan, ranks)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    base: Float[jax.Array, "M N"] | None,
    ranks: Float[jax.Array, "G n s"] | None,
    batch_invariant: bool = False,
    tiles: GPUTiles | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "M N"]:
    """Implement `jlora.ops.expand`."""
    ranks = all_ranks(b.shape[0], len(slice_sizes), b.shape[1]) if ranks is None else ranks
    dtype = float_of(b) if base is None else base.dtype
    products = dtype if b.dtype == jnp.int8 else b.dtype
    # Stand-ins with K = N, which only choose the tiles.
    x = jax.ShapeDtypeStruct((plan.num_rows, b.shape[2]), products)
    a = jax.ShapeDtypeStruct((b.shape[0], len(slice_sizes), *b.shape[1:]), b.dtype)
    tiles = tiles or gpu_tiles(problem_of(plan, x, a, b, len(slice_sizes), batch_invariant), gpu)
    h = jnp.moveaxis(h, 0, 1).reshape(1, plan.num_rows, -1)
    total = _expand(base, h, b, plan, ranks, slice_sizes, tiles, products, dtype, interpret)
    return jnp.where(has_group(plan)[:, None], total, -0.0) if base is None else total


def add_lora(
    base: Float[jax.Array, "M N"] | None,
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    ranks: Float[jax.Array, "G n s"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
    batch_invariant: bool = False,
    tiles: GPUTiles | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
    keep_h: bool = False,
) -> Any:
    """Implement `jlora.ops.add_lora` in two launches, or in three after a base product (`_depends`).

    A handful of experts' rows take one launch (`fused`), but not with `batch_invariant` or `keep_h`. With `keep_h`,
    return the result and the partial sums of h, for `expand_grads`.
    """
    groups, n, rank, _ = a.shape
    ranks = all_ranks(groups, n, rank) if ranks is None else ranks
    # bfloat16 halves the bytes of the delta, and has the range of float32. PEFT rounds the delta to it too.
    narrow = dot_dtype(x, a, b) if base is None else base.dtype
    delta_dtype = jnp.bfloat16 if narrow == jnp.bfloat16 else jnp.float32
    if tiles is None and not batch_invariant and not keep_h and fused.suits(plan, a, slice_sizes):
        delta = fused.delta(
            x, a, b, plan, slice_sizes=slice_sizes, ranks=ranks, x_rows=x_rows, dtype=delta_dtype, interpret=interpret
        )
        return _add(base, delta, plan)
    tiles = tiles or gpu_tiles(problem_of(plan, x, a, b, n, batch_invariant), gpu)
    separate = plan.num_rows <= (SEPARATE_ROWS if plan.experts == 1 else SEPARATE_PAIRS) and not batch_invariant
    gate_up = len(slice_sizes) == 2 and plan.num_rows > EARLY_ROWS
    late = separate and gate_up if plan.experts == 1 else not separate
    after_base = base is not None and late and not batch_invariant
    shrink_plan = replace(plan, tiles_used=_depends(plan.tiles_used, x, interpret)) if after_base else plan
    h = shrink_parts(x, a, b, shrink_plan, ranks, tiles, x_rows=x_rows, interpret=interpret)
    h = checkpoint_name(h, H) if keep_h else h
    expanded = partial(
        expand_parts, x=x, a=a, h=h, b=b, plan=plan, ranks=ranks, slice_sizes=slice_sizes, tiles=tiles,
        interpret=interpret,
    )  # fmt: skip
    out = _add(base, expanded(None, out_dtype=delta_dtype), plan) if base is None or separate else expanded(base)
    return (out, h) if keep_h else out


@partial(jax.jit, static_argnames="interpret")
def _depends(used, x, interpret: bool):
    """Return `used` from a kernel with x as an operand, so that XLA launches the base product before the shrink.

    XLA launches what depends on less first, and the product of gate and up is the longest of a layer. On an H100 a
    decode step of 64 sequences is up to 3% shorter with it, and of qkv, o and down it is longer. A block of experts
    with 4,096 pairs is 2.4% shorter on an H200, and one with up to 128 pairs is not.
    """

    def kernel(used_ref, x_ref, out_ref):
        del x_ref
        store(out_ref, (jnp.int32(0),), scalar(used_ref, jnp.int32(0)), True)

    return pl.pallas_call(
        kernel,
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((1,), used.dtype),
        compiler_params=compiler_params(1),
        interpret=interpret,
        name="lora_after_base",
    )(used, x)


def _add(base, delta, plan: Plan):
    """Return base + delta, or if base is None the delta in float32. Rows without a group keep base, or are -0.0."""
    grouped = has_group(plan)[:, None]
    if base is None:
        return jnp.where(grouped, delta.astype(jnp.float32), -0.0)
    total = base.astype(jnp.float32) + delta.astype(jnp.float32)
    return jnp.where(grouped, total.astype(base.dtype), base)


def shrink_parts(x, a, b, plan: Plan, ranks, tiles: GPUTiles, *, x_rows=None, interpret: bool):
    """Compute partial sums [split_k, M, n * R] for `expand_parts`.

    Rows without a group and entries past the rank are undefined.
    """
    return _shrink(x, a, plan, ranks, x_rows, tiles, h_dtype(x, a, b), interpret)


def expand_parts(base, x, a, h, b, plan: Plan, ranks, slice_sizes, tiles: GPUTiles, *, out_dtype=None, interpret: bool):
    """Add the delta of `shrink_parts` to base, in its place. If base is None, return the delta in `out_dtype`.

    The rows without a group of a delta are undefined.
    """
    options = slice_sizes, tiles, dot_dtype(x, a, b), out_dtype if base is None else base.dtype
    return _expand(base, h, b, plan, ranks, *options, interpret)


# Jitted so that layers with equal shapes share one trace and lowering. A kernel takes half a second.
@partial(jax.jit, static_argnames=("tiles", "dtype", "interpret"))
def _shrink(x, a, plan: Plan, ranks, x_rows, tiles: GPUTiles, dtype, interpret: bool):
    """Compute partial sums [split_k, M, n * R].

    Rows without a group and entries past the rank may be left unwritten.
    """
    groups, n, rank, k = a.shape
    indexed = () if x_rows is None else (x_rows,)
    units = plan.num_tiles * pl.cdiv(n * rank, tiles.block_r) * tiles.split_k  # an upper bound
    return pl.pallas_call(
        partial(_shrink_kernel, rank=rank, tile_m=plan.tile_m, tiles=tiles),
        grid=(min(tiles.shrink_programs, units),),
        out_shape=jax.ShapeDtypeStruct((tiles.split_k, plan.num_rows, n * rank), dtype),
        compiler_params=compiler_params(tiles.shrink_warps, tiles.shrink_stages),
        interpret=interpret,
        name="lora_shrink",
    )(plan.tiles_used, plan.tile_group, plan.tile_rows, ranks, x, a.reshape(groups, n * rank, k), *indexed)


@partial(jax.jit, static_argnames=("slice_sizes", "tiles", "dtype", "out_dtype", "interpret"))
def _expand(base, h, b, plan: Plan, ranks, slice_sizes, tiles: GPUTiles, dtype, out_dtype, interpret: bool):
    """Add the delta of h [split_k, M, n * R] to base, as `expand_parts` does. `dtype` is that of the products."""
    units = plan.num_tiles * sum(pl.cdiv(size, tiles.block_n) for size in slice_sizes)  # an upper bound
    return pl.pallas_call(
        partial(_expand_kernel, tile_m=plan.tile_m, slice_sizes=slice_sizes, tiles=tiles, dtype=dtype),
        grid=(min(tiles.programs, units),),
        out_shape=jax.ShapeDtypeStruct((plan.num_rows, b.shape[2]), out_dtype),
        input_output_aliases={} if base is None else {6: 0},
        compiler_params=compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="lora_expand",
    )(plan.tiles_used, plan.tile_group, plan.tile_rows, ranks, h, b, base, plan.row_scales)


def _shrink_kernel(
    used_ref, group_ref, rows_ref, ranks_ref, x_ref, a_ref, *refs, rank: int, tile_m: int, tiles: GPUTiles
):
    """Compute h[part, rows of a tile, block of ranks] = x[rows, K part] @ a[group, block of ranks, K part]ᵀ.

    The ranks of all slices are numbered consecutively. A block may span slices, so x is read once for all of them.
    `refs` holds h, optionally after an index by which row m of the plan is x[index[m]].

    The units of work are the used tiles times the blocks of ranks times the parts of K, parts innermost. Program p
    takes the units p, p + programs, ...

                 K part 0   K part 1
        tile 0  | x . aᵀ  | x . aᵀ  |  -> two partial sums, which the reader of h adds in order
    """
    *index_refs, h_ref = refs
    program, programs = pl.program_id(0), pl.num_programs(0)
    _, width, k_size = a_ref.shape
    block_r, block_k, parts = tiles.block_r, tiles.block_k, tiles.split_k
    per_tile = pl.cdiv(width, block_r) * parts
    steps = pl.cdiv(pl.cdiv(k_size, block_k), parts)

    def look_up(u):
        return find_tile(jnp.minimum(u // per_tile, group_ref.shape[0] - 1), group_ref, rows_ref, tile_m)

    def unit(u, found):
        group, rows = found
        ahead = look_up(u + programs)
        r0, part = u % per_tile // parts * block_r, u % parts
        cuts = [(r0 + begin, size) for begin, size in _dots(min(block_r, width))]
        columns, read, busy = zip(*(_columns(ranks_ref, group, *cut, rank) for cut in cuts), strict=True)
        present = rows < h_ref.shape[1]
        live = present[:, None]
        sources = load(index_refs[0], (rows,), present) if index_refs else rows

        def step(j, sums):
            k = (j * parts + part) * block_k + jnp.arange(block_k, dtype=jnp.int32)
            inside = None if parts * steps * block_k == k_size else (k < k_size)[None, :]
            x = load(x_ref, (sources[:, None], k[None, :]), both(live, inside))
            loaded = [
                load(a_ref, (group, r[:, None], k[None, :]), both(m[:, None], inside))
                for r, m in zip(columns, read, strict=True)
            ]
            dtype = dot_dtype(x, a_ref)
            return tuple(total + dot(x, a, dtype, 1) for total, a in zip(sums, loaded, strict=True))

        @pl.when(reduce(jnp.logical_or, busy))
        def _():
            zeros = tuple(jnp.zeros((len(rows), len(r)), jnp.float32) for r in columns)
            for r, h in zip(columns, jax.lax.fori_loop(0, steps, step, zeros), strict=True):
                store(h_ref, (part, rows[:, None], r[None, :]), h, live & (r < width)[None, :])

        return ahead

    share_out(tiles_used(used_ref, group_ref) * per_tile, unit, look_up(program))


def _expand_kernel(
    used_ref,
    group_ref,
    rows_ref,
    ranks_ref,
    h_ref,
    b_ref,
    base_ref,
    row_scales_ref,
    out_ref,
    *,
    tile_m: int,
    slice_sizes,
    tiles: GPUTiles,
    dtype,
):
    """Compute out[rows of a tile, chunk of columns] = base + h @ b[group], block by block of columns.

    The units of work are the used tiles times the chunks of columns. A chunk is within one slice. With fewer used tiles
    the chunks are shorter, so that all programs have work. The chunks of a slice interleave their blocks of columns:

                  slice 0             | slice 1
        tile 0   c0 c1 c2 c0 c1 c2 c0 | c3 c4 c3 c4
        tile 1   ...

    `base_ref` and `out_ref` are the same memory, or `base_ref` is None and `out` is the delta. The delta of a slice of
    rank 0 is -0.0, which changes no bit of a base output. `row_scales_ref` may be None. Base is read a few blocks ahead
    of its use. For b, Triton's pipeline does so.
    """
    rank, block_n = b_ref.shape[1], tiles.block_n
    used = tiles_used(used_ref, group_ref)
    counts = column_chunks(slice_sizes, block_n, used, tiles.programs)
    per_tile = sum(counts[1:], counts[0])

    def unit(u, carry):
        group, rows = find_tile(u // per_tile, group_ref, rows_ref, tile_m)
        live = (rows < out_ref.shape[0])[:, None]
        i, first, stride, begin, end = find_chunk(u % per_tile, counts, slice_sizes)
        steps = (pl.cdiv(end - begin, block_n) - first + stride - 1) // stride
        true_rank = rank_of(ranks_ref, group, i)
        blocks = [r0 + jnp.arange(rank_block(rank), dtype=jnp.int32) for r0 in range(0, rank, rank_block(rank))]
        scales = scales_of(ranks_ref, group, i, blocks, row_scales_ref, rows)
        read = jnp.int32(rank) if rank <= WAIT_FOR_RANK else true_rank

        def columns(j):
            col = begin + (first + j * stride) * block_n + jnp.arange(block_n, dtype=jnp.int32)
            return col, (col < end)[None, :]

        def read_base(j):
            if base_ref is None:
                return jnp.zeros((len(rows), block_n), jnp.float32)
            col, inside = columns(j)
            return load(base_ref, (rows[:, None], col[None, :]), live & inside & (j < steps))

        def column_block(j, ahead, h):
            base, *ahead = *ahead, read_base(j + tiles.ahead)
            col, inside = columns(j)
            total = base.astype(jnp.float32)
            for r, h_block in zip(blocks, h, strict=True):
                b = load(b_ref, (group, r[:, None], col[None, :]), (r < read)[:, None] & inside)
                total += dot(h_block, b, dtype, 0)
            if base_ref is None:
                store(out_ref, (rows[:, None], col[None, :]), jnp.where(true_rank > 0, total, -0.0), live & inside)
            else:
                store(out_ref, (rows[:, None], col[None, :]), total, live & inside & (true_rank > 0))
            return tuple(ahead)

        def all_blocks():
            ahead = tuple(read_base(jnp.int32(d)) for d in range(tiles.ahead))  # before h, whose loads take as long
            h = tuple(
                sum_parts(h_ref, i * rank, rows, r, live, rank, true_rank, scale)
                for r, scale in zip(blocks, scales, strict=True)
            )
            jax.lax.fori_loop(0, steps, partial(column_block, h=h), ahead)

        if tile_m > 16 and base_ref is not None:
            pl.when(read > 0)(all_blocks)
        else:  # few rows: waiting for the rank takes longer than reading values that the store's mask drops
            all_blocks()
        return carry

    share_out(used * per_tile, unit, jnp.int32(0))


def _dots(width: int) -> list[tuple[int, int]]:
    """Cut a number of ranks into (first, size) of dots: powers of two from 16 on, the largest first."""
    cuts, first, left = [], 0, pl.cdiv(width, 16) * 16
    while left:
        size = 1 << (left.bit_length() - 1)
        cuts.append((first, size))
        first, left = first + size, left - size
    return cuts


def _columns(ranks_ref, group, first, size: int, rank: int):
    """Return `size` ranks from `first` on, numbered over all slices, a mask of those to read, and whether any is."""
    n = ranks_ref.shape[1]
    r = first + jnp.arange(size, dtype=jnp.int32)
    if rank <= WAIT_FOR_RANK:
        return r, r < n * rank, True
    if rank % size == 0:  # within one slice
        end = first // rank * rank + rank_of(ranks_ref, group, first // rank)
        return r, r < end, first < end
    read = (r % rank < rank_of(ranks_ref, group, jnp.minimum(r // rank, n - 1))) & (r < n * rank)
    return r, read, jnp.max(read.astype(jnp.int32)) > 0


def column_chunks(slice_sizes, block_n: int, used, programs: int):
    """Return the number of chunks of each slice, of nearly equal length, with which the longest program ends first.

    Every program takes a unit in each round, and a round lasts as long as its longest unit. Short chunks even out the
    last round, but each unit reads its partial sums, which takes about as long as two blocks of columns.
    """
    blocks = [pl.cdiv(size, block_n) for size in slice_sizes]
    length, best, shortest = max(blocks), [jnp.int32(1)] * len(blocks), jnp.int32(2**30)
    while length:
        counts = [pl.cdiv(count, length) for count in blocks]
        length = max(map(pl.cdiv, blocks, counts))
        duration = (used * sum(counts) + programs - 1) // programs * (length + 2)
        best = [jnp.where(duration < shortest, new, old) for new, old in zip(counts, best, strict=True)]
        shortest = jnp.minimum(duration, shortest)
        length = min(length - 1, length * 7 // 8)
    return best
