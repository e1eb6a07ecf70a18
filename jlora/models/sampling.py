"""How the next token of each sequence is chosen; one row never depends on the others.

`jlora.models.generate` and `jlora.serve` share it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

COLDEST, HOTTEST = 1e-30, 1e30  # temperatures: far beyond them float32 division gives NaN


class Sampling(NamedTuple):
    """Settings of each sequence, traced, so that changing them compiles nothing.

    Attributes:
      temperature: float32; 0 takes the likeliest token.
      top_k: int32; the vocabulary's size or more for no limit.
      top_p: float32; infinity for no limit, where 1 could lose the tail to a rounded sum.
      keys: of the random draws; the number of the token is folded in.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    keys: Key[Array, "B"]


def likeliest(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The likeliest token of each row, int32; of equals the first."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def choose(logits: Float[Array, "B V"], steps: Int[Array, "B"], sampling: Sampling, *, ranked: bool) -> Int[Array, "B"]:
    """One token a row, int32.

    A draw depends on its row's key, step, settings and logits alone, and not on `ranked`, where the row has no limits.

    Args:
      logits: float32.
      steps: the number of the token, folded into the keys.
      sampling: settings of each row.
      ranked: static; whether `top_k` and `top_p` are looked at, which takes a sort of the vocabulary.
    """
    keys = jax.vmap(jax.random.fold_in)(sampling.keys, steps)
    temperature = jnp.maximum(sampling.temperature, COLDEST)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if ranked:
        scaled = jnp.where(_kept(scaled, sampling.top_k, sampling.top_p), scaled, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
    return jnp.where(sampling.temperature > 0, drawn, likeliest(logits))


def _kept(scores: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]) -> Bool[Array, "B V"]:
    """Which tokens may be drawn: the first of each row in falling order, of equals those with the smaller number."""
    falling = -jnp.sort(-scores, axis=-1)
    falling = jnp.where(jnp.arange(scores.shape[-1])[None, :] < top_k[:, None], falling, -jnp.inf)
    chances = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances
    count = jnp.sum((before < top_p[:, None]) & (falling > -jnp.inf), axis=-1, keepdims=True)
    count = jnp.maximum(count, 1)  # a `top_p` below the least float32 is 0 by now
    least = jnp.take_along_axis(falling, count - 1, axis=-1)
    above, equal = scores > least, scores == least
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
