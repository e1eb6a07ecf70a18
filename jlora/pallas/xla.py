"""The XLA backend: plain jnp in tile space, for any platform and shape. The kernels are tested against it.

In tile space rows are [T, tile_m, ...], gathered by the plan. A tile copies its group's weights once, so the cost grows
with the number of tiles (rows and active groups), not of slots. JAX differentiates every function, and all run under
vmap, scan and remat.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jlora.pallas.plan import Plan


def shrink(
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Float[jax.Array, "G n 2"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
) -> Float[jax.Array, "n M R"]:
    """Implement `jlora.ops.shrink`."""
    h = _shrink_tiles(to_tiles(x, plan, x_rows), a, plan, ranks)
    return jnp.moveaxis(to_rows(jnp.moveaxis(h, 1, 2), plan), 1, 0)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    base: Float[jax.Array, "M N"] | None,
    ranks: Float[jax.Array, "G n 2"] | None,
) -> Float[jax.Array, "M N"]:
    """Implement `jlora.ops.expand`."""
    delta = to_rows(_expand_tiles(to_slice_tiles(h, plan), b, plan, slice_sizes, ranks), plan)
    return _added(base, delta, plan, slice_sizes, ranks, b.dtype)


def add_lora(
    base: Float[jax.Array, "M N"] | None,
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    ranks: Float[jax.Array, "G n 2"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
) -> Float[jax.Array, "M N"]:
    """Implement `jlora.ops.add_lora`; the rank-R intermediate stays in tile space."""
    h = _shrink_tiles(to_tiles(x, plan, x_rows), a, plan, ranks)
    delta = to_rows(_expand_tiles(h, b, plan, slice_sizes, ranks), plan)
    return _added(base, delta, plan, slice_sizes, ranks, jnp.float32)


def to_tiles(rows, plan: Plan, sources=None):
    """Gather rows into tiles: [M, ...] -> [T, tile_m, ...].

    Empty places are zero, so a NaN of another row cannot reach them. With `sources` [M], row m is rows[sources[m]].
    """
    filled = plan.tile_rows < plan.num_rows
    taken = jnp.minimum(plan.tile_rows, plan.num_rows - 1)
    taken = rows[taken if sources is None else sources[taken]]
    tiles = jnp.where(filled.reshape(-1, *(1,) * (rows.ndim - 1)), taken, 0)
    return tiles.reshape(plan.num_tiles, plan.tile_m, *rows.shape[1:])


def to_slice_tiles(h, plan: Plan):
    """Gather h into tiles: [n, M, R] -> [T, n, tile_m, R] float32."""
    return jnp.moveaxis(to_tiles(jnp.moveaxis(h.astype(jnp.float32), 0, 1), plan), 2, 1)


def to_rows(tiles, plan: Plan):
    """Return tiles to rows: [T, tile_m, ...] -> [M, ...] in the original order; dropped rows are zero."""
    flat = tiles.reshape(-1, *tiles.shape[2:])
    taken = flat[jnp.minimum(plan.row_slot, flat.shape[0] - 1)]
    return jnp.where(has_group(plan).reshape(-1, *(1,) * (taken.ndim - 1)), taken, 0)


def has_group(plan: Plan):
    """Return a mask [M] of the rows with a group, which is computed once for all layers of a step."""
    return plan.row_slot < plan.num_tiles * plan.tile_m


def _shrink_tiles(x_tiles, a, plan: Plan, ranks):
    """Multiply [T, t, K] x [G, n, R, K] -> [T, n, t, R] float32."""
    a_tiles = take_a(a, plan, ranks)
    dtype = jnp.promote_types(x_tiles.dtype, a.dtype)
    h = jnp.einsum(
        "tmk,tnrk->tnmr",
        x_tiles.astype(dtype),
        a_tiles.astype(dtype),
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    return mask_ranks(h, plan, ranks)


def take_a(a, plan: Plan, ranks):
    """Gather [G, n, R, K] -> [T, n, R, K], zero from each tile's true rank on, where a may not be finite."""
    tiles = a[plan.tile_group]
    return tiles if ranks is None else jnp.where(_below_rank(a.shape[2], plan, ranks)[..., None], tiles, 0)


def take_b(b, plan: Plan, slice_sizes, ranks):
    """Gather [G, R, N] -> float32 [T, R, columns of the slice] for every slice, zero from each tile's true rank on."""
    tiles, parts, start = b[plan.tile_group].astype(jnp.float32), [], 0
    below = None if ranks is None else _below_rank(b.shape[1], plan, ranks)
    for i, size in enumerate(slice_sizes):
        columns = jax.lax.slice_in_dim(tiles, start, start + size, axis=2)
        parts.append(columns if below is None else jnp.where(below[:, i, :, None], columns, 0))
        start += size
    return parts


def mask_ranks(h, plan: Plan, ranks):
    """Zero [T, n, tile_m, R] from each tile's true rank on."""
    return h if ranks is None else jnp.where(_below_rank(h.shape[-1], plan, ranks)[:, :, None, :], h, 0)


def scale_tiles(h, plan: Plan, ranks):
    """Multiply [T, n, tile_m, R] by the scales of groups and slices and of rows, and zero it from the true rank on."""
    if ranks is not None:
        h = h * ranks[plan.tile_group][:, :, 1, None, None]
    if plan.row_scales is not None:
        h = h * to_tiles(plan.row_scales, plan)[:, None, :, None]
    return mask_ranks(h, plan, ranks)


def _below_rank(rank: int, plan: Plan, ranks):
    """Return [T, n, R]: True for ranks below the true rank of the tile's group."""
    return jnp.arange(rank, dtype=jnp.float32)[None, None, :] < ranks[plan.tile_group][:, :, :1]


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
    """Return [groups, n, 2] ranks that are all `rank`, with scale 1."""
    return jnp.broadcast_to(jnp.array([rank, 1], jnp.float32), (groups, n, 2))


def tile_of_rows(plan: Plan):
    """Return [M], the tile of each row, and any for a dropped row."""
    return jnp.minimum(plan.row_slot // plan.tile_m, plan.num_tiles - 1)


def _present(plan: Plan, ranks, slices: int):
    """Return [M, n]: True if a row has a group whose rank in the slice is above 0."""
    grouped = jnp.broadcast_to(has_group(plan)[:, None], (plan.num_rows, slices))
    if ranks is None:
        return grouped
    return grouped & (ranks[plan.tile_group[tile_of_rows(plan)], :, 0] > 0)
