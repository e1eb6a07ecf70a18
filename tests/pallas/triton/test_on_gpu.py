"""The Triton kernels compiled and run on a GPU; skipped elsewhere. Run with JAX_PLATFORMS=cuda.

Interpret mode does not cover the compiler's shared memory, masked tails and wide loads.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from jlora.pallas import api
from jlora.pallas.gpus import GPU, current_gpu, platform
from jlora.pallas.tiles import ProductTiles, too_large
from jlora.pallas.triton import lora as triton
from jlora.pallas.triton import product as kernels
from tests import oracle
from tests.pallas.lowering import shared_memory
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import close, problem
from tests.pallas.triton.test_product import exact, of_weights, weights

pytestmark = [pytest.mark.device("gpu"), pytest.mark.skipif(platform() != "gpu", reason="compiled for an NVIDIA GPU")]

add_lora = jax.jit(api.add_lora, static_argnames=("slice_sizes", "backend"))

SHAPES = [  # rows, K, slices, R, groups
    (1, 5, (3,), 1, 1),
    (7, 129, (65, 1, 33), 8, 3),
    (19, 1000, (333, 20), 24, 5),
    (64, 4096, (1024, 512), 40, 8),
    (70, 500, (300,), 64, 4),
    (300, 257, (129, 64), 100, 3),
    (1030, 640, (320, 64), 16, 2),
    (700, 512, (256, 128, 128), 200, 3),
    (33, 384, (256,), 512, 2),
    (600, 384, (256,), 512, 2),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "k", "sizes", "rank", "groups"), SHAPES)
def test_values(rows, k, sizes, rank, groups, dtype):
    base, x, a, b, ids, ranks = problem(rows, rows, k, sizes, rank, groups, dtype=dtype)
    a = a * jnp.asarray(k**-0.5, dtype)  # h within float16's range of exact values
    plan = api.make_plan(ids, num_groups=groups)
    run = dict(slice_sizes=sizes, ranks=with_scales(ranks), backend="triton")
    got = add_lora(base * 0, x, a, b, plan, **run)
    want = oracle.lora_delta(x, ids, a, b, sizes)
    tolerance = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 2e-6}[dtype]
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= tolerance * np.linalg.norm(want) + 1e-30
    order = np.random.default_rng(rows).permutation(rows)
    again = add_lora(base[order], x[order], a, b, api.make_plan(ids[order], num_groups=groups), **run)
    straight = add_lora(base, x, a, b, plan, **run)
    np.testing.assert_array_equal(np.asarray(again, np.float64), np.asarray(straight, np.float64)[order])
    untouched = np.asarray((ids < 0) | (ids >= groups))
    np.testing.assert_array_equal(
        np.asarray(straight, np.float64)[untouched], np.asarray(base, np.float64)[untouched], strict=True
    )


def test_gradients():
    sizes = (40, 24)
    base, x, a, b, ids, ranks = problem(3, 50, 96, sizes, 16, 4)
    plan, ranks = api.make_plan(ids, num_groups=4), with_scales(ranks)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=base.shape), jnp.float32)

    def loss(arrays, backend):
        base, x, a, b = arrays
        return (api.add_lora(base, x, a, b, plan, slice_sizes=sizes, ranks=ranks, backend=backend) * weight).sum()

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)((base, x, a, b), name) for name in ("triton", "xla"))
    for g, w in zip(got, want, strict=True):
        close(g, np.asarray(w, np.float64), 1e-5)


def test_vmap():
    base, x, a, b, ids, ranks = problem(4, 20, 64, (48,), 16, 3)
    plan = api.make_plan(ids, num_groups=3)
    bases, xs = jnp.stack([base, base + 1]), jnp.stack([x, 2 * x])

    def run(base, x):
        return api.add_lora(base, x, a, b, plan, ranks=with_scales(ranks), backend="triton")

    for got, one_base, one_x in zip(jax.jit(jax.vmap(run))(bases, xs), bases, xs, strict=True):
        close(got, oracle.add_lora(one_base, one_x, ids, a, b), 2e-6)


PRODUCTS = [  # rows, K, N, tiles
    (1, 4096, 4096, ProductTiles(32, 128, 8, 4, 4)), (7, 1000, 353, ProductTiles(64, 64, 3, 4, 3)),
    (19, 129, 99, ProductTiles(16, 16, 1, 2, 1)), (33, 70, 19, ProductTiles(16, 32, 5, 4, 2)),
    (64, 4096, 6144, ProductTiles(64, 128, 2, 4, 3)), (128, 4096, 1536, ProductTiles(64, 64, 8, 8, 4)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "k", "n", "tiles"), PRODUCTS)
def test_products(rows, k, n, tiles, dtype):
    """Values of a base product, with the same bits again and in any order of the rows."""
    x, w = weights(rows, rows, k, n, dtype)
    run = jax.jit(partial(kernels.product, tiles=tiles))
    got, want = np.asarray(run(x, w), np.float64), exact(x, w)
    assert np.linalg.norm(got - want) <= {"bfloat16": 3e-3, "float16": 4e-4}[dtype] * np.linalg.norm(want)
    np.testing.assert_array_equal(np.asarray(run(x, w), np.float64), got)
    order = np.random.default_rng(rows).permutation(rows)
    np.testing.assert_array_equal(np.asarray(run(x[order], w), np.float64), got[order])


@pytest.mark.parametrize("rows", [8, 64, 256])
def test_kernels_side_by_side_give_the_same_bits(rows):
    """A chain of products with LoRA, compiled with and without `jlora.compiler_options()`."""
    sizes, layers, width = (1024, 512, 512), 4, 2048
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 9, rows), jnp.int32)  # 8 is nobody's
    of_layers = [of_weights(i, rows, width, sizes, 16, 8, ids=ids, dtype="bfloat16") for i in range(layers)]

    def run(x, layers, ids):
        plan = api.make_plan(ids, num_groups=8, backend="triton")
        for w, a, b in layers:
            x = jnp.tanh(api.linear_lora(x, w * width**-0.5, a * width**-0.5, b, plan, slice_sizes=sizes))
        return x

    args = of_layers[0][0], [layer[1:4] for layer in of_layers], ids
    one_by_one = np.asarray(jax.jit(run)(*args), np.float32)
    step = jax.jit(run, compiler_options=jlora.compiler_options())
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(step(*args), np.float32), one_by_one)


SMALL = GPU("of_99_kb", 99 << 10, 89)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "k", "sizes", "rank", "groups"),
    [*SHAPES, (64, 4096, (4096, 1024, 1024), 16, 64), (2048, 4096, (14336, 14336), 64, 8), (600, 512, (512,), 256, 2)],
)
def test_the_rule_for_99_kb_compiles_and_takes_no_more(rows, k, sizes, rank, groups, dtype, tmp_path):
    plan = api.make_plan(jnp.zeros(rows, jnp.int32), num_groups=groups)
    shapes = (rows, sum(sizes)), (rows, k), (groups, len(sizes), rank, k), (groups, rank, sum(sizes))
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    reason = too_large(triton.sizes_of(rows, *arrays[1:], len(sizes), 16), SMALL)
    assert (reason is not None) == (rank == 512 and rows >= 32 and dtype != "bfloat16")
    if reason is None:
        run = jax.jit(partial(triton.add_lora, plan=plan, slice_sizes=sizes, ranks=None, gpu=SMALL))
        found = shared_memory(run.lower(*arrays), tmp_path)
        assert set(found) == {"lora_shrink", "lora_expand"}
        assert max(found.values()) <= SMALL.shared_memory


def test_the_device_reports_its_properties():
    gpu = current_gpu()
    assert gpu.kind == jax.devices()[0].device_kind.lower().replace(" ", "_")
    assert gpu.shared_memory == jax.devices()[0].shared_memory_per_block_optin
    assert gpu.capability is not None
    assert gpu.capability >= 80
