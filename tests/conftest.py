"""Test setting: 8 virtual CPU devices, strict dtype promotion, no silent rank promotion, annotations checked."""

import atexit
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# As set by the user. `-m device` restores them.
GIVEN = {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")}
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Else each worker, and each process that a test starts, would compile jlora's sources and those of the tests again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# libtpu is only used as a compiler here, by several test processes at once.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
# Compiling takes most of a test's time, and the programs run for a millisecond. `make test-slow` and `make parity`
# set 0 and compile as users do.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and importlib.metadata.version("jaxlib") < "0.11":
    # Saves another third of the time. Later versions lack the first flag and stop at unknown flags. The cores are taken
    # by other workers, so the parts of a program are compiled as one.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Programs are compiled once a run, for all workers and for the processes that tests start.
    _compiled = tempfile.mkdtemp(prefix="jlora-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jaxtyping
import numpy as np
import pytest
from hypothesis import settings
from jax._src import callback as callbacks
from jax.experimental.compilation_cache import compilation_cache

# Calls into these are held to their annotations, shapes included. The machines that lend a GPU may lack beartype. Not
# jlora.config, whose classes check every field themselves and turn any path into a string, as tests rely on; not
# jlora.adapters.patterns and pattern_table, which tests give tens of thousands of expressions; not jlora.layers.site,
# whose small properties are read hundreds of thousands of times; and not jlora._typing and jlora.layers.wrap.discover,
# whose functions are called for tens of thousands of objects while models are traversed.
# Tests that pass wrong arguments, or arguments accepted beyond the annotations, use
# `unchecked_calls`.
CHECKED = (
    *("jlora._compat", "jlora.errors", "jlora.ops"),
    *(f"jlora.adapters.{name}" for name in ("adapter", "checkpoint", "config_file", "files")),
    *(f"jlora.adapters.{name}" for name in ("peft_config", "resolve", "tensor_file")),
    *(f"jlora.layers.{name}" for name in ("base_kernel", "einsum", "forward", "specs")),
    *(f"jlora.layers.wrap.{name}" for name in ("apply", "make_sites", "select", "wrapped")),
    *("jlora.fit", "jlora.manager", "jlora.slots", "jlora.training", "jlora.verify.repeats"),
    *("jlora.models.decode_attention", "jlora.models.prefill_attention", "jlora.pallas"),
)
if importlib.util.find_spec("beartype"):
    import tests.checked

    jaxtyping.install_import_hook(CHECKED, f"{tests.checked.__name__}.check")


def _callback_of_numpy(*args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    return jax.tree.map(np.asarray, callback(*args))


# TPU kernels in interpret mode make thousands of callbacks, which read their arguments as NumPy arrays. JAX moves those
# to a device first, which took half of the time of such tests.
callbacks.io_callback_impl = _callback_of_numpy

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def on_device(config: pytest.Config) -> bool:
    """Return True if the tests run on an accelerator: `-m device`, or an expression that selects this mark."""
    return re.search(r"(?<!not )\bdevice\b", config.getoption("markexpr")) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Choose the platform, before the first array is made.

    Raises:
      pytest.UsageError: device tests are selected, and JAX finds no accelerator.
    """
    if on_device(config):
        for name, value in GIVEN.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes that tests start share it
        jax.config.update("jax_platforms", GIVEN["JAX_PLATFORMS"])
        jax.config.update("jax_disable_most_optimizations", False)
        # The expected values are float64, and accelerators would round the operands of float32 products.
        jax.config.update("jax_default_matmul_precision", "highest")
        if jax.default_backend() == "cpu":
            raise pytest.UsageError("`-m device` runs tests on an accelerator, and JAX finds none here")
    # `make test-slow` runs all of hypothesis' tests again.
    quick = jax.config.read("jax_disable_most_optimizations") or on_device(config)
    settings.register_profile("ci", deadline=None, derandomize=True, max_examples=6 if quick else 50)
    settings.load_profile("ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On an accelerator, deselect the tests of other platforms and those that need more devices; see `pyproject.toml`.

    The slow part of a matrix is deselected too, unless the expression names it.
    """
    if not on_device(config):
        return
    here, devices = jax.default_backend(), jax.device_count()
    slow = "slow" in config.getoption("markexpr")

    def runs(item: pytest.Item) -> bool:
        marks = [*item.iter_markers("device")]
        fits = all(here in (mark.args or (here,)) and devices >= mark.kwargs.get("devices", 1) for mark in marks)
        return fits and (slow or item.get_closest_marker("slow") is None)

    chosen = [item for item in items if runs(item)]
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = chosen


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore modules that the mark expression deselects entirely, so that their imports are not needed.

    Without parity these imports are PyTorch and transformers.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text, marks = collection_path.read_text("utf-8"), config.getoption("markexpr")
    if on_device(config):
        return "pytest.mark.device" not in text or None
    if marks == "parity":
        return "pytest.mark.parity" not in text or None
    if marks and not re.search(r"(?<!not )\bparity\b", marks):
        return re.search(r"^pytestmark = .*\bmark\.parity\b", text, re.MULTILINE) is not None or None
    return None


def pytest_collection_finish() -> None:
    """Exclude imported objects from the garbage collections of the tests, and collect less often.

    Tracing makes so many objects that collections took a tenth of the tests' time. Each module ends with one anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


# Half of what Linux allows a process by default (vm.max_map_count), beyond which LLVM crashes.
MAX_MAPPINGS = 32_000
MIN_RESIDENT, MAX_RESIDENT = 3 << 30, 6 << 30  # bounds of the bytes that a worker may take


@pytest.fixture(scope="module", autouse=True)
def freeze_objects_after_a_module() -> Iterator[None]:
    """Exclude objects that JAX keeps from later garbage collections, after each module.

    Compiled programs are dropped if they take too much memory or, because each has its own mappings, are too many. Only
    malloc_trim returns their memory to the system.
    """
    yield
    crowded = _crowded()
    if crowded:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    if crowded:
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()


def _crowded() -> bool:
    """Return True on Linux if this process has too many memory mappings, or more than its part of half the memory."""
    process = Path("/proc/self")
    if not (process / "statm").exists():
        return False
    page, workers = os.sysconf("SC_PAGE_SIZE"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    resident = int((process / "statm").read_text().split()[1]) * page
    most = min(MAX_RESIDENT, max(MIN_RESIDENT, os.sysconf("SC_PHYS_PAGES") * page // 2 // workers))
    mappings = (process / "maps").read_bytes().count(b"\n")
    return mappings > MAX_MAPPINGS or resident > most


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def clear_trace_counts() -> None:
    """Clear the counts of `chex.assert_max_traces`, which would add up over the parameters of a test."""
    if (chex := sys.modules.get("chex")) is not None:
        chex.clear_trace_counter()


def _optimisations_left_out(most: bool) -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", most)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def as_users_compile() -> Iterator[None]:
    """Compile with all of XLA's optimisations, in `make test` too."""
    yield from _optimisations_left_out(False)


@pytest.fixture
def quickly_compiled(pytestconfig: pytest.Config) -> Iterator[None]:
    """Compile without most of XLA's optimisations, in `make test-slow` too, if they do not affect the test."""
    yield from _optimisations_left_out(not on_device(pytestconfig))


@pytest.fixture
def without_cache() -> Iterator[None]:
    """Disable the compilation cache, because programs for an absent TPU cannot be read back."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def unchecked_calls() -> Iterator[None]:
    """Disable the checks of annotations, so that wrong calls reach jlora's own checks, as for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget the classes that a test registers."""
    from jlora.layers.wrap.discover import _describe  # imported here, since tests of documents need no JAX model

    before = dict(_describe)
    yield
    _describe.clear()
    _describe.update(before)
