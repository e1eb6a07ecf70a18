"""An open batch holds its slots: calls that wait, calls that are refused, and the end of a lease."""

import threading

import numpy as np
import pytest

import jlora
from tests.manager.tiny import make_adapter, same
from tests.records import slot_names

pytestmark = pytest.mark.device


def test_no_free_slot_changes_nothing(world):
    world.load("a", "b", "c", "d")
    m = world.manager
    m.pin_adapter("a")
    batch = m.prepare(["b", None, "a"])
    first, before, stats = world.logits(batch), world.held(), m.stats()
    for call in (
        lambda: m.prepare(["c", None, None]),
        lambda: m.prepare(["a", "b", "c"]),
        lambda: m.pin_adapter("d"),
    ):
        with pytest.raises(jlora.NoFreeSlotError, match="of 2 slots 0 are free and 0 can be evicted"):
            call()
        assert same(before, world.held())
    assert m.stats() == stats
    np.testing.assert_array_equal(world.logits(batch), first)
    batch.close()
    assert m.prepare(["a", "c", None]).close() is None
    assert slot_names(m) == ("a", "c")


def test_a_leased_adapter_is_not_removed_deactivated_or_replaced(world):
    world.load("a", "b")
    m = world.manager
    with m.prepare(["a", None, None]) as batch:
        first, before = world.logits(batch), world.held()
        for call in (
            lambda: m.remove_adapter("a"),
            lambda: m.add_adapter(make_adapter("a", 1), load_inplace=True),
            m.remove_all_adapters,
        ):
            with pytest.raises(jlora.AdapterInUseError, match="'a' is held by an open batch; close it before"):
                call()
            assert same(before, world.held())
        with pytest.raises(jlora.AdapterInUseError, match="a batch with 'a' is open; close it before"):
            m.unwrap()
        assert same(before, world.held())
        assert not m.add_adapter(make_adapter("a", 1))  # without load_inplace: there already
        np.testing.assert_array_equal(world.logits(batch), first)
        assert m.remove_adapter("b")  # not held
    assert m.remove_adapter("a")


def test_closing_takes_no_lock(world):
    """A batch may be collected in a thread that must not wait: here another thread sits inside the manager."""
    world.load("a")
    batches = [world.manager.prepare(["a", None, None]) for _ in range(2)]
    with world.manager._state.lock.writing:
        for end in (batches[0].close, batches.clear):
            closer = threading.Thread(target=end)
            closer.start()
            closer.join(timeout=10)
            assert not closer.is_alive()
    assert world.manager.stats().leased == 0
    assert world.manager.leases() == ()
