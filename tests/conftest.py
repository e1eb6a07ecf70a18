"""Test setting: 8 virtual CPU devices, strict dtype promotion, no silent rank promotion, annotations checked."""

import importlib.util
import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# libtpu is only used as a compiler here, by several test processes at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jaxtyping
import numpy as np
import pytest
from hypothesis import settings

# Calls into these are held to their annotations, shapes included. The machines that lend a GPU may lack beartype.
CHECKED = (
    *("jlora.pallas", "jlora.ops", "jlora._compat", "jlora.errors"),
    # not jlora.manager.manager and batches: tests hand them what users might, to see it refused
    *(f"jlora.manager.{name}" for name in ("blocks", "content", "export", "fit", "host", "leases", "loader", "lru")),
    *(f"jlora.manager.{name}" for name in ("names", "pool", "prepare", "registry", "report", "slots")),
    *(f"jlora.layers.{name}" for name in ("batch", "coverage", "site")),
)
if importlib.util.find_spec("beartype"):
    jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ci")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def unchecked_calls() -> Iterator[None]:
    """Lets a wrong call through to the checks that users have, who run without those of annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
