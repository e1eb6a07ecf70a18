"""The XLA backend: values against the NumPy oracle, bitwise untouched rows, transforms, and cost."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.errors import LoRAError
from jlora.pallas import api
from tests import oracle
from tests.pallas.scales import with_scales

pytestmark = [pytest.mark.device, pytest.mark.optimised]

shrink = jax.jit(api.shrink, static_argnames=("backend",))
expand = jax.jit(api.expand, static_argnames=("slice_sizes", "backend"))
add_lora = jax.jit(api.add_lora, static_argnames=("slice_sizes", "backend"))
make_plan = jax.jit(api.make_plan, static_argnames=("num_groups", "tile_m"))


def problem(seed, rows, k, sizes, rank, groups, ids=None, dtype=jnp.float32):
    """Random arrays; every group has ranks of its own, and its factors are zero past them."""
    rng = np.random.default_rng(seed)
    ranks = rng.integers(0, rank + 1, (groups, len(sizes)))
    keep = np.arange(rank) < ranks[..., None]  # [G, n, R]
    a = rng.normal(size=(groups, len(sizes), rank, k)) * keep[..., None]
    b = np.concatenate([rng.normal(size=(groups, rank, s)) * keep[:, i, :, None] for i, s in enumerate(sizes)], axis=2)
    x, base = rng.normal(size=(rows, k)), rng.normal(size=(rows, sum(sizes)))
    ids = rng.integers(-1, groups + 1, rows) if ids is None else np.asarray(ids)
    # NumPy casts, and `jnp.asarray` is not called, since each shape would be one more program.
    arrays = *(v.astype(jnp.dtype(dtype)) for v in (base, x, a, b)), ids.astype(np.int32), ranks.astype(np.int32)
    return jax.device_put(arrays)


def close(got, want, tolerance):
    scale = np.abs(want).max() + 1e-30
    np.testing.assert_allclose(np.asarray(got, np.float64) / scale, np.asarray(want) / scale, atol=tolerance, rtol=0)


def close_in_sum(got, want, terms):
    """Compare within a few float32 units of the sum of the absolute terms, because terms may cancel."""
    assert (np.abs(np.asarray(got, np.float64) - want) <= 5e-7 * terms).all()


@given(
    st.integers(0, 99), st.sampled_from([1, 40]), st.sampled_from([((5,), 3), ((7, 1, 19), 8)]),
    st.sampled_from([None, 3]), st.booleans(),
)  # fmt: skip
def test_values(seed, rows, shape, tile_m, with_ranks):
    (sizes, rank), groups = shape, 4
    base, x, a, b, ids, ranks = problem(seed, rows, 33, sizes, rank, groups)
    plan = make_plan(ids, num_groups=groups, tile_m=tile_m)
    ranks = ranks if with_ranks else None
    got = add_lora(base, x, a, b, plan, slice_sizes=tuple(sizes), ranks=with_scales(ranks), backend="xla")
    terms = oracle.lora_delta(np.abs(x), ids, np.abs(a), np.abs(b), sizes)
    close_in_sum(got, oracle.add_lora(base, x, ids, a, b, sizes), terms + np.abs(base))
    h = shrink(x, a, plan, ranks=with_scales(ranks), backend="xla")
    chex.assert_shape(h, (len(sizes), rows, rank))
    delta = expand(h, b, plan, slice_sizes=tuple(sizes), ranks=with_scales(ranks), backend="xla")
    close_in_sum(delta, oracle.lora_delta(x, ids, a, b, sizes), terms)
    both = expand(h, b, plan, slice_sizes=tuple(sizes), ranks=with_scales(ranks), base=base, backend="xla")
    np.testing.assert_array_equal(both, got)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_once(dtype):
    """The float64 result for the same half-precision inputs, rounded, differs by at most one unit in the last place."""
    sizes = [24, 8]
    base, x, a, b, ids, _ = problem(1, 33, 40, sizes, 8, 4, dtype=dtype)
    got = add_lora(base, x, a, b, api.make_plan(ids, num_groups=4), slice_sizes=tuple(sizes), backend="xla")
    assert got.dtype == dtype
    want = oracle.add_lora(base, x, ids, a, b, sizes)
    unit = np.abs(want) * float(jnp.finfo(dtype).eps) + 1e-4
    assert (np.abs(np.asarray(got, np.float64) - want) <= 0.51 * unit).all()


def test_a_nan_stays_with_its_own_row():
    base, x, a, b, ids, _ = problem(6, 20, 8, [6], 3, 3)
    ids = ids.at[4].set(1)
    plan = api.make_plan(ids, num_groups=3, tile_m=4)
    clean = add_lora(base, x, a, b, plan, backend="xla")
    dirty = add_lora(base, x.at[4].set(jnp.nan), a, b, plan, backend="xla")
    rows = np.arange(20) != 4
    np.testing.assert_array_equal(np.asarray(clean)[rows], np.asarray(dirty)[rows])
    grads = jax.grad(lambda a: add_lora(base, x.at[4].set(jnp.nan), a, b, plan, backend="xla").sum())(a)
    chex.assert_tree_all_finite(np.asarray(grads)[np.array([0, 2])])


def cost(slots, ids, max_active, k=64, n=64, rank=8):
    shape = jax.ShapeDtypeStruct
    rows = len(ids)

    def run(base, x, a, b, ids):
        plan = api.make_plan(ids, num_groups=slots, max_active=max_active)
        return add_lora(base, x, a, b, plan, backend="xla")

    args = (shape((rows, n), jnp.float32), shape((rows, k), jnp.float32), shape((slots, 1, rank, k), jnp.float32),
            shape((slots, rank, n), jnp.float32), shape((rows,), jnp.int32))  # fmt: skip
    analysis = jax.jit(run).lower(*args).compile().cost_analysis()
    return analysis["flops"], analysis["bytes accessed"] - (slots * rank * (k + n) * 4)


@pytest.mark.parametrize(("rows", "max_active"), [(8, 8), (64, 4), (256, 4)])
def test_cost_does_not_grow_with_slots(rows, max_active):
    """XLA's own count of operations, and of bytes beyond one pass over the weights it counts as read."""
    small, *rest = [cost(s, np.zeros(rows, np.int32), max_active) for s in (8, 64, 512)]
    for larger in rest:
        assert larger[0] <= small[0] * 1.05
        assert larger[1] <= small[1] * 1.10


@pytest.mark.device("cpu")  # counts the operations of the program that XLA makes for a CPU
def test_few_rows_are_cheap_and_many_share_their_weights():
    """A row alone costs its own 2 r (K + N) operations; many rows of one adapter do not copy A once a row."""
    k = n = 256
    flops, _ = cost(64, np.zeros(1, np.int32), 1, k, n)
    assert flops < 4 * 2 * 8 * (k + n)
    ids = jnp.zeros(1024, jnp.int32)
    plan = api.make_plan(ids, num_groups=64, max_active=4, backend="xla")
    assert plan.num_tiles <= 1024 // 32


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((4, 6))}, "x must be"),
        ({"x": jnp.zeros((5, 6), jnp.int32)}, "x must be bfloat16"),
        ({"a": jnp.zeros((2, 1, 3, 7))}, "a must be"),
        ({"b": jnp.zeros((3, 3, 4))}, "b must be"),
        ({"b": jnp.zeros((2, 4, 4))}, "disagree"),
        ({"base": jnp.zeros((5, 5))}, "base must be"),
        ({"slice_sizes": (3, 2)}, "slice_sizes"),
        ({"ranks": jnp.zeros((2, 2), jnp.int32)}, "ranks must be"),
    ],
)
def test_bad_shapes_raise(change, message):
    args = {
        "base": jnp.zeros((5, 4)), "x": jnp.zeros((5, 6)), "a": jnp.zeros((2, 1, 3, 6)), "b": jnp.zeros((2, 3, 4)),
        "plan": api.make_plan(jnp.zeros(5, jnp.int32), num_groups=2),
    }  # fmt: skip
    with pytest.raises(LoRAError, match=message):
        api.add_lora(**{**args, **change})


def test_gradients_need_no_float32_array_of_all_groups():
    """float16, because XLA computes updates of bfloat16 arrays in float32 on a CPU."""
    base, x, a, b, ids, _ = problem(0, 32, 512, (256,), 8, 128, dtype="float16")
    plan = make_plan(ids, num_groups=128, tile_m=8)

    def backward(base, x, a, b, plan):
        return jax.vjp(lambda *v: api.add_lora(base, *v, plan, backend="xla"), x, a, b)[1](base)

    memory = jax.jit(backward).lower(base, x, a, b, plan).compile().memory_analysis()
    assert memory.temp_size_in_bytes < a.nbytes + b.nbytes
