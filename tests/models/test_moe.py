"""The order of rows of experts, their activation, and ties of their router; goldens have the values."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.models import moe, routing

pytestmark = pytest.mark.device


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
