"""Grouped products against a plain loop, by every way they are computed, and which way is taken where.

On a GPU: JAX_PLATFORMS=cuda python -m pytest tests/models/test_grouped.py
"""

import contextlib
import importlib.util
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from benchmarks.aot_tpu import _sharding
from jlora.models import grouped
from tests.matrix import thinned
from tests.models import goldens

pytestmark = pytest.mark.device

ON_GPU = jax.default_backend() == "gpu"

# Rows of each group, K, N: groups without rows at the ends and inside, one row, all rows in one group, whole tiles.
SHAPES = [
    ([0, 3, 0, 0, 5, 1, 0], 24, 40),
    ([1], 8, 8),
    ([0, 0, 70], 136, 72),
    ([128, 0, 128], 256, 128),
    ([130, 7, 64, 1], 72, 264),
    ([2, 0, 5], 64, 128),  # from here on of sizes that tokamax takes
    ([130, 0, 7, 64, 1, 0], 192, 320),
]


def problem(counts, k, n, dtype):
    rng = np.random.default_rng(sum(counts))
    x = jnp.asarray(rng.normal(size=(sum(counts), k)), dtype)
    w = jnp.asarray(rng.normal(size=(len(counts), k, n)) * k**-0.5, dtype)
    rows, group = np.asarray(x, np.float64), np.repeat(np.arange(len(counts)), counts)
    want = np.stack([row @ np.asarray(w[g], np.float64) for row, g in zip(rows, group, strict=True)])
    return x, w, jnp.array(counts, jnp.int32), want


def assert_near(got, want, dtype):
    assert got.dtype == dtype
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 6e-3}[dtype]
    assert goldens.relative_error(got, want) < tolerance


@pytest.mark.parametrize("dtype", thinned(["float32", "bfloat16", "float16"], 0, 1))
@pytest.mark.parametrize(("counts", "k", "n"), SHAPES)
def test_values(counts, k, n, dtype):
    """By what is taken on the machine that runs this."""
    x, w, counts, want = problem(counts, k, n, dtype)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        assert_near(jax.jit(grouped.grouped_matmul)(x, w, counts), want, dtype)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(sum))
def test_any_groups(counts):
    x, w, counts, want = problem(counts, 5, 3, "float32")
    with jax.default_matmul_precision("highest"):
        assert_near(grouped.grouped_matmul(x, w, counts), want, "float32")


@pytest.mark.skipif(ON_GPU, reason="a CPU computes what a TPU would")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(("counts", "k", "n"), thinned(SHAPES, 0, 2, 3))
def test_values_on_tpu_interpreted(counts, k, n, dtype):
    x, w, counts, want = problem(counts, k, n, dtype)
    with pltpu.force_tpu_interpret_mode():
        assert_near(jax.jit(grouped._megablox)(x, w, counts), want, dtype)


@pytest.mark.skipif(ON_GPU, reason="compiled ahead of time")
@pytest.mark.usefixtures("without_cache")
@pytest.mark.parametrize(
    ("chip", "rows", "experts", "k", "n"),
    [
        ("v5e", 512, 128, 2048, 1536),  # Qwen3-30B-A3B, 64 tokens
        pytest.param("v6e", 16384, 128, 768, 2048, marks=pytest.mark.slow),
        pytest.param("v5p", 256, 32, 2880, 5760, marks=pytest.mark.slow),  # gpt-oss-20b
        pytest.param("tpu7x", 8192, 32, 2880, 2880, marks=pytest.mark.slow),
        pytest.param("v5e", 16, 8, 14336, 4096, marks=pytest.mark.slow),  # Mixtral-8x7B
        pytest.param("tpu7x", 4096, 8, 4096, 28672, marks=pytest.mark.slow),
        ("v6e", 3, 5, 33, 65),
    ],
)
def test_compiles_for_tpus(chip, rows, experts, k, n):
    operands = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(chip))
        for shape, dtype in (((rows, k), jnp.bfloat16), ((experts, k, n), jnp.bfloat16), ((experts,), jnp.int32))
    ]
    program = jax.jit(grouped._megablox).lower(*operands).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
    # The matrices are not copied: what is beside them is of the rows' size.
    assert program.memory_analysis().temp_size_in_bytes < max(4 * 2 * rows * (k + n), 2 << 20)


@pytest.mark.parametrize(
    ("target", "dtype", "sizes", "installed", "taken"),
    [
        (("cpu", None), "bfloat16", (64, 128), True, "_ragged_dot"),
        (("tpu", None), "bfloat16", (5, 3), False, "_megablox"),
        (("tpu", None), "float32", (5, 3), False, "_megablox"),
        (("tpu", None), "float16", (64, 128), False, "_ragged_dot"),
        (("gpu", 90), "bfloat16", (2880, 5760), True, "_tokamax"),
        (("gpu", 100), "float16", (64, 128), True, "_tokamax"),
        (("cuda", None), "bfloat16", (64, 128), True, "_ragged_dot"),  # a machine that is not here
        (("gpu", 90), "float32", (64, 128), True, "_ragged_dot"),
        (("gpu", 90), "bfloat16", (64, 72), True, "_ragged_dot"),
        (("gpu", 90), "bfloat16", (72, 64), True, "_ragged_dot"),
        (("gpu", 80), "bfloat16", (64, 128), True, "_ragged_dot"),
        (("gpu", 0), "bfloat16", (64, 128), True, "_ragged_dot"),
        (("gpu", 90), "bfloat16", (64, 128), False, "_ragged_dot"),
    ],
)
def test_what_is_taken_where(monkeypatch, target, dtype, sizes, installed, taken):
    monkeypatch.setattr(grouped, "_target", lambda: target)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    choice = grouped._choose(jnp.zeros((4, sizes[0]), dtype), jnp.zeros((2, *sizes), dtype))
    assert choice is getattr(grouped, taken)


def test_the_mesh_says_what_a_program_is_for(monkeypatch):
    """In a shard_map as outside; there a GPU's compute capability is that of a device of the mesh's kind."""
    found = []
    devices = jax.devices()[:2]  # a machine may have one GPU
    mesh = jax.make_mesh((len(devices),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    sharded = jax.shard_map(
        lambda x: found.append(grouped._target()) or x, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    sharded(jnp.zeros(4))
    assert {platform for platform, _ in found} == {grouped._target()[0]}
    if not ON_GPU:
        here = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
        monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(device_kind="other"), here])
        monkeypatch.setattr(grouped, "abstract_device", lambda: ("gpu", "NVIDIA H200"))
        assert grouped._target() == ("gpu", 90)
        monkeypatch.setattr(grouped, "abstract_device", lambda: ("gpu", "NVIDIA B200"))
        assert grouped._target() == ("gpu", None)


@pytest.mark.parametrize("interpreted", [pytest.param(False, id="here"), pytest.param(True, id="tpu")])
def test_rows_of_no_group_disturb_no_others(interpreted):
    """As on a shard that has only some of the experts; what the kernel makes of such rows is nobody's."""
    if interpreted and ON_GPU:
        return
    x, w, counts, want = problem([130, 0, 7, 64, 1, 0], 192, 320, "bfloat16")
    x = jnp.concatenate([x, jnp.full((150, 192), jnp.nan, x.dtype)])
    with pltpu.force_tpu_interpret_mode() if interpreted else contextlib.nullcontext():
        got = jax.jit(grouped._megablox if interpreted else grouped.grouped_matmul)(x, w, counts)
    assert_near(got[:202], want, "bfloat16")


def test_a_missing_extra_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(grouped, "_target", lambda: ("gpu", 90))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    grouped._tell_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="jlora"):
        for _ in range(3):
            grouped.grouped_matmul(
                jnp.ones((4, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16), jnp.array([4, 0])
            )
    assert [record.message for record in caplog.records if "jlora[moe]" in record.message] == [caplog.messages[0]]


@pytest.mark.skipif(not ON_GPU or importlib.util.find_spec("tokamax") is None, reason="needs a GPU and tokamax")
def test_tokamax_is_what_runs():
    x, w, counts, want = problem([130, 0, 7, 64, 1, 0], 192, 320, "bfloat16")
    run = jax.jit(grouped.grouped_matmul)
    assert "ragged_dot_sm90" in run.lower(x, w, counts).as_text()
    got = run(x, w, counts)
    assert_near(got, want, "bfloat16")
    np.testing.assert_array_equal(run(x, w, counts), got)
