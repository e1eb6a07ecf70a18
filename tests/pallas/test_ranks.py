"""Ranks and scales of groups and slices, and scales of rows. Values past a rank never reach a result or a gradient.

The factors hold zeros from each rank on, and NaN past the rank rounded up to 16.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.errors import LoRAError
from jlora.pallas import api, gradients, xla
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.triton import lora as triton
from tests import oracle
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import close
from tests.pallas.triton.test_lora import TILES

pytestmark = pytest.mark.device

SIZES, K, RANK, ROWS = (20, 9), 40, 40, 13
IDS = np.array([0, 1, 0, 4, 1, 2, 0, 2, 1, 3, -1, 3, 3])
OWNED = (IDS >= 0) & (IDS < 4)
RANKS = np.array([[17, 0], [40, 3], [0, 0], [16, 33]])
SCALES = np.array([[1 / 1024, 5], [64, -0.3], [2, 7], [-2, 1 / 3]], np.float32)
ROW_SCALES = np.array([1, -1, 0.125, 3, 0.7, 1, 1, 9, 1, -2, np.nan, 0, 1e3], np.float32)  # NaN is that of no group
ROW_RANKS = np.where(OWNED[:, None], RANKS[np.where(OWNED, IDS, 0)], 0)  # [M, n]
OF_ROWS = np.where(OWNED, ROW_SCALES, 0)
BACKENDS = {"xla": xla, "triton": triton, "mosaic_tpu": mosaic_tpu}
XLA = pytest.param("xla", marks=pytest.mark.optimised)
TRITON = pytest.param("triton", marks=pytest.mark.device("gpu"))
MOSAIC = pytest.param("mosaic_tpu", marks=pytest.mark.device("tpu"))
SLOW_MOSAIC = pytest.param(*MOSAIC.values, marks=[*MOSAIC.marks, pytest.mark.slow])
EACH_BACKEND = pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])


@pytest.fixture(autouse=True)
def interpreted(request):
    """Compile interpreted kernels quickly, because users never run them."""
    if "backend" in request.fixturenames and request.getfixturevalue("backend") != "xla":
        request.getfixturevalue("quickly_compiled")


def run_of(backend, op):
    run = getattr(BACKENDS[backend], op)
    if backend == "triton":
        return partial(run, tiles=TILES, interpret=interpret_of("triton"))
    return partial(run, interpret=interpret_of("mosaic_tpu")) if backend == "mosaic_tpu" else run


@cache
def compiled(backend, op):
    """Return the jitted function, whose programs the tests of one shape share."""
    return jax.jit(run_of(backend, op), static_argnames=() if op == "shrink" else "slice_sizes")


class Backward(NamedTuple):
    """The functions of a backend's backward pass, interpreted where the platform cannot run them."""

    shrink_grads: Callable
    expand_grads: Callable


def backward_of(backend):
    if backend == "xla":
        return xla
    interpret = interpret_of(backend)
    return Backward(
        *(partial(getattr(BACKENDS[backend].backward, name), interpret=interpret) for name in Backward._fields)
    )


def of_columns(values):
    return np.repeat(values, SIZES, axis=1).swapaxes(1, 2)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    shapes = (ROWS, sum(SIZES)), (ROWS, K), (4, 2, RANK, K), (4, RANK, sum(SIZES))
    base, x, a, b = (rng.normal(size=shape) for shape in shapes)
    zero = np.arange(RANK) >= RANKS[..., None]
    past = np.arange(RANK) >= np.minimum(-(-RANKS // 16) * 16, RANK)[..., None]
    a = np.where(past[..., None], np.nan, np.where(zero[..., None], 0, a))
    b = np.where(of_columns(past), np.nan, np.where(of_columns(zero), 0, b))
    plan = api.make_plan(jnp.asarray(IDS), num_groups=4, tile_m=16)
    return *jax.device_put([v.astype(np.float32) for v in (base, x, a, b)]), plan


def reference(base, x, a, b):
    """Return the oracle's sum in float64, with the scales in b."""
    a, b = np.nan_to_num(np.asarray(a, np.float64)), np.nan_to_num(np.asarray(b, np.float64))
    delta = oracle.lora_delta(x, IDS, a, b * np.repeat(SCALES, SIZES, axis=1)[:, None], SIZES)
    return np.asarray(base, np.float64) + OF_ROWS[:, None] * delta


def close_rows(got, want, tolerance):
    """Compare row by row, because rows differ by orders of magnitude."""
    for have, expected in zip(got, want, strict=True):
        close(have, expected, tolerance)


def untouched_bits(got, base):
    """Check that rows without a group and slices of rank 0 have the bits of the base."""
    untouched = np.repeat(ROW_RANKS == 0, SIZES, axis=1)
    np.testing.assert_array_equal(
        np.asarray(got)[untouched].view(np.uint32), np.asarray(base)[untouched].view(np.uint32)
    )


@EACH_BACKEND
def test_add_lora(operands, backend):
    base, x, a, b, plan = operands
    base = base.at[:, ::2].set(-0.0)
    run = compiled(backend, "add_lora")
    got = run(base, x, a, b, plan.scaled(ROW_SCALES), slice_sizes=SIZES, ranks=with_scales(RANKS, SCALES))
    close_rows(got, reference(base, x, a, b), 2e-6)
    untouched_bits(got, base)


@pytest.mark.parametrize("backend", [XLA, TRITON, SLOW_MOSAIC])
def test_shrink_is_unscaled_and_expand_scales(operands, backend):
    """The intermediate may hold NaN past the rank of its row, as one that is gathered from the slots of a table."""
    base, x, a, b, plan = operands
    ranks, plan = with_scales(RANKS, SCALES), plan.scaled(ROW_SCALES)
    h = compiled(backend, "shrink")(x, a, plan, ranks=ranks)
    of_row = np.nan_to_num(np.asarray(a, np.float64))[np.where(OWNED, IDS, 0)] * OWNED[:, None, None, None]
    close(h, np.einsum("mk,mnrk->nmr", np.asarray(x, np.float64), of_row), 2e-6)
    h = jnp.where(np.arange(RANK) < ROW_RANKS.T[..., None], h, jnp.nan)
    expand = compiled(backend, "expand")
    for given in (base, None):
        got = expand(h, b, plan, slice_sizes=SIZES, base=given, ranks=ranks)
        close_rows(got, reference(np.zeros_like(base) if given is None else given, x, a, b), 3e-6)


@EACH_BACKEND
def test_the_full_rank_and_a_scale_of_nan_reach_every_column(operands, backend):
    """A copy of the model that missed a write has these, whatever its factors are."""
    base, x, a, b, plan = operands
    run = compiled(backend, "add_lora")
    ranks, plan = with_scales(np.full_like(RANKS, RANK), np.nan), plan.scaled(np.ones(ROWS, np.float32))
    got = np.asarray(run(base, x, 0 * jnp.nan_to_num(a), jnp.nan_to_num(b), plan, slice_sizes=SIZES, ranks=ranks))
    assert np.isnan(got[OWNED]).all()
    np.testing.assert_array_equal(got[~OWNED], base[~OWNED])


def test_a_scaled_float16_intermediate_may_exceed_its_range():
    x, a = jnp.full((2, 64), 8.0, jnp.float16), jnp.full((1, 1, 4, 64), 8.0, jnp.float16)
    b = jnp.full((1, 4, 16), 1e-3, jnp.float16)
    plan = api.make_plan(jnp.zeros(2, jnp.int32), num_groups=1, tile_m=16)
    for backend in ("xla", "triton"):
        run = compiled(backend, "add_lora")
        zeros, ranks = jnp.zeros((2, 16), jnp.float16), with_scales([[4]], 64)
        got = run(zeros, x, a, b, plan, slice_sizes=(16,), ranks=ranks)
        close(got, 64 * oracle.lora_delta(x, [0, 0], a, b), 5e-3)


@pytest.mark.parametrize("backend", [XLA, TRITON, SLOW_MOSAIC])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_delta_alone(operands, backend, dtype):
    """It is float32, and adding it to a base keeps the bits of base where there is no adapter."""
    *arrays, plan = operands
    base, x, a, b = (v.astype(dtype) for v in arrays)
    base = base.at[:, ::2].set(-0.0)
    run = compiled(backend, "add_lora")
    delta = run(None, x, a, b, plan.scaled(ROW_SCALES), slice_sizes=SIZES, ranks=with_scales(RANKS, SCALES))
    assert delta.dtype == jnp.float32
    close_rows(delta, reference(np.zeros_like(base), x, a, b), 2e-6 if dtype == "float32" else 1e-2)
    untouched_bits(base.astype(jnp.float32) + delta, base.astype(jnp.float32))


def pulled(call, *given):
    """Return a cotangent, and the gradients of `given` for it."""
    shape = jax.eval_shape(call, *given).shape
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    return cotangent, jax.jit(lambda given, cotangent: jax.vjp(call, *given)[1](cotangent))(given, cotangent)


@pytest.mark.parametrize("backend", [XLA, TRITON, SLOW_MOSAIC])
@pytest.mark.parametrize("alone", [False, True], ids=["", "delta"])
def test_gradients(operands, backend, alone):
    base, x, a, b, plan = operands
    ranks, run, backward = with_scales(RANKS, SCALES), run_of(backend, "add_lora"), backward_of(backend)
    plan = plan.scaled(ROW_SCALES)

    def call(base, *v):
        out = gradients.add_lora(run, backward, SIZES, None if alone else base, *v, plan, ranks)
        return base + out if alone else out

    cotangent, got = pulled(call, base, x, a, b)
    want = oracle.lora_gradients(cotangent, x, IDS, a, b, SIZES, ranks, OF_ROWS)
    for have, expected in zip(got, (cotangent, *want), strict=True):
        close(have, expected, 1e-5)


@EACH_BACKEND
def test_gradients_of_shrink(operands, backend):
    """The oracle's are those of an expand by the identity, without scales."""
    _, x, a, _, plan = operands
    run, backward = run_of(backend, "shrink"), backward_of(backend)

    def call(x, a):
        return gradients.shrink(run, backward, x, a, plan.scaled(ROW_SCALES), with_scales(RANKS, SCALES))

    cotangent, got = pulled(call, x, a)
    dout, identity = np.moveaxis(cotangent, 0, 1).reshape(ROWS, -1), np.tile(np.eye(RANK), (4, 1, 2))
    want = oracle.lora_gradients(dout, x, IDS, a, identity, (RANK, RANK), with_scales(RANKS))
    for have, expected in zip(got, want, strict=False):
        close(have, expected, 1e-5)


@EACH_BACKEND
def test_gradients_of_expand(operands, backend):
    """The oracle's are those of a shrink by the identity."""
    base, x, a, b, plan = operands
    ranks, run, backward = with_scales(RANKS, SCALES), run_of(backend, "expand"), backward_of(backend)
    plan = plan.scaled(ROW_SCALES)
    h = np.asarray(compiled("xla", "shrink")(x, a, plan, ranks=ranks))
    bad_h = jnp.asarray(np.where(np.arange(RANK) < ROW_RANKS.T[..., None], h, np.nan))

    def call(h, b, base):
        return gradients.expand(run, backward, SIZES, h, b, plan, base, ranks)

    cotangent, (dh, db, dbase) = pulled(call, bad_h, b, base)
    identity = np.broadcast_to(np.eye(2 * RANK).reshape(2, RANK, -1), (4, 2, RANK, 2 * RANK))
    flat = np.moveaxis(h, 0, 1).reshape(ROWS, -1)
    want_h, _, want_b = oracle.lora_gradients(cotangent, flat, IDS, identity, b, SIZES, ranks, OF_ROWS)
    close(dh, np.moveaxis(want_h.reshape(ROWS, 2, RANK), 1, 0), 1e-5)
    close(db, want_b, 1e-5)
    np.testing.assert_array_equal(dbase, cotangent)


def test_ranks_and_scales_are_constants_of_gradients(operands):
    base, x, a, b, plan = operands

    def loss(ranks, row_scales):
        scaled_plan = plan.scaled(row_scales)
        return api.add_lora(base, x, a, b, scaled_plan, slice_sizes=SIZES, ranks=ranks, backend="xla").sum()

    for gradient in jax.jit(jax.grad(loss, (0, 1)))(with_scales(RANKS, SCALES), jnp.asarray(ROW_SCALES)):
        assert not np.asarray(gradient).any()


@pytest.mark.usefixtures("unchecked_calls")
def test_wrong_scales_are_refused(operands):
    base, x, a, b, plan = operands
    for ranks, message in (
        (jnp.zeros((4, 2, 3)), r"ranks must be float32 \[G, n, 2\] = \[4, 2, 2\]"),
        (jnp.asarray(RANKS), r"ranks must be .* got int32\[4, 2\]"),
        (jnp.zeros((4, 2, 2), jnp.bfloat16), r"ranks must be .* got bfloat16\[4, 2, 2\]"),
    ):
        with pytest.raises(LoRAError, match=message):
            api.add_lora(base, x, a, b, plan, slice_sizes=SIZES, ranks=ranks)
    for scales in (jnp.zeros(ROWS - 1), jnp.zeros(ROWS, jnp.bfloat16)):
        with pytest.raises(LoRAError, match=r"row_scales must be float32 \[M\] = \[13\]"):
            plan.scaled(scales)


@pytest.mark.parametrize("alone", [False, True], ids=["", "delta"])
def test_scales_of_rows_need_no_launch(alone):
    struct = jax.ShapeDtypeStruct
    shapes = (64, 768), (64, 512), (8, 2, 16, 512), (8, 16, 768)
    floats = [struct((64,), "float32"), struct((8, 2, 2), "float32")]
    args = *(struct(shape, "bfloat16") for shape in shapes), *floats, struct((64,), "int32")

    def run(base, x, a, b, row_scales, ranks, ids):
        plan = api.make_plan(ids, num_groups=8, backend="triton").scaled(row_scales)
        options = {"slice_sizes": (512, 256), "ranks": ranks, "backend": "triton"}
        return api.add_lora(None if alone else base, x, a, b, plan, **options)

    text = lowered_text(run, args, "cuda")
    kernels = text.count("custom_call @__gpu$xla.gpu.triton") + text.count("custom_call @triton_kernel_call_ffi")
    assert kernels == (2 if alone else 3)  # with a base, one comes after its product
