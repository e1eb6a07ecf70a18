"""Sums of partial results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas.triton.parts import add_in_order


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 501, 2048])
def test_each_part_is_added_once(count):
    parts = np.random.default_rng(count).integers(-8, 8, (count, 3, 2)).astype(np.float32)  # sums are exact
    np.testing.assert_array_equal(jax.jit(add_in_order)(parts), parts.sum(axis=0))


def test_the_order_of_a_sum_depends_on_the_number_of_parts_alone():
    parts = jnp.asarray(np.random.default_rng(0).standard_normal((501, 8), np.float32))
    whole = jax.jit(add_in_order)(parts)
    np.testing.assert_array_equal(jax.jit(add_in_order)(parts[:, 3:5]), whole[3:5])
