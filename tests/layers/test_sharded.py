"""Layers on a mesh, compared with merged weights on one device."""

import functools

import numpy as np
import pytest

from tests.layers.merging import assert_close, make_manager, normal, serve
from tests.layers.mesh_models import NAMES, K, Zoo, adapters_of, expected, mesh_of, placed

pytestmark = pytest.mark.device

ROUNDING = 1e-5


def inputs_of(sequences: int, length: int = 3):
    tokens = np.random.default_rng(1).integers(0, 24, (sequences, length)).astype(np.int32)
    tokens[0, 0] = -1  # as an index of the table; padding, if the table has any
    return tokens, normal(sequences, length, K)


@functools.cache
def truth(parts: int, names: tuple, length: int = 3):
    zoo = Zoo(parts)
    return expected(zoo, {a.name: a for a in adapters_of(zoo)}, names, inputs_of(len(names), length))


def check(found, want):
    assert found.keys() == want.keys()
    for name in want:
        try:
            assert_close(found[name], want[name], ROUNDING)
        except AssertionError as error:
            raise AssertionError(name) from error


def test_the_expected_values_differ_between_adapters():
    """Equal expected values would hide a wrong adapter."""
    want = truth(4, tuple(NAMES))
    base = truth(4, (None,) * 4)
    for name, values in want.items():
        change = np.abs(values - base[name]).reshape(4, -1).max(axis=1) > 1e-2 * np.abs(base[name]).max()
        assert change[0], name
        assert change[3], name
        assert not change[1], name


MESHES = [({"u": 2, "t": 2}, {"fully_sharded": True})]
MORE = [
    ({"data": 2, "t": 4}, {"data_axes": ["data"]}),
    ({"data": 2, "u": 2, "t": 2}, {"data_axes": ["data"], "fully_sharded": True}),
    ({"t": 4, "u": 2}, {}),
]


def served(axes, parts, config, names=NAMES, length=3):
    mesh = mesh_of(**axes)
    zoo = placed(Zoo(parts), mesh)
    manager = make_manager(zoo, adapters_of(Zoo(parts)), max_lora_rank=6, **config)
    with manager.prepare(["three", "two", "one", None]):
        pass  # slots that held another adapter before
    with manager.prepare(names) as batch:
        return serve(zoo, inputs_of(len(names), length), batch)


@pytest.mark.parametrize(("axes", "config"), [
    *(pytest.param(*case, marks=pytest.mark.mesh) for case in MESHES),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
])  # fmt: skip
def test_every_kind_of_layer(axes, config):
    check(served(axes, 4, config), truth(4, tuple(NAMES)))
