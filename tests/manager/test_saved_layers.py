"""Weights of layers of every kind as files: read back they are the blocks that the manager itself would make."""

import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.manager.saved import base_digest
from jlora.manager.saved_content import read_content, write_content
from tests.layers.expert_models import Gathering, Model, Ragged, Scanned, Seams
from tests.layers.merging import make_adapter
from tests.layers.mesh_models import SMALL, SMALL_TARGETS, Small, mesh_of, placed
from tests.manager.test_experts import each, stacked
from tests.manager.test_shared_experts import shared


def manager(model, **config):
    return jlora.LoRAManager(model, jlora.LoRAConfig(**{"max_loras": 5, "max_lora_rank": 4, **config}))


def sharing(model, **config):
    return manager(model, **{"max_expert_loras": 2, "max_shared_expert_loras": 2, **config})


def seams():
    return Model(Seams, nnx.Rngs(0))


def on_mesh():
    return placed(Small(), mesh_of(data=2, t=2), SMALL)


# (the manager that saves, the one that restores, the adapter)
CASES = {
    "experts": (lambda: manager(seams()), None, lambda: each("x")),
    "one expert": (lambda: manager(seams()), None, lambda: each("x", experts=[2])),
    "all experts in one": (lambda: manager(seams()), None, lambda: stacked("x")),
    "experts that share": (lambda: sharing(Model(Gathering, nnx.Rngs(0))), None, lambda: shared("x", gate=True)),
    "a stack of layers": (
        lambda: sharing(Scanned(Ragged, nnx.Rngs(0)), max_staging_bytes=1024), None, lambda: shared("x"),
    ),
    "blocks of other sizes": (
        lambda: manager(Scanned(Ragged, nnx.Rngs(0))),
        lambda: manager(Scanned(Ragged, nnx.Rngs(0)), max_staging_bytes=1024, max_loras=2, max_lora_rank=40),
        lambda: each("x"),
    ),
    "a mesh": (lambda: manager(on_mesh()), None, lambda: make_adapter("x", SMALL_TARGETS, 3)),
    "onto a mesh": (
        lambda: manager(Small()), lambda: manager(on_mesh()), lambda: make_adapter("x", SMALL_TARGETS, 3),
    ),
    "off a mesh": (
        lambda: manager(on_mesh()), lambda: manager(Small()), lambda: make_adapter("x", SMALL_TARGETS, 3),
    ),
}  # fmt: skip
QUICK = ("experts that share", "onto a mesh")


@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.slow] * (what not in QUICK)) for what in CASES])
def test_the_same_blocks(tmp_path, what):
    make, make_other, make_one = CASES[what]
    one, adapter = make(), make_one()
    other = one if make_other is None else make_other()
    for each_one in {one, other}:
        each_one.add_adapter(adapter)
    assert base_digest(one.model) == base_digest(other.model)
    digest = write_content(one._cache.contents["x"], tmp_path)
    found = read_content("x", tmp_path / digest, other._pool.sites, other._pool.chunks, allow_nonfinite=False)
    want = other._cache.contents["x"]
    assert found.placements == want.placements
    np.testing.assert_array_equal(found.ranks, want.ranks)
    assert found.slots == want.slots
    for block, known in zip(found.blocks, want.blocks, strict=True):
        assert (block.chunk, block.row, block.start) == (known.chunk, known.row, known.start)
        for half in ("a", "b"):
            a, b = np.asarray(getattr(block, half)), np.asarray(getattr(known, half))
            assert a.shape == b.shape
            assert a.tobytes() == b.tobytes()


def test_experts_that_share_need_slots_for_that(tmp_path):
    one = sharing(Model(Gathering, nnx.Rngs(0)))
    one.add_adapter(shared("x"))
    digest = write_content(one._cache.contents["x"], tmp_path)
    other = manager(Model(Gathering, nnx.Rngs(0)))
    with pytest.raises(jlora.AdapterMismatchError, match="which this manager does not wrap"):
        read_content("x", tmp_path / digest, other._pool.sites, other._pool.chunks, allow_nonfinite=False)


def test_bases_are_told_apart():
    """Wherever they lie."""
    assert base_digest(Small()) == base_digest(on_mesh())
    graph, state = nnx.split(Small())
    first, *_ = nnx.to_flat_state(state)
    first[1].set_value(first[1].get_value() + 1)
    assert base_digest(nnx.merge(graph, state)) != base_digest(Small())
