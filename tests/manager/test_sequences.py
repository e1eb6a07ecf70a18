"""Named sequences of the verbs: edge cases of add, activate, pin and their opposites.

The worlds have two slots; the order of `list_adapters` is least recently used first.
"""

import pytest

import jlora
from tests.manager.tiny import make_adapter, request
from tests.records import on_host, slot_names

pytestmark = pytest.mark.device


def add(world, *names):
    return [world.manager.add_adapter(make_adapter(name)) for name in names]


@pytest.fixture
def load(tmp_path):
    """Return `add` for adapters on disk, which can be evicted."""
    return lambda world, *names: [world.manager.add_adapter(request(tmp_path, name)) for name in names]


def hosts(world):
    return on_host(world.manager)


def test_a_full_host_drops_its_oldest_also_from_its_slot(world, load):
    load(world, "a", "b", "c", "d")
    world.manager.activate_adapter("a")
    for name in ("b", "c", "d"):
        load(world, name)
    assert hosts(world) == ["a", "b", "c", "d"]
    assert load(world, "e") == [True]
    assert hosts(world) == ["b", "c", "d", "e"]
    assert slot_names(world.manager) == (None, None)
    assert world.manager.list_adapters()["a"].level == "evicted"


def test_slots_fill_lowest_first_and_evict_the_least_recently_used(world):
    m = world.manager
    add(world, "a", "b", "c", "d")
    assert m.activate_adapter("a")
    assert slot_names(m) == ("a", None)
    assert m.activate_adapter("b")
    assert slot_names(m) == ("a", "b")
    assert m.activate_adapter("c")
    assert slot_names(m) == ("c", "b")
    assert not m.activate_adapter("b")  # in a slot already: this touches it
    assert m.activate_adapter("d")
    assert slot_names(m) == ("d", "b")


def test_a_slot_given_up_is_taken_first(world):
    m = world.manager
    add(world, "a", "b", "c")
    m.activate_adapter("a")
    m.activate_adapter("b")
    assert m.deactivate_adapter("a")
    assert slot_names(m) == (None, "b")
    assert not m.deactivate_adapter("a")
    assert not m.deactivate_adapter("unknown")
    assert hosts(world) == ["c", "a", "b"]
    m.activate_adapter("c")
    assert slot_names(m) == ("c", "b")


def test_pin_activates_and_survives_every_eviction(world, load):
    m = world.manager
    load(world, "a", "b", "c", "d")
    assert m.pin_adapter("a")
    assert slot_names(m) == ("a", None)
    for name in ("b", "c", "d"):
        m.activate_adapter(name)
        assert slot_names(m) == ("a", name)
    load(world, "e", "f", "g")
    assert hosts(world) == ["a", "e", "f", "g"]
    assert [m.remove_oldest_adapter() for _ in range(4)] == [True, True, True, False]
    assert hosts(world) == ["a"]
    assert slot_names(m) == ("a", None)


def test_pin_evicts_to_make_room_but_never_a_pinned_one(world):
    m = world.manager
    add(world, "a", "b", "c")
    m.activate_adapter("a")
    m.activate_adapter("b")
    assert m.pin_adapter("c")
    assert slot_names(m) == ("c", "b")
    assert m.pin_adapter("b")
    before = world.held()
    for verb in (m.pin_adapter, m.activate_adapter):
        with pytest.raises(jlora.NoFreeSlotError, match="'a'"):
            verb("a")
    assert world.held()[:2] == before[:2]
    assert not m.list_adapters()["a"].pinned


def test_after_unpin_the_old_order_of_use_counts(world):
    m = world.manager
    add(world, "a", "b", "c")
    m.pin_adapter("a")
    m.activate_adapter("b")
    m.unpin_adapter("a")  # not a use: a is still the least recently used
    m.activate_adapter("c")
    assert slot_names(m) == ("c", "b")
