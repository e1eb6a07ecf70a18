"""What every family's layers are made of: root-mean-square norm, projections, the gated MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from jlora._typing import DType


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the last axis, in float32."""

    def __init__(self, features: int, epsilon: float, dtype: DType):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[jax.Array, "B L *F"]) -> Float[jax.Array, "B L *F"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def linear(
    in_features: int,
    *output_sizes: int,
    bias: bool,
    dtype: DType,
    rngs: nnx.Rngs,
    param_dtype: DType | None = None,
    out_dtype: DType | None = None,
) -> nnx.Linear:
    """A projection; with several output sizes a merged one, its outputs side by side."""
    layer = nnx.Linear(
        in_features,
        sum(output_sizes),
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype if param_dtype is None else param_dtype,
        kernel_init=nnx.initializers.normal(0.02),
        preferred_element_type=out_dtype,
        rngs=rngs,
    )
    if len(output_sizes) > 1:
        layer.output_sizes = output_sizes  # pyright: ignore[reportAttributeAccessIssue]
    return layer


class MLP(nnx.Module):
    """Gated SiLU (arXiv:2002.05202)."""

    def __init__(self, features: int, inner: int, *, bias: bool = False, dtype: DType, rngs: nnx.Rngs):
        self.gate_up_proj = linear(features, inner, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = linear(inner, features, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[jax.Array, "*rows E"]) -> Float[jax.Array, "*rows E"]:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)
