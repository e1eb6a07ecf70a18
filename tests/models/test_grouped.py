"""Grouped products compared with a plain loop, and the choice of their implementation.

On a GPU: JAX_PLATFORMS=cuda python -m pytest tests/models/test_grouped.py
"""

import contextlib
import importlib.machinery
import importlib.util
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from benchmarks.aot_tpu import sharding_of
from jlora.models import grouped
from tests.models import goldens

pytestmark = pytest.mark.device

ON_GPU = jax.default_backend() == "gpu"

# Rows of each group, K, N: groups without rows at the ends and inside, one row, all rows in one group, whole tiles.
SHAPES = [
    ([0, 3, 0, 0, 5, 1, 0], 24, 40),
    ([0, 0, 70], 136, 72),
    ([130, 7, 64, 1], 72, 264),
    ([2, 0, 5], 64, 128),  # from here on of sizes that tokamax takes
    ([130, 0, 7, 64, 1, 0], 192, 320),
]


def problem(counts, k, n, dtype):
    rng = np.random.default_rng(sum(counts))
    shapes = (sum(counts), k), (len(counts), k, n)
    x, w = ((rng.normal(size=shape) * k**-0.5).astype(jnp.dtype(dtype)) for shape in shapes)
    rows, group = x.astype(np.float64), np.repeat(np.arange(len(counts)), counts)
    want = np.stack([row @ w[g].astype(np.float64) for row, g in zip(rows, group, strict=True)])
    return *jax.device_put((x, w, np.array(counts, np.int32))), want


def compiled_anew():
    """Return a jitted product that shares no trace with another test."""
    return jax.jit(lambda x, w, counts: grouped.grouped_matmul(x, w, counts))


def assert_near(got, want, dtype):
    assert got.dtype == dtype
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 6e-3}[dtype]
    assert goldens.relative_error(got, want) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("counts", "k", "n"), SHAPES)
def test_values(counts, k, n, dtype):
    x, w, counts, want = problem(counts, k, n, dtype)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        assert_near(jax.jit(grouped.grouped_matmul)(x, w, counts), want, dtype)


@pytest.mark.skipif(ON_GPU, reason="a CPU computes what a TPU would")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_on_tpu_interpreted(on, dtype):
    x, w, counts, want = problem([130, 7, 64, 1], 72, 264, dtype)
    on("tpu")
    with pltpu.force_tpu_interpret_mode():
        assert_near(compiled_anew()(x, w, counts), want, dtype)


@pytest.mark.skipif(ON_GPU, reason="compiled ahead of time")
@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize(
    ("chip", "rows", "experts", "k", "n"),
    [
        ("v5e", 512, 128, 2048, 1536),  # Qwen3-30B-A3B, 64 tokens
        pytest.param("v5p", 256, 32, 2880, 5760, marks=pytest.mark.slow),  # gpt-oss-20b
        pytest.param("tpu7x", 4096, 8, 4096, 28672, marks=pytest.mark.slow),
        ("v6e", 3, 5, 33, 65),
    ],
)
@pytest.mark.slow
def test_compiles_for_tpus(on, chip, rows, experts, k, n):
    on("tpu")
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(chip))
        for shape, dtype in (((rows, k), jnp.bfloat16), ((experts, k, n), jnp.bfloat16), ((experts,), jnp.int32))
    ]
    program = compiled_anew().lower(*operands).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
    # The matrices are not copied; temporary memory has the size of the rows.
    assert program.memory_analysis().temp_size_in_bytes < max(4 * 2 * rows * (k + n), 2 << 20)


@pytest.fixture
def on(monkeypatch):
    """`on(platform, kind)`: trace for a device of that kind, on a machine with one H200, one A100 and one MI300."""
    here = {"NVIDIA H200": "9.0", "NVIDIA B200": "10.0", "NVIDIA A100": "8.0", "AMD MI300": "gfx942"}
    devices = [types.SimpleNamespace(device_kind=kind, compute_capability=number) for kind, number in here.items()]

    def choose(platform, kind=""):
        monkeypatch.setattr(jax, "local_devices", lambda: devices)
        monkeypatch.setattr(grouped, "abstract_device", lambda: (platform, kind))

    return choose


@pytest.mark.parametrize(
    ("platform", "kind", "dtype", "sizes", "installed", "taken"),
    [
        ("cpu", "", "bfloat16", (64, 128), True, "ragged_dot"),
        ("tpu", "TPU v6e", "bfloat16", (5, 3), False, "gmm"),
        ("tpu", "TPU v6e", "float16", (64, 128), False, "ragged_dot"),
        ("gpu", "NVIDIA H200", "bfloat16", (2880, 5760), True, "tokamax"),
        ("gpu", "NVIDIA B200", "float16", (64, 128), True, "tokamax"),
        ("cuda", "a device of another machine", "bfloat16", (64, 128), True, "ragged_dot"),
        ("gpu", "NVIDIA H200", "float32", (64, 128), True, "ragged_dot"),
        ("gpu", "NVIDIA H200", "bfloat16", (64, 72), True, "ragged_dot"),
        ("gpu", "NVIDIA A100", "bfloat16", (64, 128), True, "ragged_dot"),
        ("gpu", "AMD MI300", "bfloat16", (64, 128), True, "ragged_dot"),
        ("gpu", "NVIDIA H200", "bfloat16", (64, 128), False, "ragged_dot"),
    ],
)
def test_the_device_the_dtype_and_the_sizes_select_the_product(
    monkeypatch, on, platform, kind, dtype, sizes, installed, taken
):
    calls = []

    def stand_in(x, w, counts, *, preferred_element_type, implementation):
        assert implementation == "mosaic"
        calls.append(x.shape)
        return jnp.zeros((len(x), w.shape[2]), preferred_element_type)

    tokamax = types.ModuleType("tokamax")
    tokamax.__spec__, tokamax.ragged_dot = importlib.machinery.ModuleSpec("tokamax", None), stand_in
    monkeypatch.setitem(sys.modules, "tokamax", tokamax if installed else None)
    on(platform, kind)
    x, w = jnp.zeros((5, sizes[0]), dtype), jnp.zeros((2, *sizes), dtype)
    program = str(jax.make_jaxpr(compiled_anew())(x, w, jnp.zeros(2, jnp.int32)))
    found = "tokamax" if calls else "gmm" if "pallas_call" in program else "ragged_dot"
    assert found == taken
    assert ("ragged_dot" in program) == (taken == "ragged_dot")


@pytest.mark.parametrize("interpreted", [pytest.param(False, id="here"), pytest.param(True, id="tpu")])
def test_rows_of_no_group_disturb_no_others(on, interpreted):
    """As on a shard that has only some of the experts. The result of rows of other shards is not defined."""
    if interpreted and ON_GPU:
        return
    if interpreted:
        on("tpu")
    x, w, counts, want = problem([130, 0, 7, 64, 1, 0], 192, 320, "bfloat16")
    x = jnp.concatenate([x, jnp.full((150, 192), jnp.nan, x.dtype)])
    with pltpu.force_tpu_interpret_mode() if interpreted else contextlib.nullcontext():
        got = compiled_anew()(x, w, counts)
    assert_near(got[:202], want, "bfloat16")


def test_a_missing_extra_is_logged_once(monkeypatch, on, caplog):
    on("gpu", "NVIDIA H200")
    monkeypatch.setitem(sys.modules, "tokamax", None)
    grouped._tell_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="jlora"):
        for _ in range(3):
            grouped.grouped_matmul(
                jnp.ones((4, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16), jnp.array([4, 0])
            )
    assert [record.message for record in caplog.records if "jlora[moe]" in record.message] == [caplog.messages[0]]


@pytest.mark.skipif(not ON_GPU or importlib.util.find_spec("tokamax") is None, reason="needs a GPU and tokamax")
def test_tokamax_runs_on_a_gpu():
    x, w, counts, want = problem([130, 0, 7, 64, 1, 0], 192, 320, "bfloat16")
    run = jax.jit(grouped.grouped_matmul)
    assert "ragged_dot_sm90" in run.lower(x, w, counts).as_text()
    got = run(x, w, counts)
    assert_near(got, want, "bfloat16")
    np.testing.assert_array_equal(run(x, w, counts), got)
