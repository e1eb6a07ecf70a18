"""Compute the product of a row-parallel layer together with its LoRA, so that one sum over the shards covers both."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jlora import _qwix
from jlora._compat import promote_dtype
from jlora.errors import LoRAError
from jlora.layers.einsum import EinsumAxes, EinsumRows
from jlora.layers.forward.delta import SlotFactors, add_rows, factor_specs, plan_specs, slot_factors, summed
from jlora.layers.forward.mesh import on_mesh, reached
from jlora.layers.forward.scope import Scope
from jlora.layers.site import Site
from jlora.layers.specs import LinearSpec, general_rows
from jlora.pallas.plan import Plan
from jlora.sharding.rules import AxisNames, partition, split_axis


class _Product(NamedTuple):
    """The output of a layer as `compute(x, kernel) + bias`, with the bias in the order of the output's axes.

    Attributes:
      x, kernel, bias: the operands, in the dtype of the product; bias is None without one.
      axes: how their axes flatten.
      compute: the product, which works on shards of both operands too.
      out_sharding: the sharding of the output that a call requests.
    """

    x: Array
    kernel: Array
    bias: Array | None
    axes: EinsumAxes
    compute: Callable[[Array, Array], Array]
    out_sharding: Any = None


def row_parallel_output(
    method: Callable[..., Any],
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Array | None:
    """Return the output of a layer with its LoRA, in one sum over the shards.

    None if K is not split, a finisher does not commute with the sum or with the layer's bias, the product of the
    layer's call `method` is not known, or the rows fit no layout of the batch.
    """
    sharding = site.spec.sharding
    if sharding is None or not sharding.ins or reached(site) or _qwix.is_intercepted(layer):
        return None  # qwix computes the products of its layers
    spec: LinearSpec = vars(layer)["jlora_spec"]
    # LoRA reads the input in the dtype of the call, and the product reads it in that of the layer.
    x = args[0] if args else kwargs.get("inputs")
    product = None if x is None else _product_of(method, layer, jnp.asarray(x), args, kwargs)
    if product is None or not product.x.size:
        return None
    follows = {"sum"} if product.bias is None else {"sum", "bias"}  # what is added to the result of each shard
    if not all(follows <= finisher.commutes for finisher in site.spec.finishers):
        return None
    x, kernel, axes = jnp.asarray(x), product.kernel, product.axes
    call = scope.rows(site, _flat(x, axes))
    if call is None:
        return None
    of_kernel: list[AxisNames] = [()] * kernel.ndim
    of_x: list[AxisNames] = [()] * x.ndim
    of_y: list[AxisNames] = [()] * len(axes.y)
    for i, axis in enumerate(axes.kernel_in):
        if axis == split_axis(axes.kernel_in, kernel.shape):
            of_kernel[axis] = of_x[axes.x[axes.lead + i]] = sharding.ins
    for i, axis in enumerate(axes.kernel_out):
        if axis == split_axis(axes.kernel_out, kernel.shape):
            of_kernel[axis] = of_y[axes.y[axes.lead + i]] = sharding.outs
    for i, names in enumerate(call.sharding.axes):
        of_x[axes.x[i]] = of_y[axes.y[i]] = names

    def local(x: Array, kernel: Array, slots: SlotFactors, adapters: Sequence[tuple[Plan, ...]]) -> Array:
        base = product.compute(x.astype(product.x.dtype), kernel).transpose(axes.y)
        rows = base.reshape(*base.shape[: axes.lead], -1)
        out = add_rows(site, spec, rows, _flat(x, axes), slots, adapters, complete=False).reshape(base.shape)
        return summed(out.transpose([axes.y.index(i) for i in range(out.ndim)]), sharding.ins)

    with jax.named_scope("lora"):
        specs = partition(*of_x), partition(*of_kernel), factor_specs(site.spec), plan_specs(call)
        slots = slot_factors(layer, site, scope.batch)
        out = on_mesh(sharding, local, specs, partition(*of_y))(x, kernel, slots, call.adapters)
    if product.out_sharding is not None:
        out = jax.sharding.reshard(out, product.out_sharding)
    if product.bias is not None:
        out = out + jnp.expand_dims(product.bias, axes.y[: axes.lead])
    return out


def _product_of(
    method: Callable[..., Any], layer: nnx.Module, x: Array, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Product | None:
    """Return the product of this call as its spec gives it, or as Flax's own call computes it; None if unknown."""
    held = vars(layer)
    spec: LinearSpec = held["jlora_spec"]
    if spec.product is not None:
        axes = _axes_of_spec(spec, x)
        bias = None if spec.bias is None else held.get(spec.bias)
        kernel = held[str(spec.param)][...]
        return None if axes is None else _Product(x, kernel, None if bias is None else bias[...], axes, spec.product)
    if method not in (nnx.Linear.__call__, nnx.LinearGeneral.__call__, nnx.Einsum.__call__):
        return None
    if held["promote_dtype"] is not promote_dtype:
        return None  # it may change the input, which LoRA must not see
    given = inspect.signature(method).bind(layer, *args, **kwargs).arguments
    operands = x, held["kernel"][...], None if held["bias"] is None else held["bias"][...]
    x, kernel, bias = promote_dtype(operands, dtype=held["dtype"])
    options = {"precision": held["precision"], "preferred_element_type": held["preferred_element_type"]}
    rows = spec.rows  # `rows` of a registered spec may do more than the product shows
    if method is nnx.Einsum.__call__:
        if held["einsum_op"] is not jnp.einsum or not isinstance(rows, EinsumRows):
            return None
        equation = given.get("einsum_str") or held["einsum_str"]
        try:
            axes = rows.axes(equation, x.ndim)
        except LoRAError:
            return None  # raised again where `rows` follows the call
        compute = partial(jnp.einsum, equation, **options)
    else:
        if held["dot_general"] not in (None, lax.dot_general) or held.get("dot_general_cls") is not None:
            return None
        if rows not in (None, general_rows):
            return None
        axis = held["axis"] if method is nnx.LinearGeneral.__call__ else (-1,)
        features = tuple(sorted(each % x.ndim for each in axis))
        lead = tuple(i for i in range(x.ndim) if i not in features)
        order, count = tuple(range(kernel.ndim)), len(features)
        y = tuple(range(len(lead) + kernel.ndim - count))
        axes = EinsumAxes((*lead, *features), y, len(lead), order[:count], order[count:])
        compute = partial(lax.dot_general, dimension_numbers=((features, order[:count]), ((), ())), **options)
    return _Product(x, kernel, bias, axes, compute, given.get("out_sharding"))


def _axes_of_spec(spec: LinearSpec, x: Array) -> EinsumAxes | None:
    """Return the axes of a product that a spec gives, or None if its rows do not show them."""
    if isinstance(spec.rows, EinsumRows):
        return spec.rows.axes(spec.rows.equation, x.ndim)
    if spec.rows is not None or len(spec.in_axes) != 1 or len(spec.out_axes) != 1:
        return None
    order = tuple(range(x.ndim))
    return EinsumAxes(order, order, x.ndim - 1, spec.in_axes, spec.out_axes)


def _flat(x: Array, axes: EinsumAxes) -> Array:
    """Return the input as [*lead, K]."""
    return x.transpose(axes.x).reshape(*(x.shape[i] for i in axes.x[: axes.lead]), -1)
