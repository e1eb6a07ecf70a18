"""The expert block against plain NumPy loops over tokens and experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jlora.models import moe, routing
from jlora.models.config import MoEConfig
from tests.models import goldens

pytestmark = pytest.mark.device


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    chances = np.exp(x - x.max())
    return chances / chances.sum()


def best(scores, k):
    """Return the k largest, the first first among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def wide(*arrays):
    return [np.asarray(array, np.float64) for array in arrays]


def oracle(layer, x, experts, weights):
    """Compute each token and each of its experts in a loop, in float64."""
    up, down = wide(layer.gate_up_proj[...], layer.down_proj[...])
    count, features, columns = up.shape
    up_bias, down_bias = np.zeros((count, columns)), np.zeros((count, features))
    if hasattr(layer, "down_proj_bias"):
        up_bias, down_bias = wide(layer.gate_up_proj_bias[...], layer.down_proj_bias[...])
    out = np.zeros((len(x), features))
    for t, token in enumerate(np.asarray(x, np.float64)):
        for e, weight in zip(np.asarray(experts)[t], np.asarray(weights, np.float64)[t], strict=True):
            hidden = token @ up[e] + up_bias[e]
            gate, value = hidden[: columns // 2], hidden[columns // 2 :]
            if isinstance(layer.activation, moe.ClampedSwiGLU):
                gate, value = np.minimum(gate, 7.0), np.maximum(np.minimum(value, 7.0), -7.0) + 1
                hidden = value * gate * sigmoid(1.702 * gate)
            else:
                hidden = gate * sigmoid(gate) * value
            out[t] += weight * (hidden @ down[e] + down_bias[e])
    return out


def fill(layer, rng, scale=1.0):
    """Fill every parameter with random values, large enough to matter."""
    for _, param in nnx.to_flat_state(nnx.state(layer)):
        param[...] = jnp.asarray(scale * rng.normal(size=param.shape) / 2, param.dtype)
    return layer


def test_clamped_swiglu():
    """The gate is clamped from above alone: where -4 stays, its sigmoid is smaller than where it becomes -1."""
    gate, up = np.meshgrid(*[np.array([-4, -1.5, -0.5, 0, 0.5, 1.5, 4], np.float32)] * 2)
    want = np.zeros_like(gate)
    for i in np.ndindex(gate.shape):
        g, u = min(gate[i], 1), max(-1, min(up[i], 1))
        want[i] = (u + 1) * g / (1 + np.exp(-1.702 * g))
    np.testing.assert_allclose(moe.ClampedSwiGLU(1.702, 1.0)(gate, up), want, rtol=1e-5, atol=1e-7)


@given(
    st.integers(1, 7).flatmap(
        lambda e: st.tuples(st.just(e), st.lists(st.lists(st.integers(0, e - 1), min_size=2, max_size=2), min_size=1))
    )
)
def test_dispatch_sorts_stably(case):
    num_experts, pairs = case
    rows, places = jax.jit(moe.dispatch, static_argnums=(1, 2))(np.array(pairs, np.int32), num_experts, 7)
    # In order of experts; of one expert in order of tokens; two choices of the same expert in their order.
    want = [(e, t, i) for e in range(num_experts) for t, pair in enumerate(pairs) for i in range(2) if pair[i] == e]
    assert rows.expert.tolist() == [e for e, _, _ in want]
    assert rows.token.tolist() == [t for _, t, _ in want]
    assert rows.counts.tolist() == [sum(e == expert for e, _, _ in want) for expert in range(num_experts)]
    assert rows.length == 7
    for m, (_, t, i) in enumerate(want):
        assert places[t, i] == m


def test_ties_go_to_the_lower_expert():
    for route in (routing.top_k_softmax, lambda x, k: routing.softmax_top_k(x, k, renormalize=True)):
        assert route(np.zeros((1, 5), np.float32), 2).experts.tolist() == [[0, 1]]


QWEN = MoEConfig(num_experts=5, experts_per_token=2, intermediate_size=10, layers=(True,), shared_size=7)
GPT_OSS = MoEConfig(
    num_experts=5,
    experts_per_token=2,
    intermediate_size=12,
    layers=(True,),
    router="chosen_softmax",
    router_name="router",
    router_bias=True,
    expert_bias=True,
    interleaved=True,
    swiglu_limit=7.0,
)


def block_oracle(block, x):
    """Compute a whole block token by token."""
    config = block.config
    router = getattr(block, config.router_name)
    logits = x @ np.asarray(router.kernel[...], np.float64)
    if config.router_bias:
        logits += np.asarray(router.bias[...], np.float64)
    chosen = np.array([best(row, config.experts_per_token) for row in logits])
    if config.router == "chosen_softmax" or config.renormalize:
        weights = np.array([softmax(row[c]) for row, c in zip(logits, chosen, strict=True)])
    else:
        weights = np.array([softmax(row)[c] for row, c in zip(logits, chosen, strict=True)])
    out = oracle(block.experts, x, chosen, weights)
    if config.shared_size:
        gate, up, down, share = wide(
            *np.split(np.asarray(block.shared_expert.gate_up_proj.kernel[...]), 2, axis=1),
            block.shared_expert.down_proj.kernel[...],
            block.shared_expert_gate.kernel[...],
        )
        out += sigmoid(x @ share) * (((x @ gate) * sigmoid(x @ gate) * (x @ up)) @ down)
    return out


@pytest.mark.parametrize(
    "config", [QWEN, dataclasses.replace(QWEN, renormalize=False), GPT_OSS], ids=lambda c: c.router
)
def test_block_equals_the_loop(rng, config):
    block = fill(moe.MoE(12, config, dtype=jnp.float32, rngs=nnx.Rngs(0)), rng)
    x = rng.normal(size=(3, 4, 12)).astype(np.float32)
    got = jax.jit(lambda block, x: block(x))(block, x)
    want = block_oracle(block, x.reshape(-1, 12).astype(np.float64))
    assert goldens.relative_error(np.asarray(got).reshape(-1, 12), want) < 1e-5
    packed = jax.jit(lambda block, x: block(x))(block, x.reshape(-1, 12))
    np.testing.assert_array_equal(packed, np.asarray(got).reshape(-1, 12))
