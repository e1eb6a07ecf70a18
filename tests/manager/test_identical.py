"""Adapters of the same weights under several names have their bytes on the host once, and count once."""

import gc
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from jlora.manager import host
from tests.manager.tiny import make_adapter, make_world

FULL = ["layers.0.q_proj", "layers.1.o_proj", "embed"]


def named(name, of="a", version=0):
    adapter = make_adapter(of, version, rank=4, modules=FULL)
    return jlora.Adapter(name=name, modules=adapter.modules)


def one_size():
    world = make_world()
    world.manager.add_adapter(named("x"))
    return world.manager.list_adapters()["x"].nbytes


def test_bytes_are_kept_and_counted_once(world):
    manager = world.manager
    manager.add_adapter(named("a"))
    (alone,) = (info.nbytes for info in manager.list_adapters().values())
    for name in ("b", "c"):
        manager.add_adapter(named(name))
    blocks = {id(manager._registry.contents[name].blocks) for name in "abc"}
    ranks = manager._registry.contents["a"].ranks.nbytes
    assert len(blocks) == 1
    assert manager.stats().host_bytes == alone + 2 * ranks
    assert [info.nbytes for info in manager.list_adapters().values()] == [alone] * 3
    world.check(world.serve(["a", None, "b"]), [named("a"), None, named("a")])


def test_evicting_one_keeps_the_others(world):
    for name in "ab":
        world.manager.add_adapter(named(name))
    before = world.serve(["b", "b", None])
    world.manager.remove_adapter("a")
    world.manager.deactivate_adapter("b")
    np.testing.assert_array_equal(world.serve(["b", "b", None]), before)
    assert world.manager.stats().host_bytes == world.manager.list_adapters()["b"].nbytes


def test_one_value_makes_them_different(world):
    """Wherever it is: what the sample does not see, the comparison does."""
    world.manager.add_adapter(named("a"))
    for i in range(0, 4 * 16, 7):
        other = named("b")
        module = other.modules["layers.0.q_proj"]
        a = module.a.copy()
        a.reshape(-1)[i] += 1e-3
        modules = {**other.modules, "layers.0.q_proj": jlora.ModuleLoRA(**{**vars(module), "a": a})}
        changed = jlora.Adapter(name="b", modules=modules)
        world.manager.add_adapter(changed, load_inplace=True)
        contents = world.manager._registry.contents
        assert contents["a"].blocks is not contents["b"].blocks
        world.check(world.serve(["a", None, "b"]), [named("a"), None, changed])


def test_another_scaling_is_another_content(world):
    world.manager.add_adapter(named("a"))
    modules = {
        name: jlora.ModuleLoRA(**{**vars(module), "scaling": module.scaling * 2, "alpha": module.alpha * 2})
        for name, module in named("a").modules.items()
    }
    world.manager.add_adapter(jlora.Adapter(name="b", modules=modules))
    contents = world.manager._registry.contents
    assert contents["a"].blocks is not contents["b"].blocks


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_an_update_lets_go_of_what_was_shared(world, kind):
    world.manager.add_adapter(named("a"))
    shared = weakref.ref(world.manager._registry.contents["a"].shared)
    world.manager.update_adapter("a", {"layers.0.q_proj.lora_A.weight": kind(np.ones((4, 16), np.float32))})
    gc.collect()
    assert shared() is None


def test_the_last_content_dies_without_running_python(world):
    """An interrupt that came while it did would reach nobody."""
    world.manager.add_adapter(named("a"))
    content = [world.manager._registry.contents["a"]]
    shared = weakref.ref(content[0].shared)
    world.manager.remove_adapter("a")
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    content.clear()
    sys.setprofile(None)
    assert shared() is None
    assert "call" not in calls


def test_what_was_shared_is_forgotten_when_many_came_and_went(world):
    for i in range(300):
        world.manager.add_adapter(named("a", version=i), load_inplace=True)
    assert len(world.manager._registry._shared) < 100
    world.manager.add_adapter(named("b", version=299))
    contents = world.manager._registry.contents
    assert contents["a"].blocks is contents["b"].blocks


def test_an_update_parts_them(world):
    for name in "ab":
        world.manager.add_adapter(named(name))
    before = world.serve(["b", None, "a"])
    array = named("b").modules["layers.0.q_proj"].a + 1
    tensor = "base_model.model.layers.0.q_proj.lora_A.weight"
    for new in (array, jnp.asarray(array + 1)):
        world.manager.update_adapter("b", {tensor: new})
        after = world.serve(["b", None, "a"])
        np.testing.assert_array_equal(after[2], before[2])
        assert np.abs(after[0] - before[0]).max() > 1e-3


def test_the_cache_holds_as_many_names_as_share_bytes():
    """`max_cpu_bytes` of two adapters: four names of one content and one more fit, the next evicts the oldest."""
    size = one_size()
    world = make_world(max_loras=1, max_cpu_loras=8, max_cpu_bytes=2 * size + size // 2)
    manager = world.manager
    for name in ("a1", "a2", "a3", "a4"):
        manager.add_adapter(named(name))
    manager.add_adapter(named("b", "b"))
    assert list(manager.list_adapters()) == ["a1", "a2", "a3", "a4", "b"]
    assert manager.stats().host_evictions == 0
    manager.add_adapter(named("c", "c"))  # has no room until the last of the four is out
    assert list(manager.list_adapters()) == ["b", "c"]
    manager.add_adapter(named("b2", "b"), load_inplace=True)
    assert list(manager.list_adapters()) == ["b", "c", "b2"]
    assert manager.stats().host_bytes <= 2 * size + size // 2


def test_what_shares_with_a_pinned_one_frees_nothing():
    size = one_size()
    world = make_world(max_loras=1, max_cpu_loras=8, max_cpu_bytes=size + size // 2)
    for name in "ab":
        world.manager.add_adapter(named(name))
    world.manager.pin_adapter("a")
    with pytest.raises(jlora.NoFreeSlotError, match="max_cpu_bytes"):
        world.manager.add_adapter(named("c", "c"))
    assert list(world.manager.list_adapters()) == ["b", "a"]


def test_loads_at_the_same_time_share_all_the_same(world, monkeypatch):
    """None of them finds another on the host, neither while it is staged nor just before it is let in."""
    together, looked = threading.Barrier(3), Counter()
    share = host.Host._share

    def shared(self, content, unlike, *others):
        found = share(self, content, unlike, *others)
        looked[content.name] += 1
        if looked[content.name] <= 2:
            together.wait(60)
        return found

    monkeypatch.setattr(host.Host, "_share", shared)
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(world.manager.add_adapter, map(named, "abc")))
    assert len({id(world.manager._registry.contents[name].blocks) for name in "abc"}) == 1


def test_no_lock_is_held_while_bytes_are_compared(world, monkeypatch):
    """A step goes on while another thread compares."""
    world.manager.add_adapter(named("a"))
    comparing, go_on = threading.Event(), threading.Event()
    same = host.same_bytes

    def slow(*args):
        comparing.set()
        assert go_on.wait(60)
        return same(*args)

    monkeypatch.setattr(host, "same_bytes", slow)
    with ThreadPoolExecutor(1) as threads:
        added = threads.submit(world.manager.add_adapter, named("b"))
        assert comparing.wait(60)
        world.check(world.serve(["a", None, None]), [named("a"), None, None])
        go_on.set()
        assert added.result()
