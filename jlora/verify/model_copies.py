"""Copies of a wrapped model that share its arrays, either wrapped or unwrapped with merged factors."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlora.layers.base_kernel import held_by
from jlora.layers.site import Site, set_attribute
from jlora.layers.specs import LinearSpec
from jlora.layers.wrap.discover import walk
from jlora.layers.wrap.wrapped import WrappedModel, set_class, spec_of, take_off
from jlora.sharding.put import put


def wrapped_copy(wrapped: WrappedModel) -> tuple[nnx.Module, dict[Site, nnx.Module]]:
    """Return a copy of the wrapped model and its layers. Its variables are new but hold the same arrays."""
    copy = nnx.clone(wrapped.model)
    modules = dict(walk(copy))
    return copy, {site: modules[wrapped.paths[site]] for site in wrapped.modules}


def unwrapped_copy(wrapped: WrappedModel) -> tuple[nnx.Module, dict[Site, nnx.Module]]:
    """Return a copy of the model without LoRA and its layers, each with the class it had before wrapping."""
    copy, layers = wrapped_copy(wrapped)
    for site, layer in layers.items():
        take_off(layer, site, wrapped.classes[id(wrapped.modules[site])])
    return copy, layers


def merge(layer: nnx.Module, wrapped: WrappedModel, site: Site, a: np.ndarray, b: np.ndarray) -> None:
    """Add a [(layers,) (E,) n, r, K] and b [.., r, N] to the kernel of a layer of an unwrapped copy, in float32.

    A table that serves both lookup and logits keeps its values. Each of the two methods then reads its own merged copy
    of the table.
    """
    spec = spec_of(wrapped.modules[site], site)
    starts = np.cumsum((0, *site.spec.out_sizes))
    slices = [np.swapaxes(a[..., i, :, :], -1, -2) @ b[..., starts[i] : starts[i + 1]] for i in range(site.spec.slices)]
    delta = np.concatenate(slices, axis=-1)  # [(layers,) k, n]
    if isinstance(spec, LinearSpec):
        kernel: Any = held_by(layer, spec)
        delta = _unflatten(spec, _spread(spec, delta), kernel.get_value().shape)
        kernel.set_value(_add(kernel.get_value(), delta))
        return
    if site.kind == "embedding":
        name, attribute, delta = spec.lookup, "jlora_lookup_table", _spread(spec.table, delta)
    else:
        name, attribute = spec.attend, "jlora_attend_table"
        delta = np.swapaxes(_spread(spec.head, delta), -1, -2)
    assert name is not None
    set_attribute(layer, attribute, nnx.Param(_add(vars(layer)[spec.param].get_value(), delta)))
    set_class(layer, _with_table(type(layer), name, spec.param, attribute))


def cast_to_float32(model: nnx.Module) -> None:
    """Cast a copy's variables of less than 32 bits, and the dtypes that its modules compute in, to float32."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            node.set_value(jax.tree.map(in_float32, node.get_value()))
    for _, module in (("", model), *walk(model)):
        for name, value in vars(module).items():
            if name in ("dtype", "param_dtype") and _is_short(value):
                vars(module)[name] = jnp.float32


def in_float32(value: Any) -> Any:
    """Return `value` in float32 if it is a floating array of less than 32 bits, else unchanged."""
    return value.astype(jnp.float32) if hasattr(value, "dtype") and _is_short(value.dtype) else value


def _is_short(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    except TypeError:
        return False


def _spread(spec: LinearSpec, delta: np.ndarray) -> np.ndarray:
    """Expand [..., k, n] of the checkpoint to [..., K, N] of the layer, with zeros for padding."""
    for axis, index in ((-2, spec.columns_in), (-1, spec.columns_out)):
        if index is not None:
            full = np.moveaxis(delta, axis, 0)[np.maximum(index.source, 0)]
            full[index.source < 0] = 0
            delta = np.moveaxis(full, 0, axis)
    return delta


def _unflatten(spec: LinearSpec, delta: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reshape and transpose [(layers,) K, N] to the kernel's own axes."""
    axes = (*spec.in_axes, *spec.out_axes)
    lead = len(shape) - len(axes)
    sizes = [shape[lead + axis] for axis in axes]
    order = [*range(lead), *(lead + axes.index(axis) for axis in range(len(axes)))]
    return delta.reshape(*shape[:lead], *sizes).transpose(order)


def _add(base: jax.Array, delta: np.ndarray) -> jax.Array:
    (placed,) = put([delta.astype(np.float32)], [base.sharding])
    return (base.astype(jnp.float32) + placed).astype(base.dtype)


@functools.cache
def _with_table(cls: type, name: str, param: str, table: str) -> type:
    """Return a subclass whose method `name` reads the variable `table` in place of `param`."""

    @functools.wraps(getattr(cls, name))
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        twin = cast("nnx.Module", object.__new__(cls))
        vars(twin).update(vars(self))
        vars(twin)[param] = vars(self)[table]
        return getattr(cls, name)(twin, *args, **kwargs)

    body = {"__module__": cls.__module__, name: method}
    return type(cls)(f"{cls.__name__}With{name}", (cls,), body, pytree=getattr(cls, "_pytree__is_pytree", True))
