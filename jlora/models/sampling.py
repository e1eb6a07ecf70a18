"""Choose the next token of each sequence, independently of the other rows.

`jlora.models.generate` and `jlora.serve` share it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

COLDEST = 1e-30
HOTTEST = 1e30
"""The largest temperature. Far beyond it, and far below `COLDEST`, float32 division gives NaN."""


class Sampling(NamedTuple):
    """Sampling settings of each sequence. They are traced, so changing them compiles nothing new.

    Attributes:
      temperature: [B] float32. 0 takes the likeliest token.
      top_k: [B] int32. The vocabulary size or more means no limit.
      top_p: [B] float32. Infinity means no limit; 1 could lose the tail to a rounded sum.
      keys: [B] random keys. The number of the token is folded in.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    keys: Key[Array, "B"]


def likeliest(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """Return the likeliest token of each row, int32, the first one in a tie."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def choose(logits: Float[Array, "B V"], steps: Int[Array, "B"], sampling: Sampling, *, ranked: bool) -> Int[Array, "B"]:
    """Choose one token per row, int32.

    A draw depends on its row's key, step, settings and logits only. For a row without limits it does not depend on
    `ranked`.

    Args:
      logits: [B, V] float32.
      steps: [B] number of the token, folded into the keys.
      sampling: Settings of each row.
      ranked: Static. True applies `top_k` and `top_p`, which sorts the vocabulary.
    """
    keys = jax.vmap(jax.random.fold_in)(sampling.keys, steps)
    drawn = jax.vmap(jax.random.categorical)(keys, _processed(logits, sampling, ranked)).astype(jnp.int32)
    return jnp.where(sampling.temperature > 0, drawn, likeliest(logits))


def processed_logits(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """Return the logits that `choose` draws from, -inf for tokens that it cannot draw.

    Rows of temperature 0 keep their logits.
    """
    return jnp.where(sampling.temperature[:, None] > 0, _processed(logits, sampling, True), logits)


def _processed(logits: Float[Array, "B V"], sampling: Sampling, ranked: bool) -> Float[Array, "B V"]:
    temperature = jnp.maximum(sampling.temperature, COLDEST)[:, None]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if not ranked:
        return scaled
    return jnp.where(_kept(scaled, sampling.top_k, sampling.top_p), scaled, -jnp.inf)


def _kept(scores: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]) -> Bool[Array, "B V"]:
    """Return True for tokens that may be drawn: a prefix of each row in falling order, lower indices first in a tie."""
    falling = -jnp.sort(-scores, axis=-1)
    falling = jnp.where(jnp.arange(scores.shape[-1])[None, :] < top_k[:, None], falling, -jnp.inf)
    chances = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances
    count = jnp.sum((before < top_p[:, None]) & (falling > -jnp.inf), axis=-1, keepdims=True)
    count = jnp.maximum(count, 1)  # a `top_p` below the least float32 has become 0
    least = jnp.take_along_axis(falling, count - 1, axis=-1)
    above, equal = scores > least, scores == least
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
