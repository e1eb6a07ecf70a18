"""Flax's own layers as seams: where a base product is split by its input features, it is made with its LoRA in one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jlora._compat import promote_dtype
from jlora.errors import LoRAError
from jlora.layers.einsum import EinsumAxes, EinsumRows
from jlora.layers.observe import NO_LAYOUT, note_served, note_unserved
from jlora.layers.sharded import Held, joined, reached
from jlora.layers.site import Site
from jlora.layers.specs import LinearSpec, general_rows
from jlora.sharding.rules import Names, partition, split_axis


def joins(cls: type[nnx.Module], layer: nnx.Module, site: Site) -> bool:
    """Whether the product of a layer can be replaced: it is Flax's own, JAX's own computes it, and K is split."""
    sharding, own = site.spec.sharding, vars(layer)
    if sharding is None or not sharding.ins or reached(site) or own.get("promote_dtype") is not promote_dtype:
        return False
    rows = own["jlora_spec"].rows  # a user's own may say what the product does not show
    if cls.__call__ in (nnx.Linear.__call__, nnx.LinearGeneral.__call__):
        plain = own.get("dot_general") in (None, lax.dot_general) and own.get("dot_general_cls") is None
        return plain and rows in (None, general_rows)
    return cls.__call__ is nnx.Einsum.__call__ and own.get("einsum_op") is jnp.einsum and isinstance(rows, EinsumRows)


def join(
    cls: type[nnx.Module],
    layer: nnx.Module,
    site: Site,
    scope: Any,
    slots: Callable[[], Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The output of `layer`, whose product is made together with its LoRA.

    `slots` gives A, B and ranks. Rows that fit no layout of the batch get the base output.
    """
    spec: LinearSpec = vars(layer)["jlora_spec"]
    # LoRA reads the layer's input in its own dtype, and the product in that of the layer.
    given = jnp.asarray(args[0] if args else kwargs["inputs"])
    if not given.size:
        return cls.__call__(layer, *args, **kwargs)

    def serve(cast: Array, kernel: Array, places: EinsumAxes, product: Callable[[Array, Array], Array]) -> Array | None:
        x, dtype = given, cast.dtype
        lead_shape = tuple(x.shape[i] for i in places.x[: places.lead])
        flat = x.transpose(places.x).reshape(*lead_shape, -1)
        plan = scope.plan(site, flat)
        if plan is None:
            note_unserved(site, NO_LAYOUT)
            return None
        note_served(site)
        lead = scope.lead(site, flat)
        sharding = site.spec.sharding
        assert sharding is not None
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

        def rows(x: Array, kernel: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
            y = product(x.astype(dtype), kernel)
            moved = y.transpose(places.y)
            shape = moved.shape[: places.lead]
            back = tuple(places.y.index(i) for i in range(y.ndim))

            def restore(out: Array) -> Array:
                return out.reshape(moved.shape).transpose(back)

            return x.transpose(places.x).reshape(*shape, -1), moved.reshape(*shape, -1), restore

        specs = partition(*of_x), partition(*of_kernel), partition(*of_y)
        with jax.named_scope("lora"):
            return joined(site, rows, spec, specs, lead, x, kernel, Held(plan, *slots()))

    # A copy that shares the parameters: another thread may be calling the layer.
    twin = object.__new__(type(layer))
    vars(twin).update(vars(layer))
    if cls.__call__ is nnx.Einsum.__call__:
        rows = spec.rows
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
