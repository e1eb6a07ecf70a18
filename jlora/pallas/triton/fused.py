"""The delta of experts in one launch on NVIDIA GPUs, for a handful of rows.

The rules of `lora` hold here too. With few rows a launch costs as much as its work, because each launch waits for the
previous one, then for the position of its tile, then for the data. Here every program computes h again for its own
block of columns, and has A and B in flight at the same time. For Qwen3's experts at rank 16 that takes 3.9 us instead
of 5.5 for one token, and 4.4 us instead of 7.1 for eight (H200, w1 and w3 plus w2). The price is that A is read from
the cache once for each block of columns, which `suits` limits.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jlora.pallas.plan import Plan
from jlora.pallas.triton.parts import (
    compiler_params,
    find_chunk,
    group_scale,
    load,
    rank_of,
    scalar,
    share_out,
    store,
    tiles_used,
)

MAX_RANK = 16
MOST_A = 128 << 10  # bytes of one slice's A, all of which a program loads into registers at once
MOST_READ = 10_000_000  # bytes of A that all programs read together
BLOCK_K = 512
WARPS = 8
_PROGRAMS = 132  # above this number, blocks of columns are wider


def suits(plan: Plan, a, slice_sizes: tuple[int, ...]) -> bool:
    """Return True if one launch is less work than two.

    It depends on sizes only, so the result of a row does not depend on its batch.
    """
    rank, k = a.shape[2:]
    slice_bytes = rank * k * jnp.dtype(a.dtype).itemsize
    read = plan.num_rows * _blocks(slice_sizes, _block_n(plan, slice_sizes)) * slice_bytes
    return plan.experts > 1 and rank <= MAX_RANK and slice_bytes <= MOST_A and read <= MOST_READ


def delta(
    x, a, b, plan: Plan, *, slice_sizes, ranks, dtype, x_rows=None, block_n: int | None = None, block_k: int = BLOCK_K,
    interpret: bool = False,
):  # fmt: skip
    """Return the delta [M, N] in `dtype`, for R up to `MAX_RANK`. Rows without a group are undefined."""
    groups, n, rank, k = a.shape
    block_n = block_n or _block_n(plan, slice_sizes)
    kernel = partial(_kernel, rank=rank, tile_m=plan.tile_m, slice_sizes=slice_sizes, block_n=block_n, block_k=block_k)
    return pl.pallas_call(
        kernel,
        grid=(plan.num_tiles * _blocks(slice_sizes, block_n),),
        out_shape=jax.ShapeDtypeStruct((plan.num_rows, b.shape[2]), dtype),
        compiler_params=compiler_params(WARPS),
        interpret=interpret,
        name="lora_fused",
    )(
        plan.tiles_used, plan.tile_group, plan.tile_rows, plan.tile_start, plan.tile_end, ranks, x,
        a.reshape(groups, n * rank, k), b, x_rows, plan.row_scales,
    )  # fmt: skip


def _blocks(slice_sizes: tuple[int, ...], block_n: int) -> int:
    return sum(pl.cdiv(size, block_n) for size in slice_sizes)


def _block_n(plan: Plan, slice_sizes: tuple[int, ...]) -> int:
    return 512 if plan.num_tiles * _blocks(slice_sizes, 512) <= _PROGRAMS else 1024


def _kernel(
    used_ref, group_ref, rows_ref, start_ref, end_ref, ranks_ref, x_ref, a_ref, b_ref, index_ref, row_scales_ref,
    out_ref, *, rank: int, tile_m: int, slice_sizes, block_n: int, block_k: int,
):  # fmt: skip
    """Compute (x[row] @ a[group, slice]ᵀ) @ b[group] for a block of columns, row by row of a tile.

    The units of work are the used tiles times the blocks of columns, each of which is within one slice. `index_ref`
    holds an index by which row m of the plan is x[index[m]], or is None. `row_scales_ref` may be None. All products are
    float32 and use no matrix unit. The delta of a slice of rank 0 is -0.0, which changes no bit of a base output.
    """
    k_size = a_ref.shape[2]
    per_slice = [pl.cdiv(size, block_n) for size in slice_sizes]
    r = jnp.arange(MAX_RANK, dtype=jnp.int32)
    read = r < rank  # waiting for the true rank takes longer than it saves; past it a and b may be NaN

    def unit(u, carry):
        tile = u // sum(per_slice)
        group, count = scalar(group_ref, tile), scalar(end_ref, tile) - scalar(start_ref, tile)
        i, block, _, begin, end = find_chunk(u % sum(per_slice), per_slice, slice_sizes)
        col = begin + block * block_n + jnp.arange(block_n, dtype=jnp.int32)
        inside = col < end
        true_rank, of_group = rank_of(ranks_ref, group, i), group_scale(ranks_ref, group, i, r)
        factors = load(b_ref, (group, r[:, None], col[None, :]), read[:, None] & inside[None, :])

        def one(j, row):
            following = scalar(rows_ref, jnp.minimum(tile * tile_m + j + 1, rows_ref.shape[0] - 1))
            source = row if index_ref is None else scalar(index_ref, row)
            scale = of_group if row_scales_ref is None else of_group * scalar(row_scales_ref, row)

            def step(s, total):
                k = s * block_k + jnp.arange(block_k, dtype=jnp.int32)
                within = k < k_size
                some = load(x_ref, (source, k), within).astype(jnp.float32)
                mine = load(a_ref, (group, (i * rank + r)[:, None], k[None, :]), read[:, None] & within[None, :])
                return total + some[None, :] * mine.astype(jnp.float32)

            total = jnp.zeros((MAX_RANK, block_k), jnp.float32)
            for s in range(pl.cdiv(k_size, block_k)):  # unrolled, so that all loads are in flight at once
                total = step(s, total)
            h = jnp.where(r < true_rank, jnp.sum(total, axis=1) * scale, 0)
            products = jnp.where((r < true_rank)[:, None], h[:, None] * factors.astype(jnp.float32), 0)
            store(out_ref, (row, col), jnp.where(true_rank > 0, jnp.sum(products, axis=0), -0.0), inside)
            return following

        jax.lax.fori_loop(0, count, one, scalar(rows_ref, tile * tile_m))
        return carry

    share_out(tiles_used(used_ref, group_ref) * sum(per_slice), unit, jnp.int32(0))
