"""The backward passes of the backends against float64: long groups, high ranks and experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora import ops
from jlora.pallas import gradients
from jlora.pallas.triton import backward as triton_backward
from tests import oracle
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_moe import routed
from tests.pallas.test_ranks import MOSAIC, TRITON, XLA, Backward, backward_of, run_of
from tests.pallas.test_xla import close, problem

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("quickly_compiled")]


MARKS = {str(case.values[0]): case.marks for case in (XLA, TRITON, MOSAIC)}


def check(got, want, tolerance=1e-5):
    for have, expected in zip(got, want, strict=True):
        close(have, expected, tolerance)


def pull(call, dout, *operands):
    return jax.jit(lambda dout, *operands: jax.vjp(call, *operands)[1](dout.astype(operands[0].dtype)))(dout, *operands)


def in_blocks(**sizes):
    blocks = triton_backward.Blocks(**sizes)
    functions = [getattr(triton_backward, name) for name in Backward._fields]
    return Backward(*(partial(f, blocks=blocks, interpret=interpret_of("triton")) for f in functions))


BLOCKS = [  # rows, K, slices, R, groups, rows of a segment
    (150, 40, (33, 20), 5, 3, 32),  # groups of one, two and more segments
    pytest.param(90, 20, (20, 9), 80, 2, 32, marks=pytest.mark.slow),  # several launches, which add to dx
    (1, 20, (20,), 16, 3, 32),
]


@pytest.mark.parametrize(("rows", "k", "sizes", "rank", "groups", "segment"), BLOCKS)
def test_segments_of_long_groups(rows, k, sizes, rank, groups, segment):
    base, x, a, b, ids, ranks = problem(rows, rows, k, sizes, rank, groups)
    plan, ranks = ops.make_plan(ids, num_groups=groups, tile_m=16), with_scales(ranks, -1.5)
    backward = in_blocks(rows=16, columns=16, segment=segment, stages=1)
    run = run_of("triton", "add_lora")
    got = pull(lambda *v: gradients.add_lora(run, backward, sizes, base, *v, plan, ranks), base, x, a, b)
    check(got, oracle.lora_gradients(base, x, ids, a, b, sizes, ranks))


HALF = [(name, "bfloat16", marks) for name, marks in MARKS.items()]
HALF += [("triton", "float16", MARKS["triton"])]  # Mosaic takes no float16


@pytest.mark.parametrize(("backend", "dtype"), [pytest.param(*case, marks=marks) for *case, marks in HALF])
def test_half_precision(backend, dtype):
    """Sums over many rows are float32, whatever the dtype of the factors."""
    base, x, a, b, ids, ranks = problem(0, 300, 24, (20,), 8, 2, dtype=dtype)
    plan, ranks = ops.make_plan(ids, num_groups=2, tile_m=16), with_scales(ranks, 0.5)
    run, backward = run_of(backend, "add_lora"), backward_of(backend)
    got = pull(lambda *v: gradients.add_lora(run, backward, (20,), base, *v, plan, ranks), base, x, a, b)
    assert {g.dtype for g in got} == {jnp.dtype(dtype)}
    check(got, oracle.lora_gradients(base, x, ids, a, b, (20,), ranks), 6e-3 if dtype == "bfloat16" else 1e-3)


@pytest.mark.parametrize("backend", [XLA, TRITON, MOSAIC])
def test_a_nan_stays_in_its_group(backend):
    """Rows of group 2 and a row without a group have NaN, in x and in the cotangent.

    Group 0, which tiles without rows refer to, has no rows and gradients of zero.
    """
    ids = np.array([1, 2, 3, 1, 2, 3, -1])
    base, x, a, b, *_ = problem(3, 7, 40, (17, 6), 5, 4, ids=ids)
    plan, ranks = ops.make_plan(jnp.asarray(ids), num_groups=4, tile_m=16), with_scales(jnp.full((4, 2), 5))
    assert plan.num_tiles > int(plan.tiles_used[0])
    x, dout = x.at[np.array([1, 6])].set(jnp.nan), base.at[np.array([4, 6])].set(jnp.nan)
    run, backward = run_of(backend, "add_lora"), backward_of(backend)
    _, dx, da, db = pull(lambda *v: gradients.add_lora(run, backward, (17, 6), *v, plan, ranks), dout, base, x, a, b)
    want_x, want_a, want_b = oracle.lora_gradients(dout, x, ids, a, b, (17, 6), ranks)
    others, rows = np.array([0, 1, 3]), np.isin(ids, [1, 3])
    check([dx[rows], da[others], db[others]], [want_x[rows], want_a[others], want_b[others]])
    for gradient in (dx[6], da[0], db[0]):
        assert not np.asarray(gradient).any()


EXPERTS = [(XLA, 3, ()), (TRITON, 30, ()), (MOSAIC, 3, ()), (MOSAIC, 30, (pytest.mark.slow,))]


@pytest.mark.parametrize(
    ("backend", "tokens"),
    [pytest.param(*case.values, tokens, marks=[*case.marks, *marks]) for case, tokens, marks in EXPERTS],
)
def test_experts(backend, tokens):
    """The rows of a token's experts share its row of x. For few rows the plan is unsorted."""
    d = routed(5, tokens, 3, 2, 8, 5, 9, (6,))
    slot, expert = jnp.asarray(d["slot"]), jnp.asarray(d["expert"]).ravel()[jnp.asarray(d["order"])]
    token = jnp.asarray(d["token"], jnp.int32)
    plan = ops.plan_experts(slot, token, expert, num_slots=2, num_experts=8, tile_m=16, backend="xla")
    ranks, scales = with_scales(d["ranks"], 2), jnp.asarray(np.linspace(-1, 1, len(token)), jnp.float32)
    run, backward = run_of(backend, "add_lora"), backward_of(backend)

    def call(x, a, b):
        return gradients.add_lora(run, backward, (6,), d["base"], x, a, b, plan.scaled(scales), ranks, token)

    got = pull(call, d["base"], d["x"], d["a"], d["b"])
    want = oracle.lora_gradients(
        d["base"], d["x"], d["group"], d["a"], d["b"], (6,), ranks, np.asarray(scales), np.asarray(token)
    )
    check(got, want)
