"""Compute the base product of Flax's own layers, and of layers with `LinearSpec.product`, together with its LoRA.

If the kernel is split by input features, both share one reduction. On a GPU, jlora's product of few rows is faster than
XLA's.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jlora import _qwix
from jlora._compat import promote_dtype
from jlora.errors import LoRAError
from jlora.layers.einsum import EinsumAxes, EinsumRows
from jlora.layers.forward.delta import (
    SlotFactors,
    adapter_specs,
    add_rows,
    check_stamps,
    factor_specs,
    slot_factors,
    summed,
)
from jlora.layers.forward.mesh import on_mesh, reached, split_of
from jlora.layers.forward.scope import AdapterRows, Scope
from jlora.layers.site import Site
from jlora.layers.specs import LinearSpec, general_rows
from jlora.pallas.api import has_product
from jlora.pallas.api import product as few_rows_product
from jlora.sharding.rules import Names, partition, split_axis

Product: TypeAlias = Callable[..., Array]  # (x, kernel, out_sharding=) -> y of the layer
# (x, kernel, axes, the layer's own product, out_sharding) -> y with its LoRA
Compute: TypeAlias = Callable[[Array, Array, EinsumAxes, Product, Any], Array]


def can_fuse(
    cls: type[nnx.Module], layer: nnx.Module, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return True if this call computes the layer's product together with its LoRA.

    Only Flax's own call, computed by JAX's own product, can be replaced, and a call that its spec gives as a product.
    """
    own, sharding = vars(layer), site.spec.sharding
    if _qwix.is_intercepted(layer):
        return False  # qwix computes the layer's product
    if sharding is not None and (not sharding.ins or reached(site)):
        return False
    if site.spec.dora and sharding is not None and sharding.b[2] != sharding.outs:
        return False  # a shard has the magnitudes of a part of the columns of its partial sum
    spec: LinearSpec = own["jlora_spec"]
    if spec.product is not None:
        x = _input(args, kwargs)
        return sharding is not None and x is not None and _product_axes(spec, x) is not None
    if own.get("promote_dtype") is not promote_dtype:
        return False
    rows = spec.rows  # `rows` of a registered spec may do more than the product shows
    if cls.__call__ in (nnx.Linear.__call__, nnx.LinearGeneral.__call__):
        plain = own.get("dot_general") in (None, lax.dot_general) and own.get("dot_general_cls") is None
        plain &= rows in (None, general_rows)
    else:
        plain = cls.__call__ is nnx.Einsum.__call__ and own.get("einsum_op") is jnp.einsum
        plain &= isinstance(rows, EinsumRows)
    return plain and (sharding is not None or _has_kernel(layer, site, args, kwargs))


def _has_kernel(layer: nnx.Module, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if jlora's kernel may compute the product of this call, and is faster."""
    own, spec, x = vars(layer), cast("LinearSpec", vars(layer)["jlora_spec"]), _input(args, kwargs)
    if site.bitwise_base or site.batch_invariant or site.spec.stack or not isinstance(x, Array):
        return False  # a stack's kernel is a slice, which only XLA's own products read in place
    if own.get("precision") is not None or own.get("preferred_element_type") is not None:
        return False
    if spec.columns_in is not None or spec.columns_out is not None:
        return False
    kernel: Array = own["kernel"][...]
    bias = own.get("bias")
    if bias is not None and bias[...].dtype != kernel.dtype:
        return False  # Flax promotes all to one dtype
    flat = (*spec.in_axes, *spec.out_axes) == tuple(range(kernel.ndim))
    if not flat or own.get("dtype") not in (None, kernel.dtype) or not jax.sharding.get_abstract_mesh().empty:
        return False
    rows = x.size // spec.in_features
    flat_x = jax.ShapeDtypeStruct((rows, spec.in_features), x.dtype)
    flat_kernel = jax.ShapeDtypeStruct((spec.in_features, spec.out_features), kernel.dtype)
    return has_product(flat_x, flat_kernel, backend=site.backend)


def fused_base(
    cls: type[nnx.Module],
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return the output of `layer`, with its product and LoRA computed together.

    On one device, jlora's kernel computes the product. If K is split, product and LoRA are summed in one reduction.
    Rows that fit no layout of the batch get the base output.
    """
    # LoRA reads the layer's input in the input's dtype, and the product reads it in the layer's dtype.
    x = jnp.asarray(_input(args, kwargs))
    if not x.size:
        return cls.__call__(layer, *args, **kwargs)
    spec: LinearSpec = vars(layer)["jlora_spec"]
    if spec.product is not None:
        return check_stamps(layer, site, scope.batch, _given_product(layer, site, scope, spec, spec.product, x))

    def compute(cast_x: Array, kernel: Array, axes: EinsumAxes, product: Product, out_sharding: Any) -> Array:
        out = _with_lora(layer, site, scope, x, cast_x.dtype, kernel, axes, product)
        if out is None:
            return product(cast_x, kernel, out_sharding=out_sharding)
        return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)

    # Use a copy that shares the parameters, because another thread may be calling the layer.
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    if cls.__call__ is nnx.Einsum.__call__:
        rows = vars(layer)["jlora_spec"].rows
        assert isinstance(rows, EinsumRows)
        vars(twin)["einsum_op"] = functools.partial(_einsum, compute, site, rows)
    else:
        vars(twin)["dot_general"] = functools.partial(_dot_general, compute)
    return check_stamps(layer, site, scope.batch, cls.__call__(twin, *args, **kwargs))


def _given_product(layer: nnx.Module, site: Site, scope: Scope, spec: LinearSpec, product: Product, x: Array) -> Array:
    """Return the output of a layer that computes `product(x, kernel) + bias`, with its LoRA."""
    axes = _product_axes(spec, x)
    assert axes is not None  # `can_fuse`
    assert spec.param is not None  # `LinearSpec`
    kernel: Array = vars(layer)[spec.param][...]
    out = _with_lora(layer, site, scope, x, x.dtype, kernel, axes, product)
    out = product(x, kernel) if out is None else out
    bias: Any = None if spec.bias is None else vars(layer).get(spec.bias)
    return out if bias is None else out + jnp.expand_dims(bias[...], tuple(range(axes.lead)))


def _product_axes(spec: LinearSpec, x: Any) -> EinsumAxes | None:
    """Return the axes of a product that a spec gives, or None if its rows do not show them."""
    if isinstance(spec.rows, EinsumRows):
        return spec.rows.axes(spec.rows.equation, x.ndim)
    if spec.rows is not None or len(spec.in_axes) != 1 or len(spec.out_axes) != 1:
        return None
    order = tuple(range(x.ndim))
    return EinsumAxes(order, order, x.ndim - 1, spec.in_axes, spec.out_axes)


def _with_lora(
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    x: Array,
    dtype: Any,
    kernel: Array,
    axes: EinsumAxes,
    product: Product,
) -> Array | None:
    """Return the product of `x`, cast to `dtype`, and the kernel, plus its LoRA; None if the rows fit no layout."""
    spec: LinearSpec = vars(layer)["jlora_spec"]
    sharding, flat = split_of(site.spec), _flat(x, axes)
    call = scope.rows(site, flat)
    if call is None:
        return None
    of_kernel: list[Names] = [()] * kernel.ndim
    of_x: list[Names] = [()] * x.ndim
    of_y: list[Names] = [()] * (axes.lead + len(axes.kernel_out))
    for i, axis in enumerate(axes.kernel_in):
        if axis == split_axis(axes.kernel_in, kernel.shape):
            of_kernel[axis] = of_x[axes.x[axes.lead + i]] = sharding.ins
    for i, axis in enumerate(axes.kernel_out):
        if axis == split_axis(axes.kernel_out, kernel.shape):
            of_kernel[axis] = of_y[axes.y[axes.lead + i]] = sharding.outs
    for i, names in enumerate(call.sharding.axes):
        of_x[axes.x[i]] = of_y[axes.y[i]] = names

    def local(x: Array, kernel: Array, own: SlotFactors, adapters: Sequence[AdapterRows]) -> Array:
        rows = _flat(x, axes)
        *shape, k = rows.shape
        if sharding.ins:
            base = product(x.astype(dtype), kernel).transpose(axes.y)
        else:
            base = few_rows_product(rows.reshape(-1, k), kernel.reshape(k, -1), backend=site.backend)
        out = add_rows(site, spec, base.reshape(*shape, -1), rows, own, adapters, complete=not sharding.ins)
        out = out.reshape(*shape, *(kernel.shape[i] for i in axes.kernel_out))
        return summed(out.transpose([axes.y.index(i) for i in range(out.ndim)]), sharding.ins)

    specs = partition(*of_x), partition(*of_kernel), factor_specs(site.spec), adapter_specs(site, call)
    with jax.named_scope("lora"):
        mapped = on_mesh(sharding, local, specs, partition(*of_y))
        return mapped(x, kernel, slot_factors(layer, site), call.adapters)


def _flat(x: Array, axes: EinsumAxes) -> Array:
    """Return the input as [*lead, K]."""
    return x.transpose(axes.x).reshape(*(x.shape[i] for i in axes.x[: axes.lead]), -1)


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("inputs")


def _dot_general(
    compute: Compute, x: Array, kernel: Array, dims: Any, *, out_sharding: Any = None, **options: Any
) -> Array:
    """Replace `lax.dot_general` in Flax's own call of a linear layer."""
    (x_in, kernel_in), _ = dims
    lead = [i for i in range(x.ndim) if i not in x_in]
    kernel_out = tuple(i for i in range(kernel.ndim) if i not in kernel_in)
    count = len(lead)
    axes = EinsumAxes((*lead, *x_in), tuple(range(count + len(kernel_out))), count, tuple(kernel_in), kernel_out)

    def product(x: Array, kernel: Array, **where: Any) -> Array:
        return lax.dot_general(x, kernel, dims, **options, **where)

    return compute(x, kernel, axes, product, out_sharding)


def _einsum(
    compute: Compute,
    site: Site,
    rows: EinsumRows,
    equation: str,
    x: Array,
    kernel: Array,
    *,
    out_sharding: Any = None,
    **options: Any,
) -> Array:
    """Replace `jnp.einsum` in Flax's own call of an einsum layer."""
    try:
        axes = rows.axes(equation, x.ndim)
    except LoRAError as error:
        raise LoRAError(f"{site.path}: {error}") from error

    def product(x: Array, kernel: Array, **where: Any) -> Array:
        return jnp.einsum(equation, x, kernel, **options, **where)

    return compute(x, kernel, axes, product, out_sharding)
