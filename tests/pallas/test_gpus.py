"""Which GPU a program is for: the one lowered for, the default device, else an H200."""

import types

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jlora.pallas import gpus
from jlora.pallas.gpus import GPU, H200, current_gpu, device_kind


def device(kind="NVIDIA A100-SXM4-40GB", platform="gpu", **attributes):
    return types.SimpleNamespace(device_kind=kind, platform=platform, **attributes)


def here(monkeypatch, device):
    monkeypatch.setattr(gpus, "default_device", lambda: device)


def lowering_for(kind, platform="cuda"):
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform)))


def test_names():
    assert device_kind("NVIDIA H200") == "nvidia_h200"
    assert device_kind("NVIDIA A100-SXM4-40GB") == "nvidia_a100_sxm4_40gb"
    assert device_kind(" NVIDIA GeForce RTX 4090 ") == "nvidia_geforce_rtx_4090"


def test_without_a_gpu_it_is_an_h200():
    assert current_gpu() == H200


def test_the_default_device_is_asked(monkeypatch):
    here(monkeypatch, device(shared_memory_per_block_optin=123456, compute_capability="8.0"))
    assert current_gpu() == GPU("nvidia_a100_sxm4_40gb", 123456, 80)


@pytest.mark.parametrize(
    ("kind", "attributes", "want"),
    [
        ("NVIDIA A100-SXM4-40GB", {}, GPU("nvidia_a100_sxm4_40gb", 163 << 10, 80)),
        ("NVIDIA New", {"compute_capability": "12.0"}, GPU("nvidia_new", 99 << 10, 120)),
        ("NVIDIA New", {"compute_capability": "9.0"}, GPU("nvidia_new", 227 << 10, 90)),
        ("NVIDIA New", {}, GPU("nvidia_new", 99 << 10, None)),  # the least there is
        ("Tesla T4", {}, GPU("tesla_t4", 64 << 10, 75)),
        ("AMD Instinct MI300X", {"compute_capability": "gfx942"}, GPU("amd_instinct_mi300x", 64 << 10, 0)),
    ],
)
def test_what_a_device_does_not_say_is_known_by_its_kind(monkeypatch, kind, attributes, want):
    here(monkeypatch, device(kind, **attributes))
    assert current_gpu() == want


def test_a_device_that_is_lowered_for_comes_first(monkeypatch):
    with lowering_for("NVIDIA L4"):
        assert current_gpu() == GPU("nvidia_l4", 99 << 10, 89)
        assert jax.eval_shape(lambda x: (x, _seen.append(current_gpu()))[0], 1.0) is not None
    assert _seen.pop() == GPU("nvidia_l4", 99 << 10, 89)
    here(monkeypatch, device(shared_memory_per_block_optin=123456, compute_capability="8.0"))
    with lowering_for("NVIDIA L4"):
        assert current_gpu().kind == "nvidia_l4"
    with lowering_for("NVIDIA A100-SXM4-40GB"):  # as the one that is here
        assert current_gpu().shared_memory == 123456
    with lowering_for("cpu", "cpu"):
        assert current_gpu().kind == "nvidia_a100_sxm4_40gb"


_seen: list[GPU] = []
