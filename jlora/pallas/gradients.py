"""Derivatives of the kernels: forward runs a kernel, backward is plain jnp in tile space, without atomics.

With h = x aᵀ and out = base + s h b for each slice, where s is the scale of the row's group times the row's own:

    dh = s dout bᵀ    db = (s h)ᵀ dout    dx = dh a    da = dhᵀ x    dbase = dout

The sums over a group's rows run tile by tile in the plan's order. They are therefore deterministic, and a NaN in the
rows of one group does not reach the gradients of another.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jlora import _qwix
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
    """Run `run(base, x, a, b, plan, ...)`, differentiable in base (which may be None), x, a and b."""
    return run(base, x, a, b, plan, slice_sizes=slice_sizes, ranks=ranks, x_rows=x_rows)


def _shrink_forward(run, x, a, plan, ranks, x_rows):
    return run(x, a, plan, ranks=ranks, x_rows=x_rows), (x, a, plan, ranks, x_rows)


@_qwix.unintercepted
def _shrink_backward(run, residuals, dh):
    del run
    x, a, plan, ranks, x_rows = residuals
    return *_shrink_grads(x, a, plan, ranks, x_rows, dh), None, None, None


def _expand_forward(run, slice_sizes, h, b, plan, base, ranks):
    out = expand(run, slice_sizes, h, b, plan, base, ranks)
    return out, (h, b, plan, base is None, ranks)


@_qwix.unintercepted
def _expand_backward(run, slice_sizes, residuals, dout):
    del run
    h, b, plan, no_base, ranks = residuals
    dh, db = _expand_grads(h, b, plan, ranks, slice_sizes, dout)
    return dh, db, None, None if no_base else dout, None


def _add_lora_forward(run, slice_sizes, base, x, a, b, plan, *options):
    return add_lora(run, slice_sizes, base, x, a, b, plan, *options), (base is None, x, a, b, plan, *options)


@_qwix.unintercepted
def _add_lora_backward(run, slice_sizes, residuals, dout):
    del run
    no_base, x, a, b, plan, ranks, x_rows = residuals
    h = xla.shrink(x, a, plan, ranks=ranks, x_rows=x_rows)
    dh, db = _expand_grads(h, b, plan, ranks, slice_sizes, dout)
    return None if no_base else dout, *_shrink_grads(x, a, plan, ranks, x_rows, dh), db, None, None, None


def _shrink_grads(x, a, plan: Plan, ranks, x_rows, dh):
    x_tiles = xla.to_tiles(x, plan, x_rows).astype(jnp.float32)
    dh_tiles = xla.mask_ranks(xla.to_slice_tiles(dh, plan), plan, ranks)
    dx = _dot("tnmr,tnrk->tmk", dh_tiles, xla.take_a(a, plan, ranks).astype(jnp.float32))
    da = _sum_by_group(lambda dh, x: _dot("nmr,mk->nrk", dh, x), a.shape, plan, dh_tiles, x_tiles)
    dx = xla.to_rows(dx, plan) if x_rows is None else _sum_by_source(dx, x_rows, plan, len(x))
    return dx.astype(x.dtype), da.astype(a.dtype)


def _expand_grads(h, b, plan: Plan, ranks, slice_sizes, dout):
    h_tiles = xla.scale_tiles(xla.to_slice_tiles(h, plan), plan, ranks)
    dout_tiles = xla.to_tiles(dout, plan).astype(jnp.float32)
    columns = [slice(sum(slice_sizes[:i]), sum(slice_sizes[: i + 1])) for i in range(len(slice_sizes))]
    b_tiles = xla.take_b(b, plan, slice_sizes, ranks)
    dh = jnp.stack([_dot("tmn,trn->tmr", dout_tiles[..., c], b) for c, b in zip(columns, b_tiles, strict=True)], axis=1)
    dh = jnp.moveaxis(xla.to_rows(jnp.moveaxis(xla.scale_tiles(dh, plan, ranks), 1, 2), plan), 1, 0)

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
add_lora.defvjp(_add_lora_forward, _add_lora_backward)
