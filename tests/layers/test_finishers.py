"""Finishers follow the sum of base output and delta: their values, their errors, and the rows that keep the base."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.layers.variants.dora import SCALE_COLUMNS
from jlora.pallas import api
from tests import oracle
from tests.pallas.test_ranks import TRITON, XLA, run_of

pytestmark = pytest.mark.device

M, K, N, RANK, SLOTS = 40, 32, 48, 4, 3
SLOT_OF_ROW = np.arange(M) % (SLOTS + 1)  # the last id is no slot


def scale_columns(y, base, bias, magnitudes, slots=SLOT_OF_ROW):
    return SCALE_COLUMNS.apply(y, jnp.zeros((len(y), K)), base, bias, magnitudes, jnp.asarray(slots))


def scaled(y, bias, magnitudes):
    """Return DoRA's columns in float64, and rows without a slot as they are."""
    y, rows = np.asarray(y, np.float64), np.concatenate([magnitudes, np.ones((1, N))])[SLOT_OF_ROW]
    return bias + rows * (y - bias)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = (M, N), (M, K), (SLOTS, 1, RANK, K), (SLOTS, RANK, N)
    base, x, a, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    magnitudes = rng.uniform(0.25, 4, (SLOTS, N)).astype(np.float32)
    magnitudes[:, ::3] = 1
    return base, x, a / np.float32(np.sqrt(K)), b, magnitudes


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("backend", [XLA, TRITON])
@pytest.mark.parametrize("size", [0.1, 10])
def test_errors_of_a_bfloat16_layer(arrays, backend, size):
    """They are at most 1.5 times those of a sum that is in float32 and rounded once."""
    *arrays, magnitudes = arrays
    base, x, a, b = jax.device_put([v.astype(jnp.bfloat16) for v in (*arrays[:3], arrays[3] * size)])
    bias = jnp.linspace(-1, 1, N, dtype=jnp.bfloat16)
    plan = api.make_plan(jnp.asarray(SLOT_OF_ROW), num_groups=SLOTS, tile_m=16)
    run = partial(jax.jit(run_of(backend, "add_lora"), static_argnames="slice_sizes"), slice_sizes=(N,), ranks=None)
    wide = base.astype(jnp.float32)
    apart, once = wide + run(None, x, a, b, plan), run(wide, x, a, b, plan)
    exact = scaled(oracle.add_lora(base, x, SLOT_OF_ROW, a, b), np.asarray(bias, np.float64), magnitudes)

    def error(y):
        got = jax.jit(scale_columns)(y, base, bias, magnitudes).astype(jnp.bfloat16)
        return np.sqrt(np.mean((np.asarray(got, np.float64) - exact) ** 2))

    assert 0 < error(apart) <= 1.5 * error(once)


@pytest.mark.parametrize("with_bias", [False, True])
def test_magnitudes_of_one_change_no_bit(arrays, with_bias):
    y, *_, magnitudes = arrays
    y = jnp.asarray(y).at[::2, ::2].set(-0.0)
    bias = jnp.linspace(-1, 1, N, dtype=jnp.float32) if with_bias else None
    got = jax.jit(scale_columns)(y, y, bias, jnp.asarray(magnitudes))
    np.testing.assert_allclose(
        got, scaled(y, 0 if bias is None else np.asarray(bias), magnitudes), rtol=1e-6, atol=1e-6
    )
    same = np.concatenate([magnitudes, np.ones((1, N))])[SLOT_OF_ROW] == 1
    np.testing.assert_array_equal(np.asarray(got)[same].view(np.uint32), np.asarray(y)[same].view(np.uint32))


def test_gradients(arrays):
    y, *_, magnitudes = arrays
    cotangent = np.random.default_rng(1).normal(size=y.shape).astype(np.float32)
    bias = jnp.linspace(-1, 1, N, dtype=jnp.float32)
    pull = jax.jit(lambda *v: jax.vjp(lambda y, b, m: scale_columns(y, y, b, m), *v)[1](cotangent))
    of_y, of_bias, of_magnitudes = pull(jnp.asarray(y), bias, jnp.asarray(magnitudes))
    want = np.concatenate([magnitudes, np.ones((1, N))])[SLOT_OF_ROW] * cotangent
    np.testing.assert_allclose(of_y, want, rtol=1e-6)
    np.testing.assert_allclose(of_bias, (cotangent - want).sum(0), rtol=1e-4, atol=1e-5)
    assert not np.asarray(of_magnitudes).any()
