"""Flax's own layers as seams, where a base product is made together with its LoRA.

Where it is split by its input features, both share one reduction; where a device's tuned table says so, their kernels.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jlora._compat import promote_dtype
from jlora.errors import LoRAError
from jlora.layers.einsum import EinsumAxes, EinsumRows
from jlora.layers.forward.delta import SlotFactors, add_rows, factor_specs, factors_of, lead_of_rows, summed
from jlora.layers.forward.mesh import on_mesh, reached, split_of
from jlora.layers.forward.scope import Scope
from jlora.layers.site import Site
from jlora.layers.specs import LinearSpec, general_rows
from jlora.pallas.api import linear_lora, product_tiles
from jlora.sharding.rules import Names, partition, split_axis


def joins(
    cls: type[nnx.Module], layer: nnx.Module, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the product of a layer is made together with its LoRA in this call.

    The product can be replaced where it is Flax's own, and JAX's own computes it.
    """
    own, sharding = vars(layer), site.spec.sharding
    if sharding is not None and (not sharding.ins or reached(site)):
        return False
    if own.get("promote_dtype") is not promote_dtype:
        return False
    rows = own["jlora_spec"].rows  # a user's own may say what the product does not show
    if cls.__call__ in (nnx.Linear.__call__, nnx.LinearGeneral.__call__):
        plain = own.get("dot_general") in (None, lax.dot_general) and own.get("dot_general_cls") is None
        plain &= rows in (None, general_rows)
    else:
        plain = cls.__call__ is nnx.Einsum.__call__ and own.get("einsum_op") is jnp.einsum
        plain &= isinstance(rows, EinsumRows)
    return plain and (sharding is not None or _fuses(layer, site, args, kwargs))


def _fuses(layer: nnx.Module, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether kernels that make product and LoRA together are there for this call, and may be used."""
    own, spec, x = vars(layer), cast("LinearSpec", vars(layer)["jlora_spec"]), _input(args, kwargs)
    if site.bitwise_base or site.spec.stack or not isinstance(x, Array):
        return False  # (of a stack the kernel is a slice, which only XLA's own products read where it lies)
    if own.get("precision") is not None or own.get("preferred_element_type") is not None:
        return False
    if spec.columns_in is not None or spec.columns_out is not None:
        return False
    kernel: Array = own["kernel"][...]
    bias = own.get("bias")
    if bias is not None and bias[...].dtype != kernel.dtype:
        return False  # Flax brings all to one dtype
    flat = (*spec.in_axes, *spec.out_axes) == tuple(range(kernel.ndim))
    if not flat or own.get("dtype") not in (None, kernel.dtype) or not jax.sharding.get_abstract_mesh().empty:
        return False
    rows = x.size // spec.in_features
    two = (rows, spec.in_features), (spec.in_features, spec.out_features)
    a, b = (jax.ShapeDtypeStruct(shape, site.spec.dtype) for shape in site.spec.shapes[:2])
    like = jax.ShapeDtypeStruct(two[0], x.dtype), jax.ShapeDtypeStruct(two[1], kernel.dtype), a, b
    return product_tiles(*like, slice_sizes=site.spec.out_sizes, backend=site.backend) is not None


def joined(
    cls: type[nnx.Module],
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """The output of `layer`, whose product and LoRA are made together: by the same kernels on one device, in the same
    sum where K is split. Rows that fit no layout of the batch get the base output."""
    spec: LinearSpec = vars(layer)["jlora_spec"]
    sharding = split_of(site.spec)
    # LoRA reads the layer's input in its own dtype, and the product in that of the layer.
    given = jnp.asarray(_input(args, kwargs))
    if not given.size:
        return cls.__call__(layer, *args, **kwargs)

    def serve(cast_x: Array, kernel: Array, places: EinsumAxes, product: Callable[..., Array]) -> Array | None:
        x, dtype = given, cast_x.dtype
        flat = _flat(x, places)
        plan = scope.plan(site, flat)
        if plan is None:
            return None
        lead = lead_of_rows(scope, site, flat)
        of_kernel: list[Names] = [()] * kernel.ndim
        of_x: list[Names] = [()] * x.ndim
        of_y: list[Names] = [()] * (places.lead + len(places.kernel_out))
        for i, axis in enumerate(places.kernel_in):
            if axis == split_axis(places.kernel_in, kernel.shape):
                of_kernel[axis] = of_x[places.x[places.lead + i]] = sharding.ins
        for i, axis in enumerate(places.kernel_out):
            if axis == split_axis(places.kernel_out, kernel.shape):
                of_kernel[axis] = of_y[places.y[places.lead + i]] = sharding.outs
        for i, names in enumerate(lead.axes):
            of_x[places.x[i]] = of_y[places.y[i]] = names

        def local(x: Array, kernel: Array, held: SlotFactors) -> Array:
            rows = _flat(x, places)
            *shape, k = rows.shape
            if not sharding.ins:
                out = linear_lora(
                    rows.reshape(-1, k), kernel.reshape(k, -1), held.a, held.b, held.plan,
                    slice_sizes=site.spec.out_sizes, ranks=held.ranks, backend=site.backend,
                )  # fmt: skip
            else:
                base = product(x.astype(dtype), kernel).transpose(places.y).reshape(*shape, -1)
                out = add_rows(site, spec, base, rows, held, complete=False)
            out = out.reshape(*shape, *(kernel.shape[i] for i in places.kernel_out))
            return summed(out.transpose([places.y.index(i) for i in range(out.ndim)]), sharding.ins)

        specs = partition(*of_x), partition(*of_kernel), factor_specs(site.spec, lead)
        with jax.named_scope("lora"):
            made = on_mesh(sharding, local, specs, partition(*of_y))
            return made(x, kernel, factors_of(layer, site, plan))

    return _through(cls, layer, site, serve, *args, **kwargs)


def _flat(x: Array, places: EinsumAxes) -> Array:
    """The input as [*lead, K]."""
    return x.transpose(places.x).reshape(*(x.shape[i] for i in places.x[: places.lead]), -1)


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("inputs")


def _through(
    cls: type[nnx.Module], layer: nnx.Module, site: Site, serve: Callable[..., Array | None], *args: Any, **kwargs: Any
) -> Any:
    """What `layer` returns where `serve` makes its product, and its LoRA with it."""
    # A copy that shares the parameters: another thread may be calling the layer.
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    if cls.__call__ is nnx.Einsum.__call__:
        rows = vars(layer)["jlora_spec"].rows
        assert isinstance(rows, EinsumRows)
        vars(twin)["einsum_op"] = functools.partial(_einsum, serve, site, rows)
    else:
        vars(twin)["dot_general"] = functools.partial(_dot_general, serve)
    return cls.__call__(twin, *args, **kwargs)


def _dot_general(
    serve: Callable[..., Array | None], x: Array, kernel: Array, dims: Any, *, out_sharding: Any = None, **options: Any
) -> Array:
    (x_in, kernel_in), _ = dims
    lead = [i for i in range(x.ndim) if i not in x_in]
    kernel_out = tuple(i for i in range(kernel.ndim) if i not in kernel_in)
    count = len(lead)
    places = EinsumAxes((*lead, *x_in), tuple(range(count + len(kernel_out))), count, tuple(kernel_in), kernel_out)

    def product(x: Array, kernel: Array, **where: Any) -> Array:
        return lax.dot_general(x, kernel, dims, **options, **where)

    return _made(serve, x, kernel, places, product, out_sharding)


def _einsum(
    serve: Callable[..., Array | None],
    site: Site,
    rows: EinsumRows,
    equation: str,
    x: Array,
    kernel: Array,
    *,
    out_sharding: Any = None,
    **options: Any,
) -> Array:
    try:
        places = rows.axes(equation, x.ndim)
    except LoRAError as error:
        raise LoRAError(f"{site.path}: {error}") from error

    def product(x: Array, kernel: Array, **where: Any) -> Array:
        return jnp.einsum(equation, x, kernel, **options, **where)

    return _made(serve, x, kernel, places, product, out_sharding)


def _made(
    serve: Callable[..., Array | None],
    x: Array,
    kernel: Array,
    places: EinsumAxes,
    product: Callable[..., Array],
    out_sharding: Any,
) -> Array:
    """The product with its LoRA, or alone where rows fit no layout; where the layer's caller asks for it."""
    out = serve(x, kernel, places, product)
    if out is None:
        return product(x, kernel, out_sharding=out_sharding)
    return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)
