"""Derivatives of the functions of a backend: its forward pass, and its gradients of shrink and expand.

With h = x aᵀ and out = base + s h b for each slice, where s is the scale of the row's group times the row's own:

    dh = s dout bᵀ    db = (s h)ᵀ dout    dx = dh a    da = dhᵀ x    dbase = dout

The sums over a group's rows run in the plan's order. They are therefore deterministic, and a NaN in the rows of one
group does not reach the gradients of another. `add_lora` keeps h for the backward pass under the name "lora_h", by
which a policy of `jax.checkpoint` saves it or computes it again.

`backward` is a module, or another hashable object, with the functions `shrink_grads` and `expand_grads` (see
`jlora.pallas.xla`).
"""

from functools import partial

import jax
import jax.numpy as jnp

from jlora import _qwix
from jlora.pallas import xla
from jlora.pallas.plan import Plan


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def shrink(run, backward, x, a, plan: Plan, ranks, x_rows=None):
    """Run `run(x, a, plan, ...)`, differentiable in x and a."""
    return run(x, a, plan, ranks=ranks, x_rows=x_rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def expand(run, backward, slice_sizes: tuple[int, ...], h, b, plan: Plan, base, ranks):
    """Run `run(h, b, plan, ...)`, differentiable in h, b and base (which may be None)."""
    return run(h, b, plan, slice_sizes=slice_sizes, base=base, ranks=ranks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def add_lora(run, backward, slice_sizes: tuple[int, ...], base, x, a, b, plan: Plan, ranks, x_rows=None):
    """Run `run(base, x, a, b, plan, ...)`, differentiable in base (which may be None), x, a and b."""
    return run(base, x, a, b, plan, slice_sizes=slice_sizes, ranks=ranks, x_rows=x_rows)


def _shrink_forward(run, backward, x, a, plan, ranks, x_rows):
    return shrink(run, backward, x, a, plan, ranks, x_rows), (x, a, plan, ranks, x_rows)


@_qwix.unintercepted
def _shrink_backward(run, backward, residuals, dh):
    x, a, plan, ranks, x_rows = residuals
    dx, da = backward.shrink_grads(_rows_of(dh)[0], x, a, plan, ranks, x_rows)
    return dx, _of_factor(a, da), None, None, None


def _expand_forward(run, backward, slice_sizes, h, b, plan, base, ranks):
    out = expand(_searching(run), backward, slice_sizes, h, b, plan, base, ranks)
    return out, (h, b, plan, base is None, ranks)


@_qwix.unintercepted
def _expand_backward(run, backward, slice_sizes, residuals, dout):
    h, b, plan, no_base, ranks = residuals
    dh, db = backward.expand_grads(_rows_of(h), dout, b, plan, ranks, slice_sizes)
    dh = jnp.moveaxis(dh.reshape(len(dh), *h.shape[::2]), 1, 0)
    dh = xla.mask_rows(dh, plan, ranks).astype(h.dtype)
    return dh, _of_factor(b, db), None, None if no_base else dout, None


def _add_lora_forward(run, backward, slice_sizes, base, x, a, b, plan, ranks, x_rows):
    options = {"slice_sizes": slice_sizes, "ranks": ranks, "x_rows": x_rows}
    out, h = _searching(run)(base, x, a, b, plan, keep_h=True, **options)
    return out, (base is None, h, x, a, b, plan, ranks, x_rows)


@_qwix.unintercepted
def _add_lora_backward(run, backward, slice_sizes, residuals, dout):
    no_base, h, x, a, b, plan, ranks, x_rows = residuals
    dh, db = backward.expand_grads(h, dout, b, plan, ranks, slice_sizes)
    dx, da = backward.shrink_grads(dh, x, a, plan, ranks, x_rows)
    return None if no_base else dout, dx, _of_factor(a, da), _of_factor(b, db), None, None, None


def _searching(run):
    """Return `run` without `finite`, because a step of training may make any factor NaN."""
    return partial(run, finite=False) if "finite" in getattr(run, "keywords", ()) else run


def _of_factor(factor, gradient):
    """Return the gradient of a factor; None for int8, which has none. That of `backward` is then undefined."""
    return None if factor.dtype == jnp.int8 else gradient


def _rows_of(h):
    """Return [n, M, R] as a sum of one part, [1, M, n * R]."""
    return jnp.moveaxis(h, 0, 1).reshape(1, h.shape[1], -1)


shrink.defvjp(_shrink_forward, _shrink_backward)
expand.defvjp(_expand_forward, _expand_backward)
add_lora.defvjp(_add_lora_forward, _add_lora_backward)
