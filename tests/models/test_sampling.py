"""The next token of each row, compared with a NumPy sampler and independent of the other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.models import sampling
from jlora.models.sampling import HOTTEST, Sampling

choose = jax.jit(sampling.choose, static_argnames="ranked")
ROWS, VOCAB = 4, 9
KEY = jax.random.key(5)


def settings(temperature=1.0, top_k=VOCAB, top_p=np.inf, seeds=range(ROWS)):
    rows = [jnp.broadcast_to(jnp.asarray(value), ROWS) for value in (temperature, top_k, top_p)]
    keys = jax.vmap(jax.random.key)(jnp.asarray(list(seeds), jnp.uint32))
    return Sampling(rows[0].astype(jnp.float32), rows[1].astype(jnp.int32), rows[2].astype(jnp.float32), keys)


def kept(logits, top_k, top_p):
    """Return the tokens of one row within the limits, by the definition in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    chances = np.exp(np.asarray(logits, np.float64)[order])
    chances /= chances.sum()
    before = np.concatenate([[0.0], np.cumsum(chances)[:-1]])
    return {i for i, sum_before in zip(order, before, strict=True) if sum_before < top_p}


@given(st.data())
@pytest.mark.slow
def test_the_drawn_tokens_are_those_within_the_limits(data):
    logits = np.array(data.draw(st.lists(st.integers(-1, 1), min_size=VOCAB, max_size=VOCAB)), np.float32)  # ties
    top_k = data.draw(st.integers(1, VOCAB + 1))
    top_p = data.draw(st.sampled_from([1e-46, 0.01, 0.313, 0.611, 0.97, np.inf]))
    draws = 2000  # every token that may be drawn has a probability above 1 %
    limits = Sampling(
        jnp.ones(draws), jnp.full(draws, top_k), jnp.full(draws, top_p, jnp.float32), jax.random.split(KEY, draws)
    )
    drawn = choose(jnp.broadcast_to(logits, (draws, VOCAB)), jnp.zeros(draws, jnp.int32), limits, ranked=True)
    assert set(np.asarray(drawn).tolist()) == kept(logits, top_k, top_p)


@given(st.integers(0, 100))
def test_a_row_without_limits_draws_the_same_where_others_have_some(seed):
    logits = jnp.asarray(np.random.default_rng(seed).normal(0, 3, (ROWS, VOCAB)), jnp.float32)
    steps = jnp.full(ROWS, seed)
    alone = choose(logits, steps, settings(), ranked=False)
    limits = settings(top_k=[VOCAB, 1, VOCAB, 3], top_p=[np.inf, np.inf, 0.3, 0.5])
    mixed = choose(logits, steps, limits, ranked=True)
    assert alone[0] == mixed[0]
    assert mixed[1] == np.argmax(np.asarray(logits)[1])


def test_greedy_rows_take_the_likeliest_beside_others():
    logits = jnp.asarray(np.random.default_rng(1).normal(0, 0.1, (ROWS, VOCAB)), jnp.float32)
    temperature = [0.0, 5.0, 0.0, 5.0]
    drawn = np.stack(
        [np.asarray(choose(logits, jnp.full(ROWS, step), settings(temperature), ranked=False)) for step in range(50)]
    )
    assert (drawn[:, ::2] == np.argmax(np.asarray(logits), axis=1)[::2]).all()
    assert len(set(drawn[:, 1].tolist())) > 3


@pytest.mark.parametrize("ranked", [False, True])
def test_the_hottest_temperature_keeps_the_mask_of_the_model(ranked):
    """Logits of -infinity are a model's mask."""
    logits = jnp.full((ROWS, VOCAB), -jnp.inf).at[:, 3:5].set(jnp.array([1.0, 2.0]))
    hottest = settings(HOTTEST)
    drawn = [np.asarray(choose(logits, jnp.full(ROWS, step), hottest, ranked=ranked)) for step in range(10)]
    assert set(np.ravel(drawn).tolist()) == {3, 4}
