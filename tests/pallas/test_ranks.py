"""Values past a rank, rounded up to 16, never reach a result or a gradient.

The factors hold NaN there. The oracle's factors hold zeros there.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas import api, gradients, xla
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.triton import lora as triton
from tests import oracle
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import close
from tests.pallas.triton.test_lora import TILES

pytestmark = pytest.mark.device

SIZES, K, ROWS = (20, 9), 40, 11
IDS = np.array([0, 1, 0, 4, 1, 2, 0, 2, 1, 3, -1])
RANKS = [  # R, ranks [G, n]
    (40, [[17, 0], [40, 3], [0, 0], [16, 33]]),
    pytest.param((20, [[20, 0], [3, 17], [0, 0], [0, 16]]), marks=pytest.mark.slow),
]
BACKENDS = {
    "xla": xla,
    "triton": triton,
    "mosaic_tpu": mosaic_tpu,
}
XLA = pytest.param("xla", marks=pytest.mark.optimised)
TRITON = pytest.param("triton", marks=pytest.mark.device("gpu"))
MOSAIC = pytest.param("mosaic_tpu", marks=pytest.mark.device("tpu"))


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


@pytest.fixture(params=RANKS, ids=lambda case: f"R{case[0]}")
def poisoned(request):
    """Clean and poisoned a and b: zero past the rank in both, then NaN or Inf past the rank rounded up to 16."""
    rank, ranks = request.param
    rng = np.random.default_rng(0)
    ranks = np.array(ranks)
    r = np.arange(rank)
    a = np.where((r < ranks[..., None])[..., None], rng.normal(size=(4, 2, rank, K)), 0)
    of_column = np.repeat(ranks, SIZES, axis=1)  # [G, N]
    b = np.where(r[None, :, None] < of_column[:, None, :], rng.normal(size=(4, rank, sum(SIZES))), 0)
    kept = np.minimum(-(-ranks // 16) * 16, rank)
    bad_a = np.where((r < kept[..., None])[..., None], a, np.nan)
    bad_b = np.where(r[None, :, None] < np.repeat(kept, SIZES, axis=1)[:, None, :], b, np.inf)
    assert np.isnan(bad_a).any()
    assert np.isinf(bad_b).any()
    base, x = rng.normal(size=(ROWS, sum(SIZES))), rng.normal(size=(ROWS, K))
    floats = [jnp.asarray(v, jnp.float32) for v in (base, x, a, b, bad_a, bad_b)]
    plan = api.make_plan(jnp.asarray(IDS), num_groups=4, tile_m=16)
    return *floats, plan, jnp.asarray(ranks, jnp.int32)


@pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
def test_add_lora(poisoned, backend):
    base, x, a, b, bad_a, bad_b, plan, ranks = poisoned
    got = jax.jit(run_of(backend, "add_lora"), static_argnames="slice_sizes")(
        base, x, bad_a, bad_b, plan, slice_sizes=SIZES, ranks=with_scales(ranks)
    )
    close(got, oracle.add_lora(base, x, IDS, a, b, SIZES), 2e-6)
    untouched = np.isin(IDS, [-1, 2, 4])
    np.testing.assert_array_equal(np.asarray(got)[untouched], np.asarray(base)[untouched])


@pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
def test_shrink(poisoned, backend):
    _, x, a, _, bad_a, _, plan, ranks = poisoned
    got = np.asarray(jax.jit(run_of(backend, "shrink"))(x, bad_a, plan, ranks=with_scales(ranks)))
    owned = (IDS >= 0) & (IDS < 4)
    want = np.einsum("mk,mnrk->nmr", np.asarray(x, np.float64), np.asarray(a, np.float64)[np.where(owned, IDS, 0)])
    close(got, want * owned[None, :, None], 2e-6)


@pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
@pytest.mark.parametrize("with_base", [True, False])
def test_expand(poisoned, backend, with_base):
    """Call it as an embedding does. h is gathered from the slot arrays, with their values past the rank."""
    base, x, a, b, _, bad_b, plan, ranks = poisoned
    group = np.where((IDS >= 0) & (IDS < 4), IDS, 0)
    h = np.einsum("mk,mnrk->nmr", x, np.asarray(a)[group])
    past = np.arange(h.shape[2]) >= np.asarray(ranks)[group].T[..., None]
    h = jnp.asarray(np.where(past, np.nan, h), jnp.float32)
    got = jax.jit(run_of(backend, "expand"), static_argnames="slice_sizes")(
        h, bad_b, plan, slice_sizes=SIZES, base=base if with_base else None, ranks=with_scales(ranks)
    )
    delta = oracle.lora_delta(x, IDS, a, b, SIZES)
    close(got, delta + np.asarray(base) if with_base else delta, 3e-6)


@pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
def test_gradients(poisoned, backend):
    base, x, a, b, bad_a, bad_b, plan, r = poisoned
    ranks = with_scales(r)
    cotangent = np.random.default_rng(1).normal(size=base.shape)
    run, backward = run_of(backend, "add_lora"), backward_of(backend)

    def call(base, x, a, b):
        return gradients.add_lora(run, backward, SIZES, base, x, a, b, plan, ranks)

    pull = jax.jit(lambda given, cotangent: jax.vjp(call, *given)[1](cotangent))
    got = pull((base, x, bad_a, bad_b), jnp.asarray(cotangent, jnp.float32))
    want = oracle.lora_gradients(cotangent, x, IDS, a, b, SIZES, ranks)
    for have, expected in zip(got, (cotangent, *want), strict=True):
        close(have, expected, 1e-5)


@pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
def test_gradients_of_expand(poisoned, backend):
    """dh from the rank on is zero, and dh and db below it do not depend on values past it."""
    base, x, a, b, _, bad_b, plan, ranks = poisoned
    row_ranks = np.asarray(ranks)[np.where((IDS >= 0) & (IDS < 4), IDS, 0)].T
    ranks = with_scales(ranks)
    h = xla.shrink(x, a, plan, ranks=ranks)
    bad_h = jnp.asarray(np.where(np.arange(h.shape[2]) < row_ranks[..., None], h, np.nan))
    run, backward = run_of(backend, "expand"), backward_of(backend)

    def call(h, b):
        return gradients.expand(run, backward, SIZES, h, b, plan, base, ranks)

    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=base.shape), jnp.float32)
    pull = jax.jit(lambda given, cotangent: jax.vjp(call, *given)[1](cotangent))
    for got, want in zip(pull((bad_h, bad_b), cotangent), pull((h, b), cotangent), strict=True):
        chex.assert_tree_all_finite(want)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
def test_groups_without_rows_have_zero_gradients(backend):
    """Includes group 0, which tiles without rows refer to."""
    rng = np.random.default_rng(0)
    shapes = (4, 5), (4, 6), (3, 1, 2, 6), (3, 2, 5)
    base, x, a, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    plan = api.make_plan(jnp.array([1, 1, 1, 7]), num_groups=3, tile_m=2)
    assert plan.num_tiles > int(plan.tiles_used[0])
    ranks = with_scales(jnp.full((3, 1), 2))
    run, backward = run_of(backend, "add_lora"), backward_of(backend)

    def total(a, b):
        return gradients.add_lora(run, backward, (5,), base, x, a, b, plan, ranks).sum()

    for gradient in jax.jit(jax.grad(total, (0, 1)))(a, b):
        assert not np.asarray(gradient)[[0, 2]].any()
        assert np.asarray(gradient)[1].all()
