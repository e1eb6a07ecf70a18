"""Factors in int8 with a scale a row give the products of the dequantized factors.

From the true rank on, int8 factors hold other values and the scales NaN. The oracle's factors hold zeros there.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora import ops
from jlora.errors import LoRAError
from jlora.pallas import api, gradients
from jlora.pallas.triton import fused
from tests import oracle
from tests.pallas.running import interpret_of
from tests.pallas.test_moe import routed
from tests.pallas.test_ranks import MOSAIC, TRITON, XLA, backward_of, compiled, run_of
from tests.pallas.test_xla import close

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("quickly_compiled")]

SIZES, K, RANK, ROWS = (20, 9), 40, 24, 13
IDS = np.array([0, 1, 0, 4, 1, 2, 0, 2, 1, 3, -1, 3, 3])
OWNED = (IDS >= 0) & (IDS < 4)
RANKS = np.array([[17, 0], [24, 3], [0, 0], [16, 20]])
ROW_SCALES = np.array([1, -1, 0.125, 3, 0.7, 1, 1, 9, 1, -2, np.nan, 0, 50], np.float32)  # NaN is that of no group
BACKENDS = pytest.mark.parametrize("backend", [XLA, TRITON])
EVERY = pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])


def factors(ranks, rank, k, sizes):
    """Return a, b and `ranks` as the kernels take them, then a and b dequantized in float64, zero past the ranks."""
    rng = np.random.default_rng(0)
    groups, n = ranks.shape
    a = rng.integers(-127, 128, (groups, n, rank, k)).astype(np.int8)
    b = rng.integers(-127, 128, (groups, rank, sum(sizes))).astype(np.int8)
    below = np.arange(rank) < ranks[..., None]  # [G, n, R]
    scales = np.where(below, rng.uniform(-1, 1, below.shape) * 1e-4, np.nan).astype(np.float32)
    with_scales = np.concatenate([ranks[..., None].astype(np.float32), scales], axis=2)
    of_columns = np.repeat(np.where(below, scales, 0).astype(np.float64), sizes, axis=1).swapaxes(1, 2)
    exact = np.where(below[..., None], a, 0).astype(np.float64), np.where(of_columns == 0, 0, b * of_columns)
    return *jax.device_put((a, b, with_scales)), *exact


def rows_of(dtype, count=ROWS):
    rng = np.random.default_rng(1)
    return (jax.device_put(rng.normal(size=(count, size)).astype(jnp.dtype(dtype))) for size in (sum(SIZES), K))


def norm_close(got, want, tolerance):
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= tolerance * np.linalg.norm(want)


@BACKENDS
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 5e-3), ("float16", 1e-3)])
def test_add_lora(backend, dtype, tolerance):
    """With a base and without one, and with factors of rows. Rows without a group and rank 0 keep the base's bits."""
    a, b, ranks, *exact = factors(RANKS, RANK, K, SIZES)
    base, x = rows_of(dtype)
    plan = ops.make_plan(jnp.asarray(IDS), num_groups=4, tile_m=16)
    run = compiled(backend, "add_lora")
    want = oracle.lora_delta(x, IDS, *exact, SIZES)
    delta = run(None, x, a, b, plan, slice_sizes=SIZES, ranks=ranks)
    assert delta.dtype == jnp.float32
    norm_close(delta, want, tolerance)
    scaled = run(base, x, a, b, plan.scaled(ROW_SCALES), slice_sizes=SIZES, ranks=ranks)
    assert scaled.dtype == dtype
    want = want * np.where(OWNED, ROW_SCALES, 0)[:, None]
    norm_close(scaled, np.asarray(base, np.float64) + want, tolerance)
    np.testing.assert_array_equal(np.asarray(scaled, np.float64)[want == 0], np.asarray(base, np.float64)[want == 0])


@EVERY
def test_the_full_rank_and_scales_of_nan_reach_every_column(backend):
    a, b, ranks, *_ = factors(RANKS, RANK, K, SIZES)
    base, x = rows_of("float32")
    plan = ops.make_plan(jnp.asarray(IDS), num_groups=4, tile_m=16).scaled(np.ones(ROWS, np.float32))
    run = compiled(backend, "add_lora")
    ranks = jnp.full_like(ranks, jnp.nan).at[..., 0].set(RANK)
    assert np.isnan(np.asarray(run(base, x, 0 * a, b, plan, slice_sizes=SIZES, ranks=ranks))[OWNED]).all()


@EVERY
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_shrink_then_expand(backend, dtype):
    """h is that of the int8 values, and the delta alone is float32."""
    a, b, ranks, *exact = factors(RANKS, RANK, K, SIZES)
    base, x = rows_of(dtype)
    plan = ops.make_plan(jnp.asarray(IDS), num_groups=4, tile_m=16)
    h = compiled(backend, "shrink")(x, a, plan, ranks=ranks)
    of_rows = np.einsum("mk,mnrk->nmr", np.asarray(x, np.float64), exact[0][np.where(OWNED, IDS, 0)])
    close(h, of_rows * OWNED[None, :, None], 2e-6)
    h = jnp.where(np.arange(RANK) < np.where(OWNED[:, None], RANKS[IDS % 4], 0).T[..., None], h, jnp.nan)
    expand = compiled(backend, "expand")
    delta = expand(h, b, plan, slice_sizes=SIZES, base=None, ranks=ranks)
    assert delta.dtype == jnp.float32
    want = oracle.lora_delta(x, IDS, *exact, SIZES)
    close(delta, want, 2e-6)
    total = expand(h, b, plan, slice_sizes=SIZES, base=base, ranks=ranks)
    norm_close(total, np.asarray(base, np.float64) + want, 2e-6 if dtype == "float32" else 5e-3)


@EVERY
def test_gradients(backend):
    """x and base have gradients, and int8 factors none."""
    a, b, ranks, *exact = factors(RANKS, RANK, K, SIZES)
    base, x = rows_of("float32")
    plan = ops.make_plan(jnp.asarray(IDS), num_groups=4, tile_m=16).scaled(ROW_SCALES)
    run, backward = run_of(backend, "add_lora"), backward_of(backend)

    def call(base, x, a, b):
        return gradients.add_lora(run, backward, SIZES, base, x, a, b, plan, ranks)

    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=base.shape), jnp.float32)
    dbase, dx, da, db = jax.jit(lambda *v: jax.vjp(call, *v)[1](cotangent))(base, x, a, b)
    np.testing.assert_array_equal(dbase, cotangent)
    rows = np.where(OWNED, ROW_SCALES, 0)
    want, _, _ = oracle.lora_gradients(cotangent, x, IDS, *exact, SIZES, row_scales=rows)
    close(dx, want, 1e-5)
    assert {da.dtype, db.dtype} == {jax.dtypes.float0}


@pytest.mark.parametrize("fuse", [True, False], ids=["one launch", "two"])
def test_experts(fuse):
    """Rows of x are indexed, and B is that of an expert's slot."""
    d = routed(23, 23, 4, 3, 6, 5, 20, (11, 8))
    a, b, ranks, *exact = factors(np.asarray(d["ranks"]), 5, 20, (11, 8))
    row_scales = np.random.default_rng(1).normal(size=len(d["group"])).astype(np.float32)
    plan = ops.make_plan(d["group"], num_groups=18, tile_m=16).scaled(row_scales)
    given = {"slice_sizes": (11, 8), "ranks": ranks, "x_rows": d["token"]}
    want = row_scales[:, None] * oracle.lora_delta(np.asarray(d["x"])[d["token"]], d["group"], *exact, (11, 8))
    grouped = np.asarray(d["group"]) >= 0
    if fuse:
        options = {"dtype": jnp.float32, "block_n": 16, "block_k": 16, "interpret": interpret_of("triton")}
        got = [fused.delta(d["x"], a, b, plan, **given, **options)]
    else:
        runs = [jax.jit(partial(run_of(name, "add_lora"), None, slice_sizes=(11, 8))) for name in ("triton", "xla")]
        got = [run(d["x"], a, b, plan, ranks=ranks, x_rows=d["token"]) for run in runs]
    for delta in got:
        close(np.asarray(delta)[grouped], want[grouped], 2e-6)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_row_has_the_same_bits_in_any_order(batch_invariant):
    a, b, ranks, *_ = factors(RANKS, RANK, K, SIZES)
    base, x = rows_of("bfloat16")
    run = jax.jit(partial(run_of("triton", "add_lora"), batch_invariant=batch_invariant), static_argnames="slice_sizes")

    def bits(order):
        plan = ops.make_plan(jnp.asarray(IDS[order]), num_groups=4, tile_m=16)
        return np.asarray(run(base[order], x[order], a, b, plan, slice_sizes=SIZES, ranks=ranks), np.float32)

    straight, order = bits(np.arange(ROWS)), np.random.default_rng(2).permutation(ROWS)
    np.testing.assert_array_equal(bits(np.arange(ROWS)), straight)
    np.testing.assert_array_equal(bits(order), straight[order])


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b": jnp.zeros((4, RANK, 29))}, "a and b must both be int8, or neither, got a int8 and b float32"),
        ({"a": jnp.zeros((4, 2, RANK, K), jnp.uint8)}, "a must be bfloat16, float16, float32 or int8, got uint8"),
        ({"ranks": jnp.zeros((4, 2, 2))}, r"\[G, n, 1 \+ R\] = \[4, 2, 25\] of ranks and scales of the rows of int8"),
        ({"base": jnp.zeros((ROWS, 29), jnp.int8)}, "base must be bfloat16, float16 or float32, got int8"),
        ({"x": jnp.zeros((ROWS, K), jnp.int8)}, "x must be bfloat16, float16 or float32, got int8"),
    ],
)
def test_wrong_operands_are_refused(given, message):
    a, b, ranks, *_ = factors(RANKS, RANK, K, SIZES)
    base, x = rows_of("float32")
    plan = api.make_plan(jnp.asarray(IDS), num_groups=4)
    with pytest.raises(LoRAError, match=message):
        api.add_lora(plan=plan, slice_sizes=SIZES, **({"base": base, "x": x, "a": a, "b": b, "ranks": ranks} | given))
