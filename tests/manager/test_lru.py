"""`LRU` against a list that is scanned."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jlora.manager.lru import LRU

NAMES = st.sampled_from("abcdef")


class LRUMachine(RuleBasedStateMachine):
    """The model: a list of (name, value), oldest use first, and a list of pinned names."""

    def __init__(self):
        super().__init__()
        self.lru = LRU[int]()
        self.entries: list[tuple[str, int]] = []
        self.pins: list[str] = []

    def known(self, name):
        return any(n == name for n, _ in self.entries)

    def take(self, name):
        entry = next(e for e in self.entries if e[0] == name)
        self.entries = [e for e in self.entries if e is not entry]
        return entry

    @rule(name=NAMES, value=st.integers())
    def put(self, name, value):
        self.lru.put(name, value)
        self.entries = [e for e in self.entries if e[0] != name] + [(name, value)]

    @rule(name=NAMES)
    def touch(self, name):
        if self.known(name):
            self.lru.touch(name)
            used = self.take(name)
            self.entries.append(used)
        else:
            with pytest.raises(KeyError):
                self.lru.touch(name)

    @rule(name=NAMES)
    def read(self, name):
        want = dict(self.entries).get(name)
        assert self.lru.get(name) == want
        if self.known(name):
            assert self.lru[name] == want
        else:
            with pytest.raises(KeyError):
                self.lru[name]

    @rule(name=NAMES)
    def remove(self, name):
        if self.known(name):
            assert self.lru.remove(name) == self.take(name)[1]
            self.pins = [n for n in self.pins if n != name]
        else:
            with pytest.raises(KeyError):
                self.lru.remove(name)

    @rule(name=NAMES)
    def pin(self, name):
        if self.known(name):
            self.lru.pin(name)
            self.pins.append(name)
        else:
            with pytest.raises(KeyError):
                self.lru.pin(name)

    @rule(name=NAMES)
    def unpin(self, name):
        assert self.lru.unpin(name) == (name in self.pins)
        self.pins = [n for n in self.pins if n != name]

    @rule(busy=st.sets(NAMES))
    def evictable(self, busy):
        want = [n for n, _ in self.entries if n not in self.pins and n not in busy]
        assert list(self.lru.evictable(lambda name: name in busy)) == want

    @invariant()
    def agrees(self):
        assert [(n, self.lru[n]) for n in self.lru] == self.entries
        assert len(self.lru) == len(self.entries)
        assert self.lru.pins == set(self.pins)
        for name in "abcdef":
            assert (name in self.lru) == self.known(name)
            assert self.lru.pinned(name) == (name in self.pins)


LRUMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLRU = LRUMachine.TestCase


def test_a_loop_may_remove():
    lru = LRU[int]()
    for i, name in enumerate("abc"):
        lru.put(name, i)
    for name in lru:
        lru.remove(name)
    assert list(lru) == []
