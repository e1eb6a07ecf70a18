"""LoRA of experts as plain functions: rows by an index, plans of thousands of groups."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora import ops
from jlora.errors import LoRAError
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.triton import fused as triton_fused
from jlora.pallas.triton import lora as triton
from jlora.pallas.triton import plan as triton_plan
from tests import oracle
from tests.matrix import thinned
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_plan import check
from tests.pallas.test_xla import close
from tests.pallas.triton.test_lora import TILES

pytestmark = pytest.mark.device


def routed(seed, tokens, k, slots, experts, rank, n_in, sizes, dtype=jnp.float32):
    """A routed batch: rows sorted by expert, as a base model's grouped products have them, and factors of all groups.

    Returns a dict: x [T, K], base [M, N], a, b, ranks, token [M], group [M], order [M]; slot [T]; rows, expert and
    weights [T, k].
    """
    rng = np.random.default_rng(seed)
    expert = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).ravel()  # of the pairs, token by token
    order = np.argsort(expert, kind="stable")
    slot = rng.integers(-1, slots + 1, tokens)
    token = order // k
    inside = (slot[token] >= 0) & (slot[token] < slots)
    ranks = rng.integers(0, rank + 1, (slots * experts, len(sizes)))
    keep = np.arange(rank) < ranks[..., None]
    a = rng.normal(size=(slots * experts, len(sizes), rank, n_in)) * keep[..., None]
    b = np.concatenate(
        [rng.normal(size=(slots * experts, rank, s)) * keep[:, i, :, None] for i, s in enumerate(sizes)], axis=2
    )
    rows = np.empty(tokens * k, np.int64)
    rows[order] = np.arange(tokens * k)
    floats = {
        "x": rng.normal(size=(tokens, n_in)), "base": rng.normal(size=(tokens * k, sum(sizes))), "a": a, "b": b,
        "weights": rng.uniform(size=(tokens, k)),
    }  # fmt: skip
    ints = {
        "ranks": ranks, "token": token, "group": np.where(inside, slot[token] * experts + expert[order], -1),
        "rows": rows.reshape(tokens, k), "slot": slot, "expert": expert.reshape(tokens, k), "order": order,
    }  # fmt: skip
    arrays = {name: v.astype(jnp.dtype(dtype)) for name, v in floats.items()}
    return jax.device_put(arrays | {name: v.astype(np.int32) for name, v in ints.items()})


SHAPES = [  # tokens, k, slots, experts, R, K, sizes
    (1, 2, 1, 3, 4, 9, (5, 5)),
    (23, 4, 3, 6, 5, 20, (11, 8)),
    (40, 1, 2, 2, 16, 33, (7,)),
    (17, 8, 5, 8, 8, 16, (24, 24)),
]


SIZES = (11, 8)
EACH = {
    "xla": (partial(ops.shrink, backend="xla"), partial(ops.expand, backend="xla")),
    "triton": tuple(
        partial(op, tiles=TILES, interpret=interpret_of("triton")) for op in (triton.shrink, triton.expand)
    ),
    "mosaic_tpu": tuple(
        partial(op, interpret=interpret_of("mosaic_tpu")) for op in (mosaic_tpu.shrink, mosaic_tpu.expand)
    ),
}


@pytest.mark.parametrize(("backend", "once"), thinned(list(itertools.product(EACH, "ab")), 2, 3))
def test_a_factor_that_experts_share_has_a_plan_of_its_own(backend, once):
    """By slot where the other goes by slot and expert; rows of neither keep their bits."""
    slots, experts = 3, 6
    d = jax.tree.map(np.array, routed(3, 23, 4, slots, experts, 8, 20, SIZES))
    of_slot = {name: d[name].reshape(slots, experts, *d[name].shape[1:])[:, 0] for name in ("a", "b", "ranks")}
    d["ranks"] = np.repeat(of_slot["ranks"], experts, axis=0)
    expert = d["expert"].ravel()[d["order"]]
    elsewhere = np.where(d["token"] % 5 == 0, expert + experts, expert)
    make = jax.jit(partial(ops.plan_experts, num_slots=slots), static_argnames="num_experts")
    plans = {
        "each": (make(d["slot"], d["token"], elsewhere, num_experts=experts), d["ranks"]),
        "once": (make(d["slot"], d["token"], np.where(elsewhere < experts, 0, -1), num_experts=1), of_slot["ranks"]),
    }
    a, b = (of_slot[name] if name == once else d[name] for name in "ab")
    (a_plan, a_ranks), (b_plan, b_ranks) = (plans["once" if name == once else "each"] for name in "ab")
    shrink, expand = EACH[backend]

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is what takes the time
    def run(base, x, a, b):
        h = shrink(x, a, a_plan, ranks=with_scales(a_ranks))
        return expand(h, b, b_plan, slice_sizes=SIZES, base=base, ranks=with_scales(b_ranks))

    d["base"][::7] = -0.0
    base, x = d["base"], d["x"][d["token"]]
    got = np.asarray(run(base, x, a, b))
    a, b = (np.repeat(of_slot[name], experts, axis=0) if name == once else d[name] for name in "ab")
    a = a * (np.arange(8) < d["ranks"][..., None])[..., None]
    group = np.where(elsewhere < experts, d["group"], -1)
    close(got, oracle.add_lora(base, x, group, a, b, SIZES), 2e-6)
    nobody = (group < 0) | (group >= slots * experts)
    assert nobody.any()
    assert got[nobody].tobytes() == base[nobody].tobytes()


def test_a_plan_of_thousands_of_groups_is_as_any_other():
    rng = np.random.default_rng(0)
    ids = rng.integers(-9, 8300, 3000)
    for tile_m in (1, 16):
        check(jax.jit(partial(ops.make_plan, num_groups=8192, tile_m=tile_m))(jnp.asarray(ids)), ids, 8192)
    few = rng.choice(8192, 40)[rng.integers(0, 40, 3000)]
    check(jax.jit(partial(ops.make_plan, num_groups=8192, tile_m=16, max_active=40))(jnp.asarray(few)), few, 8192)


def test_a_large_plan_does_not_compare_all_pairs_of_rows():
    rows = 32768
    make = jax.jit(partial(ops.make_plan, num_groups=8192))
    cost = make.lower(jax.ShapeDtypeStruct((rows,), jnp.int32)).compile().cost_analysis()
    assert 0 < cost["flops"] < rows * rows / 10


@pytest.mark.parametrize(("tokens", "k", "slots", "experts", "rank", "n_in", "sizes"), SHAPES)
def test_the_plan_of_experts(tokens, k, slots, experts, rank, n_in, sizes):
    d = routed(tokens, tokens, k, slots, experts, rank, n_in, sizes)
    order = np.asarray(d["order"])
    token, expert = order // k, np.asarray(d["expert"]).ravel()[order]
    # The kernels leave a few rows unsorted.
    make = jax.jit(partial(ops.plan_experts, num_slots=slots, num_experts=experts, tile_m=3, backend="xla"))
    plan = make(d["slot"], token, expert)
    check(plan, np.asarray(d["group"]), slots * experts)
    assert plan.experts == experts
    assert make(d["slot"], token - tokens, expert).tiles_used.tolist() == [0]  # of no token
    assert make(d["slot"], token, expert + experts).tiles_used.tolist() == [0]  # of no expert that is here


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"experts": jnp.zeros(3, jnp.int32)}, "experts must be a vector of 4 of integers"),
        ({"tokens": jnp.zeros(4)}, "tokens must be a vector of integers"),
        ({"slot_ids": jnp.zeros((2, 2), jnp.int32)}, "slot_ids must be a vector of integers"),
        ({"num_slots": 0}, "num_slots and num_experts must be at least 1"),
        ({"tile_m": 0}, "at least 1"),
    ],
)
def test_plan_experts_refuses_wrong_shapes(changed, message):
    four = jnp.zeros(4, jnp.int32)
    args = {"slot_ids": jnp.zeros(2, jnp.int32), "tokens": four, "experts": four, "num_slots": 2, "num_experts": 3}
    with pytest.raises(LoRAError, match=message):
        ops.plan_experts(**(args | changed))


@pytest.mark.parametrize(
    ("rows", "groups", "tile_m", "most", "pairwise"),  # rows above `pairwise` take the counting sort
    thinned([
        (1, 1, 16, 1, 99), (40, 5, 16, 3, 99), (90, 1024, 16, 90, 99), (300, 3, 64, 3, 16), (700, 100, 16, 100, 16),
        (520, 5000, 5, 520, 16),
    ], 0, 1, 3, 4),
)  # fmt: skip
def test_the_kernels_make_the_same_plan(rows, groups, tile_m, most, pairwise):
    @jax.jit
    def plans(ids):
        return (
            triton_plan.plan(ids, 1, groups, tile_m, most, pairwise=pairwise, interpret=interpret_of("triton")),
            ops.make_plan(ids, num_groups=groups, tile_m=tile_m, max_active=most),
        )

    random = np.random.default_rng(rows).integers(0, groups + 1, rows)
    for ids in (random, np.sort(random), np.full(rows, groups)):  # in the last no row has a group
        got, want = plans(jnp.asarray(ids, jnp.int32))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_plan_without_sorting():
    d = routed(6, 9, 3, 2, 4, 5, 10, (7, 6))
    group = np.asarray(d["group"])
    plan = jax.jit(lambda ids: triton_plan.row_tiles(ids, 4, 8, 16))(jnp.asarray(np.where(group < 0, 8, group)))
    want = oracle.add_lora(d["base"], np.asarray(d["x"])[d["token"]], d["group"], d["a"], d["b"], (7, 6))
    args = d["base"], d["x"], d["a"].at[0].set(jnp.nan), d["b"], plan  # dropped rows' tiles are group 0's
    assert not (group == 0).any()
    assert (group < 0).any()
    run = {"slice_sizes": (7, 6), "ranks": with_scales(d["ranks"]), "x_rows": d["token"]}
    close(jax.jit(partial(triton.add_lora, **run, tiles=TILES, interpret=interpret_of("triton")))(*args), want, 2e-6)
    close(jax.jit(partial(ops.add_lora, **run, backend="xla"))(*args), want, 2e-6)


@pytest.mark.parametrize(("tokens", "k", "slots", "experts", "rank", "n_in", "sizes"), thinned(SHAPES, 1, 2))
def test_one_launch(tokens, k, slots, experts, rank, n_in, sizes):
    d = jax.tree.map(np.array, routed(tokens, tokens, k, slots, experts, rank, n_in, sizes))
    d["base"][::2] = -0.0
    rng = np.random.default_rng(0)
    scales = rng.choice([-2, 1 / 64, 3], d["ranks"].shape).astype(np.float32)
    of_rows = rng.normal(size=len(d["group"])).astype(np.float32)

    @jax.jit
    def run(d):
        plan = ops.make_plan(d["group"], num_groups=slots * experts, tile_m=16).scaled(of_rows)
        delta = triton_fused.delta(
            d["x"], d["a"], d["b"], plan, slice_sizes=sizes, ranks=with_scales(d["ranks"], scales), dtype=jnp.float32,
            x_rows=d["token"], block_n=16, block_k=16, interpret=interpret_of("triton"),
        )  # fmt: skip
        return jnp.where(d["group"][:, None] >= 0, d["base"] + delta, d["base"])

    got = run(d)
    b = d["b"].astype(np.float64) * np.repeat(scales, sizes, axis=1)[:, None]
    want = of_rows[:, None] * oracle.lora_delta(d["x"][d["token"]], d["group"], d["a"], b, sizes)
    close(got, d["base"] + want, 2e-6)
    past = np.arange(rank) >= d["ranks"][..., None]  # [G, n, R]
    unused = np.repeat(past, sizes, axis=1).swapaxes(1, 2)
    dirty = {
        "a": np.where(past[..., None], np.float32(np.nan), d["a"]),
        "b": np.where(unused, np.float32(np.nan), d["b"]),
    }
    np.testing.assert_array_equal(run(d | dirty), got)
    ranks = d["ranks"][np.maximum(d["group"], 0)] * (d["group"] >= 0)[:, None]
    none = np.repeat(ranks == 0, sizes, axis=1)  # [M, N]: not changed by an adapter
    np.testing.assert_array_equal(np.asarray(got)[none].view(np.uint32), d["base"][none].view(np.uint32))


def test_one_launch_is_for_a_handful_of_rows():
    def taken(tokens, hidden, inner, experts, k, rank, n=2):
        ids = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (tokens, tokens * k, tokens * k)]
        plan = jax.eval_shape(
            partial(ops.plan_experts, num_slots=8, num_experts=experts, backend="xla", tile_m=16), *ids
        )
        a = jax.ShapeDtypeStruct((8 * experts, n, rank, hidden), jnp.bfloat16)
        return triton_fused.suits(plan, a, (inner,) * n)

    assert taken(8, 2048, 768, 128, 8, 16)
    assert taken(1, 4096, 14336, 8, 2, 8)
    assert not taken(8, 2048, 768, 128, 8, 17)  # rank
    assert not taken(64, 2048, 768, 128, 8, 16)  # A read too often
    assert not taken(1, 14336, 4096, 8, 2, 16, n=1)  # more of A than registers hold
    assert not taken(8, 2048, 768, 1, 1, 16)  # no experts


REAL = [(2048, 768, 128, 8), (2880, 2880, 32, 4), (4096, 14336, 8, 2)]  # hidden, intermediate, experts, top k


@pytest.mark.parametrize(("tokens", "slots"), [(8, 64), (8192, 8)])
@pytest.mark.parametrize(("hidden", "inner", "experts", "k"), thinned(REAL, 1))
def test_lowers_for_cuda(default_device, hidden, inner, experts, k, tokens, slots):
    default_device()
    groups, rank, pairs = slots * experts, 16, tokens * k
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((tokens, k), (tokens,))]
    shapes = [
        (pairs, 2 * inner), (pairs, hidden), (tokens, hidden), (pairs, inner), (groups, 2, rank, hidden),
        (groups, rank, 2 * inner), (groups, 1, rank, inner), (groups, rank, hidden),
    ]  # fmt: skip

    def run(expert, slot, base13, base2, x, act, a13, b13, a2, b2):
        order = jnp.argsort(expert.ravel(), stable=True)
        token = order // k
        plan = ops.plan_experts(slot, token, expert.ravel()[order], num_slots=slots, num_experts=experts)
        first = ops.add_lora(base13, x, a13, b13, plan, slice_sizes=(inner, inner), x_rows=token, backend="triton")
        return first, ops.add_lora(base2, act, a2, b2, plan, backend="triton")

    text = lowered_text(run, (*ints, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)), "cuda")
    for name in ("lora_shrink", "lora_expand"):
        assert (name in text) == (tokens != 8 or hidden != 2048)  # both products of that one take one launch
    assert ("lora_fused" in text) == (tokens == 8 and hidden < 4096)
    assert ("lora_after_base" in text) == (pairs > triton.SEPARATE_PAIRS)
    for name in ("lora_sort", "lora_plan_cut"):
        assert (name in text) == (pairs > min(64, experts))
    assert ("lora_sort_move" in text) == (pairs > triton_plan.PAIRWISE)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_rows": jnp.zeros(3, jnp.int32)}, r"x_rows must be integers \[M\] = \[24\]"),
        ({"x_rows": jnp.zeros(24)}, "x_rows must be integers"),
        ({"x": jnp.zeros((0, 6)), "x_rows": jnp.zeros(24, jnp.int32)}, "x has no rows"),
        ({"x": jnp.zeros((8, 6))}, "say with x_rows"),
    ],
)
def test_add_lora_refuses_wrong_shapes(changed, message):
    d = routed(0, 8, 3, 2, 4, 5, 6, (7,))
    plan = ops.make_plan(d["group"], num_groups=8)
    args = {"x": jnp.zeros((8, 6)), "x_rows": d["token"]} if "x" not in changed else {}
    with pytest.raises(LoRAError, match=message):
        ops.add_lora(jnp.zeros((24, 7)), a=d["a"], b=d["b"], plan=plan, **(args | changed))
