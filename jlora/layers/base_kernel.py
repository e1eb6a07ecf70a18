"""The base weight of a layer: in a variable, in an array that qwix has quantized, or in a form of the layer's own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jlora import _qwix
from jlora.errors import LoRAError
from jlora.layers.specs import EmbedSpec, LinearSpec

_WIDTHS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Kernel:
    """A base kernel as it is stored.

    Attributes:
      array: the stored values (or their shape and sharding), with the axes that the spec names.
      dtype: dtype of the values that `array` represents: its own, or that of the dequantized values.
      exact: True if `array` holds these values themselves.
    """

    array: Array | jax.ShapeDtypeStruct
    dtype: Any
    exact: bool


def held_by(layer: nnx.Module, spec: LinearSpec | EmbedSpec) -> object:
    """Return the attribute that the spec names, or None."""
    return None if spec.param is None else vars(layer).get(spec.param)


def kernel_of(layer: nnx.Module, spec: LinearSpec | EmbedSpec) -> Kernel | None:
    """Return the kernel of a layer, or None if the layer stores its weight in a form of its own."""
    held = held_by(layer, spec)
    if isinstance(held, nnx.Variable):
        array = cast("Array", cast("Any", held).get_value())
        scaled = isinstance(spec, LinearSpec) and spec.dequantize is not None
        return Kernel(array, array.dtype, exact=not scaled and jnp.issubdtype(array.dtype, jnp.floating))
    if _qwix.is_quantized(held):
        quantized = _qwix.unboxed(held)
        return Kernel(quantized.qvalue, quantized.scale.dtype, exact=False)
    return None


def can_dequantize(layer: nnx.Module, spec: LinearSpec) -> bool:
    """Return True if `dequantized` returns the weight of a layer whose kernel is not exact."""
    return spec.dequantize is not None or _qwix.is_quantized(held_by(layer, spec))


def dequantized(layer: nnx.Module, spec: LinearSpec) -> Array:
    """Return the base weight of a layer in the forward, float32 [K, N] in the order of the rows that the spec gives.

    Raises:
      LoRAError: `LinearSpec.dequantize` returns another shape.
    """
    if spec.dequantize is None:
        weight = _qwix.dequantized(held_by(layer, spec)).transpose(*spec.in_axes, *spec.out_axes)
        return weight.reshape(spec.in_features, spec.out_features)
    weight = jnp.asarray(spec.dequantize(layer), jnp.float32)
    if weight.shape != (spec.in_features, spec.out_features):
        raise LoRAError(
            f"LinearSpec.dequantize of {type(layer).__name__} must return [K, N] = [{spec.in_features}, "
            f"{spec.out_features}], and returned {list(weight.shape)}"
        )
    return weight


def arrays_of(layer: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Yield (attribute, array) for each variable of a layer, those inside quantized arrays included."""
    for name, value in vars(layer).items():
        held = _qwix.variables_of(value) if _qwix.is_quantized(value) else [value]
        yield from ((name, one.get_value()) for one in held if isinstance(one, nnx.Variable))


def forgotten(layer: nnx.Module, spec: LinearSpec) -> bool:
    """Return True if the layer holds a kernel of the spec's size in a variable that the spec does not name."""
    size = spec.in_features * spec.out_features
    return spec.dequantize is None and any(
        getattr(array, "size", 0) == size and jnp.dtype(array.dtype).name in _WIDTHS for _, array in arrays_of(layer)
    )
