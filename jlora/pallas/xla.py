"""The XLA backend: plain jnp in tile space, for any platform and shape. The kernels are tested against it.

In tile space rows are [T, tile_m, ...], gathered by the plan. A tile copies its group's weights once, so the cost grows
with the number of tiles (rows and active groups), not of slots. JAX differentiates every function, and all run under
vmap, scan and remat.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int, Real

from jlora.pallas.plan import Plan

H = "lora_h"  # name of h for the policies of `jax.checkpoint`


def shrink(
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Float[jax.Array, "G n s"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
) -> Float[jax.Array, "n M R"]:
    """Implement `jlora.ops.shrink`."""
    h = mask_ranks(_shrink_tiles(to_tiles(x, plan, x_rows), a, plan), plan, ranks)
    return jnp.moveaxis(to_rows(jnp.moveaxis(h, 1, 2), plan), 1, 0)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    base: Float[jax.Array, "M N"] | None,
    ranks: Float[jax.Array, "G n s"] | None,
) -> Float[jax.Array, "M N"]:
    """Implement `jlora.ops.expand`."""
    delta = to_rows(_expand_tiles(to_slice_tiles(h, plan), b, plan, slice_sizes, ranks), plan)
    return _added(base, delta, plan, slice_sizes, ranks, float_of(b))


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
    keep_h: bool = False,
) -> Any:
    """Implement `jlora.ops.add_lora`; the rank-R intermediate stays in tile space.

    With `keep_h`, return the result and h [1, M, n * R], for `expand_grads`.
    """
    h, kept = _shrink_tiles(to_tiles(x, plan, x_rows), a, plan), None
    if keep_h:
        rows = to_rows(jnp.moveaxis(h, 1, 2), plan)
        kept = checkpoint_name(rows.reshape(1, plan.num_rows, -1), H)
        h = to_slice_tiles(jnp.moveaxis(kept.reshape(rows.shape), 1, 0), plan)
    delta = to_rows(_expand_tiles(h, b, plan, slice_sizes, ranks), plan)
    out = _added(base, delta, plan, slice_sizes, ranks, jnp.float32)
    return (out, kept) if keep_h else out


def by_head(
    x: Float[jax.Array, "M heads F"],
    a: Real[jax.Array, "G n R K"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    ranks: Float[jax.Array, "G n s"],
    part: slice,
    transposed: bool,
) -> Float[jax.Array, "M heads W"]:
    """Return the delta of x[:, h] @ W[h], or of x[:, h] @ W[h]ᵀ, in float32. W[h] has the features `part` of head h."""
    b = b.reshape(*b.shape[:2], x.shape[1], -1)[..., part]
    below = _below_rank(a.shape[2], plan, ranks)
    a_tiles = jnp.where(below[..., None], pick(a, plan.tile_group), 0)[:, 0].astype(jnp.float32)
    b_tiles = mask_ranks(jnp.moveaxis(pick(b, plan.tile_group), 1, 3), plan, ranks).astype(jnp.float32)
    first, second = ("thfr", b_tiles), ("trg", a_tiles)
    if not transposed:
        first, second = ("trf", a_tiles), ("thgr", b_tiles)
    tiles = to_tiles(x, plan).astype(jnp.float32)
    h = jnp.einsum(f"tmhf,{first[0]}->thmr", tiles, first[1], precision="highest")
    h = scale_tiles(h, plan, ranks)
    return to_rows(jnp.einsum(f"thmr,{second[0]}->tmhg", h, second[1], precision="highest"), plan)


def expand_grads(
    h: Float[jax.Array, "P M nR"],
    dout: Float[jax.Array, "M N"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    ranks: Float[jax.Array, "G n s"] | None,
    slice_sizes: tuple[int, ...],
) -> tuple[Float[jax.Array, "M nR"], Real[jax.Array, "G R N"]]:
    """Return dh = s dout bᵀ in float32, of the rows with a group, and db = (s h)ᵀ dout, summed over each group's rows.

    h is a sum of P parts. s is the scale of the row's group and slice times the row's own.
    """
    (groups, rank, _), n = b.shape, len(slice_sizes)
    ranks = all_ranks(groups, n, rank) if ranks is None else ranks
    edges = [sum(slice_sizes[:i]) for i in range(n + 1)]

    def tile(group, rows, live):
        below = _ranks_below(rank, ranks[group])
        taken = live[:, None] & below.reshape(1, -1)  # [tile_m, n * R]
        scale = jnp.broadcast_to(ranks[group, :, 1:], (n, rank)).reshape(1, -1)
        scale = scale if plan.row_scales is None else scale * plan.row_scales[rows, None]
        values = jnp.where(live[:, None], dout[rows].astype(jnp.float32), 0)
        scaled = jnp.where(taken, h[:, rows].astype(jnp.float32).sum(0) * scale, 0)
        dh, db = [], []
        for i in range(n):
            columns, own = values[:, edges[i] : edges[i + 1]], slice(i * rank, (i + 1) * rank)
            factor = jnp.where(below[i, :, None], b[group, :, edges[i] : edges[i + 1]].astype(jnp.float32), 0)
            dh.append(_dot(columns, factor.T))
            db.append(_dot(scaled[:, own].T, columns))
        return jnp.where(taken, jnp.concatenate(dh, axis=1) * scale, 0), jnp.concatenate(db, axis=1)

    return _by_tile(tile, plan, b)


def shrink_grads(
    dh: Float[jax.Array, "M nR"],
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    plan: Plan,
    ranks: Float[jax.Array, "G n s"] | None,
    x_rows: Int[jax.Array, "M"] | None,
) -> tuple[Float[jax.Array, "T K"], Real[jax.Array, "G n R K"]]:
    """Return dx = dh a and da = dhᵀ x, summed over each group's rows. dh need not be finite past the rank."""
    groups, n, rank, k = a.shape
    ranks = all_ranks(groups, n, rank) if ranks is None else ranks

    def tile(group, rows, live):
        below = _ranks_below(rank, ranks[group]).reshape(n * rank, 1)
        factor = jnp.where(below, a[group].reshape(n * rank, k).astype(jnp.float32), 0)
        h = jnp.where(live[:, None] & below.T, dh[rows].astype(jnp.float32), 0)
        source = rows if x_rows is None else jnp.where(live, x_rows[rows], 0)
        values = jnp.where(live[:, None], x[source].astype(jnp.float32), 0)
        return _dot(h, factor).astype(x.dtype), _dot(h.T, values).reshape(n, rank, k)

    dx, da = _by_tile(tile, plan, a)
    return dx if x_rows is None else sum_by_source(dx, x_rows, plan, len(x)).astype(x.dtype), da


def _by_tile(run, plan: Plan, factor):
    """Run `run(group, rows, live)` on each tile, and return its first results as rows and the sums of its second.

    The sums over the tiles of a group are float32, and are rounded to the dtype of the factor [G, ...]. Only that of
    the current group is kept in float32.
    """
    last_row = plan.num_rows - 1
    order = jnp.argsort(jnp.where(plan.tile_start < plan.tile_end, plan.tile_group, plan.num_groups), stable=True)
    groups = jnp.where(plan.tile_start < plan.tile_end, plan.tile_group, plan.num_groups)[order]
    rows = plan.tile_rows.reshape(plan.num_tiles, plan.tile_m)[order]

    def step(carry, tile):
        total, grad, before = carry
        group, rows = tile
        group = jnp.where(group < plan.num_groups, group, before)  # an empty tile adds zeros
        out, added = run(group, jnp.minimum(rows, last_row), rows <= last_row)
        total = jnp.where(group == before, total, 0) + added
        grad = jax.lax.dynamic_update_index_in_dim(grad, total.astype(grad.dtype), group, 0)
        return (total, grad, group), out

    zeros = jnp.zeros(factor.shape[1:], jnp.float32), jnp.zeros_like(factor), jnp.int32(0)
    (_, grad, _), tiles = jax.lax.scan(step, zeros, (groups, rows))
    return to_rows(tiles[jnp.argsort(order)], plan), grad


def sum_by_source(rows, x_rows, plan: Plan, sources: int):
    """Add the row of each m, in order, to row x_rows[m]: [M, K] -> float32 [sources, K].

    Each round adds one more row to every source, so no two rows are added to the same place at once.
    """
    source = jnp.where(has_group(plan), x_rows, sources)
    order = jnp.argsort(source, stable=True)
    edges = jnp.searchsorted(source[order], jnp.arange(sources + 1))
    start, count = edges[:-1], jnp.diff(edges)

    def add(j, total):
        row = order[jnp.minimum(start + j, len(order) - 1)]
        return total + jnp.where((j < count)[:, None], rows[row].astype(jnp.float32), 0)

    return jax.lax.fori_loop(0, jnp.max(count), add, jnp.zeros((sources, rows.shape[1]), jnp.float32))


def dot_dtype(*operands):
    """Return the dtype of a product: the widest of the operands. int8 is exact in all of them."""
    with jax.numpy_dtype_promotion("standard"):  # operands of mixed dtypes work under any setting of the caller
        return functools.reduce(jnp.promote_types, [operand.dtype for operand in operands])


def float_of(factor):
    """Return the dtype of a delta without a base: that of the factor, float32 of int8."""
    return jnp.dtype(jnp.float32) if factor.dtype == jnp.int8 else factor.dtype


def _dot(x, y):
    return jnp.dot(x, y, precision="highest")


def pick(values, index):
    """Return values[index] for indices of a plan. They are never negative or out of bounds, so none is wrapped."""
    return values.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def to_tiles(rows, plan: Plan, sources=None):
    """Gather rows into tiles: [M, ...] -> [T, tile_m, ...].

    Empty places are zero, so a NaN of another row cannot reach them. With `sources` [M], row m is rows[sources[m]].
    """
    filled = plan.tile_rows < plan.num_rows
    taken = jnp.minimum(plan.tile_rows, plan.num_rows - 1)
    taken = pick(rows, taken) if sources is None else rows[pick(sources, taken)]
    tiles = jnp.where(filled.reshape(-1, *(1,) * (rows.ndim - 1)), taken, 0)
    return tiles.reshape(plan.num_tiles, plan.tile_m, *rows.shape[1:])


def to_slice_tiles(h, plan: Plan):
    """Gather h into tiles: [n, M, R] -> [T, n, tile_m, R] float32."""
    return jnp.moveaxis(to_tiles(jnp.moveaxis(h.astype(jnp.float32), 0, 1), plan), 2, 1)


def to_rows(tiles, plan: Plan):
    """Return tiles to rows: [T, tile_m, ...] -> [M, ...] in the original order; dropped rows are zero."""
    flat = tiles.reshape(-1, *tiles.shape[2:])
    taken = pick(flat, jnp.minimum(plan.row_slot, flat.shape[0] - 1))
    return jnp.where(has_group(plan).reshape(-1, *(1,) * (taken.ndim - 1)), taken, 0)


def has_group(plan: Plan):
    """Return a mask [M] of the rows with a group, which is computed once for all layers of a step."""
    return plan.row_slot < plan.num_tiles * plan.tile_m


def _shrink_tiles(x_tiles, a, plan: Plan):
    """Multiply [T, t, K] x [G, n, R, K] -> [T, n, t, R] float32, which need not be finite from the true rank on."""
    dtype = dot_dtype(x_tiles, a)
    return jnp.einsum(
        "tmk,tnrk->tnmr",
        x_tiles.astype(dtype),
        pick(a, plan.tile_group).astype(dtype),
        preferred_element_type=jnp.float32,
        precision="highest",
    )


def take_b(b, plan: Plan, slice_sizes, ranks):
    """Gather [G, R, N] -> float32 [T, R, columns of the slice] for every slice, zero from each tile's true rank on."""
    tiles, parts, start = pick(b, plan.tile_group).astype(jnp.float32), [], 0
    below = None if ranks is None else _below_rank(b.shape[1], plan, ranks)
    for i, size in enumerate(slice_sizes):
        columns = jax.lax.slice_in_dim(tiles, start, start + size, axis=2)
        parts.append(columns if below is None else jnp.where(below[:, i, :, None], columns, 0))
        start += size
    return parts


def mask_ranks(h, plan: Plan, ranks):
    """Zero [T, n, tile_m, R] from each tile's true rank on."""
    return h if ranks is None else jnp.where(_below_rank(h.shape[-1], plan, ranks)[:, :, None, :], h, 0)


def mask_rows(h, plan: Plan, ranks):
    """Zero [n, M, R] in rows without a group and from each row's true rank on."""
    if ranks is None:
        return jnp.where(has_group(plan)[None, :, None], h, 0)
    rank = jnp.where(has_group(plan)[None], _rank_of_rows(plan, ranks).T, 0)  # [n, M]
    return jnp.where(jnp.arange(h.shape[2], dtype=jnp.float32)[None, None] < rank[..., None], h, 0)


def scale_tiles(h, plan: Plan, ranks):
    """Multiply [T, n, tile_m, R] by the scales of groups and slices and of rows, and zero it from the true rank on."""
    if ranks is not None:
        h = h * pick(ranks, plan.tile_group)[:, :, None, 1:]
    if plan.row_scales is not None:
        h = h * to_tiles(plan.row_scales, plan)[:, None, :, None]
    return mask_ranks(h, plan, ranks)


def _below_rank(rank: int, plan: Plan, ranks):
    """Return [T, n, R]: True for ranks below the true rank of the tile's group."""
    return jnp.arange(rank, dtype=jnp.float32)[None, None, :] < pick(ranks, plan.tile_group)[:, :, :1]


def _ranks_below(rank: int, ranks):
    """Return [n, R] of one group's `ranks`: True below the true rank."""
    return jnp.arange(rank, dtype=jnp.float32)[None] < ranks[:, :1]


def _expand_tiles(h_tiles, b, plan: Plan, slice_sizes, ranks):
    """Multiply [T, n, t, R] x [G, R, N] -> [T, t, N] float32."""
    h_tiles = scale_tiles(h_tiles, plan, ranks)
    parts = [
        jnp.einsum("tmr,trn->tmn", h_tiles[:, i], columns, precision="highest")
        for i, columns in enumerate(take_b(b, plan, slice_sizes, ranks))
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _added(base, delta, plan: Plan, slice_sizes, ranks, dtype):
    """Return base + delta [M, N], rounded once; without a base the delta in `dtype`, -0.0 where it is absent.

    Unchanged values are selected from the base and not added to, since -0.0 + 0.0 is +0.0.
    """
    total = delta if base is None else base.astype(jnp.float32) + delta
    base = jnp.full(delta.shape, -0.0, dtype) if base is None else base
    total = total.astype(base.dtype)
    present = _present(plan, ranks, len(slice_sizes))
    columns = [jnp.broadcast_to(present[:, i, None], (len(base), size)) for i, size in enumerate(slice_sizes)]
    return jnp.where(jnp.concatenate(columns, axis=1), total, base)


def all_ranks(groups: int, n: int, rank: int):
    """Return [groups, n, 2] ranks that are all `rank`, with scale 1 for all rows."""
    return jnp.broadcast_to(jnp.array([rank, 1], jnp.float32), (groups, n, 2))


def tile_of_rows(plan: Plan):
    """Return [M], the tile of each row, and any for a dropped row."""
    return jnp.minimum(jax.lax.div(plan.row_slot, jnp.int32(plan.tile_m)), plan.num_tiles - 1)


def _rank_of_rows(plan: Plan, ranks):
    """Return [M, n], the true rank of each row's group in each slice, and any for a dropped row."""
    return pick(ranks, pick(plan.tile_group, tile_of_rows(plan)))[:, :, 0]


def _present(plan: Plan, ranks, slices: int):
    """Return [M, n]: True if a row has a group whose rank in the slice is above 0."""
    grouped = jnp.broadcast_to(has_group(plan)[:, None], (plan.num_rows, slices))
    if ranks is None:
        return grouped
    return grouped & (_rank_of_rows(plan, ranks) > 0)
