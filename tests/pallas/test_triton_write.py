"""The write of a block in one launch: values in interpret mode against NumPy, and lowering for CUDA without a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas.triton.write import can_write, write_rows
from tests.pallas.lowering import lowered_text


def problem(rng, rows, slots, slices, ranks, step, k, n, dtype=jnp.bfloat16):
    def random(*shape):
        return jnp.asarray(rng.integers(-100, 100, shape), dtype)

    all_a = [random(slots, slices, ranks, k) for _ in range(rows)]
    all_b = [random(slots, ranks, n) for _ in range(rows)]
    return all_a, all_b, random(rows, slices, step, k), random(rows, step, n)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("rows", "slots", "slices", "ranks", "step", "k", "n", "slot", "start"),
    [
        (2, 1, 1, 1, 1, 1, 1, 0, 0),
        (3, 4, 1, 16, 16, 300, 7, 2, 0),  # A of three tiles, B of one
        (2, 3, 3, 40, 16, 5, 400, 1, 24),  # several slices, ranks in the middle of a slot, B of four tiles
        (5, 2, 2, 12, 12, 64, 96, 0, 0),
        (2, 3, 1, 16, 16, 128, 256, 2, 0),  # whole tiles
    ],
)
def test_what_it_writes_and_what_it_leaves_alone(rng, rows, slots, slices, ranks, step, k, n, slot, start, dtype):
    all_a, all_b, a, b = problem(rng, rows, slots, slices, ranks, step, k, n, dtype)
    got = write_rows(all_a, all_b, a, b, jnp.int32(slot), jnp.int32(start), interpret=True)
    for i in range(rows):
        want_a, want_b = np.array(all_a[i]), np.array(all_b[i])
        want_a[slot, :, start : start + step] = a[i]
        want_b[slot, start : start + step] = b[i]
        np.testing.assert_array_equal(got[i], want_a)
        np.testing.assert_array_equal(got[rows + i], want_b)


def test_it_is_one_kernel_for_an_nvidia_gpu(rng):
    args = (*problem(rng, 3, 2, 2, 16, 16, 64, 96), jnp.int32(1), jnp.int32(0))
    text = lowered_text(write_rows, args, "cuda")
    assert text.count("stablehlo.custom_call") == 1
    assert "dynamic_update_slice" not in text


def test_arrays_that_are_donated_are_written_in_place(rng):
    all_a, all_b, a, b = problem(rng, 3, 2, 1, 16, 16, 8, 8)
    write = jax.jit(partial(write_rows, interpret=True), donate_argnums=(0, 1))
    write(all_a, all_b, a, b, jnp.int32(1), jnp.int32(0))
    assert all(array.is_deleted() for array in (*all_a, *all_b))


class Device:
    def __init__(self, platform, capability):
        self.platform = platform
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("device", "largest", "can"),
    [
        (Device("gpu", "9.0"), 2**30, True),
        (Device("gpu", "8.0"), 2**30, True),
        (Device("gpu", "7.5"), 2**30, False),
        (Device("gpu", "gfx942"), 2**30, False),
        (Device("gpu", "9.0"), 2**31, False),  # past what int32 counts
        (Device("cpu", None), 8, False),
        (Device("tpu", None), 8, False),
    ],
)
@pytest.mark.usefixtures("unchecked_calls")
def test_where_it_runs(device, largest, can):
    assert can_write(device, largest) is can
