"""DoRA and activated LoRA (aLoRA) adapters are refused unless the configuration serves them."""

import pytest

import jlora
from tests.manager.tiny import MAX_RANK, Model, as_dora, make_adapter, make_world

TOKENS = (7, 1, 1)


ACTIVATED = make_adapter("act", rank=2, modules=["layers.0.k_proj"], invocation_tokens=TOKENS)
DORA = as_dora(make_adapter("dora", rank=2, modules=["layers.0.k_proj"]))


def sources(adapter, folder):
    adapter.save_pretrained(folder / adapter.name)
    return adapter, jlora.LoRARequest(adapter.name, str(folder / adapter.name))


def config_of(**options):
    return jlora.LoRAConfig(max_loras=2, max_lora_rank=MAX_RANK, **options)


@pytest.mark.parametrize(
    ("adapter", "other", "switch"),
    [
        (ACTIVATED, {"variants": ("dora",)}, "activated=True"),
        (DORA, {"activated": True}, r"variants=\['dora'\]"),
    ],
)
def test_adapters_that_the_configuration_does_not_serve(tmp_path, adapter, switch, other):
    for options in ({}, other):
        manager = jlora.LoRAManager(Model(), config_of(**options))
        for source in sources(adapter, tmp_path):
            for call in (manager.add_adapter, jlora.Survey(Model(), config_of(**options)).check):
                cause = rf"adapter '{adapter.name}'.* LoRAConfig\({switch}\) serves it"
                with pytest.raises(jlora.AdapterMismatchError, match=cause):
                    call(source)
        assert manager.list_adapters() == {}


def test_activated_adapters_are_loaded_and_listed(tmp_path):
    world = make_world(activated=True, max_loras=1, max_cpu_loras=1)
    for source in sources(ACTIVATED, tmp_path):
        jlora.Survey(Model(), config_of(activated=True)).check(source)
        assert world.manager.add_adapter(source)
        assert world.manager.list_adapters()["act"].invocation_tokens == TOKENS
        world.manager.prepare(["act"]).close()
        assert world.manager.export_adapter("act").invocation_tokens == TOKENS
        world.manager.remove_adapter("act")
    world.manager.add_adapter(make_adapter("plain", rank=2, modules=["layers.0.k_proj"]))
    assert world.manager.list_adapters()["plain"].invocation_tokens == ()


def test_activated_weights_are_not_restored_as_plain_ones(tmp_path):
    saved = jlora.LoRAManager(Model(), config_of(activated=True))
    saved.add_adapter(ACTIVATED)
    saved.save(tmp_path)
    with pytest.raises(jlora.AdapterMismatchError, match=r"'act'.*LoRAConfig\(activated=True\) serves it"):
        jlora.LoRAManager(Model(), config_of()).restore(tmp_path)


def test_names_of_no_variant_are_refused():
    for make in (jlora.LoRAManager, jlora.Survey):
        with pytest.raises(
            jlora.LoRAUsageError, match=r"LoRAConfig\.variants: 'dara' is no variant; expected .*'dora'"
        ):
            make(Model(), config_of(variants=["dora", "dara"]))
