"""Shared parts of all families: root-mean-square norm, projections and the gated MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from jlora._typing import DType
from jlora.models.config import Activation, DecoderConfig, Quantization
from jlora.models.partition import ONE_DEVICE, Axes, Blocks, Partition, merged, width
from jlora.models.quantized import QuantizedLinear


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the last axis, in float32, times w or 1 + w."""

    def __init__(self, features: int, config: DecoderConfig, dtype: DType, partition: Partition):
        self.offset = 1.0 if config.zero_centered_norms else 0.0
        scale = jnp.full((features,), 1.0 - self.offset, dtype, device=partition.sharding(None))
        self.scale = nnx.Param(scale, **partition.metadata(None))
        self.epsilon = config.rms_norm_eps

    def __call__(self, x: Float[jax.Array, "B L *F"]) -> Float[jax.Array, "B L *F"]:
        """Normalize the last axis of `x`; returns the dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(jnp.float32) + self.offset
        return (wide * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def linear(
    in_features: int,
    *output_sizes: int,
    bias: bool,
    dtype: DType,
    rngs: nnx.Rngs,
    param_dtype: DType | None = None,
    out_dtype: DType | None = None,
    partition: Partition = ONE_DEVICE,
    axes: Axes = (None, None),
    blocks: Blocks | None = None,
    quantization: Quantization | None = None,
) -> nnx.Linear | QuantizedLinear:
    """Create a projection; with several output sizes a merged one, with its outputs side by side.

    `axes` are the mesh axes of its inputs and outputs. `blocks` gives the order of its columns if it differs from the
    checkpoint's; the layer keeps it as `output_blocks`. `quantization` quantizes the kernel.
    """
    layer = nnx.Linear(
        in_features,
        sum(output_sizes) if blocks is None else width(blocks),
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype if param_dtype is None else param_dtype,
        kernel_init=partition.draw(axes, blocks),
        bias_init=lambda _, shape, dtype: jnp.zeros(shape, dtype, device=partition.sharding(axes[1])),
        preferred_element_type=out_dtype,
        rngs=rngs,
        kernel_metadata=partition.metadata(*axes),
        bias_metadata=partition.metadata(axes[1]),
    )
    if quantization is not None:
        layer = QuantizedLinear(layer, quantization, partition=partition, axes=axes)
    if len(output_sizes) > 1:
        layer.output_sizes = output_sizes  # pyright: ignore[reportAttributeAccessIssue]
    if blocks is not None:
        layer.output_blocks = blocks  # pyright: ignore[reportAttributeAccessIssue]
    return layer


class MLP(nnx.Module):
    """Gated MLP (arXiv:2002.05202) with SiLU, or GELU in its approximation by tanh."""

    def __init__(
        self,
        features: int,
        inner: int,
        *,
        bias: bool = False,
        dtype: DType,
        rngs: nnx.Rngs,
        partition: Partition = ONE_DEVICE,
        quantization: Quantization | None = None,
        activation: Activation = "silu",
    ):
        self.shards = partition.size("tensor")
        self.activation = activation
        self.gate_up_proj = linear(
            features,
            inner,
            inner,
            bias=bias,
            dtype=dtype,
            rngs=rngs,
            partition=partition,
            axes=(None, "tensor"),
            blocks=merged([(inner, 1), (inner, 1)], self.shards),
            quantization=quantization,
        )
        self.down_proj = linear(
            inner,
            features,
            bias=bias,
            dtype=dtype,
            rngs=rngs,
            partition=partition,
            axes=("tensor", None),
            quantization=quantization,
        )

    def __call__(self, x: Float[jax.Array, "*rows E"]) -> Float[jax.Array, "*rows E"]:
        """Compute down_proj(activation(gate) * up), [.., E] -> [.., E]."""
        both = self.gate_up_proj(x)
        gate, up = jnp.split(both.reshape(*x.shape[:-1], self.shards, -1), 2, axis=-1)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down_proj((gate * up).reshape(*x.shape[:-1], -1))
