"""DoRA and activated LoRA (aLoRA) adapters are refused unless the configuration serves them."""

from dataclasses import replace

import numpy as np
import pytest

import jlora
from tests.manager.tiny import MAX_RANK, Model, make_adapter, make_world

TOKENS = (7, 1, 1)


def activated(name="act"):
    return make_adapter(name, rank=2, modules=["layers.0.k_proj"], invocation_tokens=TOKENS)


def dora(name="dora"):
    plain = make_adapter(name, rank=2, modules=["layers.0.k_proj"])
    modules = {n: replace(m, magnitude=np.ones(len(m.b), np.float32)) for n, m in plain.modules.items()}
    return replace(plain, modules=modules)


def from_memory(adapter, folder):
    return adapter


def from_files(adapter, folder):
    adapter.save_pretrained(folder / adapter.name)
    return jlora.LoRARequest(adapter.name, str(folder / adapter.name))


def manager_of(**config):
    return jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=2, max_lora_rank=MAX_RANK, **config))


REFUSED = {
    "aLoRA": (activated, {}, r"is an activated LoRA \(aLoRA\); LoRAConfig\(activated=True\) serves it"),
    "aLoRA with DoRA on": (activated, {"dora": True}, r"LoRAConfig\(activated=True\) serves it"),
    "DoRA": (dora, {}, r"is a DoRA adapter; LoRAConfig\(dora=True\) serves it"),
    "DoRA with aLoRA on": (dora, {"activated": True}, r"LoRAConfig\(dora=True\) serves it"),
}


@pytest.mark.parametrize("source", [from_memory, from_files])
@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_the_configuration_does_not_serve(tmp_path, case, source):
    make, config, cause = REFUSED[case]
    manager, adapter = manager_of(**config), source(make(), tmp_path)
    for call in (
        manager.add_adapter,
        jlora.Survey(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=8, **config)).check,
    ):
        with pytest.raises(jlora.AdapterMismatchError, match=f"adapter '{adapter.name}'.* {cause}"):
            call(adapter)
    assert manager.list_adapters() == {}


@pytest.mark.parametrize("source", [from_memory, from_files])
def test_activated_adapters_are_loaded_and_listed(tmp_path, source):
    world = make_world(activated=True, max_loras=1, max_cpu_loras=1)
    added = source(activated(), tmp_path)
    jlora.Survey(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=MAX_RANK, activated=True)).check(added)
    assert world.manager.add_adapter(added)
    assert world.manager.list_adapters()["act"].invocation_tokens == TOKENS
    world.manager.activate_adapter("act")
    assert world.manager.export_adapter("act").invocation_tokens == TOKENS
    world.manager.remove_adapter("act")
    world.manager.add_adapter(make_adapter("plain", rank=2, modules=["layers.0.k_proj"]))
    assert world.manager.list_adapters()["plain"].invocation_tokens == ()


def test_activated_weights_are_not_restored_as_plain_ones(tmp_path):
    saved = manager_of(activated=True)
    saved.add_adapter(activated())
    saved.save(tmp_path)
    with pytest.raises(jlora.AdapterMismatchError, match=r"'act'.*LoRAConfig\(activated=True\) serves it"):
        manager_of().restore(tmp_path)
