"""Figures of the benchmarks that no device is needed for."""

import types

import jax
import pytest

from benchmarks.moe_specs import MODELS
from benchmarks.moe_specs import floor_us as experts_floor_us
from benchmarks.roofline import floor_us
from benchmarks.specs import PROJECTIONS


@pytest.fixture
def device(monkeypatch):
    def use(kind: str) -> None:
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])

    return use


@pytest.mark.parametrize(
    "floor", [lambda: floor_us(PROJECTIONS["o"], 16, 64, 8), lambda: experts_floor_us(MODELS["mixtral-8x7b"], 16, 8, 8)]
)
def test_floor_is_of_the_device_that_ran(device, floor):
    """Both rows are bound by bytes: their floors differ as the bandwidths do."""
    device("NVIDIA H200")
    h200 = floor()
    device("NVIDIA H100 80GB HBM3")
    assert floor() == pytest.approx(h200 * 4.3 / 3.0)
    device("cpu")
    assert floor() is None


def test_floor_of_one_projection_by_hand(device):
    """Shrink: x [64, 4096] and A of 8 adapters [16, 4096]. Expand: B [16, 4096] of each, and y twice. bfloat16."""
    device("NVIDIA H200")
    elements = 64 * 4096 + 8 * 16 * 4096 + 8 * 16 * 4096 + 2 * 64 * 4096
    assert floor_us(PROJECTIONS["o"], 16, 64, 8) == pytest.approx(2 * elements / 4.3e12 * 1e6)
