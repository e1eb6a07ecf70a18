"""The expert block against plain NumPy loops over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jlora.models import moe, routing
from jlora.models.grouped import grouped_matmul
from tests.models import goldens


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    chances = np.exp(x - x.max())
    return chances / chances.sum()


def best(scores, k):
    """The k largest, the first of equals first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def wide(*arrays):
    return [np.asarray(array, np.float64) for array in arrays]


def oracle(layer, x, experts, weights, weigh_hidden=False):
    """Each token and each of its experts, one after the other, in float64."""
    up, down = wide(layer.gate_up_proj[...], layer.down_proj[...])
    count, features, columns = up.shape
    up_bias, down_bias = np.zeros((count, columns)), np.zeros((count, features))
    if hasattr(layer, "down_proj_bias"):
        up_bias, down_bias = wide(layer.gate_up_proj_bias[...], layer.down_proj_bias[...])
    out = np.zeros((len(x), features))
    for t, token in enumerate(np.asarray(x, np.float64)):
        for e, weight in zip(np.asarray(experts)[t], np.asarray(weights, np.float64)[t], strict=True):
            hidden = token @ up[e] + up_bias[e]
            if not layer.gated:
                hidden = np.tanh(hidden)
            else:
                half = columns // 2
                gate, value = (hidden[::2], hidden[1::2]) if layer.interleaved else (hidden[:half], hidden[half:])
                if isinstance(layer.activation, moe.ClampedSwiGLU):
                    gate, value = np.minimum(gate, 7.0), np.maximum(np.minimum(value, 7.0), -7.0) + 1
                    hidden = value * gate * sigmoid(1.702 * gate)
                else:
                    hidden = gate * sigmoid(gate) * value
            if weigh_hidden:
                out[t] += (weight * hidden) @ down[e] + down_bias[e]
            else:
                out[t] += weight * (hidden @ down[e] + down_bias[e])
    return out


def fill(layer, rng, scale=1.0):
    """Random values for every parameter, large enough that all of them show."""
    for _, param in nnx.to_flat_state(nnx.state(layer)):
        param[...] = jnp.asarray(scale * rng.normal(size=param.shape) / 2, param.dtype)
    return layer


CLAMPED = moe.ClampedSwiGLU(1.702, 7.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"interleaved": True},
        {"interleaved": True, "bias": True, "activation": CLAMPED},
        {"gated": False, "activation": jnp.tanh, "bias": True},
        {"weigh_hidden": True, "bias": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("shape", [(13,), (3, 5)], ids=["packed", "batch"])
def test_experts_equal_the_loop(rng, options, shape):
    layer = fill(moe.Experts(12, 10, 6, dtype=jnp.float32, rngs=nnx.Rngs(0), **options), rng, scale=3.0)
    x = rng.normal(size=(*shape, 12)).astype(np.float32)
    tokens = np.prod(shape)
    experts = np.stack([rng.permutation(5)[:3] for _ in range(tokens)]).astype(np.int32)  # none goes to the last one
    weights = rng.random((tokens, 3)).astype(np.float32)
    got = jax.jit(lambda layer, *args: layer(args[0], routing.Routing(*args[1:])))(layer, x, experts, weights)
    want = oracle(layer, x.reshape(-1, 12), experts, weights, options.get("weigh_hidden", False))
    if options.get("activation") == CLAMPED:  # the limits are reached, from either side
        hidden = np.concatenate([x.reshape(-1, 12) @ np.asarray(layer.gate_up_proj[...][e]) for e in range(5)])
        assert hidden.min() < -7 < 7 < hidden.max()
    assert got.shape == x.shape
    assert goldens.relative_error(np.asarray(got).reshape(-1, 12), want) < 1e-5


@given(
    st.integers(1, 7).flatmap(
        lambda e: st.tuples(st.just(e), st.lists(st.lists(st.integers(0, e - 1), min_size=2, max_size=2), min_size=1))
    )
)
def test_dispatch_sorts_stably(case):
    num_experts, pairs = case
    rows, places = moe.dispatch(np.array(pairs, np.int32), num_experts, 7)
    # In order of experts; of one expert in order of tokens; two choices of the same expert in their order.
    want = [(e, t, i) for e in range(num_experts) for t, pair in enumerate(pairs) for i in range(2) if pair[i] == e]
    assert rows.expert.tolist() == [e for e, _, _ in want]
    assert rows.token.tolist() == [t for _, t, _ in want]
    assert rows.counts.tolist() == [sum(e == expert for e, _, _ in want) for expert in range(num_experts)]
    assert rows.length == 7
    for m, (_, t, i) in enumerate(want):
        assert places[t, i] == m


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(sum))
def test_grouped_matmul_equals_the_loop(counts):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(counts), 5)).astype(np.float32)
    w = rng.normal(size=(len(counts), 5, 3)).astype(np.float32)
    group = np.repeat(np.arange(len(counts)), counts)
    want = np.stack([row @ w[g].astype(np.float64) for row, g in zip(x.astype(np.float64), group, strict=True)])
    assert goldens.relative_error(grouped_matmul(x, w, np.array(counts, np.int32)), want) < 1e-6
