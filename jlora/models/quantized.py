"""Linear layers whose kernels are int8 or float8_e4m3fn, with float32 scales.

    int8, fp8     one scale for each output column     kernel [K, N], scale [1, N]     (x W) * s
    fp8_blocks    one scale for 128 x 128 values       kernel [K, N], scale [K / 128, N]     x (W * s)

Activations keep their dtype, and products are accumulated in float32. A scale of blocks is repeated for the columns of
its block, so that a part of the columns is cut alike from kernel and scale.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jlora._typing import DType
from jlora.models.config import Quantization
from jlora.models.json_file import ModelError
from jlora.models.partition import ONE_DEVICE, Axes, Partition

BLOCK = 128  # inputs and outputs of a block of "fp8_blocks"
_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "fp8_blocks": jnp.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0, "fp8_blocks": 448.0}
_LEAST = 1e-30  # of a column's largest magnitude: a smaller one would make the scale subnormal

Index = tuple[slice, ...]
Tops = dict[tuple[tuple[int, int], ...], np.ndarray]  # bounds of columns -> their largest magnitudes


class QuantizedLinear(nnx.Module):
    """A linear layer with a quantized kernel, made from a layer in floating point.

    Attributes:
      kernel: int8 or float8_e4m3fn [K, N].
      kernel_scale: float32 [1, N], or [K / 128, N] with a scale for each block.
      bias: [N] or None.
      dtype: dtype of the activations.
    """

    def __init__(
        self,
        layer: nnx.Linear,
        quantization: Quantization,
        *,
        partition: Partition = ONE_DEVICE,
        axes: Axes = (None, None),
    ):
        """Quantize the kernel of `layer`. `axes` are the mesh axes of its inputs and outputs."""
        self.kernel, self.kernel_scale = quantized_params(layer.kernel[...], quantization, partition, axes)
        self.bias = layer.bias
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = jnp.dtype(layer.dtype or layer.kernel.dtype)
        self.out_dtype = jnp.dtype(layer.preferred_element_type or self.dtype)

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows N"]:
        """Compute the product with the dequantized kernel, plus the bias."""
        x, kernel, scale = x.astype(self.dtype), self.kernel[...], self.kernel_scale[...]
        row = (1,) * (x.ndim - 1) + (-1,)
        if scale.shape[0] == 1:
            # The conversion is exact. The scale comes after the product, whose float32 holds sums of any kernel.
            y = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32) * scale.reshape(row)
        else:
            y = jnp.matmul(x, dequantize(kernel, scale).astype(x.dtype), preferred_element_type=jnp.float32)
        y = y.astype(self.out_dtype)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype).reshape(row)

    def dequantized(self) -> Float[Array, "K N"]:
        """Return the kernel in float32."""
        return dequantize(self.kernel[...], self.kernel_scale[...])


def quantized_params(
    kernel: Float[Array, "*lead K N"], quantization: Quantization, partition: Partition, axes: Axes
) -> tuple[nnx.Param[jax.Array], nnx.Param[jax.Array]]:
    """Return the parameters of a quantized kernel, and of its scales, with these mesh axes."""
    of_scale = (*axes[:-2], axes[-2] if quantization == "fp8_blocks" else None, axes[-1])
    values, scale = quantize(kernel, largest(kernel, quantization), quantization)
    if partition.mesh is not None:
        values = jax.lax.with_sharding_constraint(values, partition.sharding(*axes))
        scale = jax.lax.with_sharding_constraint(scale, partition.sharding(*of_scale))
    return nnx.Param(values, **partition.metadata(*axes)), nnx.Param(scale, **partition.metadata(*of_scale))


@functools.partial(jax.jit, static_argnums=1)
def largest(kernel: Float[Array, "*lead K N"], quantization: Quantization) -> Float[Array, "*lead G N"]:
    """Return the largest magnitude of the values that share a scale, in float32."""
    sizes = jnp.abs(kernel.astype(jnp.float32))
    if quantization != "fp8_blocks":
        return jnp.max(sizes, axis=-2, keepdims=True)
    *lead, inputs, outputs = kernel.shape
    padding = [(0, 0)] * len(lead) + [(0, -inputs % BLOCK), (0, -outputs % BLOCK)]
    blocks = jnp.pad(sizes, padding).reshape(*lead, -(-inputs // BLOCK), BLOCK, -(-outputs // BLOCK), BLOCK)
    return jnp.repeat(jnp.max(blocks, axis=(-3, -1)), BLOCK, axis=-1)[..., :outputs]


@functools.partial(jax.jit, static_argnums=2)
def quantize(
    kernel: Float[Array, "*lead K N"], top: Float[Array, "*lead G N"], quantization: Quantization
) -> tuple[Array, Float[Array, "*lead G N"]]:
    """Return the quantized kernel, and the scales for which `top` becomes the largest value of the dtype."""
    limit, dtype = _LARGEST[quantization], _DTYPES[quantization]
    scale = jnp.maximum(top.astype(jnp.float32), _LEAST) / limit
    values = jnp.clip(kernel.astype(jnp.float32) / _each_input(scale, kernel.shape[-2]), -limit, limit)
    return (jnp.round(values) if quantization == "int8" else values).astype(dtype), scale


def read_quantized(
    read: Callable[[Index, DType | None, Any], jax.Array],
    index: Index,
    inputs: int,
    quantization: Quantization | None,
    tops: Tops,
    device: Any,
) -> tuple[jax.Array, jax.Array]:
    """Read a shard [.., k, n] of a kernel, and return it quantized, with the scales of its columns.

    A column's scale is that of all its `inputs` values. If the shard has a part of them, the others are read first, a
    part of that size at a time.

    Args:
      read: (index, None, device) -> the stored values in floating point.
      index: Slices of the shard.
      inputs: K of the whole kernel.
      quantization: "int8" or "fp8".
      tops: Largest magnitudes of columns, kept for the next shards of the same kernel.
      device: Device of the result.

    Raises:
      ModelError: a value is not finite.
    """
    assert quantization is not None
    *lead, part, columns = index
    size = part.stop - part.start
    key = tuple((at.start, at.stop) for at in (*lead, columns))
    values = read(index, None, device) if size == inputs else None
    if key not in tops:
        starts = range(0, inputs, size)
        pieces = (read((*lead, slice(at, min(at + size, inputs)), columns), None, device) for at in starts)
        found = (np.asarray(largest(piece, quantization)) for piece in (pieces if values is None else [values]))
        tops[key] = functools.reduce(np.maximum, found)
        if not np.isfinite(tops[key]).all():
            raise ModelError(f"holds a value that is not finite, which {quantization} cannot hold")
    if values is None:
        values = read(index, None, device)
    return quantize(values, jax.device_put(tops[key], device), quantization)


def float_of(stored: np.dtype[Any]) -> DType:
    """Return the dtype of stored values in floating point; bfloat16 for mxfp4, whose values it represents."""
    return stored if jnp.issubdtype(stored, jnp.floating) else jnp.bfloat16


def dequantize(kernel: Array, scale: Float[Array, "*lead G N"]) -> Float[Array, "*lead K N"]:
    """Return the values of a quantized kernel in float32."""
    return kernel.astype(jnp.float32) * _each_input(scale, kernel.shape[-2])


def _each_input(scale: Float[Array, "*lead G N"], inputs: int) -> Float[Array, "*lead K N"]:
    """Return the scale of each input: of one group for all inputs, else of the input's block."""
    return scale if scale.shape[-2] == 1 else jnp.repeat(scale, BLOCK, axis=-2)[..., :inputs, :]
