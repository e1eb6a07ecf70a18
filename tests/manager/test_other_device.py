"""A model on a device other than the default: its slots are there too, and a step moves no array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora._compat import set_raw_value
from tests.manager.tiny import MAX_RANK, Model, World, make_adapter

OTHER = 3  # of the eight virtual devices


def other_world(**config) -> World:
    model, device = Model(), jax.devices()[OTHER]
    nnx.update(model, jax.device_put(nnx.state(model), device))
    sizes = jlora.LoRAConfig(max_loras=2, max_cpu_loras=4, max_lora_rank=MAX_RANK, **config)
    tokens = jax.device_put(np.arange(12, dtype=np.int32).reshape(3, 4), device)
    return World(model, jlora.LoRAManager(model, sizes), tokens)


@pytest.fixture
def far():
    return other_world()


def devices(world):
    return {device for _, array in world.slots() for device in array.devices()}


def test_slots_and_batches_stay_on_the_device_of_the_model(far):
    adapters = {name: make_adapter(name) for name in "abc"}
    for adapter in adapters.values():
        far.manager.add_adapter(adapter)
    for names in (["a", None, "b"], ["c", "a", None], ["b", "b", "c"]):
        with far.manager.prepare(names) as batch:
            assert batch.slots.devices() == {jax.devices()[OTHER]}
            with jax.transfer_guard_device_to_device("disallow"):
                logits = far.logits(batch)
        far.check(logits, [adapters.get(name) for name in names])
        assert devices(far) == {jax.devices()[OTHER]}
    assert len(far.traces) == 1


@pytest.mark.parametrize("where", ["host", "model", "default"])
def test_updates_from_anywhere(far, where):
    old, new = (make_adapter("a", version, rank=2, modules=["layers.0.q_proj", "embed"]) for version in range(2))
    far.manager.add_adapter(old)
    far.serve(["a", None, None])
    arrays = {f"{name}.lora_A.weight": lora.a for name, lora in new.modules.items() if lora.kind == "linear"}
    arrays |= {f"{name}.lora_B.weight": lora.b for name, lora in new.modules.items() if lora.kind == "linear"}
    modules = {name: new.modules[name] if lora.kind == "linear" else lora for name, lora in old.modules.items()}
    if where != "host":
        place = jax.devices()[OTHER if where == "model" else 0]
        arrays = {name: jax.device_put(array, place) for name, array in arrays.items()}
    far.manager.update_adapter("a", arrays)
    far.check(far.serve(["a", None, "a"]), [found := jlora.Adapter(name="a", modules=modules), None, found])
    assert devices(far) == {jax.devices()[OTHER]}


def test_a_lost_array_is_made_anew_beside_the_others(far):
    adapter = make_adapter("a")
    far.manager.add_adapter(adapter)
    far.serve(["a", None, None])
    lost = far.model.layers[0].qkv_proj.jlora_a
    lost.get_value().delete()
    far.check(far.serve(["a", None, "a"]), [adapter, None, adapter])
    assert devices(far) == {jax.devices()[OTHER]}


def test_parts_on_several_devices_leave_slots_where_they_were():
    model = Model()
    for variable, device in ((model.embed.embedding, 1), (model.layers[0].qkv_proj.kernel, 2)):
        set_raw_value(variable, jax.device_put(jnp.asarray(variable.get_value()), jax.devices()[device]))
    jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=MAX_RANK))
    assert model.embed.jlora_a.get_value().devices() == {jax.devices()[0]}


class Gpu:
    """The first device of a machine whose model is on the CPU."""

    platform = "gpu"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "pinned_host"})]

    def memory_stats(self):
        return None


@pytest.mark.usefixtures("unchecked_calls")
def test_write_program_suits_the_device_of_the_slots(monkeypatch):
    devices = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda **_: [Gpu(), *devices])
    manager = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=2, max_lora_rank=MAX_RANK))
    pool = manager._state.pool
    assert not pool.page_locks
    assert not pool.joined
