"""The kernel of base products: interpret mode against NumPy, and `jlora.ops.linear_lora`, which calls it.

The oracle's factors are clean. Those that the kernels get hold NaN wherever they must not read.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.errors import LoRAError
from jlora.pallas import api, gradients
from jlora.pallas.tiles import ProductTiles
from jlora.pallas.triton import product as kernels
from tests import oracle
from tests.matrix import thinned
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import close, problem
from tests.pallas.triton.test_lora import TILES as LORA

# Users never run interpreted kernels, so XLA's optimisations are left out.
pytestmark = [pytest.mark.device("gpu"), pytest.mark.usefixtures("quickly_compiled")]

TILES = ProductTiles(block_n=16, block_k=16, split_k=2, warps=4, stages=1)


def product(x, w, parts=2):
    tiles = dataclasses.replace(TILES, split_k=parts)
    return kernels.product(x, w, tiles=tiles, interpret=interpret_of("triton"))


def weights(seed, rows, k, n, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, k)), dtype), jnp.asarray(rng.normal(size=(k, n)), dtype)


def exact(x, w):
    """float64."""
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


SHAPES = [  # rows, K, N, parts of K
    (1, 5, 3, 1),
    (13, 70, 38, 2),
    (70, 33, 38, 3),
    (40, 100, 19, 7),
    (23, 64, 32, 3),  # a part of K that is empty
    (128, 150, 49, 5),
    (33, 32, 32, 2),  # no remainders
]


@pytest.mark.parametrize(("rows", "k", "n", "parts"), SHAPES)
def test_values(rows, k, n, parts):
    x, w = weights(rows, rows, k, n)
    close(product(x, w, parts), exact(x, w), 2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("parts", [1, 3])
def test_half_precision_is_rounded_once(dtype, parts):
    x, w = weights(2, 21, 72, 33, dtype)
    got = product(x, w, parts)
    assert got.dtype == dtype
    want = exact(x, w)
    error = np.abs(np.asarray(got, np.float64) - want)
    assert (error <= 0.505 * float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-4).all()


@pytest.mark.parametrize("parts", [1, 3])
def test_a_row_does_not_depend_on_the_others(parts):
    """Bitwise, at one static number of rows."""
    rng = np.random.default_rng(0)
    x, w = weights(7, 24, 50, 37, jnp.bfloat16)
    want, order = np.asarray(product(x, w, parts), np.float32), rng.permutation(24)
    np.testing.assert_array_equal(np.asarray(product(x[order], w, parts), np.float32), want[order])
    others = jnp.asarray(rng.normal(size=x.shape), x.dtype).at[10].set(x[10])
    np.testing.assert_array_equal(np.asarray(product(others, w, parts), np.float32)[10], want[10])


# --- What `jlora.ops.linear_lora` makes of it -----------------------------------------------------------------------


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


@pytest.fixture
def interpreted(interpret):
    """Interpret the kernels, and return the names of those that run."""
    return interpret(add_lora=LORA)


def ops_linear_lora(x, w, a, b, ids, ranks, sizes, backend="triton"):
    plan = api.make_plan(ids, num_groups=len(a), tile_m=16)
    return api.linear_lora(x, w, a, b, plan, slice_sizes=sizes, ranks=with_scales(ranks), backend=backend)


SIZES = (24, 9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("with_ranks", thinned([True, False], 0))
def test_linear_lora_runs_both_kernels(force_product, interpreted, dtype, with_ranks):
    x, w, a, b, ids, ranks = of_weights(9, 19, 40, SIZES, 8, 4, dtype=dtype)
    ranks = ranks if with_ranks else None
    force_product(TILES)
    assert api.has_product(x, w, backend="triton")
    got = jax.jit(partial(ops_linear_lora, sizes=SIZES))(x, w, a, b, ids, ranks)
    want = expected(x, w, a, b, ids, SIZES)
    assert interpreted == ["product", "add_lora"]
    assert got.dtype == dtype
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= float(jnp.finfo(dtype).eps) * np.linalg.norm(want)


APART = {  # what differs from products of the kernel: rows, dtypes of x and w, backend
    "float32": (19, "float32", "triton"),
    "129 rows": (129, "bfloat16", "triton"),
    "xla": (19, "bfloat16", "xla"),
    "no rows": (0, "bfloat16", "triton"),
}


@pytest.mark.parametrize("case", APART)
def test_other_cases_equal_add_lora_of_the_product_bit_for_bit(default_device, force_product, interpreted, case):
    rows, dtype, backend = APART[case]
    default_device()
    x, w, a, b, ids, ranks = of_weights(9, rows, 40, SIZES, 8, 4, dtype=dtype)
    force_product(TILES)
    assert not api.has_product(x, w, backend=backend)

    def apart(x, w, a, b, ids, ranks):
        plan = api.make_plan(ids, num_groups=4, tile_m=16)
        return api.add_lora(x @ w, x, a, b, plan, slice_sizes=SIZES, ranks=with_scales(ranks), backend=backend)

    operands = x, w, a, b, ids, ranks
    got = jax.jit(partial(ops_linear_lora, sizes=SIZES, backend=backend))(*operands)
    want = jax.jit(apart)(*operands)
    np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))
    assert (got.shape, got.dtype) == ((rows, 33), x.dtype)
    assert "product" not in interpreted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": (40, 33, 1)}, r"x must be \[M, K\] and w \[K, N\] of one dtype, got bfloat16\[19, 40\] and .*33, 1\]"),
        ({"w": (41, 33)}, r"got bfloat16\[19, 40\] and bfloat16\[41, 33\]"),
        ({"w": (40, 32)}, r"w \[K, N\] = \(40, 32\) and b \[G, R, N\] = \(4, 8, 33\): N disagrees"),
        ({"dtype": "float32"}, r"of one dtype, got bfloat16\[19, 40\] and float32\[40, 33\]"),
        ({"x": (18, 40)}, r"x must be \[M, features\] with M = 19"),
        ({"x": (19, 1, 40)}, r"x must be \[M, K\]"),
        ({"a": (3, 2, 8, 40)}, r"a must be \[G, n, R, K\] with G = 4"),
        ({"a": (4, 1, 8, 40), "ranks": (4, 1, 2)}, r"n or R disagree"),
        ({"a": (4, 2, 7, 40)}, r"n or R disagree"),
        ({"b": (3, 8, 33)}, r"b must be \[G, R, N\] with G = 4"),
        ({"sizes": (24, 8)}, r"slice_sizes must be positive and sum to N = 33"),
        (
            {"ranks": (4, 2)},
            r"ranks must be float32 \[G, n, 2\] = \[4, 2, 2\] .*, got float32\[4, 2\]",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_calls", "interpreted")
def test_wrong_shapes_are_refused(force_product, change, message):
    force_product(TILES)
    shapes = {"x": (19, 40), "w": (40, 33), "a": (4, 2, 8, 40), "b": (4, 8, 33), "ranks": (4, 2, 2)} | change
    x, w, a, b = (jnp.zeros(shapes[name], "bfloat16") for name in "xwab")
    plan, ranks = api.make_plan(jnp.zeros(19, jnp.int32), num_groups=4), jnp.zeros(shapes["ranks"])
    w, sizes = w.astype(change.get("dtype", w.dtype)), change.get("sizes", SIZES)
    with pytest.raises(LoRAError, match=message):
        api.linear_lora(x, w, a, b, plan, slice_sizes=sizes, ranks=ranks, backend="triton")


# --- Transformations of `api.product` -------------------------------------------------------------------------------


def plain(x, w):
    """In float32, and in jnp alone."""
    return jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")


def forced(x, w):
    return api.product(x, w, backend="triton")


def test_gradients_of_the_product():
    x, w = weights(10, 21, 40, 33)
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(21, 33)), jnp.float32)
    of_x, of_w = jax.vjp(lambda x, w: gradients.product(product, x, w), x, w)[1](cotangent)
    close(of_x, exact(cotangent, w.T), 1e-5)
    close(of_w, exact(x.T, cotangent), 1e-5)


def alike(got, want, tolerance=5e-3):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


def grads(run):
    """Of the sum of the squares."""
    return jax.grad(lambda x, w: (run(x, w).astype(jnp.float32) ** 2).sum(), (0, 1))


def scanned(run):
    return lambda x, w: jax.lax.scan(lambda c, v: (c, run(v, w)), 0, jnp.stack([x, -x]))[1]


WITH_KERNEL = {"grad": grads, "scan": scanned}
MAPPED = {  # by which the product is XLA's: one product of all mapped rows is faster
    "vmap of x": lambda run: lambda x, w: jax.vmap(run, (0, None))(jnp.stack([x, -x]), w),
    "vmap of w": lambda run: lambda x, w: jax.vmap(run, (None, 0))(x, jnp.stack([w, -w])),
    "vmap of both": lambda run: lambda x, w: jax.vmap(run)(jnp.stack([x, -x]), jnp.stack([w, 2 * w])),
    "vmap of vmap": lambda run: lambda x, w: jax.vmap(jax.vmap(run, (0, None)), (0, None))(jnp.stack([x, -x])[None], w),
    "vmap of jit": lambda run: lambda x, w: jax.vmap(jax.jit(run), (0, None))(jnp.stack([x, -x]), w),
    "vmap of grad": lambda run: lambda x, w: jax.vmap(grads(run), (0, None))(jnp.stack([x, -x]), w),
    "grad of vmap": lambda run: lambda x, w: grads(jax.vmap(run, (0, None)))(jnp.stack([x, -x]), w),
    "vmap of scan": lambda run: lambda x, w: jax.vmap(scanned(run), (0, None))(jnp.stack([x, -x]), w),
}


@pytest.mark.parametrize("how", WITH_KERNEL)
def test_transformations_keep_the_kernel(force_product, interpreted, how):
    force_product(TILES)
    x, w = weights(11, 19, 40, 33, jnp.bfloat16)
    got, want = (jax.jit(WITH_KERNEL[how](make))(x, w) for make in (forced, plain))
    assert interpreted == ["product"]
    alike(got, want, 1.5e-2)


@pytest.mark.parametrize("how", MAPPED)
def test_mapped_products_are_xlas(force_product, how):
    force_product(TILES)
    x, w = weights(11, 19, 40, 33, jnp.bfloat16)
    assert "base_product" not in lowered_text(MAPPED[how](forced), (x, w), "cuda")
    alike(jax.jit(MAPPED[how](forced))(x, w), jax.jit(MAPPED[how](plain))(x, w), 1.5e-2)


# --- Lowering for CUDA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "k", "sizes", "rank", "dtype"),
    [
        (64, 4096, (4096, 1024, 1024), 16, "bfloat16"),
        (37, 18944, (3584,), 64, "float16"),
        (33, 5120, (5000, 120, 120), 512, "bfloat16"),
    ],
)
def test_lowers_for_cuda(rows, k, sizes, rank, dtype):
    text = lowered(rows, k, sizes, rank, dtype)
    assert all(name in text for name in ("base_product", "lora_shrink", "lora_expand"))
    assert "stablehlo.dot_general" not in text
    assert text.count("custom_call @__gpu$xla.gpu.triton") + text.count("custom_call @triton_kernel_call_ffi") == 3


@pytest.mark.parametrize(
    ("change", "has_kernels"),
    [
        ({"dtype": "float32"}, True), ({"backend": "xla"}, False), ({"rows": 65}, True), ({"rows": 32}, True),
        ({"sizes": (14336, 14336)}, True),
    ],
)  # fmt: skip
def test_other_products_are_xlas(change, has_kernels):
    case = {"rows": 64, "k": 4096, "sizes": (4096,), "rank": 8, "dtype": "bfloat16", "backend": "triton"} | change
    text = lowered(**case)
    assert "base_product" not in text
    assert "stablehlo.dot_general" in text
    assert ("lora_expand" in text) == has_kernels


def lowered(rows, k, sizes, rank, dtype="bfloat16", backend="triton"):
    struct = jax.ShapeDtypeStruct
    shapes = (rows, k), (k, sum(sizes)), (8, len(sizes), rank, k), (8, rank, sum(sizes))
    args = *(struct(s, dtype) for s in shapes), struct((rows,), jnp.int32), struct((8, len(sizes)), jnp.int32)
    return lowered_text(partial(ops_linear_lora, sizes=sizes, backend=backend), args, "cuda")
