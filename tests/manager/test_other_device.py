"""A model on a device other than the default: its slots are there too, and a step moves no array."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora._compat import set_raw_value
from tests.manager.tiny import MAX_RANK, MODULES, Model, World, make_adapter, tensors

OTHER = 3  # of the eight virtual devices


def test_slots_batches_updates_and_repairs_stay_on_the_device_of_the_model():
    model, device = Model(), jax.devices()[OTHER]
    nnx.update(model, jax.device_put(nnx.state(model), device))
    config = jlora.LoRAConfig(max_loras=2, max_cpu_loras=4, max_lora_rank=MAX_RANK)
    tokens = jax.device_put(np.arange(12, dtype=np.int32).reshape(3, 4), device)
    far = World(model, jlora.LoRAManager(model, config), tokens)
    adapters = {name: make_adapter(name, rank=2, modules=list(MODULES)) for name in "abc"}

    def check(*names):
        with far.manager.prepare(names) as batch:
            assert batch.slots.devices() == {device}
            with jax.transfer_guard_device_to_device("disallow"):
                logits = far.logits(batch)
        far.check(logits, [adapters.get(name) for name in names])
        assert {each for _, array in far.slots() for each in array.devices()} == {device}

    far.load(*adapters.values())
    for names in (["a", None, "b"], ["c", "a", None], ["b", "b", "c"]):
        check(*names)
    for version, put in enumerate((np.asarray, jnp.asarray, lambda array: jax.device_put(array, device)), 1):
        new = make_adapter("b", version, rank=2, modules=list(MODULES))
        old = adapters["b"].modules
        modules = {name: dataclasses.replace(old[name], a=m.a, b=m.b) for name, m in new.modules.items()}
        adapters["b"] = jlora.Adapter(name="b", modules=modules)
        far.manager.update_adapter("b", tensors(new, put))
        check("b", None, "c")
    model.layers[0].qkv_proj.jlora_a.get_value().delete()
    check("b", None, "c")
    assert len(far.traces) == 1


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
    slot_arrays = manager._state.slot_arrays
    assert not slot_arrays.page_locks
    assert not slot_arrays.joined
