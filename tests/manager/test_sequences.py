"""Named sequences of the verbs: edge cases of add, activate, pin and their opposites.

The worlds have two slots; the order of `list_adapters` is least recently used first.
"""

import pytest

import jlora
from tests.manager.tiny import make_adapter, make_world, request
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


def test_add_is_for_the_host_alone(world):
    assert add(world, "a", "b", "c") == [True, True, True]
    assert hosts(world) == ["a", "b", "c"]
    assert slot_names(world.manager) == (None, None)


def test_add_of_a_known_name_touches_it(world):
    add(world, "a", "b", "c")
    assert add(world, "a") == [False]
    assert hosts(world) == ["b", "c", "a"]


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


def test_remove_takes_an_adapter_from_slot_and_host(world):
    m = world.manager
    add(world, "a", "b")
    m.activate_adapter("a")
    m.activate_adapter("b")
    assert m.remove_adapter("a")
    assert slot_names(m) == (None, "b")
    assert not m.remove_adapter("a")
    assert not m.remove_adapter("never heard of")
    assert hosts(world) == ["b"]


def test_remove_oldest_goes_by_use_not_by_slot(world, load):
    m = world.manager
    load(world, "a", "b", "c")
    m.activate_adapter("a")
    assert m.remove_oldest_adapter()
    assert hosts(world) == ["c", "a"]
    assert m.remove_oldest_adapter()
    assert m.remove_oldest_adapter()
    assert not m.remove_oldest_adapter()
    assert slot_names(m) == (None, None)


def test_remove_all_takes_pinned_ones_too(world):
    m = world.manager
    add(world, "a", "b", "c")
    m.pin_adapter("a")
    m.activate_adapter("b")
    m.remove_all_adapters()
    assert m.list_adapters() == {}
    assert slot_names(m) == (None, None)
    add(world, "a")
    assert not m.list_adapters()["a"].pinned


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


def test_pin_of_one_in_a_slot_keeps_its_slot(world):
    m = world.manager
    add(world, "a", "b", "c")
    m.activate_adapter("a")
    m.activate_adapter("b")
    assert m.pin_adapter("b")
    assert m.pin_adapter("b")  # twice is once
    assert m.unpin_adapter("b")
    assert not m.unpin_adapter("b")
    m.activate_adapter("a")
    m.activate_adapter("c")
    assert slot_names(m) == ("a", "c")


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


def test_pin_and_unpin_of_the_unknown(world):
    for verb in (world.manager.pin_adapter, world.manager.unpin_adapter, world.manager.activate_adapter):
        with pytest.raises(
            jlora.AdapterNotFoundError, match=r"'x' is not loaded; call add_adapter first \(0 others are\)"
        ):
            verb("x")


def test_a_pinned_adapter_can_be_taken_out_by_name(world):
    m = world.manager
    add(world, "a", "b")
    m.pin_adapter("a")
    assert m.deactivate_adapter("a")
    assert slot_names(m) == (None, None)
    assert not m.list_adapters()["a"].pinned
    m.pin_adapter("a")
    assert m.remove_adapter("a")
    assert hosts(world) == ["b"]


def test_after_unpin_the_old_order_of_use_counts(world):
    m = world.manager
    add(world, "a", "b", "c")
    m.pin_adapter("a")
    m.activate_adapter("b")
    m.unpin_adapter("a")  # not a use: a is still the least recently used
    m.activate_adapter("c")
    assert slot_names(m) == ("c", "b")


def test_a_full_host_of_pinned_adapters_takes_no_more(load):
    world = make_world(max_loras=2, max_cpu_loras=2)
    m = world.manager
    load(world, "a", "b")
    m.pin_adapter("a")
    m.pin_adapter("b")
    before = world.held()
    with pytest.raises(jlora.NoFreeSlotError, match="host cache of 2 adapters is full"):
        add(world, "c")
    assert world.held()[:2] == before[:2]
    m.unpin_adapter("b")
    assert add(world, "c") == [True]
    assert hosts(world) == ["a", "c"]
    assert slot_names(m) == ("a", None)


def test_one_slot_serves_many_in_turn():
    world = make_world(max_loras=1, max_cpu_loras=3)
    add(world, "a", "b", "c")
    for name in "abcab":
        logits = world.serve([name, None, name])
        world.check(logits, [make_adapter(name), None, make_adapter(name)])
        assert slot_names(world.manager) == (name,)
    assert world.manager.stats().slot_evictions == 4


def test_prepare_counts_as_a_use_in_slots_and_host(world):
    m = world.manager
    add(world, "a", "b", "c")
    world.serve(["a", None, "b"])
    assert hosts(world) == ["c", "a", "b"]
    world.serve(["a", "a", None])
    assert hosts(world) == ["c", "b", "a"]
    world.serve(["c", None, None])
    assert slot_names(m) == ("a", "c")


def test_a_batch_may_evict_only_what_it_does_not_use(world):
    add(world, "a", "b", "c")
    world.serve(["a", "b", None])
    logits = world.serve(["a", "c", "a"])  # a is the least recently used, and needed
    assert slot_names(world.manager) == ("a", "c")
    world.check(logits, [make_adapter("a"), make_adapter("c"), make_adapter("a")])


def test_a_slot_taken_over_keeps_nothing_of_the_one_before(world):
    """An adapter with fewer modules and lower rank after a full one: the missing modules are cleared."""
    full = make_adapter("full", rank=4, modules=["embed", "lm_head", "layers.0.q_proj", "layers.1.o_proj"])
    small = make_adapter("small", rank=1, modules=["layers.1.v_proj"])
    world.manager.add_adapter(full)
    world.manager.add_adapter(small)
    world.check(world.serve(["full", None, None]), [full, None, None])
    world.manager.deactivate_adapter("full")
    world.check(world.serve(["small", None, None]), [small, None, None])
    assert slot_names(world.manager)[0] == "small"
    # Values past the ranks are masked, not zeroed; one layer alone has ranks.
    ranks = [array[0] for path, array in world.slots() if path[-1].endswith("ranks")]
    assert sum(bool(array.any()) for array in ranks) == 1


def test_a_removed_adapter_keeps_its_slot_while_a_handle_and_a_batch_hold_it(world):
    add(world, "a", "b", "c")
    with world.manager.hold("a") as handle, world.manager.prepare([handle, "b", None]) as batch:
        assert world.manager.remove_adapter("a")
        with pytest.raises(jlora.NoFreeSlotError):
            world.manager.activate_adapter("c")
        world.check(world.logits(batch), [make_adapter("a"), make_adapter("b"), None])
