"""The Triton kernels compiled and run on a GPU; skipped elsewhere. Run with JAX_PLATFORMS=cuda.

Interpret mode does not cover the compiler's shared memory, masked tails and wide loads.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas import api
from jlora.pallas.gpus import GPU, current_gpu, platform
from jlora.pallas.tables import too_large
from jlora.pallas.tiles import GPUTiles, ProductTiles
from jlora.pallas.triton import lora as triton
from jlora.pallas.triton import product as triton_product
from tests import oracle
from tests.pallas.lowering import shared_memory
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import close, problem
from tests.pallas.triton.test_product import expected, of_weights, poisoned

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
    run = dict(slice_sizes=sizes, ranks=ranks, backend="triton")
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
    plan = api.make_plan(ids, num_groups=4)
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
        return api.add_lora(base, x, a, b, plan, ranks=ranks, backend="triton")

    for got, one_base, one_x in zip(jax.jit(jax.vmap(run))(bases, xs), bases, xs, strict=True):
        close(got, oracle.add_lora(one_base, one_x, ids, a, b), 2e-6)


PRODUCTS = [  # rows, K, slices, R, groups, tile_m, tiles
    (1, 4096, (4096,), 16, 2, None, ProductTiles(32, 128, 8, 4, 4, GPUTiles(block_k=128, split_k=8, block_r=16))),
    (7, 1000, (333, 20), 24, 3, None, ProductTiles(64, 64, 3, 4, 3, GPUTiles(block_k=64, split_k=2, block_r=32))),
    (19, 129, (65, 1, 33), 8, 5, 16, ProductTiles(16, 16, 1, 2, 1, GPUTiles(block_k=16, block_r=16, block_n=16))),
    (33, 70, (19,), 40, 2, 5, ProductTiles(16, 32, 5, 4, 2, GPUTiles(block_k=32, split_k=3, block_n=32))),
    (64, 4096, (4096, 1024, 1024), 16, 64, None, ProductTiles(64, 128, 4, 4, 3, GPUTiles(split_k=16, block_r=16))),
    (128, 4096, (1024, 512), 64, 2, None, ProductTiles(64, 64, 8, 8, 4, GPUTiles(block_k=64, split_k=4))),
    (128, 640, (320, 64), 200, 3, 32, ProductTiles(128, 64, 1, 8, 2, GPUTiles(block_k=64, split_k=2, block_n=64))),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "k", "sizes", "rank", "groups", "tile_m", "tiles"), PRODUCTS)
def test_products(rows, k, sizes, rank, groups, tile_m, tiles, dtype):
    """A base product made with its LoRA: the oracle's values, the same bits again and in any order of the rows."""
    x, w, a, b, ids, ranks = of_weights(rows, rows, k, sizes, rank, groups, dtype=dtype)
    w, a = w * jnp.asarray(k**-0.5, dtype), a * jnp.asarray(k**-0.5, dtype)
    dirty = poisoned(a, b, ranks, sizes)

    @jax.jit
    def run(x, ids):
        plan = api.make_plan(ids, num_groups=groups, tile_m=tile_m, backend="triton")
        return triton_product.linear_lora(x, w, *dirty, plan, slice_sizes=sizes, ranks=with_scales(ranks), tiles=tiles)

    got = np.asarray(run(x, ids), np.float64)
    want = expected(x, w, a, b, ids, sizes)
    assert np.linalg.norm(got - want) <= {"bfloat16": 5e-3, "float16": 1e-3}[dtype] * np.linalg.norm(want)
    np.testing.assert_array_equal(np.asarray(run(x, ids), np.float64), got)
    order = np.random.default_rng(rows).permutation(rows)
    np.testing.assert_array_equal(np.asarray(run(x[order], ids[order]), np.float64), got[order])
    untouched = np.asarray((ids < 0) | (ids >= groups))
    alone = np.asarray(run(x, jnp.full_like(ids, groups)), np.float64)
    np.testing.assert_array_equal(alone[untouched], got[untouched])
    base = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert np.linalg.norm(alone - base) <= {"bfloat16": 3e-3, "float16": 4e-4}[dtype] * np.linalg.norm(base)


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
