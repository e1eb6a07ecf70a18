"""Rounding to int8: each value by half a step at most, and the error that `Adapter.int8_errors` gives."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np
import pytest

import jlora
from jlora.adapters.int8 import quanta_of, restored, rounded

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = hypothesis.extra.numpy.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=FLOATS)


@hypothesis.given(ROWS)
@hypothesis.example(np.zeros((2, 3), np.float32))
@hypothesis.example(np.array([[1e-45], [-1e-45]], np.float32))
@hypothesis.example(np.array([[1e-45, 3e-39, 0], [3e38, -3.4e38, 1e-45]], np.float32))
def test_a_value_changes_by_half_a_step_at_most(values):
    quanta = quanta_of(values)
    np.testing.assert_allclose(quanta * 127, np.abs(values).max(axis=1).astype(np.float64), rtol=1e-15)
    codes = rounded(values, quanta)
    assert codes.dtype == np.int8
    assert np.abs(codes.astype(int)).max() <= 127
    error = np.abs(codes * quanta[:, None] - values.astype(np.float64))
    assert (error <= 0.5 * (1 + 1e-4) * quanta[:, None]).all()  # quotients are float32
    np.testing.assert_array_equal(rounded(restored(codes, quanta), quanta), codes)


@pytest.mark.parametrize("shape", [(16, 4096), (3, 9000), (2, 5000)])
def test_rows_that_alternate_in_memory_have_the_same_steps(rng, shape):
    values = rng.normal(size=shape[::-1]).astype(np.float32)
    np.testing.assert_array_equal(quanta_of(values.T), quanta_of(np.ascontiguousarray(values.T)))


def test_errors_are_those_of_whole_deltas(rng):
    def module(tail):
        a, b = rng.normal(size=(4, 40)) ** tail, rng.normal(size=(30, 4)) ** tail
        return jlora.ModuleLoRA(a=a.astype(np.float32), b=b.astype(np.float32), alpha=8, scaling=2)

    def delta(a, b):
        return b.astype(np.float64) @ a.astype(np.float64)

    def in_255(rows):
        step = np.abs(rows).max(axis=1, keepdims=True) / 127
        return np.round(rows / step) * step

    modules = {"even": module(1), "tails": module(5)}
    zero = jlora.ModuleLoRA(a=modules["even"].a, b=np.zeros((30, 4), np.float32), alpha=8, scaling=2)
    found = jlora.Adapter(name="x", modules={**modules, "zero": zero}).int8_errors()
    assert list(found) == ["tails", "even", "zero"]
    assert found["zero"] == 0
    for name, one in modules.items():
        want = delta(one.a, one.b)
        change = delta(in_255(one.a), in_255(one.b.T).T) - want
        assert found[name] == pytest.approx(np.linalg.norm(change) / np.linalg.norm(want), rel=1e-3)
