"""`combine_lora` on NVIDIA GPUs. The rules of `lora` hold here too.

If many pairs share a group, the hidden values of a token's experts are placed side by side in one row of E * R, with
zeros for the experts that the token did not choose. The matrix unit then sums over all experts, and k times fewer rows
are written. This is wasteful if most of the product is zeros, or most of the factors read are used by no token. In that
case each pair is expanded and the rows are added.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jlora.pallas.plan import INVARIANT_TILE_M, Plan
from jlora.pallas.tiles import GPUTiles, gpu_tiles
from jlora.pallas.triton.lora import expand_parts, problem_of, shrink_parts
from jlora.pallas.triton.parts import (
    compiler_params,
    dot,
    dot_dtype,
    find_tile,
    load,
    share_out,
    store,
    tiles_used,
)
from jlora.pallas.xla import all_ranks, has_group, tile_of_rows

COMBINE = GPUTiles(block_k=64, block_n=128, warps=4, stages=3, programs=4224)


def side_by_side(plan: Plan, token_plan: Plan, rank: int, k: int) -> bool:
    """Return True if the product over all experts of a slot is faster.

    It is while it multiplies up to 200 ranks for each row of traffic saved (measured on an H200).
    """
    return plan.tile_m > INVARIANT_TILE_M and plan.num_groups // token_plan.num_groups * rank <= 200 * (k - 1)


def combine_lora(
    base, x, a, b, plan, token_plan, *, rows, experts, weights, ranks, batch_invariant=False, tiles=None,
    interpret=False,
):  # fmt: skip
    """Implement `jlora.ops.combine_lora`.

    `tiles` is a pair: tiles of the shrink and expand of pairs, and of the sum. None chooses them.
    """
    groups, _, rank, n = (*a.shape[:3], b.shape[2])
    per_slot = groups // token_plan.num_groups
    pair_tiles, sum_tiles = tiles or (gpu_tiles(problem_of(plan, x, a, b, 1, batch_invariant)), COMBINE)
    ranks = all_ranks(groups, 1, rank) if ranks is None else ranks
    true, scales = _ranks_of_pairs(plan, token_plan, rows, experts, ranks)
    taken = jnp.clip(rows, 0, plan.num_rows - 1)
    h = shrink_parts(x, a, b, plan, ranks, pair_tiles, interpret=interpret)  # [parts, M, R]
    if not side_by_side(plan, token_plan, rank, rows.shape[1]):
        options = {"out_dtype": jnp.float32, "interpret": interpret}
        delta = expand_parts(None, x, a, h, b, plan, ranks, (n,), pair_tiles, **options)
        total = jnp.zeros(base.shape, jnp.float32)
        for j in range(rows.shape[1]):
            part = delta[taken[:, j]]
            part = part if weights is None else part * weights[:, j, None].astype(jnp.float32)
            total += jnp.where(true[:, j, None] > 0, part, 0)
        return jnp.where((true > 0).any(1, keepdims=True), (base.astype(jnp.float32) + total).astype(base.dtype), base)
    hidden = sum(part[taken].astype(jnp.float32) for part in h) * scales[..., None]  # [T, k, R]
    hidden = hidden if weights is None else hidden * weights.astype(jnp.float32)[..., None]
    hidden = jnp.where(jnp.arange(rank, dtype=jnp.float32)[None, None] < true[..., None], hidden, 0).astype(h.dtype)
    tokens = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    wide = jnp.zeros((len(rows), per_slot, rank), h.dtype)
    wide = wide.at[tokens, jnp.where(true > 0, experts, per_slot)].set(hidden, mode="drop", unique_indices=True)
    kernel = partial(_combine_kernel, rank=rank, tile_m=token_plan.tile_m, tiles=sum_tiles, dtype=dot_dtype(x, a, b))
    return pl.pallas_call(
        kernel,
        grid=(sum_tiles.programs,),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        input_output_aliases={7: 0},
        compiler_params=compiler_params(sum_tiles.warps, sum_tiles.stages),
        interpret=interpret,
        name="lora_combine",
    )(
        token_plan.tiles_used, token_plan.tile_group, token_plan.tile_rows, jnp.any(true > 0, axis=1).astype(jnp.int32),
        ranks.reshape(-1, per_slot, 2), wide.reshape(len(rows), -1), b.reshape(-1, per_slot * rank, n), base,
    )  # fmt: skip


def _ranks_of_pairs(plan: Plan, token_plan: Plan, rows, experts, ranks):
    """Return the rank of each of a token's pairs [T, k], 0 for none, and its scale [T, k]."""
    inside = has_group(token_plan)[:, None] & (rows >= 0) & (rows < plan.num_rows)
    inside &= has_group(plan)[jnp.clip(rows, 0, plan.num_rows - 1)]
    slots = token_plan.tile_group[tile_of_rows(token_plan)]
    group = slots[:, None] * (plan.num_groups // token_plan.num_groups) + experts
    own = ranks[jnp.clip(group, 0, plan.num_groups - 1), 0]  # [T, k, 2]
    return jnp.where(inside, own[..., 0], 0), own[..., 1]


def _combine_kernel(
    used_ref,
    group_ref,
    rows_ref,
    touched_ref,
    ranks_ref,
    h_ref,
    b_ref,
    base_ref,
    out_ref,
    *,
    rank: int,
    tile_m: int,
    tiles: GPUTiles,
    dtype,
):
    """Compute out[tokens of a tile, block of columns] = base + h[tokens] @ b[slot] over the ranks of all experts.

    The units of work are the used tiles times the blocks of columns, innermost last. `base_ref` and `out_ref` are the
    same memory. Experts that a token did not choose add zeros. Every token is summed in the order of experts.
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
            true_ranks = load(ranks_ref, (slot, r // rank, jnp.int32(0)), within).astype(jnp.int32)
            below = within & (r % rank < true_ranks)  # b may be NaN past the rank
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
