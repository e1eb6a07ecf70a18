"""The manager with a model on a mesh: the same results as on one device, and refused configurations."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import LoRAError, LoRAUsageError
from jlora.slots.placement import of_blocks
from tests.adapters.reading import contents
from tests.compiled import compiled_programs
from tests.layers.merging import assert_close, expected_rows, make_adapter, make_manager, make_module, merge
from tests.layers.mesh_models import (
    LENGTH,
    ONE,
    SMALL,
    SMALL_TARGETS,
    TWO,
    PaddedIn,
    PaddedOut,
    Small,
    mesh_of,
    placed,
    tokens_of,
)
from tests.manager.conftest import WRITES
from tests.manager.tiny import World, tensors
from tests.matrix import thinned
from tests.records import content_of
from tests.small_device import on_small_device

pytestmark = pytest.mark.device


@functools.cache
def the_mesh() -> Mesh:
    return mesh_of(data=2, t=2)


TOKENS = tokens_of(4, LENGTH)
THREE, FOUR = make_adapter("three", SMALL_TARGETS[:2], 1), make_adapter("four", SMALL_TARGETS, 2)
ADAPTERS = [ONE, TWO, THREE, FOUR]


@pytest.fixture(scope="module")
def twins():
    return {None: Small()} | {a.name: merge(Small(), SMALL_TARGETS, a) for a in ADAPTERS}


def made(staging=2**28, **config) -> World:
    model = placed(Small(), the_mesh(), SMALL)
    sizes = {"max_lora_rank": 3, "max_loras": 2, "data_axes": ["data"], **config}
    return World(model, on_small_device(staging, make_manager, model, ADAPTERS, **sizes), TOKENS)


def compiled(world):
    return len(world.traces), compiled_programs(world.forward), world.manager.stats().compilations


MIXES = (["one", None, "two", "one"], ["three", "four", None, "four"], ["two", "four", "two", None], [None] * 4)


@pytest.mark.parametrize(
    ("config", "write_programs"),
    thinned(list(itertools.product([{}, {"fully_sharded": True, "staging": 64}], WRITES)), 2, 4),
    indirect=["write_programs"],
)
@pytest.mark.device(devices=4)
@pytest.mark.usefixtures("write_programs")
def test_swaps_through_one_program(twins, config):
    world = made(**config)
    for names in MIXES:
        assert_close(world.serve(names), expected_rows(twins, names, TOKENS))
    assert compiled(world) == (1, 1, 1)


@pytest.fixture(scope="module")
def world():
    return made(fully_sharded=True)


PLACES = {
    "host": lambda array: array,
    "split": lambda array: jax.device_put(
        array, NamedSharding(the_mesh(), P(None, "t") if array.shape[1] % 2 == 0 else P())
    ),
    "one device": lambda array: jax.device_put(array, jax.devices()[1]),
}
CASES = [("host", False), ("split", True), pytest.param("one device", False, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("place", "half"), CASES)
def test_updates(twins, place, half):
    """New weights from wherever they are, all of them or B alone; twice, for the second takes another way."""
    world = made(fully_sharded=True)
    world.serve(["four", None, None, "four"])
    for scale in (2.0, 0.5):
        new = tensors(FOUR, lambda array, scale=scale: PLACES[place](np.float32(scale) * array))
        new = {name: array for name, array in new.items() if not half or "_B" in name}
        world.manager.update_adapter("four", new)
        modules = {
            name: dataclasses.replace(m, a=m.a if half else np.float32(scale) * m.a, b=np.float32(scale) * m.b)
            for name, m in FOUR.modules.items()
        }
        twin = merge(Small(), SMALL_TARGETS, jlora.Adapter(name="four", modules=modules))
        names = ["four", None, "one", "four"]
        assert_close(world.serve(names), expected_rows({**twins, "four": twin}, names, TOKENS))
    assert compiled(world) == (1, 1, 1)


def test_files_and_prefetch(tmp_path, twins):
    world = made()
    FOUR.save_pretrained(tmp_path / "four")
    world.manager.remove_adapter("four")
    world.manager.prefetch(jlora.LoRARequest("four", path=str(tmp_path / "four"))).result()
    content = content_of(world.manager, "four")
    assert content.prefetched is not None
    for block in content.prefetched:
        wanted = of_blocks(block.chunk.spec, whole=True).values()
        for array, want in zip(block.arrays, wanted, strict=False):
            assert array.sharding == want
    assert_close(world.serve(MIXES[1]), expected_rows(twins, MIXES[1], TOKENS))


def test_slot_bytes_of_a_device_are_those_of_its_shards(monkeypatch, world):
    """Their shards, not the whole."""
    first = the_mesh().devices.flat[0]
    arrays = [array for array in jax.tree.leaves(world.manager.slots) if array.dtype != jnp.int32]  # without stamps
    shards = [shard for array in arrays for shard in array.addressable_shards if shard.device == first]
    taken = sum(shard.data.nbytes for shard in shards)
    room = [taken]
    monkeypatch.setattr("jlora.layers.site.device_bytes", lambda device: room[0])
    made(fully_sharded=True)
    room[0] -= 1
    with pytest.raises(LoRAError, match=f"{taken:,} bytes on a device"):
        made(fully_sharded=True)


def test_padded_features_are_read_back_and_updated():
    """Slots hold them as the layer has them; adapters as the checkpoint does."""

    class Padded(nnx.Module):
        def __init__(self):
            self.out, self.into = PaddedOut(16, 16, rngs=nnx.Rngs(0)), PaddedIn(16, 16, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.into(jnp.tanh(self.out(x)))

    rng = np.random.default_rng(0)
    adapter = jlora.Adapter(
        name="one", modules={"out": make_module(rng, 16, 12, 3), "into": make_module(rng, 12, 16, 2)}
    )
    manager = make_manager(
        placed(Padded(), the_mesh(), {"out": P(None, "t"), "into": P("t")}), [adapter], max_lora_rank=3
    )
    manager.pin_adapter("one")
    assert contents(manager.export_adapter("one"))[0] == contents(adapter)[0]
    for place in (np.asarray, jnp.asarray):
        b = rng.normal(size=(12, 3)).astype(np.float32)
        manager.update_adapter("one", {"base_model.model.out.lora_B.weight": place(b)})
        manager.pin_adapter("one")
        found = manager.export_adapter("one").modules
        np.testing.assert_allclose(found["out"].b, b, rtol=2e-7)
        assert found["into"].a.tobytes() == adapter.modules["into"].a.tobytes()
        assert found["out"].a.tobytes() == adapter.modules["out"].a.tobytes()


def test_options_without_their_mesh():
    for options in ({"fully_sharded": True}, {"data_axes": ["data"]}):
        with pytest.raises(LoRAUsageError, match="on a mesh"):
            make_manager(Small(), **options)
    model = placed(Small(), the_mesh(), SMALL)
    with pytest.raises(LoRAUsageError, match=r"data_axes names 'batch', which is no axis of the mesh of embed\.emb"):
        make_manager(model, data_axes=["batch"])
    assert type(model.up) is nnx.Linear


def test_a_set_mesh_that_is_not_the_models(world):
    refused = pytest.raises(LoRAError, match=r"embed: the model lies on a mesh \{'data': 2, 't': 2\}.* \{'x': 4\}")
    with world.manager.prepare(MIXES[0]) as batch, jax.set_mesh(mesh_of(x=4)), refused:
        world.forward(world.model, TOKENS, batch)
