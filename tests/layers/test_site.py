"""The shards of experts, and the experts, of each process."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jlora.layers.site import SlotSpec
from jlora.sharding import rules
from jlora.sharding.rules import KernelSharding


def mesh_of_eight():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "x"))


def spec_of(experts, sharding):
    return SlotSpec(None, 2, 8, (6,), 4, "float32", experts=experts, sharding=sharding)


@pytest.mark.parametrize(
    ("processes", "shards", "experts", "most"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], (0, 1, 2, 3), (range(12),), 4),
        ([0, 0, 1, 1, 0, 0, 1, 1], (0, 1), (range(6),), 2),
        ([0, 1, 0, 0, 1, 1, 1, 1], (0, 2, 3), (range(3), range(6, 12)), 4),  # the other process has a copy of all
        ([1, 1, 1, 1, 2, 2, 2, 2], (), (), 4),  # a process without a device of the mesh
    ],
)
def test_own_shards_and_experts_follow_the_devices_of_the_process(monkeypatch, processes, shards, experts, most):
    monkeypatch.setattr(rules, "process_of", lambda device: processes[device.id])
    spec = spec_of(12, KernelSharding(mesh_of_eight(), experts=("x",)))
    assert (tuple(spec.own_shards), spec.own_experts, spec.most_shards) == (shards, experts, most)
    assert spec.expert_shards == 4
