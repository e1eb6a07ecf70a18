"""Base product and LoRA in one kernel: interpret mode against the NumPy oracle, and the choice of the kernel.

The oracle's factors are clean. The kernel's hold NaN wherever it must not read.
"""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.errors import LoRAError
from jlora.pallas import api, gradients
from jlora.pallas.tables import Key, entry_of
from jlora.pallas.tiles import ProductTiles, rows_bucket
from jlora.pallas.triton import product as triton_product
from tests import oracle
from tests.matrix import thinned
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import close, problem
from tests.pallas.triton.test_lora import TILES as LORA

# Users never run interpreted kernels, so XLA's optimisations are left out.
pytestmark = [pytest.mark.device("gpu"), pytest.mark.usefixtures("quickly_compiled")]

TILES = ProductTiles(
    product_block_n=16, product_block_k=16, product_split_k=2, product_warps=4, product_stages=1, lora=LORA
)
KERNEL = triton_product.linear_lora


def tiles_of(product_split_k=2, split_k=2, **lora):
    return dataclasses.replace(
        TILES, product_split_k=product_split_k, lora=dataclasses.replace(LORA, split_k=split_k, **lora)
    )


def linear_lora(x, w, a, b, plan, sizes, ranks, tiles=TILES):
    run = jax.jit(KERNEL, static_argnames=("slice_sizes", "tiles", "interpret"))
    return run(
        x, w, a, b, plan, slice_sizes=tuple(sizes), ranks=with_scales(ranks), tiles=tiles,
        interpret=interpret_of("triton"),
    )  # fmt: skip


def of_weights(seed, rows, k, sizes, rank, groups, ids=None, dtype=jnp.float32):
    """As `problem`, with a kernel in place of a base."""
    _, x, a, b, ids, ranks = problem(seed, rows, k, sizes, rank, groups, ids=ids, dtype=dtype)
    w = np.random.default_rng(seed + 1).normal(size=(k, sum(sizes)))
    return x, jnp.asarray(w, dtype), a, b, ids, ranks


def expected(x, w, a, b, ids, sizes):
    """float64."""
    base = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    return oracle.add_lora(base, x, ids, a, b, sizes)


def poisoned(a, b, ranks, sizes):
    """NaN at and past the rank, rounded up to 16."""
    rank = a.shape[2]
    kept = np.minimum(-(-np.asarray(ranks) // 16) * 16, rank)
    past = np.arange(rank) >= kept[..., None]  # [G, n, R]
    columns = np.concatenate([past[:, i, :, None].repeat(size, 2) for i, size in enumerate(sizes)], axis=2)
    return jnp.where(past[..., None], jnp.nan, a), jnp.where(columns, jnp.nan, b)


SHAPES = [  # rows, K, slices, R, groups, tile_m, parts of the product, parts of the shrink
    (1, 5, (3,), 1, 1, 16, 1, 1),
    (13, 70, (33, 5), 5, 4, 16, 2, 3),
    (70, 33, (20, 1, 17), 16, 9, 16, 3, 1),
    (40, 100, (19,), 40, 3, 32, 7, 2),
    (23, 64, (32,), 64, 2, 5, 3, 3),  # a part of K that is empty, in both launches
    (17, 40, (24,), 100, 3, 16, 1, 1),
    (20, 40, (24, 8, 30), 24, 3, 16, 3, 1),  # blocks of ranks that begin within a slice
    (128, 150, (40, 9), 20, 5, 16, 5, 2),  # as many rows as there may be, and more than four parts
    (33, 32, (16, 16), 8, 2, 5, 2, 1),  # no remainders
]


@pytest.mark.parametrize("block_r", [16, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rows", "k", "sizes", "rank", "groups", "tile_m", "parts", "split_k"), thinned(SHAPES, 0, 1, 4, 6, 7)
)
def test_values(rows, k, sizes, rank, groups, tile_m, parts, split_k, block_r):
    x, w, a, b, ids, ranks = of_weights(rows, rows, k, sizes, rank, groups)
    plan = api.make_plan(ids, num_groups=groups, tile_m=tile_m)
    tiles = tiles_of(parts, split_k, block_r=block_r)
    got = linear_lora(x, w, *poisoned(a, b, ranks, sizes), plan, sizes, ranks, tiles)
    close(got, expected(x, w, a, b, ids, sizes), 2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("parts", [1, 3])
def test_half_precision(dtype, parts):
    """To rounding; where there is no delta, the float32 sum is rounded once."""
    sizes = (24, 9)
    x, w, a, b, ids, ranks = of_weights(2, 21, 72, sizes, 12, 4, dtype=dtype)
    plan = api.make_plan(ids, num_groups=4, tile_m=16)
    got = linear_lora(x, w, *poisoned(a, b, ranks, sizes), plan, sizes, ranks, tiles_of(parts))
    assert got.dtype == dtype
    got, want = np.asarray(got, np.float64), expected(x, w, a, b, ids, sizes)
    eps = float(jnp.finfo(dtype).eps)
    assert np.linalg.norm(got - want) <= 0.7 * eps * np.linalg.norm(want)
    alone = np.asarray((ids < 0) | (ids >= 4))
    assert alone.any()
    assert (np.abs(got - want)[alone] <= 0.505 * eps * np.abs(want[alone]) + 1e-4).all()


MIXES = {
    "nobody": np.full(20, -1),
    "all": np.arange(20) % 3,
    "one": np.where(np.arange(20) == 7, 2, 3),
    "all but one": np.where(np.arange(20) == 7, 99, 1),
}


@pytest.mark.parametrize("parts", thinned([1, 2], 1))
@pytest.mark.parametrize("mix", MIXES)
def test_mixes(mix, parts):
    ids = MIXES[mix]
    x, w, a, b, _, ranks = of_weights(3, 20, 40, (24, 9), 8, 3)
    plan = api.make_plan(jnp.asarray(ids), num_groups=3, tile_m=5)
    got = linear_lora(x, w, a, b, plan, (24, 9), ranks, tiles_of(parts))
    close(got, expected(x, w, a, b, ids, (24, 9)), 2e-6)


@pytest.mark.parametrize("parts", thinned([1, 2], 1))
def test_rows_beyond_a_bound_that_does_not_hold_are_base_rows(parts):
    ids = np.arange(18) % 6
    x, w, a, b, _, ranks = of_weights(4, 18, 40, (24,), 8, 6)
    plan = api.make_plan(jnp.asarray(ids), num_groups=6, tile_m=2, max_active=2)
    dropped = np.asarray(plan.row_slot) >= plan.num_tiles * 2
    assert 0 < dropped.sum() < 18
    got = linear_lora(x, w, a, b, plan, (24,), ranks, tiles_of(parts))
    close(got, expected(x, w, a, b, np.where(dropped, -1, ids), (24,)), 2e-6)


@pytest.mark.parametrize("rank", [8, 40])
@pytest.mark.parametrize("parts", [1, 2])
def test_rows_without_a_group_and_slices_of_rank_0_are_the_product(parts, rank):
    """To rounding: and whatever any group's factors hold, bit for bit."""
    ids = np.array([3, -1, 99, 3, 0, 0, 1, 2, 3, 1, 0, 3])
    x, w, a, b, _, _ = of_weights(5, 12, 40, (17, 20), rank, 3)
    ranks = jnp.array([[rank, 0], [0, 0], [3, rank]])
    plan = api.make_plan(jnp.asarray(ids), num_groups=3, tile_m=16)
    untouched = np.isin(ids, [-1, 99, 3, 1])[:, None] | (np.isin(ids, [0])[:, None] & (np.arange(37) >= 17))
    got = np.asarray(linear_lora(x, w, a, b, plan, (17, 20), ranks, tiles_of(parts)))
    product = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    close(got[untouched], product[untouched], 2e-6)
    bad = np.asarray(linear_lora(x, w, a * jnp.nan, b * jnp.nan, plan, (17, 20), ranks, tiles_of(parts)))
    np.testing.assert_array_equal(bad[untouched].view(np.uint32), got[untouched].view(np.uint32))
    assert np.isnan(bad[~untouched]).all()
    nobody = api.make_plan(jnp.full(12, 3), num_groups=3, tile_m=16)
    alone = np.asarray(linear_lora(x, w, a * jnp.nan, b * jnp.nan, nobody, (17, 20), ranks, tiles_of(parts)))
    np.testing.assert_array_equal(alone[untouched].view(np.uint32), got[untouched].view(np.uint32))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_row_does_not_depend_on_its_batch(parts):
    """Bitwise the same alone, permuted, and among other neighbours, at one static number of rows."""
    rng = np.random.default_rng(0)
    x, w, a, b, ids, ranks = of_weights(7, 24, 50, (30, 7), 20, 5, ids=np.arange(24) % 6, dtype=jnp.bfloat16)

    def run(x, ids):
        plan = api.make_plan(ids, num_groups=5, tile_m=4, max_active=5)
        return np.asarray(linear_lora(x, w, a, b, plan, (30, 7), ranks, tiles_of(parts)).astype(jnp.float32))

    want, order = run(x, ids), rng.permutation(24)
    np.testing.assert_array_equal(run(x[order], ids[order]), want[order])
    for row in (10, 11):  # of a group, and of none
        others = jnp.asarray(rng.normal(size=x.shape), x.dtype).at[row].set(x[row])
        for mix in (np.full(24, 5), np.full(24, 2), rng.integers(0, 6, 24)):
            np.testing.assert_array_equal(run(others, jnp.asarray(mix).at[row].set(ids[row]))[row], want[row])
    assert ids[10] < 5 == ids[11]


def test_the_number_of_programs_does_not_change_the_result():
    x, w, a, b, ids, ranks = of_weights(8, 30, 64, (40, 8), 20, 4)
    plan = api.make_plan(ids, num_groups=4, tile_m=16)
    want = linear_lora(x, w, a, b, plan, (40, 8), ranks)
    for change in ({"programs": 1, "shrink_programs": 1, "chunks": 1}, {"chunks": 99, "shrink_programs": 99}):
        got = linear_lora(x, w, a, b, plan, (40, 8), ranks, tiles_of(**change))
        np.testing.assert_array_equal(got, want)


# --- What `jlora.ops.linear_lora` makes of them ---------------------------------------------------------------------


def write(tuned_folder, *shapes, dtype="bfloat16", tiles=TILES):
    """A table for an H200 with entries for (rows, K, N, R)."""
    keys = [Key("linear_lora", dtype, rows_bucket(rows), *rest) for rows, *rest in shapes]
    (tuned_folder / "nvidia_h200.json").write_text(json.dumps([entry_of(key, tiles) for key in keys]))


@pytest.fixture
def interpreted(interpret):
    """Interpret the kernels, and return the names of those that run."""
    return interpret(add_lora=LORA)


def ops_linear_lora(x, w, a, b, ids, ranks, sizes, backend="triton"):
    plan = api.make_plan(ids, num_groups=len(a), tile_m=16)
    return api.linear_lora(x, w, a, b, plan, slice_sizes=sizes, ranks=ranks, backend=backend)


SIZES = (24, 9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("with_ranks", thinned([True, False], 0))
def test_linear_lora_runs_the_kernel_of_the_table(tuned_folder, interpreted, dtype, with_ranks):
    x, w, a, b, ids, ranks = of_weights(9, 19, 40, SIZES, 8, 4, dtype=dtype)
    ranks = ranks if with_ranks else None
    write(tuned_folder, (32, 40, 33, 16), dtype=dtype)
    assert api.product_tiles(x, w, a, b, slice_sizes=SIZES, backend="triton") == TILES
    got = jax.jit(partial(ops_linear_lora, sizes=SIZES))(x, w, a, b, ids, ranks)
    want = expected(x, w, a, b, ids, SIZES)
    assert interpreted == ["linear_lora"]
    assert got.dtype == dtype
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= float(jnp.finfo(dtype).eps) * np.linalg.norm(want)


APART = {  # what differs from a problem for which the table has tiles: rows, R, dtypes of x and w, a, b; backend
    "float32": (19, 8, ("float32",) * 4, "triton"),
    "slots of float32": (19, 8, ("bfloat16", "bfloat16", "float32", "float32"), "triton"),
    "one of float16": (19, 8, ("bfloat16", "bfloat16", "bfloat16", "float16"), "triton"),
    "129 rows": (129, 8, ("bfloat16",) * 4, "triton"),
    "a rank above 512": (19, 520, ("bfloat16",) * 4, "auto"),
    "xla": (19, 8, ("bfloat16",) * 4, "xla"),
    "no such rows": (8, 8, ("bfloat16",) * 4, "triton"),
    "a rank above the table's": (19, 24, ("bfloat16",) * 4, "auto"),
    "no rows": (0, 8, ("bfloat16",) * 4, "triton"),
}


@pytest.mark.parametrize("case", APART)
def test_other_cases_equal_add_lora_of_the_product_bit_for_bit(default_device, tuned_folder, interpreted, case):
    rows, rank, dtypes, backend = APART[case]
    default_device()
    x, w, a, b, ids, ranks = of_weights(9, rows, 40, SIZES, rank, 4)
    x, w, a, b = (v.astype(dtype) for v, dtype in zip((x, w, a, b), dtypes, strict=True))
    write(tuned_folder, *((r, 40, 33, 16 if "above the" in case else 1024) for r in (32, 128, 256)), dtype=dtypes[0])
    assert api.product_tiles(x, w, a, b, slice_sizes=SIZES, backend=backend) is None

    def apart(x, w, a, b, ids, ranks):
        plan = api.make_plan(ids, num_groups=4, tile_m=16)
        return api.add_lora(x @ w, x, a, b, plan, slice_sizes=SIZES, ranks=ranks, backend=backend)

    operands = x, w, a, b, ids, ranks
    with jax.numpy_dtype_promotion("standard"):  # needed by slots of another dtype
        got = jax.jit(partial(ops_linear_lora, sizes=SIZES, backend=backend))(*operands)
        want = jax.jit(apart)(*operands)
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))
    assert (got.shape, got.dtype) == ((rows, 33), x.dtype)
    assert "linear_lora" not in interpreted


def test_a_plan_of_experts_is_served_apart(tuned_folder, interpreted):
    x, w, a, b, ids, ranks = of_weights(9, 19, 40, SIZES, 8, 4, dtype="bfloat16")
    write(tuned_folder, (32, 40, 33, 16))
    plan = dataclasses.replace(api.make_plan(ids, num_groups=4, tile_m=16), experts=2)
    got = api.linear_lora(x, w, a, b, plan, slice_sizes=SIZES, ranks=ranks, backend="triton")
    assert "linear_lora" not in interpreted
    want = expected(x, w, a, b, ids, SIZES)
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": (40, 33, 1)}, r"x must be \[M, K\] and w \[K, N\] of one dtype, got bfloat16\[19, 40\] and .*33, 1\]"),
        ({"w": (41, 33)}, r"got bfloat16\[19, 40\] and bfloat16\[41, 33\]"),
        ({"w": (40, 32)}, r"w \[K, N\] = \(40, 32\) and b \[G, R, N\] = \(4, 8, 33\): N disagrees"),
        ({"dtype": "float32"}, r"of one dtype, got bfloat16\[19, 40\] and float32\[40, 33\]"),
        ({"x": (18, 40)}, r"linear_lora: x must be \[M, features\] with M = 19"),
        ({"x": (19, 1, 40)}, r"x must be \[M, K\]"),
        ({"a": (3, 2, 8, 40)}, r"linear_lora: a must be \[G, n, R, K\] with G = 4"),
        ({"a": (4, 1, 8, 40), "ranks": (4, 1)}, r"n or R disagree"),
        ({"a": (4, 2, 7, 40)}, r"n or R disagree"),
        ({"b": (3, 8, 33)}, r"linear_lora: b must be \[G, R, N\] with G = 4"),
        ({"sizes": (24, 8)}, r"linear_lora: slice_sizes must be positive and sum to N = 33"),
        ({"ranks": (4, 1)}, r"linear_lora: ranks must be integers \[G, n\] = \[4, 2\]"),
    ],
)
@pytest.mark.usefixtures("unchecked_calls", "interpreted")
def test_wrong_shapes_are_refused(tuned_folder, change, message):
    write(tuned_folder, (32, 40, 33, 16))
    shapes = {"x": (19, 40), "w": (40, 33), "a": (4, 2, 8, 40), "b": (4, 8, 33), "ranks": (4, 2)} | change
    x, w, a, b = (jnp.zeros(shapes[name], "bfloat16") for name in "xwab")
    plan, ranks = api.make_plan(jnp.zeros(19, jnp.int32), num_groups=4), jnp.zeros(shapes["ranks"], jnp.int32)
    w, sizes = w.astype(change.get("dtype", w.dtype)), change.get("sizes", SIZES)
    with pytest.raises(LoRAError, match=message):
        api.linear_lora(x, w, a, b, plan, slice_sizes=sizes, ranks=ranks, backend="triton")


# --- Transformations ------------------------------------------------------------------------------------------------


def plain(x, w, a, b, ids, ranks, sizes):
    """In float32, and in jnp alone."""
    x, w, a, b = (v.astype(jnp.float32) for v in (x, w, a, b))
    there = (ids >= 0) & (ids < len(a))
    group = jnp.where(there, ids, 0)
    keep = (jnp.arange(a.shape[2], dtype=jnp.int32)[None, None] < ranks[group][..., None]) & there[:, None, None]
    h = jnp.where(keep, jnp.einsum("mk,mnrk->mnr", x, a[group], precision="highest"), 0)
    slice_of = np.repeat(np.arange(len(sizes)), sizes)
    return jnp.matmul(x, w, precision="highest") + jnp.einsum(
        "mrc,mrc->mc", h.transpose(0, 2, 1)[:, :, slice_of], b[group], precision="highest"
    )


def test_gradients_of_the_kernels():
    x, w, a, b, ids, ranks = of_weights(10, 21, 40, SIZES, 5, 4)
    plan = api.make_plan(ids, num_groups=4, tile_m=16)

    def run(x, w, a, b, plan, ranks, *_):
        return KERNEL(x, w, a, b, plan, slice_sizes=SIZES, ranks=ranks, tiles=TILES, interpret=interpret_of("triton"))

    @partial(jax.jit, static_argnums=0)
    def pull(call, operands, cotangent):
        return jax.vjp(call, *operands)[1](cotangent)

    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(21, 33)), jnp.float32)
    got = pull(lambda *v: gradients.linear_lora(run, SIZES, *v, plan, with_scales(ranks)), (x, w, a, b), cotangent)
    want = pull(lambda *v: plain(*v, ids, ranks, SIZES), (x, w, a, b), cotangent)
    for one, other in zip(got, want, strict=True):
        close(one, np.asarray(other, np.float64), 1e-5)


@pytest.fixture
def half(tuned_folder):
    """Operands for which the table has tiles, and the loss whose gradients are compared."""
    write(tuned_folder, (32, 40, 33, 16))
    x, w, a, b, ids, ranks = of_weights(11, 19, 40, SIZES, 8, 4, dtype="bfloat16")
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(19, 33)), jnp.float32)

    def loss(make, x, w, a, b):
        return (make(x, w, a, b, ids, ranks, sizes=SIZES).astype(jnp.float32) * weight).sum()

    return (x, w, a, b), ids, ranks, loss


def alike(got, want, tolerance=1.5e-2):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


def test_gradients_of_the_function(half, interpreted):
    operands, _, _, loss = half
    got, want = (jax.jit(jax.grad(partial(loss, f), range(4)))(*operands) for f in (ops_linear_lora, plain))
    assert interpreted == ["linear_lora"]
    assert [g.dtype for g in got] == [jnp.bfloat16] * 4
    alike(got, want)


def test_in_a_scan(half, interpreted):
    (x, w, a, b), ids, ranks, _ = half

    def step(make):
        def body(total, x):
            y = make(x, w, a, b, ids, ranks, sizes=SIZES)
            return total + y.astype(jnp.float32).sum(), y

        return jax.jit(lambda xs: jax.lax.scan(body, jnp.float32(0), xs)[1])

    xs = jnp.stack([x, -x, x * 2])
    alike(step(ops_linear_lora)(xs), step(plain)(xs), 5e-3)
    assert interpreted == ["linear_lora"]


MAPPED = {  # which of x, w, a, b, ids and ranks have an axis more
    "x": "100000", "w": "010000", "x and ids": "100010", "all": "111111", "slots": "001101", "ids": "000010",
}  # fmt: skip


def batches(operands, which, copies=3):
    """Copies that differ, where there is to be another axis; and the axes."""
    axes = tuple(0 if flag == "1" else None for flag in which)

    def stack(value, i):
        if value.dtype == jnp.int32:
            return jnp.stack([jnp.roll(value, shift, 0) for shift in range(copies)])
        return jnp.stack([value * scale for scale in (1, -1, 2)][:copies])

    return [
        value if axis is None else stack(value, i) for i, (value, axis) in enumerate(zip(operands, axes, strict=True))
    ], axes


@pytest.mark.parametrize("which", MAPPED)
@pytest.mark.usefixtures("interpreted")
def test_vmap_takes_the_product_apart(half, which):
    """One XLA product of all mapped rows is faster."""
    operands, ids, ranks, _ = half
    operands, axes = batches((*operands, ids, ranks), MAPPED[which])
    got = jax.jit(jax.vmap(partial(ops_linear_lora, sizes=SIZES), in_axes=axes))(*operands)
    want = [plain(*(v if ax is None else v[i] for v, ax in zip(operands, axes, strict=True)), SIZES) for i in range(3)]
    alike(got, jnp.stack(want), 5e-3)


def both_axes(run):
    return jax.vmap(jax.vmap(run, (0,) + (None,) * 5), (0,) + (None,) * 5)


def grads(run):
    """Of the sum of the squares by x and w."""

    def loss(x, w, *rest):
        return (run(x, w, *rest).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1))


FIRST = (0,) + (None,) * 5
NESTED = {
    "vmap": lambda run: jax.vmap(run, FIRST),
    "vmap of vmap": lambda run: lambda x, *rest: both_axes(run)(x[None], *rest),
    "vmap of jit": lambda run: jax.vmap(jax.jit(run), FIRST),
    "vmap of grad": lambda run: jax.vmap(grads(run), FIRST),
    "grad of vmap": lambda run: grads(jax.vmap(run, FIRST)),
    "vmap of scan": lambda run: jax.vmap(
        lambda x, *rest: jax.lax.scan(lambda c, v: (c, run(v, *rest)), 0, jnp.stack([x, -x]))[1], FIRST
    ),
}


@pytest.mark.parametrize("how", NESTED)
def test_vmap_composes_with_other_transformations(half, interpret, how):
    operands, ids, ranks, _ = half
    operands = jnp.stack([operands[0], -operands[0]]), *operands[1:], ids, ranks
    together, reference = (NESTED[how](partial(make, sizes=SIZES)) for make in (ops_linear_lora, plain))
    text = lowered_text(together, operands, "cuda")
    assert "lora_shrink" in text
    assert "lora_product" not in text
    interpret(add_lora=LORA)
    alike(jax.jit(together)(*operands), jax.jit(reference)(*operands))


# --- Lowering for CUDA ----------------------------------------------------------------------------------------------

REAL = ProductTiles(64, 128, 4, 4, 4, lora=dataclasses.replace(LORA, block_k=128, block_r=32, block_n=128))


def lowered(rows, k, sizes, rank, dtype="bfloat16", backend="triton"):
    struct = jax.ShapeDtypeStruct
    shapes = (rows, k), (k, sum(sizes)), (8, len(sizes), rank, k), (8, rank, sum(sizes))
    args = *(struct(s, dtype) for s in shapes), struct((rows,), jnp.int32), struct((8, len(sizes)), jnp.int32)
    return lowered_text(partial(ops_linear_lora, sizes=sizes, backend=backend), args, "cuda")


@pytest.mark.parametrize(
    ("rows", "k", "sizes", "rank", "dtype", "parts"),
    thinned(
        [
            (8, 4096, (4096, 1024, 1024), 16, "bfloat16", 4),
            (128, 1000, (333, 20), 24, "float16", 1),
            (1, 4096, (14336, 14336), 64, "bfloat16", 1),
            (37, 1000, (333, 20), 512, "bfloat16", 16),
            (128, 4096, (4096,), 8, "float16", 8),
        ],
        0, 1,
    ),
)  # fmt: skip
def test_lowers_for_cuda(tuned_folder, rows, k, sizes, rank, dtype, parts):
    """Two launches: the product's, and the sum of its parts, or the expand."""
    write(
        tuned_folder, (rows, k, sum(sizes), rank), dtype=dtype, tiles=dataclasses.replace(REAL, product_split_k=parts)
    )
    text = lowered(rows, k, sizes, rank, dtype)
    assert "lora_product" in text
    assert ("lora_product_sum" in text) == (parts > 1)
    assert ("lora_expand" in text) == (parts == 1)
    assert "lora_shrink" not in text
    assert "stablehlo.dot_general" not in text
    assert text.count("custom_call @__gpu$xla.gpu.triton") + text.count("custom_call @triton_kernel_call_ffi") == 2


@pytest.mark.parametrize(
    ("change", "kernel"),
    [({"dtype": "float32"}, "lora_expand"), ({"backend": "xla"}, None), ({"rows": 129}, "lora_expand")],
)
def test_lowers_to_two_products_where_the_kernels_are_not_for_it(tuned_folder, change, kernel):
    case = {"rows": 100, "k": 40, "sizes": (33,), "rank": 8, "dtype": "bfloat16", "backend": "triton"} | change
    write(tuned_folder, (128, 40, 33, 8), (256, 40, 33, 8), dtype=case["dtype"])
    text = lowered(**case)
    assert "lora_product" not in text
    assert "stablehlo.dot_general" in text
    assert ("lora_expand" in text) == (kernel is not None)
