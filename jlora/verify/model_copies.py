"""Copies of a wrapped model that share its arrays, either wrapped or unwrapped with merged factors.

Factors are merged into a kernel of floats, and then the references of the finishers (`Finisher.reference`). To a layer
that stores its weight in another form they are added in float32, as the delta of all of its rows. If such a layer can
be dequantized, all copies compute its product in floats.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from jlora.layers.base_kernel import held_by, kernel_of
from jlora.layers.einsum import EinsumRows, einsum_axes
from jlora.layers.site import Site, SlotSpec, set_attribute
from jlora.layers.specs import Index, LinearSpec
from jlora.layers.wrap.apply import lora_class
from jlora.layers.wrap.discover import walk
from jlora.layers.wrap.wrapped import WrappedModel, set_class, spec_of, take_off
from jlora.sharding.put import put, whole
from jlora.verify.quantized import Products, add_factors, compare_product, float_product, map_columns, with_product


def wrapped_copy(
    wrapped: WrappedModel, quantized: Iterable[Site], products: Products | None = None
) -> tuple[nnx.Module, dict[Site, nnx.Module]]:
    """Return a copy of the wrapped model and its layers. Its variables are new but hold the same arrays.

    Args:
      wrapped: The wrapped model.
      quantized: The sites whose layers compute the product of their dequantized weight.
      products: If given, these layers compute their own product, and add it to `products`.
    """
    copy, layers = _copied(wrapped)
    for site in quantized:
        set_class(layers[site], lora_class(with_product(_class_of(wrapped, site)), (("linear", "__call__"),)))
        if products is None:
            float_product(layers[site], site, _linear(wrapped, site))
        else:
            compare_product(layers[site], site, _linear(wrapped, site), products)
    return copy, layers


def unwrapped_copy(
    wrapped: WrappedModel, inexact: Iterable[Site], dtype: Any = None
) -> tuple[nnx.Module, dict[Site, nnx.Module]]:
    """Return a copy of the model without LoRA and its layers, each with the class it had before wrapping.

    The layers of the sites in `inexact` compute the product of their dequantized weight if they have one. `dtype` is
    that of their results, None for their own.
    """
    copy, layers = _copied(wrapped)
    for site, layer in layers.items():
        take_off(layer, site, _class_of(wrapped, site))
    for site in inexact:
        set_class(layers[site], with_product(_class_of(wrapped, site)))
        float_product(layers[site], site, _linear(wrapped, site), dtype)
    return copy, layers


def _copied(wrapped: WrappedModel) -> tuple[nnx.Module, dict[Site, nnx.Module]]:
    copy = nnx.clone(wrapped.model)
    modules = dict(walk(copy))
    return copy, {site: modules[wrapped.paths[site]] for site in wrapped.modules}


def _class_of(wrapped: WrappedModel, site: Site) -> type:
    return wrapped.classes[id(wrapped.modules[site])]


def _linear(wrapped: WrappedModel, site: Site) -> LinearSpec:
    return cast("LinearSpec", spec_of(wrapped.modules[site], site))


def is_exact(wrapped: WrappedModel, site: Site) -> bool:
    """Return True if factors can be merged into the kernel or table of a layer."""
    layer = wrapped.modules[site]
    kernel = kernel_of(layer, spec_of(layer, site))
    return kernel is not None and kernel.exact


def merge(
    layer: nnx.Module,
    wrapped: WrappedModel,
    site: Site,
    a: Float[np.ndarray, "*entries n r K"],
    b: Float[np.ndarray, "*entries r N"],
    extras: Sequence[Float[np.ndarray, "*layers N"]],
) -> None:
    """Merge the values of one slot into a layer of an unwrapped copy, in float32.

    A table that serves both lookup and logits keeps its values. Each of the two methods then reads its own merged copy
    of the table.
    """
    spec = spec_of(wrapped.modules[site], site)
    linear = spec if isinstance(spec, LinearSpec) else spec.table if site.kind == "embedding" else spec.head
    starts = np.cumsum((0, *site.spec.out_sizes))
    if isinstance(spec, LinearSpec) and not is_exact(wrapped, site):
        own = [_columns(b, int(start), int(stop)) for start, stop in itertools.pairwise(starts)]
        own_a = _spread(spec.columns_in, np.concatenate([a[..., i, :, :] for i in range(len(own))], axis=-2))
        own_b = _spread(spec.columns_out, np.concatenate(own, axis=-2))
        add_factors(layer, _replicated(wrapped, site, own_a, own_b))
        if site.spec.finishers:
            bias = _bias(layer, site, spec)
            scale, finished = _finished(site.spec, spec, np.ones_like(bias)[..., None, :], bias, extras)
            map_columns(layer, _replicated(wrapped, site, scale[..., 0, :], finished - scale[..., 0, :] * bias))
        return
    slices = [np.swapaxes(a[..., i, :, :], -1, -2) @ b[..., starts[i] : starts[i + 1]] for i in range(site.spec.slices)]
    delta = _spread_both(linear, np.concatenate(slices, axis=-1))  # [(layers,) K, N]
    held: Any = held_by(layer, spec)
    offset: np.ndarray | None = None  # of the bias
    if site.spec.finishers:
        base, bias = _flatten(linear, whole(held.get_value()).astype(np.float64)), _bias(layer, site, linear)
        finished, finished_bias = _finished(site.spec, linear, base + delta, bias, extras)
        delta, offset = finished - base, finished_bias - bias
    changed = _add(held.get_value(), _unflatten(linear, delta, held.get_value().shape))
    if isinstance(spec, LinearSpec):
        vars(layer)[spec.param or ""] = held.copy(changed)  # a new variable, since another layer may share this one
        if offset is not None and offset.any():
            float_product(layer, site, spec)
            map_columns(layer, _replicated(wrapped, site, np.ones_like(offset), offset))
            set_class(layer, with_product(type(layer)))
        return
    name = spec.lookup if site.kind == "embedding" else spec.attend
    assert name is not None
    table = "jlora_lookup_table" if site.kind == "embedding" else "jlora_attend_table"
    set_attribute(layer, table, nnx.Param(changed))
    if offset is not None:
        (offset_there,) = _replicated(wrapped, site, offset)
        set_attribute(layer, f"{table}_offset", nnx.Param(offset_there))
    set_class(layer, _with_table(type(layer), name, spec.param, table))


def _replicated(wrapped: WrappedModel, site: Site, *arrays: np.ndarray) -> list[jax.Array]:
    """Return arrays in float32 on the devices of a site's slots."""
    slots: jax.Array = vars(wrapped.modules[site])[site.attributes[0]].get_value()
    where = slots.sharding if site.spec.sharding is None else site.spec.sharding.whole
    return put([array.astype(np.float32) for array in arrays], [where] * len(arrays))


def _finished(
    slot_spec: SlotSpec,
    spec: LinearSpec,
    weight: Float[np.ndarray, "*layers K N"],
    bias: Float[np.ndarray, "*layers N"],
    extras: Sequence[Float[np.ndarray, "*layers n"]],
) -> tuple[Float[np.ndarray, "*layers K N"], Float[np.ndarray, "*layers N"]]:
    """Return a weight and a bias after the finishers, by their references. Padding columns stay as they are.

    The extras have the features of the checkpoint, and all else has those of the layer.
    """
    if slot_spec.layers is not None:
        one = replace(slot_spec, layers=None)
        pairs = [
            _finished(one, spec, weight[i], bias[i], [extra[i] for extra in extras]) for i in range(slot_spec.layers)
        ]
        return np.stack([each for each, _ in pairs]), np.stack([each for _, each in pairs])
    finished, finished_bias = weight, bias
    for finisher, vector in zip(slot_spec.finishers, extras, strict=True):
        own = _spread(spec.columns_out, vector.astype(np.float64))
        finished, finished_bias = finisher.reference(finished, finished_bias, own)
    real = True if spec.columns_out is None else spec.columns_out.source >= 0
    return np.where(real, finished, weight), np.where(real, finished_bias, bias)


def _bias(layer: nnx.Module, site: Site, spec: LinearSpec) -> Float[np.ndarray, "*layers N"]:
    """Return the bias of a layer in the order of `out_axes`, in float64; zeros without one."""
    lead = site.spec.stack
    held: Any = None if spec.bias is None else vars(layer).get(spec.bias)
    if held is None:
        return np.zeros((*lead, spec.out_features))
    bias = whole(held.get_value()).astype(np.float64)
    axes = einsum_axes(spec.rows.equation) if isinstance(spec.rows, EinsumRows) else ""
    if not isinstance(axes, str):  # the bias has the order of the output's axes
        order = np.argsort(np.argsort(axes.y[axes.lead :]))
        bias = bias.reshape(*lead, *bias.shape[-len(order) :]).transpose(*range(len(lead)), *(len(lead) + order))
    return bias.reshape(*lead, spec.out_features)


def cast_to_float32(model: nnx.Module, quantized: Iterable[nnx.Module]) -> None:
    """Cast a copy's variables of less than 32 bits, and the dtypes that its modules compute in, to float32.

    The variables of the layers in `quantized` stay as they are.
    """
    kept: set[int] = {id(node) for layer in quantized for _, node in nnx.iter_graph(layer)}
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and id(cast("object", node)) not in kept:
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


def _columns(b: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return b [..., r, n] with zeros outside of the columns from `start` to `stop`."""
    own = np.zeros_like(b)
    own[..., start:stop] = b[..., start:stop]
    return own


def _spread_both(spec: LinearSpec, delta: np.ndarray) -> np.ndarray:
    """Expand [..., k, n] of the checkpoint to [..., K, N] of the layer, with zeros for padding."""
    delta = np.swapaxes(_spread(spec.columns_in, np.swapaxes(delta, -1, -2)), -1, -2)
    return _spread(spec.columns_out, delta)


def _spread(index: Index | None, values: np.ndarray) -> np.ndarray:
    """Expand [..., features of the checkpoint] to [..., features of the layer], with zeros for padding."""
    if index is None:
        return values
    full = values[..., np.maximum(index.source, 0)]
    full[..., index.source < 0] = 0
    return full


def _flatten(spec: LinearSpec, kernel: np.ndarray) -> np.ndarray:
    """Transpose and reshape a kernel to [(layers,) K, N]."""
    axes = (*spec.in_axes, *spec.out_axes)
    lead = kernel.ndim - len(axes)
    moved = kernel.transpose(*range(lead), *(lead + axis for axis in axes))
    return moved.reshape(*kernel.shape[:lead], spec.in_features, spec.out_features)


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


# --- Tables -----------------------------------------------------------------------------------------------------------


@functools.cache
def _with_table(cls: type, name: str, param: str, table: str) -> type:
    """Return a subclass whose method `name` reads `table` in place of `param`, and adds its offset if there is one."""

    @functools.wraps(getattr(cls, name))
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        twin = cast("nnx.Module", object.__new__(cls))
        vars(twin).update(vars(self))
        vars(twin)[param] = vars(self)[table]
        y = getattr(cls, name)(twin, *args, **kwargs)
        offset = vars(self).get(f"{table}_offset")
        return y if offset is None else (y + jnp.expand_dims(offset[...], range(y.ndim - 1))).astype(y.dtype)

    body = {"__module__": cls.__module__, name: method}
    return type(cls)(f"{cls.__name__}With{name}", (cls,), body, pytree=getattr(cls, "_pytree__is_pytree", True))
