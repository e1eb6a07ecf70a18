"""NVIDIA kernels that only experts need; see `triton`, whose rules hold here too.

`add_lora` in one launch, for tiles of few rows whose factors are small: a tile's program keeps its hidden values to
itself, and while one waits for its rows, others read. `combine_lora` sums over a token's experts in the matrix unit.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jlora.pallas.plan import Plan
from jlora.pallas.tiles import GPUTiles, rank_block
from jlora.pallas.triton import (
    WAIT_FOR_RANK,
    all_ranks,
    both,
    compiler_params,
    dot,
    dot_dtype,
    find_tile,
    load,
    share_out,
    shrink_parts,
    store,
    tiles_used,
)  # fmt: skip


def add_lora_at_once(base, x, a, b, plan: Plan, ranks, x_rows, slice_sizes, tiles: GPUTiles, interpret: bool):
    """`triton.add_lora` in one launch: a program a tile."""
    groups, n, rank, k = a.shape
    indexed = () if x_rows is None else (x_rows,)
    kernel = partial(
        _at_once_kernel, rank=rank, tile_m=plan.tile_m, slice_sizes=slice_sizes, tiles=tiles, dtype=dot_dtype(x, a, b)
    )
    return pl.pallas_call(
        kernel,
        grid=(tiles.programs,),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        input_output_aliases={7: 0},
        compiler_params=compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="lora_at_once",
    )(plan.tiles_used, plan.tile_group, plan.tile_rows, ranks, x, a.reshape(groups, n * rank, k), b, base, *indexed)


def _at_once_kernel(
    used_ref, group_ref, rows_ref, ranks_ref, x_ref, a_ref, b_ref, base_ref, *refs, rank: int, tile_m: int,
    slice_sizes, tiles: GPUTiles, dtype,
):  # fmt: skip
    """out[rows of a tile] = base + (x[rows] @ a[group]ᵀ) @ b[group], slice by slice; base and out are the same memory.

    units: tiles in use.
    refs: out alone, or before it an index, by which row m of the plan is x[index[m]].
    """
    *index_refs, out_ref = refs
    k_size, block_k, block_n = a_ref.shape[2], tiles.block_k, tiles.block_n
    block = rank_block(rank)
    pieces = [
        (i, r0 + jnp.arange(block, dtype=jnp.int32)) for i in range(len(slice_sizes)) for r0 in range(0, rank, block)
    ]

    def unit(u, carry):
        group, rows = find_tile(u, group_ref, rows_ref, tile_m)
        present = rows < base_ref.shape[0]
        live = present[:, None]
        sources = load(index_refs[0], (rows,), present) if index_refs else rows
        true = [ranks_ref[group, i] for i in range(len(slice_sizes))]
        reads = [jnp.int32(rank) if rank <= WAIT_FOR_RANK else r for r in true]

        def step(j, sums):
            k = j * block_k + jnp.arange(block_k, dtype=jnp.int32)
            inside = None if k_size % block_k == 0 else (k < k_size)[None, :]
            rows_x = load(x_ref, (sources[:, None], k[None, :]), both(live, inside))
            rows_a = [
                load(a_ref, (group, (i * rank + r)[:, None], k[None, :]), both((r < reads[i])[:, None], inside))
                for i, r in pieces
            ]
            kind = jnp.promote_types(rows_x.dtype, a_ref.dtype)
            return tuple(total + dot(rows_x, a, kind, 1) for total, a in zip(sums, rows_a, strict=True))

        zeros = tuple(jnp.zeros((len(rows), block), jnp.float32) for _ in pieces)
        sums = jax.lax.fori_loop(0, pl.cdiv(k_size, block_k), step, zeros)
        h = [jnp.where((r < true[i])[None, :], total, 0) for (i, r), total in zip(pieces, sums, strict=True)]
        if dtype == jnp.bfloat16:
            h = [part.astype(jnp.bfloat16) for part in h]

        begin = 0
        for i, size in enumerate(slice_sizes):
            here = [(r, part) for (s, r), part in zip(pieces, h, strict=True) if s == i]

            def columns(j, carry, i=i, begin=begin, end=begin + size, here=here):
                col = begin + j * block_n + jnp.arange(block_n, dtype=jnp.int32)
                inside = (col < end)[None, :]
                total = load(base_ref, (rows[:, None], col[None, :]), live & inside).astype(jnp.float32)
                for r, part in here:
                    factors = load(b_ref, (group, r[:, None], col[None, :]), (r < reads[i])[:, None] & inside)
                    total += dot(part, factors, dtype, 0)
                store(out_ref, (rows[:, None], col[None, :]), total, live & inside & (true[i] > 0))
                return carry

            jax.lax.fori_loop(0, pl.cdiv(size, block_n), columns, jnp.int32(0))
            begin += size
        return carry

    share_out(tiles_used(used_ref, group_ref), unit, jnp.int32(0))


def combine(base, h, b, token_plan: Plan, ranks, touched, tiles: GPUTiles, dtype, interpret: bool):
    """base[t] + h[t] @ b[slot of t], where h [T, E * R] has the rank-R values of a token's experts in their places.

    Args:
      b: [S * E, R, N]; ranks: [S * E, 1].
      touched: [T] integers, 0 for tokens that keep their base.
    """
    slots, (_, rank, n) = token_plan.num_groups, b.shape
    kernel = partial(_combine_kernel, rank=rank, tile_m=token_plan.tile_m, tiles=tiles, dtype=dtype)
    return pl.pallas_call(
        kernel,
        grid=(tiles.programs,),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        input_output_aliases={7: 0},
        compiler_params=compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="lora_combine",
    )(
        token_plan.tiles_used, token_plan.tile_group, token_plan.tile_rows, ranks.reshape(slots, -1), touched, h,
        b.reshape(slots, -1, n), base,
    )  # fmt: skip


def combine_lora(base, x, a, b, plan, token_plan, *, rows, experts, weights, ranks, tiles=None, interpret=False):
    """See `jlora.ops.combine_lora`. The shrink of `add_lora`, then one launch that sums.

    Between them the hidden values go to their places, [T, E * R], which is small beside T * k rows of N.
    """
    groups, _, rank, _ = a.shape
    per_slot = groups // token_plan.num_groups
    shrink_tiles, combine_tiles = tiles or (None, COMBINE)
    ranks = all_ranks(groups, 1, rank) if ranks is None else ranks
    h = shrink_parts(x, a, b, plan, ranks, shrink_tiles, interpret=interpret)  # [parts, M, R]
    inside = (rows >= 0) & (rows < plan.num_rows)
    tile = jnp.minimum(token_plan.row_slot // token_plan.tile_m, token_plan.num_tiles - 1)
    inside &= (token_plan.row_slot < token_plan.num_tiles * token_plan.tile_m)[:, None]
    group = token_plan.tile_group[tile][:, None] * per_slot + experts
    true = jnp.where(inside, ranks[jnp.clip(group, 0, groups - 1), 0], 0)  # [T, k]
    hidden = h[0][jnp.clip(rows, 0, plan.num_rows - 1)].astype(jnp.float32)
    for part in h[1:]:
        hidden += part[jnp.clip(rows, 0, plan.num_rows - 1)].astype(jnp.float32)
    if weights is not None:
        hidden *= weights.astype(jnp.float32)[..., None]
    hidden = jnp.where(jnp.arange(rank, dtype=jnp.int32)[None, None] < true[..., None], hidden, 0).astype(h.dtype)
    tokens = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    places = jnp.zeros((len(rows), per_slot, rank), h.dtype)
    places = places.at[tokens, jnp.where(true > 0, experts, per_slot)].set(hidden, mode="drop", unique_indices=True)
    touched = jnp.any(true > 0, axis=1).astype(jnp.int32)
    dtype = dot_dtype(x, a, b)
    return combine(
        base, places.reshape(len(rows), -1), b, token_plan, ranks, touched, combine_tiles, dtype, interpret=interpret
    )


COMBINE = GPUTiles(block_k=64, block_n=128, warps=4, stages=3, programs=528)


def _combine_kernel(
    used_ref, group_ref, rows_ref, ranks_ref, touched_ref, h_ref, b_ref, base_ref, out_ref, *, rank: int, tile_m: int,
    tiles: GPUTiles, dtype,
):  # fmt: skip
    """out[tokens of a tile, block of columns] = base + h[tokens] @ b[slot], over all ranks of all experts.

    units: tiles in use x blocks of columns, innermost last; base and out are the same memory. Experts that a token
    did not choose are zeros in h: they add nothing, and every token is summed in the order of experts.
    """
    width, n = b_ref.shape[1:]
    block_k, block_n = tiles.block_k, tiles.block_n
    per_tile = pl.cdiv(n, block_n)

    def unit(u, carry):
        slot, rows = find_tile(u // per_tile, group_ref, rows_ref, tile_m)
        present = rows < base_ref.shape[0]
        live = present[:, None]
        col = u % per_tile * block_n + jnp.arange(block_n, dtype=jnp.int32)
        inside = (col < n)[None, :]

        def step(j, total):
            r = j * block_k + jnp.arange(block_k, dtype=jnp.int32)
            within = r < width
            below = within & (r % rank < load(ranks_ref, (slot, r // rank), within))
            hidden = load(h_ref, (rows[:, None], r[None, :]), live & within[None, :])
            factors = load(b_ref, (slot, r[:, None], col[None, :]), below[:, None] & inside)
            return total + dot(hidden, factors, dtype, 0)

        zeros = jnp.zeros((len(rows), block_n), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(width, block_k), step, zeros)
        keep = live & inside & (load(touched_ref, (rows,), present) > 0)[:, None]
        total += load(base_ref, (rows[:, None], col[None, :]), live & inside).astype(jnp.float32)
        store(out_ref, (rows[:, None], col[None, :]), total, keep)
        return carry

    share_out(tiles_used(used_ref, group_ref) * per_tile, unit, jnp.int32(0))
