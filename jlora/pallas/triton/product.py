"""A base product of few rows fused with its LoRA on NVIDIA GPUs. The rules of `lora` hold here too.

The products of a decode step are bound by reading the kernel w. XLA's own products read it at 36 to 65% of the
bandwidth, and the separate launches of LoRA are chains of loads that wait for each other. Here the product and the
shrinks, which are independent, run in different programs of one launch. The second launch is the rest of LoRA. If K is
split, it also adds up the parts of the product.

    launch 1   | x @ w, columns 0.., part 0 | columns 0.., part 1 | ... | shrink units | shrink units | ...
    launch 2   | out = part 0 + part 1 + ... + delta, or the expand of `add_lora` for a product in one part
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from jlora.pallas.plan import Plan
from jlora.pallas.tiles import GPUTiles, ProductTiles, matrix_rows, rank_block
from jlora.pallas.triton.lora import column_chunks, expand_parts, shrink_kernel, shrink_programs, sum_parts
from jlora.pallas.triton.parts import (
    WAIT_FOR_RANK,
    both,
    compiler_params,
    dot,
    find_chunk,
    find_tile,
    h_dtype,
    load,
    magnitudes_of,
    rank_of,
    scale_of,
    share_out,
    store,
)
from jlora.pallas.xla import all_ranks, rescale

MAX_ROWS = 128  # all rows are one block of a matrix unit, whose sums are in registers


def linear_lora(
    x: Float[jax.Array, "M K"],
    w: Float[jax.Array, "K N"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    ranks: Float[jax.Array, "G n 2"] | None,
    row_scales: Float[jax.Array, "M"] | None = None,
    magnitudes: Float[jax.Array, "G N"] | None = None,
    *,
    slice_sizes: tuple[int, ...],
    tiles: ProductTiles,
    interpret: bool = False,
) -> Float[jax.Array, "M N"]:
    """Implement `jlora.ops.linear_lora` for up to `MAX_ROWS` rows and operands of one 16-bit dtype."""
    ranks = all_ranks(*a.shape[:3]) if ranks is None else ranks
    parts, h = _product(x, w, a, plan, ranks, tiles, h_dtype(x, a, b), interpret)
    if tiles.product_split_k == 1:
        return expand_parts(
            parts[0], x, a, h, b, plan, ranks, slice_sizes, tiles.lora, row_scales=row_scales,
            magnitudes=magnitudes, interpret=interpret,
        )  # fmt: skip
    return _sum(parts, h, b, plan, ranks, row_scales, magnitudes, slice_sizes, tiles.lora, interpret)


# Jitted so that layers with equal shapes share one trace and lowering, as in `lora`.
@partial(jax.jit, static_argnames=("tiles", "dtype", "interpret"))
def _product(x, w, a, plan: Plan, ranks, tiles: ProductTiles, dtype, interpret: bool):
    """Compute the parts of x @ w [split_k, M, N], float32 if there are several, and the shrink's partial sums."""
    groups, n, rank, k = a.shape
    lora, parts = tiles.lora, tiles.product_split_k
    count = pl.cdiv(w.shape[1], tiles.product_block_n) * parts
    return pl.pallas_call(
        partial(_product_kernel, rank=rank, tile_m=plan.tile_m, tiles=tiles, count=count),
        grid=(count + shrink_programs(plan, n * rank, lora),),
        out_shape=[
            jax.ShapeDtypeStruct((parts, plan.num_rows, w.shape[1]), x.dtype if parts == 1 else jnp.float32),
            jax.ShapeDtypeStruct((lora.split_k, plan.num_rows, n * rank), dtype),
        ],
        compiler_params=compiler_params(tiles.product_warps, tiles.product_stages),
        interpret=interpret,
        name="lora_product",
    )(plan.tiles_used, plan.tile_group, plan.tile_rows, ranks, x, a.reshape(groups, n * rank, k), w)


@partial(jax.jit, static_argnames=("slice_sizes", "tiles", "interpret"))
def _sum(parts, h, b, plan: Plan, ranks, row_scales, magnitudes, slice_sizes, tiles: GPUTiles, interpret: bool):
    """Add the parts of the product and the delta of h [split_k, M, n * R]."""
    # Rows without a group come last in the sorted order. The number of the others is computed once for all layers.
    grouped = jnp.sum(plan.row_slot < plan.num_tiles * plan.tile_m, dtype=jnp.int32)
    filled = jnp.stack([plan.tiles_used[0], grouped])
    tiles_at_most = plan.num_tiles + pl.cdiv(plan.num_rows, plan.tile_m)
    units = tiles_at_most * sum(pl.cdiv(size, tiles.block_n) for size in slice_sizes)
    return pl.pallas_call(
        partial(_sum_kernel, tile_m=plan.tile_m, slice_sizes=slice_sizes, tiles=tiles),
        grid=(min(tiles.programs, units),),
        out_shape=jax.ShapeDtypeStruct(parts.shape[1:], b.dtype),
        compiler_params=compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="lora_product_sum",
    )(filled, plan.tile_group, plan.tile_rows, ranks, plan.row_order, h, b, parts, row_scales, magnitudes)


def _product_kernel(
    used_ref, group_ref, rows_ref, ranks_ref, x_ref, a_ref, w_ref, parts_ref, h_ref, *, rank: int, tile_m: int,
    tiles: ProductTiles, count: int,
):  # fmt: skip
    """Compute the product in the first `count` programs and the shrink in the others.

    Each program of the product computes one block of columns of one part.
    """
    program, others = pl.program_id(0), pl.num_programs(0) - count

    @pl.when(program < count)
    def _():
        _block_of_product(program, x_ref, w_ref, parts_ref, tiles)

    @pl.when(program >= count)
    def _():
        refs = used_ref, group_ref, rows_ref, ranks_ref, x_ref, a_ref, h_ref
        shrink_kernel(*refs, rank=rank, tile_m=tile_m, tiles=tiles.lora, among=(program - count, others))


def _block_of_product(program, x_ref, w_ref, parts_ref, tiles: ProductTiles):
    """Compute parts[part, all rows, block of columns] = x[:, part of K] @ w[part of K, block of columns]."""
    (rows, k_size), n = x_ref.shape, w_ref.shape[1]
    block_n, block_k, parts = tiles.product_block_n, tiles.product_block_k, tiles.product_split_k
    blocks = pl.cdiv(n, block_n)
    part, block = program // blocks, program % blocks
    steps = pl.cdiv(pl.cdiv(k_size, block_k), parts)
    row = jnp.arange(matrix_rows(rows), dtype=jnp.int32)[:, None]
    col = (block * block_n + jnp.arange(block_n, dtype=jnp.int32))[None, :]
    live, inside = row < rows, col < n

    def step(j, total):
        k = (part * steps + j) * block_k + jnp.arange(block_k, dtype=jnp.int32)
        within = None if parts * steps * block_k == k_size else k < k_size
        x = load(x_ref, (row, k[None, :]), both(live, None if within is None else within[None, :]))
        w = load(w_ref, (k[:, None], col), both(inside, None if within is None else within[:, None]))
        return total + dot(x, w, x.dtype, 0)

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((row.shape[0], block_n), jnp.float32))
    store(parts_ref, (part, row, col), total, live & inside)


def _sum_kernel(
    filled_ref, group_ref, rows_ref, ranks_ref, order_ref, h_ref, b_ref, parts_ref, row_scales_ref, magnitudes_ref,
    out_ref, *, tile_m: int, slice_sizes, tiles: GPUTiles,
):  # fmt: skip
    """Compute out[rows of a tile, chunk of columns] = sum of parts + h @ b[group], block by block of columns.

    The units of work are those of the expand. After the used tiles come tiles of the rows without a group, which have
    no delta. `filled_ref` holds the number of used tiles and the number of their rows.
    """
    rank, block_n, all_rows = b_ref.shape[1], tiles.block_n, out_ref.shape[0]
    place = jnp.arange(matrix_rows(tile_m), dtype=jnp.int32)
    used, grouped = filled_ref[0], filled_ref[1]
    everywhere = used + (all_rows - grouped + tile_m - 1) // tile_m
    counts = column_chunks(slice_sizes, block_n, everywhere, tiles.chunks)
    per_tile = sum(counts[1:], counts[0])

    def unit(u, carry):
        tile = u // per_tile
        has_group = tile < used
        group, rows = find_tile(jnp.minimum(tile, group_ref.shape[0] - 1), group_ref, rows_ref, tile_m)
        position = grouped + (tile - used) * tile_m + place
        left = (position < all_rows) & (place < tile_m)
        rows = jnp.where(has_group, rows, load(order_ref, (position,), left & (tile >= used), other=2**30))
        live = (rows < all_rows)[:, None]
        i, first, stride, begin, end = find_chunk(u % per_tile, counts, slice_sizes)
        steps = (pl.cdiv(end - begin, block_n) - first + stride - 1) // stride
        own_rank, scale = rank_of(ranks_ref, group, i), scale_of(ranks_ref, group, i, row_scales_ref, rows)
        true_rank = jnp.where(has_group, own_rank, jnp.int32(0))
        read = jnp.where(has_group, jnp.int32(rank), jnp.int32(0)) if rank <= WAIT_FOR_RANK else true_rank
        blocks = [r0 + jnp.arange(rank_block(rank), dtype=jnp.int32) for r0 in range(0, rank, rank_block(rank))]
        h = tuple(sum_parts(h_ref, i * rank, rows, r, live, rank, true_rank, scale) for r in blocks)

        def column_block(j, carry):
            col = begin + (first + j * stride) * block_n + jnp.arange(block_n, dtype=jnp.int32)
            inside = (col < end)[None, :]
            magnitudes = magnitudes_of(magnitudes_ref, None, group, col, col < end)
            some = [_few_parts(parts_ref, p, rows, col, live & inside) for p in range(0, parts_ref.shape[0], 4)]
            total = reduce(jnp.add, some)
            delta = jnp.zeros(total.shape, jnp.float32)
            for r, h_block in zip(blocks, h, strict=True):
                b = load(b_ref, (group, r[:, None], col[None, :]), (r < read)[:, None] & inside)
                delta += dot(h_block, b, b.dtype, 0)
            changed = total + delta if magnitudes is None else rescale(total + delta, *magnitudes)
            store(out_ref, (rows[:, None], col[None, :]), jnp.where(true_rank > 0, changed, total), live & inside)
            return carry

        jax.lax.fori_loop(0, steps, column_block, jnp.int32(0))
        return carry

    share_out(everywhere * per_tile, unit, jnp.int32(0))


def _few_parts(parts_ref, first: int, rows, col, mask):
    """Sum up to four parts of the product from `first` on, in one step.

    Parts that are loaded separately would each be rearranged to the layout of a matrix unit's product.
    """
    count = min(4, parts_ref.shape[0] - first)
    part = first + jnp.arange(1 << (count - 1).bit_length(), dtype=jnp.int32)
    index = part[:, None, None], rows[None, :, None], col[None, None, :]
    return jnp.sum(load(parts_ref, index, (part < first + count)[:, None, None] & mask[None]), axis=0)
