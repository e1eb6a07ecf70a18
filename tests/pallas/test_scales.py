"""Scales of groups, slices and rows, multiplied into the rank-R intermediate.

The factors hold NaN from the true rank on. The oracle's second factor is multiplied by the scales in float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora import ops
from jlora.errors import LoRAError
from jlora.pallas import api, gradients
from jlora.pallas.triton import fused as triton_fused
from tests import oracle
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_moe import routed
from tests.pallas.test_ranks import MOSAIC, TRITON, XLA, backward_of, run_of
from tests.pallas.test_xla import close

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("quickly_compiled")]

SIZES, K, RANK, ROWS = (20, 9), 40, 24, 13
IDS = np.array([0, 1, 0, 4, 1, 2, 0, 2, 1, 3, -1, 3, 3])
RANKS = np.array([[17, 0], [24, 3], [0, 0], [16, 20]])
SCALES = np.array([[1 / 1024, 5], [64, -0.3], [2, 7], [-2, 1 / 3]], np.float32)
ROW_SCALES = np.array([1, -1, 0.125, 3, 0.7, 1, 1, 9, 1, -2, np.nan, 0, 1e3], np.float32)  # NaN is that of no group
OWNED = (IDS >= 0) & (IDS < 4)
BACKENDS = pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
SLOW_MOSAIC = pytest.param(*MOSAIC.values, marks=[*MOSAIC.marks, pytest.mark.slow])
THINNED_BACKENDS = pytest.mark.parametrize("backend", [XLA, TRITON, SLOW_MOSAIC])


def scaled(a, b, ranks, scales, sizes):
    """Return a and b in float64, zero past the ranks, b with the scales of its columns."""
    keep = np.arange(a.shape[2]) < ranks[..., None]
    of_column = np.repeat(np.where(ranks > 0, scales, 0), sizes, axis=1)[:, None, :]
    kept = np.repeat(keep, sizes, axis=1).swapaxes(1, 2)
    return np.where(keep[..., None], a, 0), np.where(kept, b, 0) * of_column


def reference(base, x, a, b, scales=SCALES, row_scales=None):
    delta = oracle.lora_delta(x, IDS, *scaled(a, b, RANKS, scales, SIZES), SIZES)
    factor = np.ones(ROWS) if row_scales is None else np.where(OWNED, row_scales, 0)
    return np.asarray(base, np.float64) + factor[:, None] * delta


@pytest.fixture
def operands():
    """Base, x, and a and b that are NaN past the ranks rounded up to 16; a plan."""
    rng = np.random.default_rng(0)
    shapes = (ROWS, sum(SIZES)), (ROWS, K), (4, 2, RANK, K), (4, RANK, sum(SIZES))
    base, x, a, b = (rng.normal(size=shape) for shape in shapes)
    past = np.arange(RANK) >= np.minimum(-(-RANKS // 16) * 16, RANK)[..., None]
    zero = np.arange(RANK) >= RANKS[..., None]
    of_columns = [np.repeat(mask, SIZES, axis=1).swapaxes(1, 2) for mask in (zero, past)]
    a = np.where(past[..., None], np.nan, np.where(zero[..., None], 0, a))
    b = np.where(of_columns[1], np.nan, np.where(of_columns[0], 0, b))
    plan = api.make_plan(jnp.asarray(IDS), num_groups=4, tile_m=16)
    return *(jnp.asarray(v, jnp.float32) for v in (base, x, a, b)), plan


def untouched_bits(got, base):
    """Check that rows without a group and slices of rank 0 have the bits of the base."""
    touched = np.where(OWNED[:, None], np.repeat(RANKS[np.where(OWNED, IDS, 0)] > 0, SIZES, axis=1), False)
    assert not touched.all(axis=1).all()
    np.testing.assert_array_equal(np.asarray(got)[~touched].view(np.uint32), np.asarray(base)[~touched].view(np.uint32))


@BACKENDS
@pytest.mark.parametrize("row_scales", [None, ROW_SCALES], ids=["", "rows"])
def test_add_lora(operands, backend, row_scales):
    base, x, a, b, plan = operands
    base = base.at[:, ::2].set(-0.0)
    run = jax.jit(run_of(backend, "add_lora"), static_argnames="slice_sizes")
    got = run(base, x, a, b, plan.scaled(row_scales), slice_sizes=SIZES, ranks=with_scales(RANKS, SCALES))
    want = reference(base, x, a, b, row_scales=row_scales)
    for m in range(ROWS):  # rows differ by orders of magnitude
        close(got[m], want[m], 2e-6)
    untouched_bits(got, base)


@THINNED_BACKENDS
def test_shrink_is_unscaled_and_expand_scales(operands, backend):
    base, x, a, b, plan = operands
    ranks, scaled_plan = with_scales(RANKS, SCALES), plan.scaled(ROW_SCALES)
    shrink = jax.jit(run_of(backend, "shrink"))
    h = shrink(x, a, scaled_plan, ranks=ranks)
    np.testing.assert_array_equal(h, shrink(x, a, plan, ranks=with_scales(RANKS)))
    row_ranks = np.where(OWNED[:, None], RANKS[np.where(OWNED, IDS, 0)], 0).T
    h = jnp.where(np.arange(RANK) < row_ranks[..., None], h, jnp.nan)
    expand = jax.jit(run_of(backend, "expand"), static_argnames="slice_sizes")
    for given in (base, None):
        got = expand(h, b, scaled_plan, slice_sizes=SIZES, base=given, ranks=ranks)
        want = reference(np.zeros_like(base) if given is None else given, x, a, b, row_scales=ROW_SCALES)
        for m in range(ROWS):
            close(got[m], want[m], 2e-6)


def test_a_scaled_float16_intermediate_may_exceed_its_range():
    x, a = jnp.full((2, 64), 8.0, jnp.float16), jnp.full((1, 1, 4, 64), 8.0, jnp.float16)
    b = jnp.full((1, 4, 16), 1e-3, jnp.float16)
    plan = api.make_plan(jnp.zeros(2, jnp.int32), num_groups=1, tile_m=16)
    for backend in ("xla", "triton"):
        run = jax.jit(run_of(backend, "add_lora"), static_argnames="slice_sizes")
        zeros, ranks = jnp.zeros((2, 16), jnp.float16), with_scales([[4]], 64)
        got = run(zeros, x, a, b, plan, slice_sizes=(16,), ranks=ranks)
        close(got, 64 * oracle.lora_delta(x, [0, 0], a, b), 5e-3)


@THINNED_BACKENDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_delta_alone(operands, backend, dtype):
    """It is float32, and adding it to a base keeps the bits of base where there is no adapter."""
    *arrays, plan = operands
    base, x, a, b = (v.astype(dtype) for v in arrays)
    base = base.at[:, ::2].set(-0.0)
    run = jax.jit(run_of(backend, "add_lora"), static_argnames="slice_sizes")
    delta = run(None, x, a, b, plan.scaled(ROW_SCALES), slice_sizes=SIZES, ranks=with_scales(RANKS, SCALES))
    assert delta.dtype == jnp.float32
    want = reference(np.zeros_like(base), x, a, b, row_scales=ROW_SCALES)
    for m in range(ROWS):
        close(delta[m], want[m], 2e-6 if dtype == "float32" else 1e-2)
    untouched_bits(base.astype(jnp.float32) + delta, base.astype(jnp.float32))


def dense(base, x, a, b, scales, row_scales):
    """add_lora in plain jnp, with scales [M, n] and ranks of each row's own group."""
    group = np.where(OWNED, IDS, 0)
    keep = (np.arange(RANK) < RANKS[group][..., None]) & OWNED[:, None, None]  # [M, n, R]
    h = jnp.where(keep, jnp.einsum("mk,mnrk->mnr", x, jnp.where(jnp.isnan(a), 0, a)[group], precision="highest"), 0)
    h = h * jnp.where(OWNED[:, None], scales[group], 0)[..., None] * row_scales[:, None, None]
    b = jnp.where(jnp.isnan(b), 0, b)[group]
    slice_of = np.repeat(np.arange(len(SIZES)), SIZES)
    return base + jnp.einsum("mcr,mrc->mc", h[:, slice_of], b, precision="highest")


@pytest.mark.parametrize("alone", [False, True], ids=["", "delta"])
@BACKENDS
def test_gradients(operands, backend, alone):
    base, x, a, b, plan = operands
    ranks, run, backward = with_scales(RANKS, SCALES), run_of(backend, "add_lora"), backward_of(backend)
    plan = plan.scaled(ROW_SCALES)

    def call(base, *v):
        own = None if alone else base
        out = gradients.add_lora(run, backward, SIZES, own, *v, plan, ranks)
        return base + out if alone else out

    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=base.shape), jnp.float32)
    pull = jax.jit(lambda run, *v: jax.vjp(run, *v)[1](cotangent), static_argnums=0)
    got = pull(call, base, x, a, b)
    rows = np.where(OWNED, ROW_SCALES, 0)
    want = pull(partial(dense, scales=SCALES, row_scales=rows), base, x, a, b)
    for have, expected in zip(got, want, strict=True):
        close(have, np.asarray(expected, np.float64), 1e-5)


@BACKENDS
def test_gradients_of_expand(operands, backend):
    base, x, a, b, plan = operands
    ranks, run, backward = with_scales(RANKS, SCALES), run_of(backend, "expand"), backward_of(backend)
    plan = plan.scaled(ROW_SCALES)
    h = jax.jit(partial(api.shrink, backend="xla"))(x, a, plan, ranks=ranks)

    def call(h, b):
        return gradients.expand(run, backward, SIZES, h, b, plan, None, ranks)

    def plain(h, b):
        """`dense` from h on."""
        group = np.where(OWNED, IDS, 0)
        scales = np.where(OWNED[:, None], SCALES[group] * np.nan_to_num(ROW_SCALES)[:, None], 0)
        keep = np.arange(RANK) < RANKS[group][..., None]
        h = jnp.where(keep, jnp.moveaxis(h, 0, 1), 0) * scales[..., None]
        slice_of = np.repeat(np.arange(len(SIZES)), SIZES)
        return jnp.einsum("mcr,mrc->mc", h[:, slice_of], jnp.where(jnp.isnan(b), 0, b)[group], precision="highest")

    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=base.shape), jnp.float32)
    pull = jax.jit(lambda run, *v: jax.vjp(run, *v)[1](cotangent), static_argnums=0)
    for have, expected in zip(pull(call, h, b), pull(plain, h, b), strict=True):
        close(have, np.asarray(expected, np.float64), 1e-5)


def test_ranks_and_scales_are_constants_of_gradients(operands):
    base, x, a, b, plan = operands

    def loss(ranks, row_scales):
        scaled_plan = plan.scaled(row_scales)
        return api.add_lora(base, x, a, b, scaled_plan, slice_sizes=SIZES, ranks=ranks, backend="xla").sum()

    for gradient in jax.jit(jax.grad(loss, (0, 1)))(with_scales(RANKS, SCALES), jnp.asarray(ROW_SCALES)):
        assert not np.asarray(gradient).any()


def test_one_launch_of_experts():
    d = routed(23, 23, 4, 3, 6, 5, 20, (11, 8))
    scales = np.random.default_rng(0).choice([-2, 1 / 64, 3], d["ranks"].shape).astype(np.float32)
    rows = np.random.default_rng(1).normal(size=len(d["group"])).astype(np.float32)
    plan = ops.make_plan(d["group"], num_groups=18, tile_m=16).scaled(rows)
    got = triton_fused.add_lora(
        d["base"], d["x"], d["a"], d["b"], plan, slice_sizes=(11, 8), ranks=with_scales(d["ranks"], scales),
        x_rows=d["token"], block_n=16, block_k=16, interpret=interpret_of("triton"),
    )  # fmt: skip
    a, b = scaled(d["a"], d["b"], np.asarray(d["ranks"]), scales, (11, 8))
    delta = oracle.lora_delta(np.asarray(d["x"])[d["token"]], d["group"], a, b, (11, 8))
    close(got, np.asarray(d["base"], np.float64) + rows[:, None] * delta, 2e-6)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": jnp.zeros((4, 2, 3))}, r"ranks must be float32 \[G, n, 2\] = \[4, 2, 2\]"),
        ({"ranks": jnp.asarray(RANKS)}, r"ranks must be .* got int32\[4, 2\]"),
        ({"ranks": jnp.zeros((4, 2, 2), jnp.int32)}, r"ranks must be .* got int32\[4, 2, 2\]"),
        ({"ranks": jnp.zeros((4, 2, 2), jnp.bfloat16)}, r"ranks must be .* got bfloat16\[4, 2, 2\]"),
    ],
)
def test_wrong_scales_are_refused(operands, given, message):
    base, x, a, b, plan = operands
    with pytest.raises(LoRAError, match=message):
        api.add_lora(base, x, a, b, plan, slice_sizes=SIZES, **given)


def test_wrong_factors_of_rows_are_refused(operands):
    *_, plan = operands
    with pytest.raises(LoRAError, match=r"row_scales must be float32 \[M\] = \[13\]"):
        plan.scaled(jnp.zeros(ROWS - 1))
    with pytest.raises(LoRAError, match=r"row_scales must be float32 .* got bfloat16"):
        plan.scaled(jnp.zeros(ROWS, jnp.bfloat16))


@pytest.mark.parametrize("alone", [False, True], ids=["", "delta"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowers_for_cuda(dtype, alone):
    """As many launches as without them."""
    struct = jax.ShapeDtypeStruct
    shapes = (64, 768), (64, 512), (8, 2, 16, 512), (8, 16, 768)
    floats = [struct((64,), "float32"), struct((8, 2, 2), "float32")]
    args = *(struct(shape, dtype) for shape in shapes), *floats, struct((64,), "int32")

    def run(base, x, a, b, row_scales, ranks, ids):
        plan = api.make_plan(ids, num_groups=8, backend="triton").scaled(row_scales)
        options = {"slice_sizes": (512, 256), "ranks": ranks, "backend": "triton"}
        return api.add_lora(None if alone else base, x, a, b, plan, **options)

    text = lowered_text(run, args, "cuda")
    assert text.count("custom_call @__gpu$xla.gpu.triton") + text.count("custom_call @triton_kernel_call_ffi") == 2
