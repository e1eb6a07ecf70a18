"""The Triton kernels: values in interpret mode against the NumPy oracle, and lowering for CUDA without a GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas import api
from jlora.pallas.tiles import GPUTiles
from jlora.pallas.triton import lora as triton
from tests import oracle
from tests.matrix import thinned
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import close, problem

# Users never run interpreted kernels, so XLA's optimisations are left out.
pytestmark = [pytest.mark.device("gpu"), pytest.mark.usefixtures("quickly_compiled")]

TILES = GPUTiles(block_k=32, split_k=2, block_r=16, shrink_programs=3, block_n=16, ahead=2, programs=4, stages=1)


# The expand adds to the base in its place, as for many rows or with `batch_invariant`, or XLA adds the delta.
IN_PLACE = pytest.mark.parametrize("in_place", [False, True])


def add_lora(base, x, a, b, plan, sizes, ranks, tiles=TILES, in_place=False):
    run = jax.jit(triton.add_lora, static_argnames=("slice_sizes", "tiles", "interpret", "batch_invariant"))
    return run(
        base, x, a, b, plan, slice_sizes=tuple(sizes), ranks=with_scales(ranks), tiles=tiles, batch_invariant=in_place,
        interpret=interpret_of("triton"),
    )  # fmt: skip


SHAPES = [  # rows, K, slices, R, groups, tile_m, split_k
    (1, 5, (3,), 1, 1, 16, 1),
    (13, 70, (33, 5), 5, 4, 16, 3),
    (70, 33, (20, 1, 17), 16, 9, 16, 1),
    (40, 100, (19,), 40, 3, 32, 2),
    (23, 64, (32,), 64, 2, 5, 3),  # a part of K that is empty
    (17, 40, (24,), 100, 3, 16, 1),
    (20, 40, (24, 8, 30), 24, 3, 16, 1),  # blocks of ranks that begin within a slice
    (20, 40, (24, 8, 30), 32, 3, 16, 2),
]


# Up to all slices at once.
@pytest.mark.parametrize(
    "block_r", [16, pytest.param(64, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("rows", "k", "sizes", "rank", "groups", "tile_m", "split_k"), thinned(SHAPES, 0, 1, 2, 7))
@IN_PLACE
def test_values(rows, k, sizes, rank, groups, tile_m, split_k, block_r, in_place):
    base, x, a, b, ids, ranks = problem(rows, rows, k, sizes, rank, groups)
    plan = api.make_plan(ids, num_groups=groups, tile_m=tile_m)
    tiles = dataclasses.replace(TILES, split_k=split_k, block_r=block_r)
    got = add_lora(base, x, a, b, plan, sizes, ranks, tiles, in_place)
    close(got, oracle.add_lora(base, x, ids, a, b, sizes), 2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("split_k", thinned([1, 2, 5], 1))
def test_half_precision(dtype, split_k):
    sizes = (24, 9)
    base, x, a, b, ids, ranks = problem(2, 21, 72, sizes, 12, 4, dtype=dtype)
    base = base * 0
    plan = api.make_plan(ids, num_groups=4, tile_m=16)
    got = add_lora(base, x, a, b, plan, sizes, ranks, dataclasses.replace(TILES, split_k=split_k, block_k=16))
    assert got.dtype == dtype
    want = oracle.lora_delta(x, ids, a, b, sizes)
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 5e-3 * np.linalg.norm(want)


@IN_PLACE
def test_untouched_values_are_bitwise_the_base(in_place):
    run = partial(add_lora, in_place=in_place)
    base, x, a, b, _, _ = problem(5, 12, 40, [17, 20], 20, 3)
    base = base.at[:, ::2].set(-0.0).at[0, 1].set(jnp.nan)
    ids = jnp.array([3, -1, 99, 3, 3, 3, 0, 0, 1, 1, 2, 3])
    ranks = jnp.array([[20, 0], [0, 0], [20, 20]])
    got = np.asarray(run(base, x, a, b, api.make_plan(ids, num_groups=3, tile_m=16), (17, 20), ranks))
    want = np.asarray(base)
    dropped = np.array([0, 1, 2, 3, 4, 5, 8, 9, 11])
    np.testing.assert_array_equal(got[dropped].view(np.uint32), want[dropped].view(np.uint32))
    np.testing.assert_array_equal(got[6:8, 17:].view(np.uint32), want[6:8, 17:].view(np.uint32))
    assert not np.isnan(got[1:]).any()
    assert (got[6:8, :17] != want[6:8, :17]).any()
    nobody = api.make_plan(jnp.full(12, 3), num_groups=3, tile_m=16)
    untouched = run(base, x, a, b, nobody, (17, 20), ranks)
    np.testing.assert_array_equal(np.asarray(untouched).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("rank", thinned([8, 24, 40], 1))
@pytest.mark.parametrize("block_r", [16, 128])
@IN_PLACE
def test_a_slice_is_cut_at_its_own_rank(rank, block_r, in_place):
    """Slices of one block have ranks of their own; NaN past one of them, or in a slice of rank 0, goes nowhere."""
    sizes = (20, 9, 13)
    base, x, a, b, ids, _ = problem(6, 9, 40, sizes, rank, 2, ids=[0, 1, 0, 2, 1, 1, 0, 0, 1])
    ranks = jnp.array([[rank // 2, 0, rank], [3, rank, 1]])
    past = (np.arange(rank) >= np.asarray(ranks)[..., None])[..., None]  # [G, n, R, 1]
    cut = np.concatenate([past[:, i].repeat(size, 2) for i, size in enumerate(sizes)], axis=2)
    tiles, b = dataclasses.replace(TILES, block_r=block_r), jnp.where(cut, 0, b)
    got = add_lora(base, x, jnp.where(past, jnp.nan, a), b, plan9(ids), sizes, ranks, tiles, in_place)
    close(got, oracle.add_lora(base, x, ids, jnp.where(past, 0, a), b, sizes), 2e-6)


def test_vmap():
    base, x, a, b, ids, ranks = problem(4, 20, 64, (48,), 16, 3)
    plan = api.make_plan(ids, num_groups=3, tile_m=16)
    bases, xs = jnp.stack([base, base + 1]), jnp.stack([x, 2 * x])
    outs = jax.jit(jax.vmap(lambda base, x: add_lora(base, x, a, b, plan, (48,), ranks)))(bases, xs)
    for got, one_base, one_x in zip(outs, bases, xs, strict=True):
        close(got, oracle.add_lora(one_base, one_x, ids, a, b), 2e-6)


def plan9(ids):
    return api.make_plan(ids, num_groups=2, tile_m=16)


@IN_PLACE
def test_a_row_does_not_depend_on_its_batch(in_place):
    base, x, a, b, ids, ranks = problem(7, 24, 50, [30, 7], 20, 5, ids=np.arange(24) % 6)

    def run(order, ids):
        plan = api.make_plan(ids, num_groups=5, tile_m=4, max_active=5)
        return np.asarray(add_lora(base[order], x[order], a, b, plan, (30, 7), ranks, in_place=in_place))

    order = np.random.default_rng(0).permutation(24)
    want = run(np.arange(24), ids)
    np.testing.assert_array_equal(run(order, ids[order]), want[order])
    alone = run(np.arange(24), jnp.full(24, 5).at[10].set(ids[10]))
    np.testing.assert_array_equal(alone[10], want[10])
    together = run(np.arange(24), jnp.full(24, ids[10]))
    np.testing.assert_array_equal(together[10], want[10])


def test_few_rows_do_not_wait_for_the_base():
    """The kernels take no base output, so that XLA may run them beside the product that computes it."""
    base, x, a, b, ids, ranks = problem(8, 30, 64, [40, 8], 20, 4)

    def run(base, x, a, b, ids, ranks, rows):
        base, x, ids = (jnp.resize(v, (rows, *v.shape[1:])) for v in (base, x, ids))
        plan = api.make_plan(ids, num_groups=4)
        return api.add_lora(base, x, a, b, plan, slice_sizes=(40, 8), ranks=with_scales(ranks), backend="triton")

    for rows, in_place in ((30, False), (triton.SEPARATE_ROWS, False), (triton.SEPARATE_ROWS + 1, True)):
        text = lowered_text(partial(run, rows=rows), (base, x, a, b, ids, ranks), "cuda")
        assert ("output_operand_alias" in text) == in_place


@pytest.mark.slow
def test_the_number_of_programs_does_not_change_the_result():
    base, x, a, b, ids, ranks = problem(8, 30, 64, [40, 8], 20, 4)
    plan = api.make_plan(ids, num_groups=4, tile_m=16)
    want = add_lora(base, x, a, b, plan, (40, 8), ranks)
    for change in ({"programs": 1, "shrink_programs": 9}, {"programs": 99, "ahead": 1}):
        got = add_lora(base, x, a, b, plan, (40, 8), ranks, dataclasses.replace(TILES, **change))
        np.testing.assert_array_equal(got, want)


REAL = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)), (1000, (333, 20))]


MIXES = [(8, 16, "bfloat16"), (2048, 512, "float16"), (64, 8, "float32"), (64, 64, "int8")]
QUICK = {(0, 0), (1, 1), (4, 2), (2, 3)}  # of `REAL` and of `MIXES`


@pytest.mark.parametrize(
    ("k", "sizes", "rows", "rank", "dtype"),
    [
        pytest.param(*real, *mix, marks=() if (i, j) in QUICK else pytest.mark.slow)
        for i, real in enumerate(REAL)
        for j, mix in enumerate(MIXES)
    ],
)
def test_lowers_for_cuda(k, sizes, rows, rank, dtype):
    struct, of_x = jax.ShapeDtypeStruct, "bfloat16" if dtype == "int8" else dtype
    arrays = [struct(s, of_x) for s in ((rows, sum(sizes)), (rows, k))]
    arrays += [struct(s, dtype) for s in ((8, len(sizes), rank, k), (8, rank, sum(sizes)))]
    args = (
        *arrays,
        struct((rows,), jnp.int32),
        struct((8, len(sizes), 1 + (rank if dtype == "int8" else 1)), "float32"),
    )

    def run(base, x, a, b, ids, ranks):
        plan = api.make_plan(ids, num_groups=8, backend="triton")
        return api.add_lora(base, x, a, b, plan, slice_sizes=sizes, ranks=ranks, backend="triton")

    text = lowered_text(run, args, "cuda")
    assert text.count("lora_shrink") > 0
    assert text.count("lora_expand") > 0
    kernels = text.count("custom_call @__gpu$xla.gpu.triton") + text.count("custom_call @triton_kernel_call_ffi")
    assert kernels == (
        3 if len(sizes) == 2 and triton.EARLY_ROWS < rows <= triton.SEPARATE_ROWS else 2
    )  # the third comes after the base product
