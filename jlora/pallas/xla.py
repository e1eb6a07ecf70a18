"""The XLA backend: plain jnp in tile space. Any platform, any shape; the values the kernels are checked against.

A tile copies its group's weights once, so cost follows the number of tiles (rows and active groups), not of slots.
Every function is differentiable by JAX itself and runs under vmap, scan and remat.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jlora.pallas.plan import Plan


def shrink(
    x: Float[jax.Array, "M K"], a: Float[jax.Array, "G n R K"], plan: Plan, *, ranks: Int[jax.Array, "G n"] | None
) -> Float[jax.Array, "n M R"]:
    """See `jlora.ops.shrink`."""
    h = _shrink_tiles(to_tiles(x, plan), a, plan, ranks)
    return jnp.moveaxis(to_rows(jnp.moveaxis(h, 1, 2), plan), 1, 0)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    base: Float[jax.Array, "M N"] | None,
    ranks: Int[jax.Array, "G n"] | None,
) -> Float[jax.Array, "M N"]:
    """See `jlora.ops.expand`."""
    delta = to_rows(_expand_tiles(to_slice_tiles(h, plan), b, plan, slice_sizes, ranks), plan)
    return delta.astype(b.dtype) if base is None else _add(base, delta, plan, slice_sizes, ranks)


def add_lora(
    base: Float[jax.Array, "M N"],
    x: Float[jax.Array, "M K"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    ranks: Int[jax.Array, "G n"] | None,
) -> Float[jax.Array, "M N"]:
    """See `jlora.ops.add_lora`. The rank-R intermediate never leaves tile space."""
    h = _shrink_tiles(to_tiles(x, plan), a, plan, ranks)
    delta = to_rows(_expand_tiles(h, b, plan, slice_sizes, ranks), plan)
    return _add(base, delta, plan, slice_sizes, ranks)


def to_tiles(rows, plan: Plan):
    """[M, ...] -> [T, tile_m, ...]; places that no row fills are zero, so that a NaN elsewhere cannot reach them."""
    filled = plan.tile_rows < plan.num_rows
    taken = rows[jnp.minimum(plan.tile_rows, plan.num_rows - 1)]
    tiles = jnp.where(filled.reshape(-1, *(1,) * (rows.ndim - 1)), taken, 0)
    return tiles.reshape(plan.num_tiles, plan.tile_m, *rows.shape[1:])


def to_slice_tiles(h, plan: Plan):
    """[n, M, R] -> [T, n, tile_m, R] float32."""
    return jnp.moveaxis(to_tiles(jnp.moveaxis(h.astype(jnp.float32), 0, 1), plan), 2, 1)


def to_rows(tiles, plan: Plan):
    """[T, tile_m, ...] -> [M, ...] in the rows' own order; dropped rows are zero."""
    flat = tiles.reshape(-1, *tiles.shape[2:])
    taken = flat[jnp.minimum(plan.row_slot, flat.shape[0] - 1)]
    return jnp.where(_has_group(plan).reshape(-1, *(1,) * (taken.ndim - 1)), taken, 0)


def _has_group(plan: Plan):
    return plan.row_slot < plan.num_tiles * plan.tile_m


def _shrink_tiles(x_tiles, a, plan: Plan, ranks):
    """[T, t, K] x [G, n, R, K] -> [T, n, t, R] float32."""
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
    """[G, n, R, K] -> [T, n, R, K], zero at and past each tile's true rank: what lies there may not be finite."""
    tiles = a[plan.tile_group]
    return tiles if ranks is None else jnp.where(_below_rank(a.shape[2], plan, ranks)[..., None], tiles, 0)


def take_b(b, plan: Plan, slice_sizes, ranks):
    """[G, R, N] -> float32 [T, R, columns of the slice] for every slice, zero as `take_a` is."""
    tiles, parts, start = b[plan.tile_group].astype(jnp.float32), [], 0
    below = None if ranks is None else _below_rank(b.shape[1], plan, ranks)
    for i, size in enumerate(slice_sizes):
        columns = jax.lax.slice_in_dim(tiles, start, start + size, axis=2)
        parts.append(columns if below is None else jnp.where(below[:, i, :, None], columns, 0))
        start += size
    return parts


def mask_ranks(h, plan: Plan, ranks):
    """Zeroes [T, n, tile_m, R] at and past each tile's true rank."""
    return h if ranks is None else jnp.where(_below_rank(h.shape[-1], plan, ranks)[:, :, None, :], h, 0)


def _below_rank(rank: int, plan: Plan, ranks):
    """[T, n, R]: which ranks a tile's group has."""
    return jnp.arange(rank, dtype=jnp.int32)[None, None, :] < ranks[plan.tile_group][:, :, None]


def _expand_tiles(h_tiles, b, plan: Plan, slice_sizes, ranks):
    """[T, n, t, R] x [G, R, N] -> [T, t, N] float32."""
    h_tiles = mask_ranks(h_tiles, plan, ranks)
    parts = [
        jnp.einsum("tmr,trn->tmn", h_tiles[:, i], columns, precision="highest")
        for i, columns in enumerate(take_b(b, plan, slice_sizes, ranks))
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _add(base, delta, plan: Plan, slice_sizes, ranks):
    """Adds in float32 and rounds once. Untouched values are selected, not added to: -0.0 + 0.0 is +0.0."""
    total = (base.astype(jnp.float32) + delta).astype(base.dtype)
    touched = _has_group(plan)[:, None]
    if ranks is not None:
        slot = jnp.minimum(plan.row_slot // plan.tile_m, plan.num_tiles - 1)
        present = ranks[plan.tile_group[slot]] > 0  # [M, n]
        columns = [jnp.broadcast_to(present[:, i, None], (len(base), size)) for i, size in enumerate(slice_sizes)]
        touched &= jnp.concatenate(columns, axis=1)
    return jnp.where(touched, total, base)
