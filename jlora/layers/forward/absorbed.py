"""LoRA of products of each head with its part of a layer's kernel, in place of the layer: absorbed latent attention."""

import functools

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jlora.errors import LoRAError
from jlora.layers.forward.delta import SlotFactors, factor_specs, plan_specs, slot_factors
from jlora.layers.forward.mesh import on_mesh, shards_of, split_of
from jlora.layers.forward.scope import enter_site
from jlora.layers.site import Site
from jlora.layers.specs import LinearSpec
from jlora.pallas.plan import Plan
from jlora.pallas.xla import by_head, has_group
from jlora.sharding.rules import partition


def absorbed_delta(
    layer: nnx.Module,
    x: Float[Array, "*lead heads F"],
    y: Float[Array, "*lead heads G"],
    part: slice,
    *,
    transposed: bool = False,
) -> Float[Array, "*lead heads G"]:
    """Return `y` plus the LoRA of every row, for a product of each head with its part W[n] of a layer's kernel.

    Absorbed latent attention (MLA) does not call `kv_b_proj`, whose kernel is [K, heads * features]. It multiplies
    queries by W_UK[n]ᵀ and latent outputs by W_UV[n], two parts of the features of head n. Call this right after each
    of the two products (docs/models.md). It returns `y` if the layer is not wrapped.

    Args:
      layer: the linear layer whose kernel is multiplied, such as `self.kv_b_proj`. Its outputs are head after head.
      x: the input of the product: [..., K], or [..., features of `part`] if it is transposed.
      y: the output of the product: [..., features of `part`], or [..., K] if it is transposed.
      part: the features of each head that W[n] holds.
      transposed: False for x @ W[n], True for x @ W[n]ᵀ.

    Raises:
      LoRAError: called outside `jlora.use`, the sizes of the arrays differ from the layer's, or the layer has outputs
        of several checkpoint modules, indices, a variant such as DoRA, or inputs or ranks that a mesh splits.
    """
    site: Site | None = vars(layer).get("jlora_site")
    scope = None if site is None else enter_site(site, layer)
    if site is None or scope is None:
        return y
    _check(site, vars(layer)["jlora_spec"], x, y, part, transposed)
    rows = scope.rows(site, y.reshape(*y.shape[:-2], -1))
    if rows is None:
        return y

    def local(y: Array, x: Array, own: SlotFactors, adapters: tuple[tuple[Plan, ...], ...]) -> Array:
        flat = x.reshape(-1, *x.shape[-2:])
        flat = flat if own.a.dtype == jnp.int8 else flat.astype(own.a.dtype)
        product = functools.partial(by_head, flat, own.a, own.b, ranks=own.ranks, part=part, transposed=transposed)
        deltas = [product(plan) for plan, *_ in adapters]
        total = (y.astype(jnp.float32) + sum(deltas[1:], deltas[0]).reshape(y.shape)).astype(y.dtype)
        served = functools.reduce(jnp.logical_or, [has_group(plan) for plan, *_ in adapters])
        return jnp.where(served.reshape(*y.shape[:-2], 1, 1), total, y)  # -0.0 + 0.0 is +0.0

    sharding = split_of(site.spec)
    of_rows = partition(*rows.sharding.axes, sharding.outs, ())
    specs = of_rows, of_rows, factor_specs(site.spec), plan_specs(rows)
    own = slot_factors(layer, site, scope.batch)
    return on_mesh(sharding, local, specs, of_rows)(y, x, own, rows.adapters)


def _check(site: Site, spec: LinearSpec, x: Array, y: Array, part: slice, transposed: bool) -> None:
    """Raise LoRAError unless the layer and the arrays are those of such a product."""
    slots, sharding, heads = site.spec, split_of(site.spec), y.shape[-2]
    if slots.slices > 1 or slots.finishers or spec.columns_in is not None or spec.columns_out is not None:
        raise LoRAError(
            f"{site.path}: absorbed_delta takes a layer with all outputs of one checkpoint module in its order, and "
            "without variants such as DoRA; leave it out with LoRAConfig.exclude_modules"
        )
    if sharding.ins or sharding.a[2] or sharding.b[2] != sharding.outs:
        raise LoRAError(f"{site.path}: absorbed_delta takes a kernel that a mesh splits by heads alone")
    of_head, left = divmod(slots.out_features // shards_of(site)[1], heads)
    sizes = (slots.in_features, len(range(of_head)[part]))
    sizes = sizes[::-1] if transposed else sizes
    if left or x.shape[:-1] != y.shape[:-1] or (x.shape[-1], y.shape[-1]) != sizes:
        raise LoRAError(
            f"{site.path}: absorbed_delta takes {list(x.shape)} to {list(y.shape)} by {part} of {heads} heads of a "
            f"layer with {slots.in_features} features in and {slots.out_features} out; expected [..., heads, "
            f"{sizes[0]}] to [..., heads, {sizes[1]}]"
        )
