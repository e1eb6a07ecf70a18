"""Attention over caches with NaN and infinity at positions that no query of the sequence may read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.models import Decoder, DecoderConfig, attention
from tests.models.test_decoder import EXPERTS

attend = jax.jit(attention.attend)
POISON = (float("nan"), float("-inf"))


def expected(q, k, v, visible, sinks):
    """Compute attention in float64, each query over its visible keys."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    out = np.zeros(q.shape)
    shared = q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(visible[b, i])
        keys, values = k[b, seen, h // shared], v[b, seen, h // shared]
        weights = np.exp(keys @ q[b, i, h] / np.sqrt(q.shape[3]))
        out[b, i, h] = weights @ values / (weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[h]))))
    return out


@pytest.mark.parametrize(("length", "sinks"), [(1, False), (3, True)])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_that_no_query_sees_may_hold_anything(rng, dtype, poison, length, sinks):
    batch, capacity, heads, groups, width = 3, 12, 4, 2, 8
    q = jnp.asarray(rng.normal(size=(batch, length, heads, width)), dtype)
    k, v = (jnp.asarray(rng.normal(size=(batch, capacity, groups, width)), dtype) for _ in range(2))
    places = np.array([0, 4, capacity - length])[:, None] + np.arange(length)
    distance = places[:, :, None] - np.arange(capacity)
    visible = (distance >= 0) & (distance < 5)
    unseen = ~visible.any(1)[..., None, None]
    given = jnp.asarray(rng.normal(size=heads), dtype) if sinks else None
    found, want = (
        attend(q, jnp.where(unseen, held, k), jnp.where(unseen, held, v), jnp.asarray(visible), given)
        for held in (jnp.asarray(poison, dtype), jnp.asarray(1, dtype))
    )
    np.testing.assert_array_equal(found, want)
    tolerance = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(np.asarray(found, np.float64), expected(q, k, v, visible, given), atol=tolerance)


CONFIG = DecoderConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, sliding_windows=(None, 9), sinks=True, max_position_embeddings=64,
)  # fmt: skip
PROMPTS = (7, 1, 20)  # tokens of each sequence


@jax.jit
def extend(model, *args):
    return model.extend(*args)


def answer(model, cache):
    """Return the logits after each chunk of 8 of padded prompts, and after each of three decode steps."""
    tokens = jax.random.randint(jax.random.key(1), (len(PROMPTS), 32), 0, 32)
    ends, places = np.array(PROMPTS), np.arange(8)
    found = []
    for start in (0, 8, 16):  # a sequence that has ended goes over its last chunk again
        starts = np.minimum(start, (ends - 1) // 8 * 8)
        here = starts[:, None] + places
        last = np.minimum(ends - starts, 8) - 1
        logits, cache = extend(model, jnp.take_along_axis(tokens, here, 1), jnp.asarray(here), cache, jnp.asarray(last))
        found.append(logits)
    for step in range(3):
        here = (ends + step)[:, None]
        none = jnp.zeros(len(PROMPTS), jnp.int32)
        logits, cache = extend(model, jnp.take_along_axis(tokens, here, 1), jnp.asarray(here), cache, none)
        found.append(logits)
    return np.stack(found)


@pytest.mark.parametrize("poison", POISON)
def test_chunked_prefill_and_decode_do_not_depend_on_the_old_cache(poison):
    model = Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    fresh = model.init_cache(len(PROMPTS), 32)
    want = answer(model, fresh)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(answer(model, jax.tree.map(lambda leaf: jnp.full_like(leaf, poison), fresh)), want)


@pytest.mark.parametrize("moe", [None, EXPERTS])
@pytest.mark.slow
def test_values_that_are_not_finite_show_in_their_own_sequence_only(moe):
    """A real token that is not finite still shows in the logits of its own sequence, and in no other's."""
    model = Decoder(dataclasses.replace(CONFIG, moe=moe), rngs=nnx.Rngs(0))
    table = model.model.embed_tokens.embedding
    table[...] = table[...].at[31].set(jnp.inf)
    tokens = jnp.array([[1, 31, 2, 3], [1, 4, 2, 3]])
    positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
    logits, cache = extend(model, tokens, positions, model.init_cache(2, 16), jnp.array([3, 3]))
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    logits, _ = extend(model, jnp.array([[5], [5]]), jnp.array([[4], [4]]), cache, jnp.zeros(2, jnp.int32))
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
