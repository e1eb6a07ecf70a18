"""Derivatives of the kernels: forward runs a kernel, backward is plain jnp in tile space, without atomics.

With h = x aᵀ and out = base + h b for each slice:

    dh = dout bᵀ    db = hᵀ dout    dx = dh a    da = dhᵀ x    dbase = dout

The sums over a group's rows run tile by tile in the plan's order. They are therefore deterministic, and a NaN in the
rows of one group does not reach the gradients of another.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jlora.pallas import xla
from jlora.pallas.plan import Plan


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def shrink(run, x, a, plan: Plan, ranks, x_rows=None):
    """Run `run(x, a, plan, ...)`, differentiable in x and a."""
    return run(x, a, plan, ranks=ranks, x_rows=x_rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def expand(run, slice_sizes: tuple[int, ...], h, b, plan: Plan, base, ranks):
    """Run `run(h, b, plan, ...)`, differentiable in h, b and base (which may be None)."""
    return run(h, b, plan, slice_sizes=slice_sizes, base=base, ranks=ranks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def add_lora(run, slice_sizes: tuple[int, ...], base, x, a, b, plan: Plan, ranks, x_rows=None):
    """Run `run(base, x, a, b, plan, ...)`, differentiable in base, x, a and b."""
    return run(base, x, a, b, plan, slice_sizes=slice_sizes, ranks=ranks, x_rows=x_rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear_lora(run, slice_sizes: tuple[int, ...], x, w, a, b, plan: Plan, ranks):
    """Run `run(x, w, a, b, plan, ranks)`, differentiable in x, w, a and b."""
    return run(x, w, a, b, plan, ranks)


@jax.custom_vjp
def combine_lora(base, x, a, b, weights, plan: Plan, token_plan: Plan, rows, experts, ranks):
    """Run `triton.moe.combine_lora`, differentiable in base, x, a, b and weights (which may be None)."""
    from jlora.pallas.triton import moe  # slow import, needed on GPUs only

    pairs = {"rows": rows, "experts": experts, "weights": weights, "ranks": ranks}
    return moe.combine_lora(base, x, a, b, plan, token_plan, **pairs)


def _combine_forward(base, x, a, b, weights, plan, token_plan, rows, experts, ranks):
    out = combine_lora(base, x, a, b, weights, plan, token_plan, rows, experts, ranks)
    return out, (base, x, a, b, weights, plan, rows, ranks)


def _combine_backward(residuals, dout):
    *operands, plan, rows, ranks = residuals

    def run(base, x, a, b, weights):
        return xla.combine_lora(base, x, a, b, plan, rows=rows, weights=weights, ranks=ranks)

    return *jax.vjp(run, *operands)[1](dout), None, None, None, None, None


def _shrink_forward(run, x, a, plan, ranks, x_rows):
    return run(x, a, plan, ranks=ranks, x_rows=x_rows), (x, a, plan, ranks, x_rows)


def _shrink_backward(run, residuals, dh):
    del run
    x, a, plan, ranks, x_rows = residuals
    return *_shrink_grads(x, a, plan, ranks, x_rows, dh), None, None, None


def _expand_forward(run, slice_sizes, h, b, plan, base, ranks):
    out = run(h, b, plan, slice_sizes=slice_sizes, base=base, ranks=ranks)
    return out, (h, b, plan, ranks, base is None)


def _expand_backward(run, slice_sizes, residuals, dout):
    del run
    h, b, plan, ranks, no_base = residuals
    return *_expand_grads(h, b, plan, ranks, slice_sizes, dout), None, None if no_base else dout, None


def _add_lora_forward(run, slice_sizes, base, x, a, b, plan, ranks, x_rows):
    out = run(base, x, a, b, plan, slice_sizes=slice_sizes, ranks=ranks, x_rows=x_rows)
    return out, (x, a, b, plan, ranks, x_rows)


def _add_lora_backward(run, slice_sizes, residuals, dout):
    del run
    x, a, b, plan, ranks, x_rows = residuals
    h = xla.shrink(x, a, plan, ranks=ranks, x_rows=x_rows)
    dh, db = _expand_grads(h, b, plan, ranks, slice_sizes, dout)
    return dout, *_shrink_grads(x, a, plan, ranks, x_rows, dh), db, None, None, None


def _linear_lora_forward(run, slice_sizes, x, w, a, b, plan, ranks):
    return run(x, w, a, b, plan, ranks), (x, w, a, b, plan, ranks)


def _linear_lora_backward(run, slice_sizes, residuals, dout):
    x, w, a, b, plan, ranks = residuals
    dbase, dx, da, db, *_ = _add_lora_backward(run, slice_sizes, (x, a, b, plan, ranks, None), dout)
    of_x, of_w = jax.vjp(jnp.matmul, x, w)[1](dbase)
    return of_x + dx, of_w, da, db, None, None


def _shrink_grads(x, a, plan: Plan, ranks, x_rows, dh):
    x_tiles = xla.to_tiles(x, plan, x_rows).astype(jnp.float32)
    dh_tiles = xla.mask_ranks(xla.to_slice_tiles(dh, plan), plan, ranks)
    dx = _dot("tnmr,tnrk->tmk", dh_tiles, xla.take_a(a, plan, ranks).astype(jnp.float32))
    da = _sum_by_group(lambda dh, x: _dot("nmr,mk->nrk", dh, x), a.shape, plan, dh_tiles, x_tiles)
    dx = xla.to_rows(dx, plan) if x_rows is None else _sum_by_source(dx, x_rows, plan, len(x))
    return dx.astype(x.dtype), da.astype(a.dtype)


def _expand_grads(h, b, plan: Plan, ranks, slice_sizes, dout):
    h_tiles = xla.mask_ranks(xla.to_slice_tiles(h, plan), plan, ranks)
    dout_tiles = xla.to_tiles(dout, plan).astype(jnp.float32)
    columns = [slice(sum(slice_sizes[:i]), sum(slice_sizes[: i + 1])) for i in range(len(slice_sizes))]
    b_tiles = xla.take_b(b, plan, slice_sizes, ranks)
    dh = jnp.stack([_dot("tmn,trn->tmr", dout_tiles[..., c], b) for c, b in zip(columns, b_tiles, strict=True)], axis=1)
    dh = jnp.moveaxis(xla.to_rows(jnp.moveaxis(xla.mask_ranks(dh, plan, ranks), 1, 2), plan), 1, 0)

    def tile_db(h, dout):
        return jnp.concatenate([_dot("mr,mn->rn", h[i], dout[:, c]) for i, c in enumerate(columns)], axis=1)

    return dh.astype(h.dtype), _sum_by_group(tile_db, b.shape, plan, h_tiles, dout_tiles).astype(b.dtype)


def _sum_by_source(tiles, x_rows, plan: Plan, sources: int):
    """Add the row of each m to row x_rows[m], one tile after the other: [T, tile_m, K] -> float32 [sources, K].

    A tile holds rows of one group, and a row of x occurs at most once in a group. No two rows of a tile are thus added
    to the same place, and the order of the sum is fixed.
    """
    rows = jnp.where(plan.tile_rows < plan.num_rows, x_rows[jnp.minimum(plan.tile_rows, plan.num_rows - 1)], sources)

    def step(total, tile):
        rows, added = tile
        return total.at[rows].add(added, mode="drop"), None

    zeros = jnp.zeros((sources, tiles.shape[-1]), jnp.float32)
    return jax.lax.scan(step, zeros, (rows.reshape(plan.num_tiles, plan.tile_m), tiles))[0]


def _sum_by_group(per_tile, shape, plan: Plan, *tiles):
    """Sum per_tile(tile of each operand) over the tiles of every group, one tile after the other: float32 [G, ...]."""

    def step(total, tile):
        group, used, *operands = tile
        added = jnp.where(used, total[group] + per_tile(*operands), total[group])
        return jax.lax.dynamic_update_index_in_dim(total, added, group, 0), None

    used = plan.tile_start < plan.tile_end
    return jax.lax.scan(step, jnp.zeros(shape, jnp.float32), (plan.tile_group, used, *tiles))[0]


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, precision="highest")


shrink.defvjp(_shrink_forward, _shrink_backward)
expand.defvjp(_expand_forward, _expand_backward)
combine_lora.defvjp(_combine_forward, _combine_backward)
add_lora.defvjp(_add_lora_forward, _add_lora_backward)
linear_lora.defvjp(_linear_lora_forward, _linear_lora_backward)
