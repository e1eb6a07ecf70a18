"""`add_lora` of experts in one launch on NVIDIA, for a handful of rows; see `lora`, whose rules hold here too.

With few rows a launch costs as much as its work: each waits for the one before, then for where its tile lies, then for
the data. Here every program computes h anew for its block of columns, and has A and B on their way at once. For Qwen3's
experts at rank 16 that takes 3.9 us instead of 5.5 for one token, 4.4 instead of 7.1 for eight (H200, w1 and w3; w2).
What it costs is reading A as often as there are blocks, from the cache, so that `suits` sets a limit to it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jlora.pallas.plan import Plan
from jlora.pallas.triton.parts import compiler_params, find_chunk, load, scalar, share_out, store, tiles_used

MAX_RANK = 16
MOST_A = 128 << 10  # bytes of one slice's A: as much is on its way into the registers of a program
MOST_READ = 10_000_000  # bytes of A that all programs read together
BLOCK_K = 512
WARPS = 8
_PROGRAMS = 132  # above, blocks of columns are wider


def suits(plan: Plan, a, slice_sizes: tuple[int, ...]) -> bool:
    """Whether one launch is less work than two: by sizes alone, so that no row's result depends on its batch."""
    rank, k = a.shape[2:]
    slice_bytes = rank * k * jnp.dtype(a.dtype).itemsize
    read = plan.num_rows * _blocks(slice_sizes, _block_n(plan, slice_sizes)) * slice_bytes
    return plan.experts > 1 and rank <= MAX_RANK and slice_bytes <= MOST_A and read <= MOST_READ


def add_lora(
    base, x, a, b, plan: Plan, *, slice_sizes, ranks, x_rows=None, block_n: int | None = None,
    block_k: int = BLOCK_K, interpret: bool = False,
):  # fmt: skip
    """See `jlora.ops.add_lora`; R is at most `MAX_RANK`."""
    groups, n, rank, k = a.shape
    block_n = block_n or _block_n(plan, slice_sizes)
    indexed = () if x_rows is None else (x_rows,)
    kernel = partial(_kernel, rank=rank, tile_m=plan.tile_m, slice_sizes=slice_sizes, block_n=block_n, block_k=block_k)
    return pl.pallas_call(
        kernel,
        grid=(plan.num_tiles * _blocks(slice_sizes, block_n),),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        input_output_aliases={9 + len(indexed): 0},
        compiler_params=compiler_params(WARPS),
        interpret=interpret,
        name="lora_fused",
    )(
        plan.tiles_used, plan.tile_group, plan.tile_rows, plan.tile_start, plan.tile_end, ranks, x,
        a.reshape(groups, n * rank, k), b, *indexed, base,
    )  # fmt: skip


def _blocks(slice_sizes: tuple[int, ...], block_n: int) -> int:
    return sum(pl.cdiv(size, block_n) for size in slice_sizes)


def _block_n(plan: Plan, slice_sizes: tuple[int, ...]) -> int:
    return 512 if plan.num_tiles * _blocks(slice_sizes, 512) <= _PROGRAMS else 1024


def _kernel(
    used_ref, group_ref, rows_ref, start_ref, end_ref, ranks_ref, x_ref, a_ref, b_ref, *refs, rank: int, tile_m: int,
    slice_sizes, block_n: int, block_k: int,
):  # fmt: skip
    """out[row, block of columns] = base + (x[row] @ a[group, slice]ᵀ) @ b[group], row after row of a tile

    units: tiles in use x blocks of columns, each within one slice; base and out are the same memory. refs: those two,
    or before them an index, by which row m of the plan is x[index[m]]. All in float32, on no matrix unit.
    """
    *index_refs, base_ref, out_ref = refs
    k_size = a_ref.shape[2]
    per_slice = [pl.cdiv(size, block_n) for size in slice_sizes]
    r = jnp.arange(MAX_RANK, dtype=jnp.int32)
    read = r < rank  # to wait for the true rank takes longer than it saves; past it a and b may be NaN

    def unit(u, carry):
        tile = u // sum(per_slice)
        group, count = scalar(group_ref, tile), scalar(end_ref, tile) - scalar(start_ref, tile)
        i, block, _, begin, end = find_chunk(u % sum(per_slice), per_slice, slice_sizes)
        col = begin + block * block_n + jnp.arange(block_n, dtype=jnp.int32)
        inside = col < end
        true_rank = scalar(ranks_ref, group, i)
        factors = load(b_ref, (group, r[:, None], col[None, :]), read[:, None] & inside[None, :])

        def one(j, row):
            following = scalar(rows_ref, jnp.minimum(tile * tile_m + j + 1, rows_ref.shape[0] - 1))
            keep = inside & (true_rank > 0)
            old = load(base_ref, (row, col), keep)
            source = scalar(index_refs[0], row) if index_refs else row

            def step(s, total):
                k = s * block_k + jnp.arange(block_k, dtype=jnp.int32)
                within = k < k_size
                some = load(x_ref, (source, k), within).astype(jnp.float32)
                mine = load(a_ref, (group, (i * rank + r)[:, None], k[None, :]), read[:, None] & within[None, :])
                return total + some[None, :] * mine.astype(jnp.float32)

            total = jnp.zeros((MAX_RANK, block_k), jnp.float32)
            for s in range(pl.cdiv(k_size, block_k)):  # unrolled, so that all loads are under way at once
                total = step(s, total)
            h = jnp.where(r < true_rank, jnp.sum(total, axis=1), 0)
            delta = jnp.sum(jnp.where((r < true_rank)[:, None], h[:, None] * factors.astype(jnp.float32), 0), axis=0)
            store(out_ref, (row, col), old.astype(jnp.float32) + delta, keep)
            return following

        jax.lax.fori_loop(0, count, one, scalar(rows_ref, tile * tile_m))
        return carry

    share_out(tiles_used(used_ref, group_ref) * sum(per_slice), unit, jnp.int32(0))
