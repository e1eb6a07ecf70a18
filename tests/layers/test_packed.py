"""Merged projections with output slices of unequal size, filled together or in groups."""

import pytest
from flax import nnx

from tests.layers.merging import Target, check_against_merged, make_adapter, normal

pytestmark = pytest.mark.device


class Merged(nnx.Module):
    """One kernel with q, k and v of 6, 4 and 2 outputs."""

    packed_modules = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, sizes: tuple[int, ...] | None = (6, 4, 2)):
        self.qkv_proj = nnx.Linear(5, 12, rngs=nnx.Rngs(0))
        if sizes is not None:
            self.qkv_proj.output_sizes = sizes

    def __call__(self, x):
        return self.qkv_proj(x)


def columns(name: str, start: int, size: int) -> Target:
    return Target(name, 5, size, "qkv_proj.kernel", at=(slice(None), slice(start, start + size)))


Q, K, V = columns("q_proj", 0, 6), columns("k_proj", 6, 4), columns("v_proj", 10, 2)
ALL = Target("qkv_proj", 5, 12, "qkv_proj.kernel")


def test_some_slices_all_slices_and_one_tensor_in_one_batch():
    """A slice that an adapter lacks does not keep the weights of an earlier adapter."""
    adapters = [make_adapter("ends", [Q, V], 3), make_adapter("packed", [ALL], 2), make_adapter("middle", [K], 4)]
    check_against_merged(Merged(), [Q, K, V, ALL], normal(3, 2, 5), adapters=adapters)


def test_groups_that_cover_several_slices():
    """One tensor of the checkpoint fills q, k and v, which share its A; another fills the rest."""
    packed = {"qkv_proj": {"in_proj_qkv": (4, 4, 2), "in_proj_z": 2}}
    qkv, z = columns("in_proj_qkv", 0, 10), columns("in_proj_z", 10, 2)
    adapters = [make_adapter("both", [qkv, z], 3), make_adapter("group", [qkv], 2), make_adapter("whole", [ALL], 1)]
    check_against_merged(Merged(), [qkv, z, ALL], normal(3, 2, 5), adapters=adapters, packed_modules=packed)
