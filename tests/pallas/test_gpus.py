"""A program is for the GPU that it is lowered for, else the default device, else an H200."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jlora.pallas.gpus import GPU, H200, current_gpu

A100 = "NVIDIA A100-SXM4-40GB"


def lowering_for(kind, platform="cuda"):
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, platform)))


def test_properties_come_from_the_default_device_and_else_are_those_of_an_h200(default_device):
    assert current_gpu() == H200
    default_device(A100, shared_memory_per_block_optin=123456, compute_capability="8.0", core_count=108)
    assert current_gpu() == GPU("nvidia_a100_sxm4_40gb", 123456, 80, 108)


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
def test_missing_properties_follow_from_the_kind(default_device, kind, attributes, want):
    default_device(kind, **attributes)
    assert current_gpu() == want


def test_the_target_of_lowering_precedes_the_default_device(default_device):
    seen: list[GPU] = []
    with lowering_for("NVIDIA L4"):
        assert current_gpu() == GPU("nvidia_l4", 99 << 10, 89, multiprocessors=1)
        assert jax.eval_shape(lambda x: (x, seen.append(current_gpu()))[0], 1.0) is not None
    assert seen.pop() == GPU("nvidia_l4", 99 << 10, 89, multiprocessors=1)
    default_device(A100, shared_memory_per_block_optin=123456, compute_capability="8.0")
    with lowering_for("NVIDIA L4"):
        assert current_gpu().kind == "nvidia_l4"
    with lowering_for(A100):  # as the one that is here
        assert current_gpu().shared_memory == 123456
    with lowering_for("cpu", "cpu"):
        assert current_gpu().kind == "nvidia_a100_sxm4_40gb"
