"""The Triton kernels compiled and run on a GPU; skipped elsewhere. Run with JAX_PLATFORMS=cuda.

Interpret mode does not cover the compiler's shared memory, masked tails and wide loads.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from jlora.layers.forward.few_rows import parts_and_stages, product_in_parts
from jlora.pallas import api
from jlora.pallas.gpus import GPU, current_gpu, platform
from jlora.pallas.tiles import too_large
from jlora.pallas.triton import lora as triton
from tests import oracle
from tests.pallas.lowering import shared_memory
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import problem

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("rows", "k", "sizes", "rank", "groups"), [*SHAPES, (4096, 1024, (512,), 16, 2)])
def test_gradients(rows, k, sizes, rank, groups, dtype):
    base, x, a, b, ids, ranks = problem(rows, rows, k, sizes, rank, groups, dtype=dtype)
    a, b = a * jnp.asarray(k**-0.5, dtype), b * jnp.asarray(rank**-0.5, dtype)
    plan, ranks = api.make_plan(ids, num_groups=groups), with_scales(ranks, 0.5)
    dout = jnp.asarray(np.random.default_rng(0).normal(size=base.shape), dtype)

    @jax.jit
    def pull(base, x, a, b):
        call = partial(api.add_lora, plan=plan, slice_sizes=sizes, ranks=ranks, backend="triton")
        return jax.vjp(call, base, x, a, b)[1](dout)

    got = pull(base, x, a, b)
    np.testing.assert_array_equal(np.asarray(got[0], np.float64), np.asarray(dout, np.float64))
    tolerance = {"bfloat16": 6e-3, "float16": 1.5e-3, "float32": 2e-6}[dtype]
    for have, want in zip(got[1:], oracle.lora_gradients(dout, x, ids, a, b, sizes, ranks), strict=True):
        assert have.dtype == dtype
        assert np.linalg.norm(np.asarray(have, np.float64) - want) <= tolerance * np.linalg.norm(want) + 1e-30
    for have, again in zip(got, pull(base, x, a, b), strict=True):
        np.testing.assert_array_equal(np.asarray(have, np.float64), np.asarray(again, np.float64))


PRODUCTS = [  # rows, K, N, parts of K, stages
    (1, 4096, 4096, 4, 4), (7, 1000, 353, 3, 3), (33, 70, 19, 2, 1), (64, 4096, 6144, 2, 3), (64, 18944, 3584, 4, 3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "k", "n", "parts", "stages"), PRODUCTS)
def test_products(rows, k, n, parts, stages, dtype):
    """Values of a base product, with the same bits again and in any order of the rows."""
    rng = np.random.default_rng(rows)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((rows, k), (k, n)))
    run = partial(product_in_parts, parts=parts, stages=stages)
    got, want = np.asarray(run(x, w), np.float64), np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert np.linalg.norm(got - want) <= {"bfloat16": 3e-3, "float16": 4e-4}[dtype] * np.linalg.norm(want)
    np.testing.assert_array_equal(np.asarray(run(x, w), np.float64), got)
    order = rng.permutation(rows)
    np.testing.assert_array_equal(np.asarray(run(x[order], w), np.float64), got[order])


@pytest.mark.parametrize("rows", [8, 64, 256])
def test_kernels_side_by_side_give_the_same_bits(rows):
    sizes, layers, width = (2048, 1024, 1024), 4, 4096
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 9, rows), jnp.int32)  # 8 is nobody's
    of_layers = []
    for i in range(layers):
        _, x, a, b, *_ = problem(i, rows, width, sizes, 16, 8, ids=ids, dtype="bfloat16")
        of_layers.append((x, jnp.asarray(rng.normal(size=(width, width)), "bfloat16"), a, b))

    def run(x, layers, ids):
        plan = api.make_plan(ids, num_groups=8, backend="triton")
        for w, a, b in layers:
            w, cut = w * width**-0.5, parts_and_stages(rows, width, width)
            base = x @ w if cut is None else product_in_parts(x, w, parts=cut[0], stages=cut[1])
            x = jnp.tanh(api.add_lora(base, x, a * width**-0.5, b, plan, slice_sizes=sizes))
        return x

    args = of_layers[0][0], [layer[1:] for layer in of_layers], ids
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
        assert set(found) - {"lora_after_base"} == {"lora_shrink", "lora_expand"}
        assert max(found.values()) <= SMALL.shared_memory


def test_the_device_reports_its_properties():
    gpu = current_gpu()
    assert gpu.kind == jax.devices()[0].device_kind.lower().replace(" ", "_")
    assert gpu.shared_memory == jax.devices()[0].shared_memory_per_block_optin
    assert gpu.capability is not None
    assert gpu.capability >= 80
