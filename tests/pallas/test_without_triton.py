"""A JAX that lacks names of Pallas' Triton lowering: XLA on GPUs, with one line in the log."""

import sys
from types import SimpleNamespace

import jax
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora._compat import triton_gap
from jlora.pallas import gpus, moe
from jlora.pallas.tiles import plan_tile_m
from jlora.slots.slot_write import takes_kernels
from tests.pallas.test_api import lowered

DEVICE = SimpleNamespace(platform="gpu", compute_capability="9.0")
ABSENT = ["module", "load"]


@pytest.fixture(params=ABSENT)
def absent(request, monkeypatch):
    if request.param == "module":
        monkeypatch.setitem(sys.modules, plt.__name__, None)
    else:
        monkeypatch.delattr(plt, request.param)
    gpus.tell_once.cache_clear()
    return plt.__name__ if request.param == "module" else f"{plt.__name__}.{request.param}"


class Model(nnx.Module):
    def __init__(self):
        self.proj = nnx.Linear(128, 128, use_bias=False, rngs=nnx.Rngs(0))


def manager_of(backend):
    return jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=8, backend=backend))


def test_a_jax_with_all_names_runs_the_kernels(default_device):
    default_device()
    assert triton_gap() is None
    assert (gpus.own_backend(), takes_kernels(DEVICE)) == ("triton", True)


def test_auto_takes_xla_and_logs_one_line(absent, default_device, caplog):
    default_device()
    assert "triton" not in lowered("auto", "cuda")
    assert "triton" not in lowered("auto", "cuda", rank=16)
    assert plan_tile_m(64, 8) == plan_tile_m(64, 8, "xla")
    assert (takes_kernels(DEVICE), moe._plan_kernels("auto", 64)) == (False, None)
    manager_of("auto").prepare([None]).close()
    (record,) = [record for record in caplog.records if record.name == "jlora"]
    want = (
        f"backend 'auto' takes 'xla' for all layers: 'triton' needs {absent}, which JAX {jax.__version__} does not have"
    )
    assert record.getMessage().startswith(want)


def test_a_named_backend_raises(absent, default_device):
    default_device()
    ids = jnp.zeros(8, jnp.int32)
    calls = [
        lambda: manager_of("triton"),
        lambda: lowered("triton", "cuda"),
        lambda: moe.plan_experts(ids, ids, ids, num_slots=1, num_experts=2, backend="triton"),
    ]
    for call in calls:
        with pytest.raises(jlora.LoRAError, match=f"backend 'triton' needs {absent}, which JAX"):
            call()


def test_other_platforms_do_not_look(absent, default_device, caplog):
    default_device("TPU v6e", "tpu")
    assert "tpu_custom_call" in lowered("auto", "tpu")
    default_device("cpu", "cpu")
    assert "triton" not in lowered("auto", "cpu")
    assert not np.any([record.name == "jlora" for record in caplog.records])
