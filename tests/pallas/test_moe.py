"""LoRA of experts as plain functions: rows by an index, sums over a token's experts, plans of thousands of groups."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora import ops
from jlora.errors import LoRAError
from tests import oracle
from tests.pallas.test_plan import check
from tests.pallas.test_xla import close


def routed(seed, tokens, k, slots, experts, rank, n_in, sizes, dtype=jnp.float32):
    """A routed batch: rows sorted by expert, as a base model's grouped products have them, and factors of all groups.

    Returns a dict: x [T, K], base [M, N], a, b, ranks, token [M], group [M], rows [T, k], weights [T, k], slot [T].
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
        "rows": rows.reshape(tokens, k), "slot": slot,
    }  # fmt: skip
    arrays = {name: jnp.asarray(v, dtype) for name, v in floats.items()}
    return arrays | {name: jnp.asarray(v, jnp.int32) for name, v in ints.items()}


SHAPES = [  # tokens, k, slots, experts, R, K, sizes
    (1, 2, 1, 3, 4, 9, (5, 5)),
    (23, 4, 3, 6, 5, 20, (11, 8)),
    (40, 1, 2, 2, 16, 33, (7,)),
    (17, 8, 5, 8, 8, 16, (24, 24)),
]


@pytest.mark.parametrize(("tokens", "k", "slots", "experts", "rank", "n_in", "sizes"), SHAPES)
def test_rows_of_x_by_index(tokens, k, slots, experts, rank, n_in, sizes):
    d = routed(tokens, tokens, k, slots, experts, rank, n_in, sizes)
    plan = ops.make_plan(d["group"], num_groups=slots * experts)
    run = partial(ops.add_lora, slice_sizes=sizes, ranks=d["ranks"], backend="xla")
    got = run(d["base"], d["x"], d["a"], d["b"], plan, x_rows=d["token"])
    close(got, oracle.add_lora(d["base"], d["x"][d["token"]], d["group"], d["a"], d["b"], sizes), 2e-6)
    h = ops.shrink(d["x"], d["a"], plan, ranks=d["ranks"], x_rows=d["token"], backend="xla")
    np.testing.assert_array_equal(h, ops.shrink(d["x"][d["token"]], d["a"], plan, ranks=d["ranks"], backend="xla"))


def combine_problem(seed, tokens, k, slots, experts, rank, n_in, n, dtype=jnp.float32):
    """A routed batch whose x has a row a pair, base a row a token."""
    d = routed(seed, tokens, k, slots, experts, rank, n_in, (n,), dtype)
    rng = np.random.default_rng(seed)
    d["x"] = jnp.asarray(rng.normal(size=(tokens * k, n_in)), dtype)
    d["base"] = jnp.asarray(rng.normal(size=(tokens, n)), dtype)
    d["plan"] = ops.make_plan(d["group"], num_groups=slots * experts)
    d["token_plan"] = ops.make_plan(d["slot"], num_groups=slots)
    return d


def combine(d, **changed):
    d = d | changed
    names = ("base", "x", "a", "b", "plan", "token_plan")
    return ops.combine_lora(
        *(d[name] for name in names), rows=d["rows"], weights=d["weights"], ranks=d["ranks"],
        backend=d.get("backend", "xla"),
    )  # fmt: skip


@pytest.mark.parametrize(("tokens", "k", "slots", "experts", "rank", "n_in", "sizes"), SHAPES)
def test_sums_over_the_experts_of_a_token(tokens, k, slots, experts, rank, n_in, sizes):
    d = combine_problem(tokens, tokens, k, slots, experts, rank, n_in, sizes[0])
    want = oracle.combine_lora(d["base"], d["x"], d["group"], d["a"], d["b"], d["rows"], d["weights"])
    close(combine(d), want, 2e-6)
    ones = oracle.combine_lora(d["base"], d["x"], d["group"], d["a"], d["b"], d["rows"], np.ones((tokens, k)))
    close(combine(d, weights=None), ones, 2e-6)
    missing = d["rows"].at[::2, 0].set(-1).at[1::3, -1].set(tokens * k)
    want = oracle.combine_lora(d["base"], d["x"], d["group"], d["a"], d["b"], missing, d["weights"])
    close(combine(d, rows=missing), want, 2e-6)


def test_tokens_without_a_pair_that_has_a_rank_are_bitwise_the_base():
    d = combine_problem(3, 30, 3, 2, 4, 5, 8, 6)
    ranks = d["ranks"].at[:4].set(0)  # slot 0
    d["base"] = d["base"].at[::2].set(-0.0)
    got, want = np.asarray(combine(d, ranks=ranks)), np.asarray(d["base"])
    alone = np.asarray(d["slot"]) != 1
    np.testing.assert_array_equal(got[alone].view(np.uint32), want[alone].view(np.uint32))
    assert (got[~alone] != want[~alone]).any(axis=1).all()


def test_a_plan_of_thousands_of_groups_is_as_any_other():
    rng = np.random.default_rng(0)
    ids = rng.integers(-9, 8300, 3000)
    for tile_m in (1, 16):
        check(jax.jit(partial(ops.make_plan, num_groups=8192, tile_m=tile_m))(jnp.asarray(ids)), ids, 8192)
    few = rng.choice(8192, 40)[rng.integers(0, 40, 3000)]
    check(jax.jit(partial(ops.make_plan, num_groups=8192, tile_m=16, max_active=40))(jnp.asarray(few)), few, 8192)


def test_a_large_plan_takes_no_time_that_grows_with_pairs_of_rows():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 8192, 32768))
    plan = jax.jit(partial(ops.make_plan, num_groups=8192)).lower(ids).compile()
    jax.block_until_ready(plan(ids))
    start = time.perf_counter()
    jax.block_until_ready(plan(ids))
    assert time.perf_counter() - start < 0.5  # 0.03 s; comparing all pairs takes 2.9 s


def test_gradients_follow_the_index():
    d = routed(5, 12, 3, 2, 4, 5, 9, (6, 5))
    plan = ops.make_plan(d["group"], num_groups=8, tile_m=4)

    def loss(run, x, a, b):
        return (run(x, a, b) ** 2).sum()

    def indexed(x, a, b):
        return ops.add_lora(
            d["base"], x, a, b, plan, slice_sizes=(6, 5), ranks=d["ranks"], x_rows=d["token"], backend="xla"
        )

    def gathered(x, a, b):
        return ops.add_lora(d["base"], x[d["token"]], a, b, plan, slice_sizes=(6, 5), ranks=d["ranks"], backend="xla")

    got, want = (jax.grad(partial(loss, run), (0, 1, 2))(d["x"], d["a"], d["b"]) for run in (indexed, gathered))
    for one, other in zip(got, want, strict=True):
        close(one, np.asarray(other, np.float64), 1e-5)


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
def test_add_lora_says_what_does_not_fit(changed, message):
    d = combine_problem(0, 8, 3, 2, 4, 5, 6, 7)
    args = {"x": jnp.zeros((8, 6)), "x_rows": d["token"]} if "x" not in changed else {}
    with pytest.raises(LoRAError, match=message):
        ops.add_lora(jnp.zeros((24, 7)), a=d["a"], b=d["b"], plan=d["plan"], **(args | changed))


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": jnp.zeros((7, 3), jnp.int32)}, r"rows must be integers \[T, k\] with T = 8"),
        ({"rows": jnp.zeros((8, 3))}, "rows must be integers"),
        ({"weights": jnp.zeros((8, 2))}, r"weights must be \[T, k\] = \[8, 3\]"),
        ({"weights": jnp.zeros((8, 3), jnp.int32)}, "weights must be bfloat16"),
        ({"x": jnp.zeros((8, 6))}, r"x must be \[M, K\] with M = 24"),
        ({"a": jnp.zeros((8, 2, 5, 6))}, "n is not 1"),
        ({"base": jnp.zeros((24, 7))}, r"base must be \[M, N\] = \[8, 7\]"),
        ({"token_plan": ops.make_plan(jnp.zeros(8, jnp.int32), num_groups=3)}, r"S \* E"),
    ],
)
def test_combine_lora_says_what_does_not_fit(changed, message):
    with pytest.raises(LoRAError, match=message):
        combine(combine_problem(0, 8, 3, 2, 4, 5, 6, 7), **changed)
