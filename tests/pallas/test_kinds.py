"""Base, plain, scaled, mixed, activated and DoRA rows in one batch of a model, on interpreted kernels against NumPy."""

import numpy as np
import pytest

from jlora import Mix
from tests.manager.tiny import LENGTH, MODULES, SEQUENCES, as_dora, expected, make_adapter, make_world
from tests.matrix import thinned

# No user runs interpreted kernels, so XLA's optimisations are of no interest.
pytestmark = pytest.mark.usefixtures("quickly_compiled")

LINEAR = [name for name, (_, _, kind) in MODULES.items() if kind == "linear"]
ADAPTERS = {
    "all": make_adapter("all", rank=4, modules=list(MODULES)),
    "some": make_adapter("some", rank=1, modules=["embed", "layers.0.k_proj", "layers.0.v_proj", "layers.1.o_proj"]),
    "dora": as_dora(make_adapter("dora", rank=3, modules=LINEAR)),
    "dora of some": as_dora(make_adapter("dora of some", rank=2, modules=["layers.0.q_proj", "layers.1.o_proj"])),
}
SWITCHES = {"max_adapters_per_sequence": 1, "activated": True, "variants": ["dora"]}
# Entries and first active rows.
BATCHES = [
    (["all", None, "dora"], [0, 0, 0]),
    ([Mix({"all": -0.5}), "dora of some", "some"], [1, 2, 3]),
    (["dora", Mix({"some": 3}), "all"], [LENGTH, 2, 1]),
    (["dora of some", "dora", Mix({"all": 0})], [0, 3, 0]),
]
MIXED = [
    ([Mix({"all": 0.5, "some": -2}), "dora", Mix({"some": 1.5, "all": 1})], [0, 1, 2]),
    ([Mix({"some": 2}), Mix({"all": -0.25, "some": 1}), None], [LENGTH, 0, 0]),
]


def parts_of(entry):
    """Return (adapter, factor) pairs; the adapter itself if there is one without a factor."""
    if isinstance(entry, Mix):
        return [(ADAPTERS[name], factor) for name, factor in entry.terms]
    return entry and ADAPTERS[entry]


def check(batches, tolerance=1e-5, **config):
    world = make_world(max_loras=4, **SWITCHES | config)
    for adapter in ADAPTERS.values():
        world.manager.add_adapter(adapter)
    with world.manager.prepare([None] * SEQUENCES, active_from=[0] * SEQUENCES, length=LENGTH) as batch:
        base = world.logits(batch).astype(np.float32)
    for entries, first in batches:
        with world.manager.prepare(entries, active_from=first, length=LENGTH) as batch:
            found = world.logits(batch).astype(np.float32)
        for row, entry, start, tokens, of_base in zip(
            found, entries, first, np.asarray(world.tokens), base, strict=True
        ):
            want = expected(world.model, parts_of(entry), tokens, start)
            np.testing.assert_allclose(row, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=f"{entry}")
            inactive = LENGTH if entry is None or entry == Mix({"all": 0}) else start
            np.testing.assert_array_equal(row[:inactive], of_base[:inactive])
    assert len(world.traces) == 1


KERNELS = {"triton": {"add_lora", "expand"}, "mosaic_tpu": {"tpu_add_lora", "tpu_expand"}}


@pytest.mark.parametrize("backend", thinned([*KERNELS], 0))
@pytest.mark.slow
def test_each_kernel_adds_every_kind_of_row(interpret, backend):
    calls = interpret()
    check(BATCHES + MIXED, backend=backend, max_adapters_per_sequence=2)
    assert set(calls) == KERNELS[backend]
