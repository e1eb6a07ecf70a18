"""NVIDIA kernels through Pallas' Triton lowering.

Two kernels. Their grids are fixed numbers of programs that share out what the plan says is there, so work follows the
tiles in use, while every sum is made in an order that only static sizes decide: which program computes a value, and
what else is in the batch, never changes it. There are no atomics.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from jlora.pallas.gpus import GPU, MIN_CAPABILITY, current_gpu
from jlora.pallas.plan import Plan
from jlora.pallas.tables import gpu_tiles, too_large
from jlora.pallas.tiles import GPUProblem, GPUTiles, ItemSizes, rank_block
from jlora.pallas.triton import fused
from jlora.pallas.triton.parts import (
    WAIT_FOR_RANK,
    all_ranks,
    both,
    compiler_params,
    dot,
    dot_dtype,
    find_chunk,
    find_tile,
    h_dtype,
    load,
    scalar,
    share_out,
    store,
    tiles_used,
)  # fmt: skip

MAX_RANK = 512


def unsupported_reason(base, x, a, b, *, slice_sizes: tuple[int, ...]) -> str | None:
    """Why the kernels cannot run `add_lora` on operands of these shapes and dtypes, on `current_gpu()`, or None."""
    gpu = current_gpu()
    if gpu.capability is not None and gpu.capability < MIN_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability 8.0 or newer, which {gpu.kind} is not; use backend='xla'"
    for name, array in (("base", base), ("x", x), ("a", a), ("b", b)):
        if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"takes bfloat16, float16 and float32, but {name} is {array.dtype}; cast it"
    if a.shape[2] > MAX_RANK:
        return f"takes ranks up to {MAX_RANK}, but R is {a.shape[2]}; use backend='xla'"
    rows = base.shape[0]
    return too_large(sizes_of(rows, x, a, b, len(slice_sizes)), gpu) if rows else None


def _problem(plan: Plan, x, a, b, slices: int) -> GPUProblem:
    return sizes_of(plan.num_rows, x, a, b, slices, plan.tile_m, plan.experts > 1)


def sizes_of(rows: int, x, a, b, slices: int, tile_m: int = 16, experts: bool = False) -> GPUProblem:
    """The sizes of an `add_lora`."""
    sizes = ItemSizes(*(jnp.dtype(dtype).itemsize for dtype in (x.dtype, a.dtype, b.dtype, h_dtype(x, a, b))))
    k, (_, rank, n) = x.shape[1], b.shape
    return GPUProblem(jnp.dtype(x.dtype).name, rows, tile_m, k, n, slices, rank, sizes, experts)


def shrink(
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Int[jax.Array, "G n"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
    tiles: GPUTiles | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "n M R"]:
    """See `jlora.ops.shrink`."""
    groups, n, rank, k = a.shape
    b = jax.ShapeDtypeStruct((groups, rank, k), a.dtype)  # as if it led back to K columns
    tiles = tiles or gpu_tiles(_problem(plan, x, a, b, n), gpu)
    ranks = all_ranks(groups, n, rank) if ranks is None else ranks
    h = _shrink(x, a, plan, ranks, x_rows, tiles, jnp.dtype(jnp.float32), interpret).sum(0)
    h = jnp.moveaxis(h.reshape(-1, *a.shape[1:3]), 1, 0)
    group = plan.tile_group[jnp.minimum(plan.row_slot // plan.tile_m, plan.num_tiles - 1)]
    rank = jnp.where(plan.row_slot < plan.num_tiles * plan.tile_m, ranks[group].T, 0)  # [n, M]
    return jnp.where(jnp.arange(h.shape[2], dtype=jnp.int32)[None, None] < rank[..., None], h, 0)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    base: Float[jax.Array, "M N"] | None,
    ranks: Int[jax.Array, "G n"] | None,
    tiles: GPUTiles | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "M N"]:
    """See `jlora.ops.expand`."""
    ranks = all_ranks(b.shape[0], len(slice_sizes), b.shape[1]) if ranks is None else ranks
    if base is None:
        base = jnp.zeros((plan.num_rows, b.shape[2]), b.dtype)
    x = jax.ShapeDtypeStruct(base.shape, b.dtype)  # as if h came of N columns
    a = jax.ShapeDtypeStruct((b.shape[0], len(slice_sizes), *b.shape[1:]), b.dtype)
    tiles = tiles or gpu_tiles(_problem(plan, x, a, b, len(slice_sizes)), gpu)
    h = jnp.moveaxis(h, 0, 1).reshape(1, plan.num_rows, -1)
    return _expand(base, h, b, plan, ranks, slice_sizes, tiles, b.dtype, interpret)


def add_lora(
    base: Float[jax.Array, "M N"],
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    ranks: Int[jax.Array, "G n"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
    tiles: GPUTiles | None = None,
    gpu: GPU | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "M N"]:
    """See `jlora.ops.add_lora`. Two launches, whatever the number of slices; one for a handful of experts' rows."""
    groups, n, rank, _ = a.shape
    ranks = all_ranks(groups, n, rank) if ranks is None else ranks
    if tiles is None and fused.suits(plan, a, slice_sizes):
        return fused.add_lora(
            base, x, a, b, plan, slice_sizes=slice_sizes, ranks=ranks, x_rows=x_rows, interpret=interpret
        )
    tiles = tiles or gpu_tiles(_problem(plan, x, a, b, n), gpu)
    h = shrink_parts(x, a, b, plan, ranks, tiles, x_rows=x_rows, interpret=interpret)
    return expand_parts(base, x, a, h, b, plan, ranks, slice_sizes, tiles, interpret=interpret)


def shrink_parts(x, a, b, plan: Plan, ranks, tiles: GPUTiles | None, *, x_rows=None, interpret: bool):
    """Partial sums [split_k, M, n * R] for `expand_parts`; rows without a group and entries past the rank: anything."""
    tiles = tiles or gpu_tiles(_problem(plan, x, a, b, a.shape[1]))
    return _shrink(x, a, plan, ranks, x_rows, tiles, h_dtype(x, a, b), interpret)


def expand_parts(base, x, a, h, b, plan: Plan, ranks, slice_sizes, tiles: GPUTiles | None, *, interpret: bool):
    """base + the delta of `shrink_parts`, in its place."""
    tiles = tiles or gpu_tiles(_problem(plan, x, a, b, len(slice_sizes)))
    return _expand(base, h, b, plan, ranks, slice_sizes, tiles, dot_dtype(x, a, b), interpret)


# Traced and lowered once for all layers of a model whose operands are alike: a kernel takes half a second.
@partial(jax.jit, static_argnames=("tiles", "dtype", "interpret"))
def _shrink(x, a, plan: Plan, ranks, x_rows, tiles: GPUTiles, dtype, interpret: bool):
    """Partial sums [split_k, M, n * R]; rows without a group and entries past the rank may be left unwritten."""
    groups, n, rank, k = a.shape
    indexed = () if x_rows is None else (x_rows,)
    return pl.pallas_call(
        partial(shrink_kernel, rank=rank, tile_m=plan.tile_m, tiles=tiles),
        grid=(shrink_programs(plan, n * rank, tiles),),
        out_shape=jax.ShapeDtypeStruct((tiles.split_k, plan.num_rows, n * rank), dtype),
        compiler_params=compiler_params(tiles.shrink_warps, tiles.shrink_stages),
        interpret=interpret,
        name="lora_shrink",
    )(plan.tiles_used, plan.tile_group, plan.tile_rows, ranks, x, a.reshape(groups, n * rank, k), *indexed)


@partial(jax.jit, static_argnames=("slice_sizes", "tiles", "dtype", "interpret"))
def _expand(base, h, b, plan: Plan, ranks, slice_sizes, tiles: GPUTiles, dtype, interpret: bool):
    """base + the delta of h [split_k, M, n * R], written over base."""
    units = plan.num_tiles * sum(pl.cdiv(size, tiles.block_n) for size in slice_sizes)  # at most
    return pl.pallas_call(
        partial(_expand_kernel, tile_m=plan.tile_m, slice_sizes=slice_sizes, tiles=tiles, dtype=dtype),
        grid=(min(tiles.programs, units),),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        input_output_aliases={6: 0},
        compiler_params=compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="lora_expand",
    )(plan.tiles_used, plan.tile_group, plan.tile_rows, ranks, h, b, base)


def shrink_programs(plan: Plan, width: int, tiles: GPUTiles) -> int:
    """How many programs share out a shrink of `width` ranks; more than it can have units would only start."""
    return min(tiles.shrink_programs, plan.num_tiles * pl.cdiv(width, tiles.block_r) * tiles.split_k)


def shrink_kernel(
    used_ref, group_ref, rows_ref, ranks_ref, x_ref, a_ref, *refs, rank: int, tile_m: int, tiles: GPUTiles, among=None
):
    """h[part, rows of a tile, block of ranks] = x[rows, K part] @ a[group, block of ranks, K part]ᵀ

    The ranks of all slices stand side by side, and a block may span slices, so that x is read once for all of them.
    refs: h alone, or before it an index, by which row m of the plan is x[index[m]]. `among`: (p, programs) where
    not all programs take part.

    units (one an iteration; program p takes p, p + programs, ...), innermost last:
    tiles in use x blocks of ranks x parts of K
             K part 0   K part 1
    tile 0  | x . aᵀ  | x . aᵀ  |  -> two partial sums, added in order by whoever reads h
    """
    *index_refs, h_ref = refs
    program, programs = among or (pl.program_id(0), pl.num_programs(0))
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
            dtype = jnp.promote_types(x.dtype, a_ref.dtype)
            return tuple(total + dot(x, a, dtype, 1) for total, a in zip(sums, loaded, strict=True))

        @pl.when(reduce(jnp.logical_or, busy))
        def _():
            zeros = tuple(jnp.zeros((len(rows), len(r)), jnp.float32) for r in columns)
            for r, h in zip(columns, jax.lax.fori_loop(0, steps, step, zeros), strict=True):
                store(h_ref, (part, rows[:, None], r[None, :]), h, live & (r < width)[None, :])

        return ahead

    share_out(tiles_used(used_ref, group_ref) * per_tile, unit, look_up(program), (program, programs))


def _expand_kernel(
    used_ref,
    group_ref,
    rows_ref,
    ranks_ref,
    h_ref,
    b_ref,
    base_ref,
    out_ref,
    *,
    tile_m: int,
    slice_sizes,
    tiles: GPUTiles,
    dtype,
):
    """out[rows of a tile, chunk of columns] = base + h @ b[group], column block by column block

        units: tiles in use x chunks of columns. A chunk lies within one slice; the fewer tiles are in use, the shorter
        the chunks, so that all programs have work. Chunks of a slice interleave their column blocks.
                  slice 0             | slice 1
        tile 0   c0 c1 c2 c0 c1 c2 c0 | c3 c4 c3 c4
        tile 1   ...

    base and out are the same memory. Base is read some blocks ahead of its use; Triton does so for b.
    """
    rank, block_n = b_ref.shape[1], tiles.block_n
    used = tiles_used(used_ref, group_ref)
    counts = column_chunks(slice_sizes, block_n, used, tiles.chunks)
    per_tile = sum(counts[1:], counts[0])

    def unit(u, carry):
        group, rows = find_tile(u // per_tile, group_ref, rows_ref, tile_m)
        live = (rows < base_ref.shape[0])[:, None]
        i, first, stride, begin, end = find_chunk(u % per_tile, counts, slice_sizes)
        steps = (pl.cdiv(end - begin, block_n) - first + stride - 1) // stride
        true_rank = scalar(ranks_ref, group, i)
        read = jnp.int32(rank) if rank <= WAIT_FOR_RANK else true_rank
        blocks = [r0 + jnp.arange(rank_block(rank), dtype=jnp.int32) for r0 in range(0, rank, rank_block(rank))]

        def columns(j):
            col = begin + (first + j * stride) * block_n + jnp.arange(block_n, dtype=jnp.int32)
            return col, (col < end)[None, :]

        def read_base(j):
            col, inside = columns(j)
            return load(base_ref, (rows[:, None], col[None, :]), live & inside & (j < steps))

        def column_block(j, ahead, h):
            base, *ahead = *ahead, read_base(j + tiles.ahead)
            col, inside = columns(j)
            total = base.astype(jnp.float32)
            for r, h_block in zip(blocks, h, strict=True):
                b = load(b_ref, (group, r[:, None], col[None, :]), (r < read)[:, None] & inside)
                total += dot(h_block, b, dtype, 0)
            store(out_ref, (rows[:, None], col[None, :]), total, live & inside & (true_rank > 0))
            return tuple(ahead)

        def all_blocks():
            ahead = tuple(read_base(jnp.int32(d)) for d in range(tiles.ahead))  # before h, whose loads take as long
            h = tuple(sum_parts(h_ref, i * rank, rows, r, live, rank, true_rank) for r in blocks)
            jax.lax.fori_loop(0, steps, partial(column_block, h=h), ahead)

        if tile_m > 16:
            pl.when(read > 0)(all_blocks)
        else:  # few rows: to wait for the rank takes longer than to read what the store's mask then drops
            all_blocks()
        return carry

    share_out(used * per_tile, unit, jnp.int32(0))


def _dots(width: int) -> list[tuple[int, int]]:
    """Cuts a number of ranks into (first, size) that a dot takes: powers of two from 16 on, the largest first."""
    cuts, first, left = [], 0, pl.cdiv(width, 16) * 16
    while left:
        size = 1 << (left.bit_length() - 1)
        cuts.append((first, size))
        first, left = first + size, left - size
    return cuts


def _columns(ranks_ref, group, first, size: int, rank: int):
    """`size` ranks from `first` on (of all slices side by side), which of them to read, and whether there is one."""
    n = ranks_ref.shape[1]
    r = first + jnp.arange(size, dtype=jnp.int32)
    if rank <= WAIT_FOR_RANK:
        return r, r < n * rank, True
    if rank % size == 0:  # within one slice
        end = first // rank * rank + scalar(ranks_ref, group, first // rank)
        return r, r < end, first < end
    read = (r % rank < scalar(ranks_ref, group, jnp.minimum(r // rank, n - 1))) & (r < n * rank)
    return r, read, jnp.max(read.astype(jnp.int32)) > 0


def sum_parts(h_ref, first, rows, r, live, rank: int, true_rank):
    """The partial sums of h, added in order -> [tile_m, block_r] float32, zero from the true rank on.

    What lies there was never written. It is dropped after the load: a mask on the load would forbid wide loads.
    """
    mask = live & (r < rank)[None, :] if rank % len(r) else live
    columns = (first + r)[None, :]
    parts = [load(h_ref, (jnp.int32(p), rows[:, None], columns), mask) for p in range(h_ref.shape[0])]
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total += part.astype(jnp.float32)
    return jnp.where((r < true_rank)[None, :], total, 0)


def column_chunks(slice_sizes, block_n: int, used, units: int):
    """How many chunks each slice has: of nearly equal length, about `units` over all tiles in use."""
    blocks = [pl.cdiv(size, block_n) for size in slice_sizes]
    length = jnp.clip((used * sum(blocks) + units - 1) // units, 1, max(blocks))
    return [(count + length - 1) // length for count in blocks]
