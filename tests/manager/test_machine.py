"""Random use of `LoRAManager` against a plain-Python model of its books, and its logits against NumPy."""

import gc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jlora
from tests.manager.tiny import SEQUENCES, World, make_adapter

NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
VERSIONS = st.integers(0, 2)
BATCHES = st.lists(st.none() | NAMES, min_size=SEQUENCES, max_size=SEQUENCES)


class Books:
    """What the manager promises, as lists that are scanned. Every verb returns its result or the error it raises."""

    def __init__(self, slots: int, host: int):
        self.room = host
        self.slots: list[str | None] = [None] * slots
        self.host: list[str] = []  # least recently used first
        self.used: list[str] = []  # the same for slots
        self.pinned: list[str] = []
        self.version: dict[str, int] = {}
        self.open: list[list[str]] = []  # adapters of each open batch

    def leased(self, name):
        return any(name in batch for batch in self.open)

    def touch(self, name):
        self.host = [n for n in self.host if n != name] + [name]

    def drop(self, name):
        self.vacate(name)
        self.host.remove(name)

    def vacate(self, name):
        self.slots = [None if n == name else n for n in self.slots]
        self.used = [n for n in self.used if n != name]
        self.pinned = [n for n in self.pinned if n != name]

    def add(self, name, version, inplace):
        if name in self.host:
            if not inplace:
                self.touch(name)
                return False
            if self.leased(name):
                return jlora.AdapterInUseError
        elif len(self.host) == self.room and not self.remove_oldest():
            return jlora.NoFreeSlotError
        self.touch(name)
        self.version[name] = version
        return True

    def remove_oldest(self):
        for name in self.host:
            if name not in self.pinned and not self.leased(name):
                self.drop(name)
                return True
        return False

    def remove(self, name):
        if name not in self.host:
            return False
        if self.leased(name):
            return jlora.AdapterInUseError
        self.drop(name)
        return True

    def remove_all(self):
        if self.open and any(self.open):
            return jlora.AdapterInUseError
        for name in list(self.host):
            self.drop(name)
        return None

    def deactivate(self, name):
        if name not in self.slots:
            return False
        if self.leased(name):
            return jlora.AdapterInUseError
        self.vacate(name)
        return True

    def activate(self, names):
        """True if one of the names was written."""
        if any(name not in self.host for name in names):
            return jlora.AdapterNotFoundError
        new = [name for name in names if name not in self.slots]
        victims = [n for n in self.used if n not in self.pinned and not self.leased(n) and n not in names]
        if len(new) > self.slots.count(None) + len(victims):
            return jlora.NoFreeSlotError
        for name in new:
            if None not in self.slots:
                victim = victims.pop(0)
                slot = self.slots.index(victim)
                self.vacate(victim)
            else:
                slot = self.slots.index(None)
            self.slots[slot] = name
        for name in names:
            self.touch(name)
            self.used = [n for n in self.used if n != name] + [name]
        return bool(new)

    def pin(self, name):
        done = self.activate([name])
        if isinstance(done, bool):
            self.pinned = [n for n in self.pinned if n != name] + [name]
            return True
        return done

    def unpin(self, name):
        if name not in self.host:
            return jlora.AdapterNotFoundError
        was = name in self.pinned
        self.pinned = [n for n in self.pinned if n != name]
        return was

    def prepare(self, names):
        adapters = list(dict.fromkeys(n for n in names if n is not None))
        done = self.activate(adapters)
        if isinstance(done, bool):
            self.open.append(adapters)
        return done


class ManagerMachine(RuleBasedStateMachine):
    world: World

    def __init__(self):
        super().__init__()
        config = self.world.manager.config
        self.manager = self.world.manager
        self.books = Books(config.max_loras, config.max_cpu_loras)
        self.batches: list[tuple[jlora.LoRABatch, list[jlora.Adapter | None], list[np.ndarray]]] = []

    @initialize()
    def empty(self):
        self.world.reset()

    def teardown(self):
        for batch, _, _ in self.batches:
            batch.close()

    def agree(self, want, call, *args, **kwargs):
        if isinstance(want, type):
            with pytest.raises(want):
                call(*args, **kwargs)
            return None
        got = call(*args, **kwargs)
        if isinstance(want, bool) and not isinstance(got, jlora.LoRABatch):
            assert got is want
        return got

    def pick(self, data, names):
        """One of `names`, or one that may be unknown."""
        return data.draw(st.sampled_from([*names, "a", "b"]))

    @rule(name=NAMES, version=VERSIONS)
    def add(self, name, version):
        self.agree(self.books.add(name, version, False), self.manager.add_adapter, make_adapter(name, version))

    @rule(name=NAMES, version=VERSIONS)
    def replace(self, name, version):
        want = self.books.add(name, version, True)
        self.agree(want, self.manager.add_adapter, make_adapter(name, version), load_inplace=True)

    @rule(data=st.data())
    def remove(self, data):
        name = self.pick(data, self.books.host)
        self.agree(self.books.remove(name), self.manager.remove_adapter, name)

    @rule()
    def remove_oldest(self):
        self.agree(self.books.remove_oldest(), self.manager.remove_oldest_adapter)

    @rule()
    def remove_all(self):
        self.agree(self.books.remove_all(), self.manager.remove_all_adapters)

    @rule(data=st.data())
    def activate(self, data):
        name = self.pick(data, self.books.host)
        self.agree(self.books.activate([name]), self.manager.activate_adapter, name)

    @rule(data=st.data())
    def deactivate(self, data):
        name = self.pick(data, self.books.host)
        self.agree(self.books.deactivate(name), self.manager.deactivate_adapter, name)

    @rule(data=st.data())
    def pin(self, data):
        name = self.pick(data, self.books.host)
        self.agree(self.books.pin(name), self.manager.pin_adapter, name)

    @rule(data=st.data())
    def unpin(self, data):
        name = self.pick(data, self.books.pinned)
        self.agree(self.books.unpin(name), self.manager.unpin_adapter, name)

    @rule(names=BATCHES)
    def prepare(self, names):
        # A step like any server's: what is asked for is loaded, when there is room.
        for name in names:
            if name is not None and name not in self.books.host:
                self.agree(self.books.add(name, 0, False), self.manager.add_adapter, make_adapter(name, 0))
        batch = self.agree(self.books.prepare(names), self.manager.prepare, names)
        if batch is not None:
            adapters = [None if n is None else make_adapter(n, self.books.version[n]) for n in names]
            self.batches.append((batch, adapters, []))
            del batch

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), how=st.sampled_from(["close", "close twice", "forget"]))
    def end(self, data, how):
        i = data.draw(st.integers(0, len(self.batches) - 1))
        batch, _, _ = self.batches.pop(i)
        self.books.open.pop(i)
        if how != "forget":
            batch.close()
        if how == "close twice":
            batch.close()
        del batch

    @invariant()
    def books_agree(self):
        listed = self.manager.list_adapters()
        assert list(listed) == self.books.host
        assert list(self.manager.slot_names) == self.books.slots
        for name, info in listed.items():
            slot = self.books.slots.index(name) if name in self.books.slots else None
            rank = make_adapter(name, self.books.version[name]).rank
            found = (info.name, info.rank, info.slot, info.pinned, info.leased)
            assert found == (name, rank, slot, name in self.books.pinned, self.books.leased(name))
        stats = self.manager.stats()
        leased = len({name for batch in self.books.open for name in batch})
        assert (stats.registered, stats.active, stats.leased) == (len(listed), len(self.books.used), leased)

    @invariant()
    def logits_agree(self):
        """Every open batch gets bitwise what it got at first; and that is what NumPy says."""
        for batch, adapters, first in self.batches:
            logits = self.world.logits(batch)
            if not first:
                self.world.check(logits, adapters)
                first.append(logits)
            np.testing.assert_array_equal(logits, first[0])


@pytest.fixture(autouse=True, scope="module")
def machine_world(shared_world):
    shared_world.reset()
    ManagerMachine.world = shared_world
    yield
    gc.collect()  # a batch that a failed example left in a traceback
    shared_world.reset()
    assert len(shared_world.traces) == 1


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestManager = ManagerMachine.TestCase
