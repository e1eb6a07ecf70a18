"""Rotary position embedding.

The variants are RoFormer (arXiv:2104.09864), linear interpolation (arXiv:2306.15595), the frequency bands of Llama 3.1,
and YaRN (arXiv:2309.00071). Frequencies are NumPy constants derived from the configuration.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jlora.models.config import RopeConfig
from jlora.models.json_file import ModelError


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float[np.ndarray, "half"], float]:
    """Return the angle per position of each pair of features, and the factor of cos and sin.

    Returns:
      float32 [head_dim / 2] radians per position, and the attention factor (1.0 except for YaRN).

    Raises:
      ModelError: The settings lead to infinite or undefined frequencies.
    """
    try:
        with np.errstate(all="ignore"):
            found, attention_factor = _frequencies(rope, head_dim)
    except (ArithmeticError, ValueError) as error:  # theta = 1, or a number that is nearly 0 or infinite
        raise ModelError(f"the rotary embedding cannot be computed with {rope}: {error}") from error
    if not np.isfinite(found).all() or not math.isfinite(attention_factor):
        raise ModelError(f"the rotary embedding is not finite with {rope}")
    return found, attention_factor


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Float[np.ndarray, "half"], float]:
    pair = np.arange(head_dim // 2, dtype=np.float64)
    plain = rope.theta ** (-2.0 * pair / head_dim)
    attention_factor = 1.0
    if rope.rope_type == "default":
        scaled = plain
    elif rope.rope_type == "linear":
        scaled = plain / rope.factor
    elif rope.rope_type == "llama3":
        # Turns of a pair over the original context: keep for many, divide for few, blend between.
        turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        scaled = plain * (keep + (1.0 - keep) / rope.factor)
    else:
        low, high = (_yarn_pair(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = np.clip((pair - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        scaled = plain * (1.0 - ramp + ramp / rope.factor)
        attention_factor = _yarn_attention_factor(rope)
    return scaled.astype(np.float32), attention_factor


def _yarn_pair(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """Return the (fractional) index of the pair that makes `turns` turns over the original context."""
    wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def rotations(
    rope: RopeConfig, head_dim: int, positions: Int[jax.Array, "B L"]
) -> tuple[Float[jax.Array, "B L 1 half"], Float[jax.Array, "B L 1 half"]]:
    """Compute cos and sin of every position, float32 [B, L, 1, head_dim / 2]; the 1 is for the heads."""
    per_position, attention_factor = frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, :, None, None] * jnp.asarray(per_position)[None, None, None, :]
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def rotate(
    x: Float[jax.Array, "B L H D"], cos: Float[jax.Array, "B L 1 half"], sin: Float[jax.Array, "B L 1 half"]
) -> Float[jax.Array, "B L H D"]:
    """Rotate feature i with feature i + D/2 (the Hugging Face order) in float32; returns the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
