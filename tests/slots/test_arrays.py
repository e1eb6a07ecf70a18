"""Writes of adapters into slots: bytes moved, in place, one compilation, bounded staging memory."""

import gc
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jlora
from tests.manager.tiny import LAYERS, MAX_RANK, MODULES, VOCAB, WIDTH, make_adapter, make_world
from tests.matrix import thinned
from tests.small_device import on_small_device

pytestmark = [pytest.mark.device, pytest.mark.optimised]


ROW = 4 * 4  # bytes of a float32 for each of the 4 ranks
A_ROW = {"layers.0.q_proj": 3 * WIDTH + 32, "layers.0.o_proj": 2 * WIDTH, "embed": VOCAB + WIDTH}
RANKS = 8 * (2 + LAYERS * (3 + 1))  # each with a scale


@pytest.mark.parametrize("module", A_ROW)
def test_an_adapter_of_one_module_moves_one_row(moved, module):
    world = make_world(max_loras=1, max_cpu_loras=3)
    m, ranks = world.manager, {"one": 1, "other": 1, "two": 2}
    adapters = [make_adapter(name, rank=rank, modules=[module]) for name, rank in ranks.items()]
    m.warmup()
    # From the second time on, where things go is on the device. Equal ranks are too.
    for adapter, nbytes in zip(adapters, (None, 0, RANKS), strict=True):
        m.add_adapter(adapter)
        moved.clear()
        assert m.pin_adapter(adapter.name)
        assert nbytes is None or sum(array.nbytes for array in moved) == ROW * A_ROW[module] + nbytes
        assert not m.pin_adapter(adapter.name)  # it is in a slot
        m.unpin_adapter(adapter.name)
        world.check(world.serve([adapter.name, None, None]), [adapter, None, None])


def staged_bytes(monkeypatch, shapes) -> list[int]:
    """Bytes of factors on the device at each transfer from here on, beside the slots and other arrays of now."""
    before, seen = {id(array) for array in jax.live_arrays()}, []
    put = jax.device_put

    def spy(x, *args, **kwargs):
        moved = put(x, *args, **kwargs)
        alive = [array for array in jax.live_arrays() if id(array) not in before and array.shape not in shapes]
        seen.append(sum(array.nbytes for array in alive if array.ndim > 2))
        return moved

    monkeypatch.setattr(jax, "device_put", spy)
    return seen


@pytest.mark.device("cpu")  # a GPU joins the blocks of a wave
@pytest.mark.parametrize("limit", [1, 6000])
def test_waves_are_bounded(monkeypatch, limit):
    """Transfers of an adapter of any size are bounded by `SlotArrays.max_bytes`, but at least one block of one row."""
    world = on_small_device(limit, make_world)
    gc.disable()  # arrays must be freed without a collection
    try:
        world.load(*"ab", rank=MAX_RANK, modules=list(MODULES))
        seen = staged_bytes(monkeypatch, {array.shape for _, array in world.slots()})
        total = world.manager.list_adapters()["a"].nbytes - RANKS
        row = ROW * max(A_ROW.values())
        world.serve(["a", None, "b"])
        assert 0 < max(seen) <= max(limit, row)
        assert len(seen) >= 2 * total / max(limit, row)
    finally:
        gc.enable()
    monkeypatch.undo()
    world.load("c")
    adapters = [make_adapter(name, rank=MAX_RANK, modules=list(MODULES)) for name in "ab"]
    world.check(world.serve(["a", "b", None]), [*adapters, None])
    world.check(world.serve(["c", "b", None]), [make_adapter("c"), adapters[1], None])
    assert world.manager.stats().compilations == 1


def test_several_writes_in_a_row_stay_bounded_together(monkeypatch):
    """The third adapter waits until the first two are written, because their blocks may still be on the device."""
    world = on_small_device(12_000, make_world, max_loras=4)
    world.load(*"abcd", rank=MAX_RANK, modules=list(MODULES))
    size = world.manager.list_adapters()["a"].nbytes
    assert 2 * size < 12_000 < 3 * size
    array_type, waited = type(jnp.zeros(1)), []
    ready, wait = array_type.is_ready, jax.block_until_ready
    monkeypatch.setattr(array_type, "is_ready", lambda array: bool(waited) and ready(array))  # a slow device
    monkeypatch.setattr(jax, "block_until_ready", lambda x: (waited.append(1), wait(x))[1])
    world.manager.prepare(["a", "b"]).close()
    assert waited == []
    world.manager.prepare(["c"]).close()
    assert len(waited) == 1


def test_the_write_is_in_place(world):
    """The arrays after a write are the same memory, and the arrays before it are gone."""
    world.load("a", "b", modules=list(MODULES))
    world.manager.pin_adapter("a")
    before = [array for _, array in world.slots()]
    places = [array.unsafe_buffer_pointer() for array in before]
    world.manager.pin_adapter("b")
    assert all(array.is_deleted() for array in before if array.shape[-1] > 2)  # the ranks may have been there
    assert [array.unsafe_buffer_pointer() for _, array in world.slots()] == places


def test_a_write_beside_another_thread_s_open_batch_consumes_nothing(world):
    """That thread may be calling its step, with the arrays as they are; through `run` it would take its turn."""
    world.load("a", "b", "c", modules=list(MODULES))
    opened, done = threading.Event(), threading.Event()

    def other():
        with world.manager.prepare(["a", None, None]):
            opened.set()
            done.wait(60)

    def consumed(name):
        before = [array for _, array in world.slots()]
        world.manager.pin_adapter(name)
        world.manager.unpin_adapter(name)
        return {array.is_deleted() for array in before}

    thread = threading.Thread(target=other)
    thread.start()
    assert opened.wait(60)
    try:
        assert consumed("b") == {False}
        table = world.model.layers[0].o_proj.jlora_b
        table[...] = table[...] + 1  # differs from the last write: repaired, and not in place either
        assert consumed("b") == {False}
        assert world.manager.jit(lambda model: 3)(world.model) == 3
        assert consumed("c") == {True}
    finally:
        done.set()
        thread.join()


CONTEXTS = {
    "precision": lambda: jax.default_matmul_precision("highest"),
    "device": lambda: jax.default_device(jax.devices()[5]),
    "x64": lambda: jax.enable_x64(True),
    "nans": lambda: jax.debug_nans(True),
    "promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "no jit": lambda: jax.disable_jit(),
}


@pytest.mark.device(devices=2)
@pytest.mark.parametrize("context", thinned([*CONTEXTS], 0, 1, 2))
def test_settings_around_the_first_prepare_do_not_stay_in_the_write(context):
    world = make_world()
    world.load("a", "b")
    where = [(array.sharding, array.dtype, array.committed) for _, array in world.slots()]
    with CONTEXTS[context]():
        batch = world.manager.prepare(["a", None, None])
    with batch:
        world.check(world.logits(batch), [make_adapter("a"), None, None])
    world.check(world.serve(["b", "a", None]), [make_adapter("b"), make_adapter("a"), None])
    assert [(array.sharding, array.dtype, array.committed) for _, array in world.slots()] == where
    assert world.manager.stats().compilations == len(world.traces) == 1


def mesh_of(*shape):
    names = ("data", "tensor")[-len(shape) :]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), names)


@pytest.mark.device(devices=8)
@pytest.mark.parametrize("late", thinned([True, False], 0))
def test_writes_keep_the_sharding_of_slot_arrays(late):
    """Spread over the mesh before the first write or after some: every write keeps each array's sharding."""
    world, mesh = make_world(), mesh_of(2, 4)
    world.load("a", "b", "c", modules=list(MODULES))
    if late:
        world.serve(["a", "b", None])
    state = nnx.state(world.model)
    for _, variable in nnx.to_flat_state(state):
        axes = [None] * len(variable.shape)
        if issubclass(variable.type, jlora.SlotParam) and variable.shape[-1] % 4 == 0 and len(axes) > 2:
            axes[-1] = "tensor"
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        variable.set_value(jax.device_put(variable.get_value(), sharding))
    nnx.update(world.model, state)
    world.tokens = jax.device_put(world.tokens, NamedSharding(mesh, PartitionSpec()))
    where = [array.sharding for _, array in world.slots()]
    assert any("tensor" in sharding.spec for sharding in where)
    for names in (["a", "b", None], ["c", "b", "c"], ["b", None, "a"]):
        with world.manager.prepare(names) as batch:
            assert [array.sharding for _, array in world.slots()] == where
            batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec()))
            adapters = [None if n is None else make_adapter(n, modules=list(MODULES)) for n in names]
            world.check(world.logits(batch), adapters)
    assert world.manager.stats().compilations == 1 + late


def test_previous_content_of_a_slot_is_masked():
    """After adapters of NaN in both slots, adapters of low rank and few modules are exact, and so is the base model."""
    world = make_world(allow_nonfinite=True)
    base = world.serve([None, None, None])
    for rank in (1, MAX_RANK):
        nan = [make_adapter(name, rank=MAX_RANK, modules=list(MODULES)) for name in ("nan0", "nan1")]
        for module in (module for adapter in nan for module in adapter.modules.values()):
            module.a[...] = module.b[...] = np.nan
        world.load(*nan)
        assert np.isnan(world.serve(["nan0", None, "nan1"])[::2]).all()
        world.reset()
        few = make_adapter("few", rank=rank, modules=["layers.0.k_proj", "lm_head"])
        one = make_adapter("one", rank=rank, modules=["embed"])
        world.load(few, one)
        logits = world.serve(["few", None, "one"])
        world.check(logits, [few, None, one])
        np.testing.assert_array_equal(logits[1], base[1])
        assert any(np.isnan(np.asarray(array)).any() for _, array in world.slots())
        world.reset()


def test_slots_are_the_state_of_the_model(world):
    world.manager.add_adapter(make_adapter("a"))
    before = world.manager.slots
    assert world.manager.slots is before  # no write in between
    world.manager.pin_adapter("a")
    after, state = world.manager.slots, nnx.state(world.model, jlora.SlotParam)
    assert after is not before
    chex.assert_trees_all_equal_structs(after, state, before)
    assert list(map(id, jax.tree.leaves(after))) == list(map(id, jax.tree.leaves(state)))  # no copies
    manager = make_world().manager
    jlora.LoRAManager(manager.unwrap(), manager.config)
    with pytest.raises(jlora.LoRAError, match="gave its model back"):  # nor are those of the next manager
        _ = manager.slots
