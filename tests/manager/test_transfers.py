"""A serving loop under `jax.transfer_guard("disallow")`, which finds implicit transfers: jlora makes none."""

import dataclasses
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from tests.manager.tiny import MAX_RANK, MODULES, Model, World, make_adapter, tensors
from tests.records import content_of

pytestmark = pytest.mark.device


@pytest.fixture
def world() -> Iterator[World]:
    """A world under a guard in every thread, those that load too. Flax makes no model under it."""
    model = Model()
    tokens = jax.device_put(np.arange(12, dtype=np.int32).reshape(3, 4))
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        config = jlora.LoRAConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=MAX_RANK)
        yield World(model, jlora.LoRAManager(model, config), tokens)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed"):  # it was on
            jnp.ones(3) + np.ones(3)
    finally:
        jax.config.update("jax_transfer_guard", None)


def served(world: World, adapters: list[jlora.Adapter | None]) -> None:
    with world.manager.prepare([None if one is None else one.name for one in adapters]) as batch:
        logits = world.logits(batch)
    with jax.transfer_guard("allow"):  # the oracle's own
        world.check(logits, adapters)


def test_swaps_loads_and_repairs_make_no_implicit_transfer(world, tmp_path):
    a, b, c, d = (make_adapter(name, rank=2, modules=list(MODULES)) for name in "abcd")
    for one in (a, b, c, d):
        one.save_pretrained(tmp_path / one.name)
    for one in (a, b):
        world.manager.add_adapter(jlora.LoRARequest(one.name, str(tmp_path / one.name)))
    served(world, [a, None, b])
    served(world, [b, a, None])
    world.manager.add_adapter(jlora.LoRARequest("c", str(tmp_path / "c")))
    world.manager.prefetch(jlora.LoRARequest("d", str(tmp_path / "d"))).result(60)
    served(world, [d, None, c])
    world.model.layers[0].qkv_proj.jlora_a.get_value().delete()
    served(world, [c, d, None])
    world.manager.prepare(["c", None, None], token_counts=[2, 0, 3]).close()


@pytest.mark.parametrize("how", ["device", "host", "both", "one half"])
def test_updates(world, how):
    old, new = (make_adapter("a", version, rank=2, modules=list(MODULES)) for version in range(2))
    world.manager.add_adapter(old)
    served(world, [old, None, old])
    arrays = tensors(new, np.asarray if how == "host" else jax.device_put)
    if how == "both":
        arrays |= {name: jax.device_get(array) for name, array in list(arrays.items())[::3]}
    if how == "one half":
        arrays = {name: array for name, array in arrays.items() if "lora_A" in name or "embedding_A" in name}
        mixed = {name: dataclasses.replace(lora, b=old.modules[name].b) for name, lora in new.modules.items()}
        new = jlora.Adapter(name="a", modules=mixed)
    world.manager.update_adapter("a", arrays)
    served(world, [new, None, new])
    while not content_of(world.manager, "a").on_host:  # copied back, by another thread
        threading.Event().wait(0.01)
    found = world.manager.export_adapter("a")
    for name, lora in new.modules.items():
        np.testing.assert_array_equal(found.modules[name].a, lora.a)


@pytest.mark.parametrize("put", [jax.device_put, np.asarray])
def test_updates_of_another_rank(world, put):
    """They take the scaling of their alpha, and leave zeros past their rank: kernels read it rounded up to 16."""
    old, new = (make_adapter("a", version, rank=rank, modules=list(MODULES)) for version, rank in ((0, 4), (1, 2)))
    modules = {
        name: dataclasses.replace(lora, alpha=old.modules[name].alpha, scaling=old.modules[name].alpha / 2)
        for name, lora in new.modules.items()
    }
    world.manager.add_adapter(old)
    served(world, [old, None, old])
    name = "layers.0.k_proj"
    for changed in ({name: modules[name]}, modules):
        new = jlora.Adapter(name="a", modules={**old.modules, **changed})
        part = jlora.Adapter(name="a", modules=changed)
        world.manager.update_adapter("a", tensors(part, put))
        served(world, [new, None, new])
        layer, slot = world.model.layers[0].qkv_proj, world.manager.list_adapters()["a"].slot
        with jax.transfer_guard("allow"):
            a, b = (np.asarray(factor.get_value())[slot] for factor in (layer.jlora_a, layer.jlora_b))
        a, b = a[1], b[:, 16:24]
        assert (a[:2].any(), b[:2].any(), a[2:].any(), b[2:].any()) == (True, True, False, False)
    found = world.manager.export_adapter("a").modules
    assert {name: lora.scaling for name, lora in found.items()} == {n: m.scaling for n, m in modules.items()}
    world.manager.add_adapter(old, load_inplace=True)
    served(world, [None, old, old])


def test_an_update_whose_scaling_is_too_large_is_refused(world):
    """The alpha fits at rank 2 and not at rank 1."""
    old, new = (make_adapter("a", version, rank=rank, modules=["embed"]) for version, rank in ((0, 2), (1, 1)))
    modules = {name: dataclasses.replace(lora, alpha=6e38, scaling=3e38) for name, lora in old.modules.items()}
    world.manager.add_adapter(jlora.Adapter(name="a", modules=modules), load_inplace=True)
    for put in (jax.device_put, np.asarray):
        with pytest.raises(jlora.AdapterMismatchError, match=r"embed: scaling must be a finite float32, found 6e\+38"):
            world.manager.update_adapter("a", tensors(new, put))
