"""Adapters without a request are never evicted from the host cache, and a batch that cannot fit loads nothing."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlora
from jlora.manager.host_cache import HostCache
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.slots.packed import PackedAdapter
from tests.manager.test_prepare import in_time
from tests.manager.tiny import MAX_RANK, MODULES, make_adapter, make_world, request, tensors
from tests.records import evict, evicted, on_host, slot_names

pytestmark = pytest.mark.device

NAMES = "abcdef"


def large(name: str) -> jlora.Adapter:
    """Return an adapter; all have one size."""
    return make_adapter(name, rank=MAX_RANK, modules=list(MODULES))


def large_request(folder, name: str) -> jlora.LoRARequest:
    large(name).save_pretrained(folder / name)
    return jlora.LoRARequest(name, str(folder / name))


def update(world, name: str, version: int) -> jlora.Adapter:
    """Replace all weights of an adapter."""
    new = make_adapter(name, version, rank=MAX_RANK, modules=list(MODULES))
    world.manager.update_adapter(name, tensors(new, np.asarray))
    return new


def test_own_weights_outlive_any_number_of_loads(tmp_path):
    world = make_world(max_loras=1, max_cpu_loras=3)
    m = world.manager
    m.add_adapter(large("memory"))
    m.add_adapter(large_request(tmp_path, "updated"))
    new = update(world, "updated", 1)
    for name in NAMES[:4]:
        world.check(world.serve([request(tmp_path, name), None, None]), [make_adapter(name), None, None])
        assert slot_names(m) == (name,)  # they may leave their slots
        assert set(on_host(m)) == {"memory", "updated", name}
    assert [evict(m) for _ in range(2)] == [True, False]
    assert m.stats().unevictable == m.stats().registered == 2
    world.check(world.serve(["memory", None, None]), [large("memory"), None, None])
    world.check(world.serve(["updated", None, None]), [new, None, None])
    assert m.list_adapters()["updated"].request is None


@pytest.mark.parametrize("how", ["memory", "updated"])
def test_one_warning_before_adapters_that_stay_take_all_places(tmp_path, caplog, how):
    world = make_world(max_loras=1, max_cpu_loras=5)
    warned = []
    for name in ("a", "b", "c", "d", "d", "e"):
        if how == "memory":
            world.manager.add_adapter(large(name), load_inplace=True)
        else:
            world.manager.add_adapter(large_request(tmp_path, name))
            update(world, name, 1)
        warned.append([r.getMessage() for r in caplog.records if "never evicted" in r.getMessage()])
    assert [len(found) for found in warned] == [0, 0, 0, 1, 1, 1]
    assert warned[-1][0].startswith("4 of the 5 places of the host cache are taken by adapters from memory")
    with pytest.raises(jlora.NoFreeSlotError, match="max_cpu_loras"):
        world.manager.add_adapter(large_request(tmp_path, "f"))


def saved(folder, adapter: jlora.Adapter) -> jlora.LoRARequest:
    adapter.save_pretrained(folder / adapter.name)
    return jlora.LoRARequest(adapter.name, str(folder / adapter.name))


def test_an_adapter_from_memory_that_was_saved_is_evicted_and_loaded_again(tmp_path, caplog):
    world = make_world(max_loras=1, max_cpu_loras=2)
    m, adapter = world.manager, large("memory")
    m.add_adapter(adapter)
    asked = saved(tmp_path, adapter)
    with m.prepare(["memory", None, None]) as batch:
        m.set_request(adapter, replace(asked, load_inplace=True))
        world.check(world.logits(batch), [adapter, None, None])
        m.add_adapter(request(tmp_path, "a"))
        assert set(on_host(m)) == {"memory", "a"}  # an open batch holds it
    assert m.stats().unevictable == 0
    for name in "bc":
        m.add_adapter(request(tmp_path, name))
    assert evicted(m)["memory"] == asked
    world.check(world.serve([asked, None, None]), [adapter, None, None])
    assert m.list_adapters()["memory"].version == 1
    assert not [record for record in caplog.records if "have changed" in record.getMessage()]


@pytest.mark.parametrize("how", ["removed", "replaced", "updated", "twice", "from a request", "drawn", "another name"])
def test_a_request_is_set_for_the_very_adapter_that_was_added(tmp_path, how):
    world = make_world(max_loras=1, max_cpu_loras=2)
    m, adapter, error = world.manager, large("memory"), jlora.LoRAUsageError
    asked = saved(tmp_path, adapter)
    m.add_adapter(asked if how == "from a request" else adapter)
    if how == "removed":
        m.remove_adapter("memory")
        error = jlora.AdapterNotFoundError
    elif how == "replaced":
        m.add_adapter(replace(adapter), load_inplace=True)
    elif how == "updated":
        update(world, "memory", 1)
    elif how == "twice":
        m.set_request(adapter, asked)
    elif how == "drawn":
        m.remove_adapter("memory")
        adapter = m.new_adapter("memory", rank=1, alpha=1)
    elif how == "another name":
        asked = replace(asked, name="other")
    before = m.stats(), m.list_adapters()
    with pytest.raises(error, match=r"'memory'"):
        m.set_request(adapter, replace(asked, path=str(tmp_path)))
    assert (m.stats(), m.list_adapters()) == before


def test_batch_without_places_loads_nothing(tmp_path):
    """Two adapters in the one place that is left would evict each other without end."""
    world = make_world(max_loras=3, max_cpu_loras=3)
    m = world.manager
    world.load(large("x"), large("y"))
    asked = [large_request(tmp_path, name) for name in "ab"]
    with pytest.raises(jlora.NoFreeSlotError, match="max_cpu_loras=3"):
        in_time(lambda: m.prepare([*asked, None]))
    assert m.stats().host_loads == 2
    assert world.serve([asked[0], None, None]).shape  # one fits
    assert m.stats().host_loads == 3


def test_batch_waits_for_places_until_its_deadline(tmp_path):
    world = make_world(max_loras=3, max_cpu_loras=3)
    m = world.manager
    m.add_adapter(make_adapter("memory"))
    asked = [request(tmp_path, name) for name in "ab"]
    batch = m.prepare([request(tmp_path, "x"), None, None])
    with pytest.raises(jlora.NoFreeSlotError, match=r"'memory', 'x'.*max_cpu_loras=3"):
        in_time(lambda: m.prepare([*asked, None], timeout=0.05))
    threading.Timer(0.1, batch.close).start()
    in_time(lambda: m.prepare([*asked, None], timeout=20)).close()
    assert set(on_host(m)) == {"memory", "a", "b"}


def test_batch_too_large_for_the_bytes_ends(tmp_path):
    """Sizes are known once an adapter was loaded. So new ones are loaded at most once, and evicted ones never."""
    world = make_world(max_loras=3, max_cpu_loras=8)
    world.manager.add_adapter(large("memory"))
    size = world.manager.stats().host_bytes
    world = make_world(max_loras=3, max_cpu_loras=8, max_cpu_bytes=2 * size)
    m = world.manager
    m.add_adapter(large("memory"))
    asked = [large_request(tmp_path, name) for name in "ab"]
    with pytest.raises(jlora.NoFreeSlotError, match="max_cpu_bytes"):
        in_time(lambda: m.prepare([*asked, None]))
    loads = m.stats().host_loads
    assert loads <= 1 + 2 + 1
    with pytest.raises(jlora.NoFreeSlotError, match=rf"need {3 * size} bytes .*max_cpu_bytes={2 * size}"):
        in_time(lambda: m.prepare([*asked, None]))
    assert m.stats().host_loads == loads


@dataclass(frozen=True)
class Entry:
    name: str
    size: int
    request: bool
    pinned: bool
    leased: bool


ENTRIES = st.lists(
    st.builds(Entry, st.sampled_from(NAMES), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans()),
    unique_by=lambda entry: entry.name,
)


def loaded(name: str, size: int, with_request: bool = True) -> LoadedAdapter:
    """Return an adapter of 8 * `size` bytes."""
    source = jlora.LoRARequest(name, name) if with_request else None
    packed = PackedAdapter(jlora.Adapter(name=name, modules={}), (), np.zeros(2 * size, np.float32), 0, ())
    return LoadedAdapter(packed, source)


def cache_of(entries: list[Entry], max_count: int, max_bytes: int) -> tuple[HostCache, set[Any]]:
    """Return a cache with these entries, oldest use first, and its leased adapters."""
    cache = HostCache(max_count, max_bytes)
    for entry in entries:
        cache.put(loaded(entry.name, entry.size, entry.request))
        if entry.pinned:
            cache.pins.add(entry.name)
    return cache, {cache.loaded[entry.name] for entry in entries if entry.leased}


def free(entry: Entry) -> bool:
    return entry.request and not entry.pinned and not entry.leased


@given(entries=ENTRIES, name=st.sampled_from(NAMES), size=st.integers(1, 4), spare=st.integers(0, 2))
def test_victims_are_the_fewest_oldest_that_make_room(entries, name, size, spare):
    count, nbytes = max(1, len(entries)) + spare % 2, 8 * (sum(entry.size for entry in entries) + spare)
    cache, leased = cache_of(entries, count, nbytes)
    others = [entry for entry in entries if entry.name != name]
    evictable = [entry for entry in others if free(entry)]

    def fits(gone: list[Entry]) -> bool:
        left = [entry for entry in others if entry not in gone]
        return len(left) < count and 8 * (size + sum(entry.size for entry in left)) <= nbytes

    want = next((evictable[:n] for n in range(len(evictable) + 1) if fits(evictable[:n])), None)
    if want is None:
        with pytest.raises(jlora.NoFreeSlotError, match="max_cpu_"):
            cache.victims_for(loaded(name, size), leased)
    else:
        assert cache.victims_for(loaded(name, size), leased) == [entry.name for entry in want]


@given(entries=ENTRIES, sizes=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4), min_size=1), data=st.data())
def test_batch_with_room_is_loaded_whole_and_another_never(entries, sizes, data):
    """After `check_room`, loads in any order fit and evict none of the batch."""
    least = max(1, len(entries))
    count = data.draw(st.integers(least, least + 3))
    nbytes = 8 * (sum(entry.size for entry in entries) + data.draw(st.integers(0, 9)))
    cache, leased = cache_of(entries, count, nbytes)
    for name, size in sizes.items():  # known from an earlier load
        if name not in cache.loaded:
            cache._sizes[name] = 8 * size
    batch = {name: next((e.size for e in entries if e.name == name), size) for name, size in sizes.items()}
    stay = [entry for entry in entries if not free(entry) and entry.name not in batch]
    room = len(batch) + len(stay) <= count and 8 * (sum(batch.values()) + sum(e.size for e in stay)) <= nbytes
    if not room:
        with pytest.raises(jlora.NoFreeSlotError, match="max_cpu_"):
            cache.check_room(batch, leased)
        return
    cache.check_room(batch, leased)
    for name in batch:
        if name in cache.loaded:
            cache.loaded.move_to_end(name)
    for name in data.draw(st.permutations(sorted(batch))):
        if name not in cache.loaded:
            new = loaded(name, batch[name])
            for victim in cache.victims_for(new, leased):
                cache.evict(victim)
            cache.put(new)
    assert batch.keys() <= set(cache.loaded)
    assert cache.unevictable() == {entry.name for entry in entries if entry.pinned or not entry.request}
    assert cache.nbytes == sum(cache.loaded[name].nbytes for name in cache.loaded) <= nbytes
