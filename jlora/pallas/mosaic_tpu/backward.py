"""The backward pass on TPUs: one kernel for each factor and slice, over rows that XLA sorts by group.

The kernel of b reads the rows of dout, and gives db and dh. That of a reads the rows of x, and gives da and dx. With w
for (s h) or dh, a grid step adds the wᵀ rows of one tile of rows to the sum of one group, and computes the rows of the
other result. A "visit" is a tile of rows with a group that has rows in it. A group without rows has one visit, which
writes zeros, and so have the rows without a group.

        sorted rows   | g0 g0 g0 g2 | g2 g2 - - |
        visits        | t0,g0 t0,g1 t0,g2  t1,g2 t1,- |
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlora.pallas import xla
from jlora.pallas.mosaic_tpu.kernel import LANES, MANY_GROUPS, SMEM_BYTES, dot
from jlora.pallas.plan import Plan, bounds, interval

_MOST_COLUMNS = 1024  # of a block
_BLOCK_BYTES = 2 << 20  # of a float32 block of a factor


def expand_grads(h, dout, b, plan: Plan, ranks, slice_sizes, *, interpret=False):
    """Return dh and db, as `xla.expand_grads`."""
    n, rank = len(slice_sizes), b.shape[1]
    ranks = xla.all_ranks(b.shape[0], n, rank) if ranks is None else ranks
    if b.dtype == jnp.int8 or _too_many(plan, n):
        return xla.expand_grads(h, dout, b, plan, ranks, slice_sizes)
    h = xla.mask_rows(jnp.moveaxis(h.astype(jnp.float32).sum(0).reshape(-1, n, rank), 1, 0), plan, ranks)
    scale = ranks[jnp.minimum(plan.row_groups, plan.num_groups - 1), :, 1].T[..., None]  # [n, M, 1]
    scale = scale if plan.row_scales is None else scale * plan.row_scales[None, :, None]
    dhs, dbs, start = [], [], 0
    for i, size in enumerate(slice_sizes):
        columns = slice(start, start + size)
        args = jnp.where(h[i] == 0, 0, scale[i] * h[i]), dout[:, columns], b[:, :, columns]
        db, parts = _outer(*args, plan, ranks[:, i : i + 1, 0], None, expand=True, interpret=interpret)
        dhs.append(jnp.where(xla.has_group(plan)[:, None], parts.sum(0) * scale[i], 0))
        dbs.append(db)
        start += size
    return jnp.concatenate(dhs, axis=1), jnp.concatenate(dbs, axis=2)


def shrink_grads(dh, x, a, plan: Plan, ranks, x_rows, *, interpret=False):
    """Return dx and da, as `xla.shrink_grads`."""
    groups, n, rank, k = a.shape
    ranks = xla.all_ranks(groups, n, rank) if ranks is None else ranks
    if a.dtype == jnp.int8 or _too_many(plan, n):
        return xla.shrink_grads(dh, x, a, plan, ranks, x_rows)
    dh = xla.mask_rows(jnp.moveaxis(dh.reshape(-1, n, rank), 1, 0), plan, ranks)
    dh = jnp.moveaxis(dh, 0, 1).reshape(-1, n * rank)
    flat = a.reshape(groups, n * rank, k)
    da, dx = _outer(dh, x, flat, plan, ranks[..., 0], x_rows, expand=False, interpret=interpret)
    dx = dx if x_rows is None else xla.sum_by_source(dx, x_rows, plan, len(x)).astype(x.dtype)
    return dx, da.reshape(a.shape)


def _too_many(plan: Plan, slices: int) -> bool:
    """Return True if the visits and ranks may exceed SMEM."""
    return 4 * (2 * (plan.num_groups + plan.num_rows // 128 + 2) + (slices + 2) * plan.num_groups) > SMEM_BYTES


def _outer(w, rows, factor, plan: Plan, ranks, index, *, expand: bool, interpret):
    """Return the sums of wᵀ rows over each group, and rows factorᵀ in parts [C tiles, M, W] or w factor [M, C].

    w [M, W] is zero past the rank, and W is the ranks of all slices in turn. `rows` is [M, C], or [T, C] with an index
    [M] of its rows. `factor` is [G, W, C], and `ranks` are true ranks [G, n].
    """
    (groups, width, columns), size = factor.shape, plan.num_rows
    tile_m = 128 if groups > MANY_GROUPS else 256
    tile_m = min(tile_m, -(-size // 16) * 16)
    row_tiles = -(-size // tile_m)
    most = min(_MOST_COLUMNS, max(LANES, _BLOCK_BYTES // (4 * width)))
    padded = columns if columns <= most else -(-columns // LANES) * LANES
    tile_c = padded if padded <= most else max(t for t in range(LANES, most + 1, LANES) if padded % t == 0)

    # 1. Sort the rows by group, and list the visits.
    order, end = bounds(plan)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), end[:-1]])
    first = jnp.minimum(start // tile_m, row_tiles - 1)
    count = jnp.maximum(1, (end - 1) // tile_m - first + 1)
    count_end = jnp.cumsum(count)
    group, _ = interval(count_end, jnp.arange(groups + 1 + row_tiles, dtype=jnp.int32))
    tile = jnp.minimum(first[group] + jnp.arange(len(group)) - (count_end - count)[group], row_tiles - 1)
    scalars = tile.astype(jnp.int32), group, start, end, ranks.astype(jnp.int32).ravel()

    # 2. Gather. Padding has no group.
    taken = jnp.pad(order, (0, row_tiles * tile_m - size))
    dtype = jnp.promote_types(rows.dtype, factor.dtype)
    w = w[taken].astype(dtype)
    rows = jnp.pad(rows[taken if index is None else index[taken]], ((0, 0), (0, padded - columns)))
    factor = jnp.pad(factor, ((0, 0), (0, 0), (0, padded - columns)))

    def own(v, group):
        return jnp.minimum(group[v], groups - 1)

    factor_spec = pl.BlockSpec((1, width, tile_c), lambda c, v, tile, group, *_: (own(v, group), 0, c))
    rows_spec = pl.BlockSpec((tile_m, tile_c), lambda c, v, tile, *_: (tile[v], c))
    out_spec, shape = rows_spec, jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    if expand:
        out_spec = pl.BlockSpec((1, tile_m, width), lambda c, v, tile, *_: (c, tile[v], 0))
        shape = jax.ShapeDtypeStruct((padded // tile_c, len(taken), width), jnp.float32)
    grad, out = pl.pallas_call(
        partial(_kernel, groups=groups, rank=width // ranks.shape[1], expand=expand),
        out_shape=[jax.ShapeDtypeStruct(factor.shape, factor.dtype), shape],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(padded // tile_c, count_end[-1]),
            in_specs=[
                pl.BlockSpec((tile_m, width), lambda c, v, tile, *_: (tile[v], 0)),
                pl.BlockSpec((width, tile_m), lambda c, v, tile, *_: (0, tile[v])),
                rows_spec,
                factor_spec,
            ],
            out_specs=[factor_spec, out_spec],
            scratch_shapes=[pltpu.VMEM((width, tile_c), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=pltpu.InterpretParams() if interpret is True else interpret,
        name="jlora_outer",
    )(*scalars, w, w.T, rows, factor)
    # Gather by the inverse permutation, because XLA makes two passes over the rows for a scatter.
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(size, dtype=jnp.int32), unique_indices=True)
    return grad[..., :columns], out[:, inverse] if expand else out[inverse, :columns]


def _kernel(
    tile, group, start, end, ranks, w, w_transposed, rows, factor, grad, out, total, *, groups: int, rank: int,
    expand: bool,
):  # fmt: skip
    """Run one visit. The visits of a group are consecutive, and those of a tile."""
    v, visits = pl.program_id(1), pl.num_programs(1)
    own = group[v]
    tile_m, width = w.shape
    begin = tile[v] * tile_m

    def mine(shape, axis):
        place = begin + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return (place >= start[own]) & (place < end[own]) & (own < groups)

    @pl.when((v == 0) | (group[jnp.maximum(v - 1, 0)] != own))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when((v == 0) | (tile[jnp.maximum(v - 1, 0)] != tile[v]))
    def _():
        out[...] = jnp.zeros_like(out)

    here = jnp.minimum(own, groups - 1)
    place = jax.lax.broadcasted_iota(jnp.int32, (width, 1), 0)
    below = jnp.zeros((width, 1), jnp.bool_)
    for i in range(width // rank):
        below |= (place >= i * rank) & (place < i * rank + ranks[here * (width // rank) + i])
    # A NaN of other rows, or past the rank, must not be multiplied by zero.
    live = mine((tile_m, 1), 0)
    values = jnp.where(live, rows[...].astype(jnp.float32), 0).astype(w.dtype)
    weights = jnp.where(below, factor[0].astype(jnp.float32), 0).astype(w.dtype)
    left = jnp.where(mine((1, tile_m), 1), w_transposed[...].astype(jnp.float32), 0).astype(w.dtype)
    total[...] += dot(left, values)
    if expand:
        out[0] = jnp.where(live, dot(values, weights, transpose=True), out[0])
    else:
        out[...] = jnp.where(live, dot(w[...], weights), out[...].astype(jnp.float32)).astype(out.dtype)

    @pl.when((own < groups) & ((v == visits - 1) | (group[jnp.minimum(v + 1, visits - 1)] != own)))
    def _():
        grad[0] = total[...].astype(grad.dtype)
