"""Random use of `LoRAManager` against a plain-Python model of its books, and its logits against NumPy.

Three threads take turns to call it; each steps the batches that it opened, also while another prepares one.
"""

import contextlib
import functools
import gc
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jlora
from tests.manager.hostile import PATIENCE, Judge, adapter
from tests.manager.tiny import SEQUENCES, World, make_world
from tests.records import slot_names

NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
VERSIONS = st.integers(0, 2)
BATCHES = st.lists(st.none() | NAMES, min_size=SEQUENCES, max_size=SEQUENCES)
TIMEOUTS = st.sampled_from([None, 0.01])
THREADS = 3


@dataclass(eq=False)
class Item:
    """One version of one adapter. `key` identifies its content; None if it equals only itself."""

    adapter: jlora.Adapter
    key: Any = None
    version: int = 0

    @property
    def name(self) -> str:
        return self.adapter.name


class Books:
    """A model of the manager with plain lists. Every verb returns its result or the error that it raises."""

    # The versions of a name go on counting, also where it is removed: one world serves every example.
    last: dict[str, tuple[int, Any]] = {}

    def __init__(self, slots: int, host: int):
        self.room = host
        self.slots: list[Item | None] = [None] * slots
        self.host: list[Item] = []  # the newest of each name, least recently used first, also in slots
        self.pinned: set[str] = set()
        self.known: dict[str, Any] = {}  # evicted, and to be had again: the key
        self.open: list[list[Item]] = []  # of each open batch
        self.handles: list[Item] = []

    def get(self, name: str) -> Item | None:
        return next((item for item in self.host if item.name == name), None)

    def leased(self, item: Item) -> bool:
        return any(item in batch for batch in self.open)

    def held(self, item: Item) -> bool:
        return self.leased(item) and item not in self.handles

    def alive(self, item: Item) -> bool:
        return item in self.host or self.leased(item) or item in self.handles

    def names(self) -> list[str | None]:
        return [item.name if item is not None and self.alive(item) else None for item in self.slots]

    def touch_host(self, item: Item) -> None:
        if item in self.host:
            self.host.remove(item)
            self.host.append(item)

    def vacate(self, item: Item) -> None:
        if not self.leased(item):
            self.slots = [None if held is item else held for held in self.slots]

    def evict(self, item: Item) -> None:
        self.host.remove(item)
        assert item.key is not None
        self.known[item.name] = item.key
        self.pinned.discard(item.name)
        self.vacate(item)

    def add(self, new: Item, inplace: bool) -> Any:
        old = self.get(new.name)
        if old is not None and not inplace:
            self.touch_host(old)
            return False
        if old is not None and self.held(old):
            return jlora.AdapterInUseError
        if old is None and len(self.host) == self.room and not self.remove_oldest():
            return jlora.NoFreeSlotError
        self.put(new, old, inplace)
        return True

    def put(self, new: Item, old: Item | None, inplace: bool = False) -> None:
        last = self.last.get(new.name)
        same = last is not None and new.key is not None and new.key == last[1] and not inplace
        new.version = 0 if last is None else last[0] + (not same)
        self.last[new.name] = (new.version, new.key)
        if old is not None:
            self.host.remove(old)
        self.host.append(new)
        self.known.pop(new.name, None)

    def update(self, new: Item) -> Any:
        old = self.get(new.name)
        assert old is not None
        if self.held(old):
            return jlora.AdapterInUseError
        self.put(new, old)
        if old in self.slots and not self.alive(old):
            self.slots[self.slots.index(old)] = new
            self.touch_host(new)
        return new.version

    def stays(self, item: Item) -> bool:
        """Pinned, or without a request that could load it again."""
        return item.name in self.pinned or item.key is None

    def remove_oldest(self) -> bool:
        for item in self.host:
            if not self.stays(item) and not self.leased(item):
                self.evict(item)
                return True
        return False

    def remove(self, name: str) -> Any:
        item = self.get(name)
        if item is not None and self.held(item):
            return jlora.AdapterInUseError
        found = self.known.pop(name, None) is not None
        self.forget(name)
        if item is None:
            return found
        self.host.remove(item)
        self.pinned.discard(name)
        self.vacate(item)
        return True

    def remove_all(self) -> Any:
        if any(map(self.held, self.host)):
            return jlora.AdapterInUseError
        for name in [*self.known, *(item.name for item in self.host)]:
            self.remove(name)
        return None

    def forget(self, name: str) -> None:
        """Versions of a removed name keep counting, so a later adapter has a new version."""
        if name in self.last:
            self.last[name] = (self.last[name][0], None)

    def sweep(self) -> None:
        for slot, item in enumerate(self.slots):
            if item is not None and not self.alive(item) and item.name not in self.pinned:
                self.slots[slot] = None

    def activate(self, wanted: list[Item]) -> Any:
        """The adapters that were written."""
        self.sweep()
        missing = [item for item in wanted if item not in self.slots]
        reserved = {item.name: i for i, item in enumerate(self.slots) if item is not None and not self.alive(item)}
        free = [i for i, item in enumerate(self.slots) if item is None]
        by_use = sorted(filter(None, self.slots), key=lambda item: item in self.host and self.host.index(item) + 1)
        victims = [
            self.slots.index(item)
            for item in by_use
            if self.alive(item) and not self.leased(item) and item not in wanted
            and not (item.name in self.pinned and item in self.host)
        ]  # fmt: skip
        places = [reserved.pop(item.name, None) if item in self.host else None for item in missing]
        rest = iter(free + victims)
        places = [next(rest, None) if place is None else place for place in places]
        if None in places:
            return jlora.NoFreeSlotError
        for item, place in zip(missing, places, strict=True):
            self.slots[place] = item
        for item in [*(item for item in wanted if item not in missing), *missing]:
            self.touch_host(item)
        return missing


@dataclass
class Open:
    """An open batch: its thread, the adapters of its sequences, and their first logits."""

    thread: int
    batch: jlora.LoRABatch
    items: list[Item | None]
    logits: list[np.ndarray] = field(default_factory=list)


@functools.cache
def folders() -> Path:
    """Adapters on disk: name and version."""
    made = Path(tempfile.mkdtemp(prefix="jlora-machine-"))
    for name in "abcdef":
        for version in range(3):
            adapter(name, version).save_pretrained(made / f"{name}{version}")
    return made


class ManagerMachine(RuleBasedStateMachine):
    world: World
    judge: Judge
    threads = tuple(ThreadPoolExecutor(1) for _ in range(THREADS))

    def __init__(self) -> None:
        super().__init__()
        config = self.world.manager.config
        self.manager = self.world.manager
        self.books = Books(config.max_loras, config.max_cpu_loras or config.max_loras)
        self.batches: list[Open] = []  # in the order of `books.open`
        self.handles: list[jlora.manager.leases.AdapterHandle] = []  # in the order of `books.handles`
        self.turn = 0  # the thread that calls

    @initialize()
    def empty(self) -> None:
        self.manager.remove_all_adapters(timeout=PATIENCE)
        for name in self.books.last:
            self.books.forget(name)

    def teardown(self) -> None:
        for batch in self.batches:
            batch.batch.close()
        for handle in self.handles:
            handle.close()

    def agree(self, want: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(want, type):
            with pytest.raises(want):
                self.result(self.turn, self.threads[self.turn].submit(call, *args, **kwargs))
            return None
        got = self.result(self.turn, self.threads[self.turn].submit(call, *args, **kwargs))
        if isinstance(want, bool | int):
            assert got == want
            assert type(got) is type(want)
        return got

    def pick(self, data: st.DataObject, names: Any) -> str:
        """One of `names`, or one that may be unknown."""
        return data.draw(st.sampled_from([*names, "a", "b"]))

    def result(self, thread: int, called: "Future[Any]") -> Any:
        """The call has returned, and its thread has released the arguments."""
        try:
            return called.result(PATIENCE)
        finally:
            del called  # or its exception, by way of this frame, would hold itself, and the batches of the frames above
            self.threads[thread].submit(int).result(PATIENCE)

    def others(self) -> bool:
        """Return whether another thread has a batch open. A wait for it would never end."""
        return any(batch.thread != self.turn for batch in self.batches)

    def patience(self, timeout: float | None) -> float | None:
        return 0.01 if timeout is None and self.others() else timeout

    def step(self, batch: Open) -> "Future[np.ndarray]":
        """A step of an open batch, in its own thread."""
        return self.threads[batch.thread].submit(self.world.logits, batch.batch)

    def one(self, data: st.DataObject) -> Open:
        """Some open batch, drawn by its index, because Hypothesis keeps drawn objects and so their leases alive."""
        return self.batches[data.draw(st.integers(0, len(self.batches) - 1))]

    def newest(self, data: st.DataObject) -> str:
        return self.pick(data, [item.name for item in self.books.host])

    def request(self, name: str, version: int, **fields: bool) -> jlora.LoRARequest:
        return jlora.LoRARequest(name, str(folders() / f"{name}{version}"), **fields)

    @rule(thread=st.integers(0, THREADS - 1))
    def take_turns(self, thread: int) -> None:
        self.turn = thread

    # --- the host ---------------------------------------------------------------------------------------------------

    @rule(name=NAMES, version=VERSIONS, inplace=st.booleans(), timeout=TIMEOUTS)
    def add(self, name: str, version: int, inplace: bool, timeout: float | None) -> None:
        timeout = self.patience(timeout)
        want = self.books.add(Item(adapter(name, version)), inplace)
        self.agree(want, self.manager.add_adapter, adapter(name, version), load_inplace=inplace, timeout=timeout)

    @rule(name=NAMES, version=VERSIONS, inplace=st.booleans(), ahead=st.booleans())
    def load(self, name: str, version: int, inplace: bool, ahead: bool) -> None:
        old = self.books.get(name)
        if (ahead or self.others()) and inplace and old is not None and self.books.held(old):
            return  # it would wait for that batch
        want = self.books.add(Item(adapter(name, version), (name, version)), inplace)
        request = self.request(name, version, load_inplace=inplace)
        if ahead:
            self.agree(want, lambda: self.manager.prefetch(request).result(30))
        else:
            self.agree(want, self.manager.add_adapter, request)

    @rule(data=st.data(), seed=st.integers(0, 3), timeout=TIMEOUTS)
    def update(self, data: st.DataObject, seed: int, timeout: float | None) -> None:
        name = self.newest(data)
        old = self.books.get(name)
        if old is None:
            return
        module, lora = sorted(old.adapter.modules.items())[seed % len(old.adapter.modules)]
        rng = np.random.default_rng(seed)
        a, b = (rng.normal(size=half.shape).astype(np.float32) for half in (lora.a, lora.b))
        stem, end = ("lora_embedding_", "") if lora.kind == "embedding" else ("lora_", ".weight")
        arrays = {f"base_model.model.{module}.{stem}{half}{end}": new for half, new in (("A", a), ("B", b))}
        new = jlora.Adapter(name=name, modules={**old.adapter.modules, module: replace(lora, a=a, b=b)})
        self.agree(
            self.books.update(Item(new)), self.manager.update_adapter, name, arrays, timeout=self.patience(timeout)
        )

    @rule(data=st.data(), timeout=TIMEOUTS)
    def remove(self, data: st.DataObject, timeout: float | None) -> None:
        name = self.pick(data, [*self.books.known, *(item.name for item in self.books.host)])
        self.agree(self.books.remove(name), self.manager.remove_adapter, name, timeout=self.patience(timeout))

    @rule(timeout=TIMEOUTS)
    def remove_all(self, timeout: float | None) -> None:
        self.agree(self.books.remove_all(), self.manager.remove_all_adapters, timeout=self.patience(timeout))

    # --- slots ------------------------------------------------------------------------------------------------------

    def recalled(self, names: list[str]) -> Any:
        """Load an evicted adapter again in the model, and return the error that this raises, or None."""
        for name in names:
            if self.books.get(name) is None:
                if (key := self.books.known.get(name)) is None:
                    return jlora.AdapterNotFoundError
                if self.books.add(Item(adapter(*key), key), False) is not True:
                    return jlora.NoFreeSlotError
        return None

    def crowded(self, asked: list[Any], items: list[Item | None]) -> Any:
        """Before a load for a batch, return the error if it does not fit into the slots or the host, or count a use."""
        books = self.books
        wanted = [a if isinstance(a, str) else item for a, item in zip(asked, items, strict=True)]
        wanted = list(dict.fromkeys(books.get(w) or w if isinstance(w, str) else w for w in wanted if w is not None))
        if any(isinstance(w, str) and w not in books.known for w in wanted):
            return jlora.AdapterNotFoundError
        stay = [
            item
            for item in books.slots
            if item is not None and item not in wanted
            and (books.leased(item) or (item.name in books.pinned and books.get(item.name) not in wanted
                                        and (item in books.host or not books.alive(item))))
        ]  # fmt: skip
        if len(wanted) + len(stay) > len(books.slots):
            return jlora.NoFreeSlotError
        names = {a for a in asked if isinstance(a, str)}
        others = [i for i in books.host if i.name not in names and (books.stays(i) or books.leased(i))]
        if len(names) + len(others) > books.room:
            return jlora.NoFreeSlotError
        for item in wanted:
            if isinstance(item, Item):
                books.touch_host(item)
        return None

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = self.pick(data, [*self.books.known, *(item.name for item in self.books.host)])
        want = self.recalled([name])
        if want is None:
            item = self.books.get(name)
            assert item is not None
            want = self.books.activate([item])
            if not isinstance(want, type):
                want = bool(want)
                self.books.pinned.add(name)
        self.agree(want, self.manager.pin_adapter, name)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = self.pick(data, sorted(self.books.pinned))
        want: Any = jlora.AdapterNotFoundError if self.books.get(name) is None else name in self.books.pinned
        self.books.pinned.discard(name)
        self.agree(want, self.manager.unpin_adapter, name)

    # --- batches ----------------------------------------------------------------------------------------------------

    def poll(self, asked: list[Any], timeout: float | None) -> jlora.LoRABatch:
        """Repeat a `prepare` while its load runs on."""
        while True:
            with contextlib.suppress(jlora.LoadTimeoutError):
                return self.manager.prepare(asked, timeout=timeout)
            time.sleep(0.001)

    @rule(names=BATCHES, data=st.data(), timeout=TIMEOUTS | st.just(0))
    def prepare(self, names: list[str | None], data: st.DataObject, timeout: float | None) -> None:
        # A step as in a server: requests are loaded if there is room, and some sequences have handles.
        asked: list[Any] = list(names)
        items: list[Item | None] = [None] * SEQUENCES
        for i, name in enumerate(names):
            if self.handles and data.draw(st.integers(0, 3)) == 0:
                which = data.draw(st.integers(0, len(self.handles) - 1))
                asked[i], items[i] = self.handles[which], self.books.handles[which]
            elif name is not None and self.books.get(name) is None and name not in self.books.known:
                want = self.books.add(Item(adapter(name), (name, 0)), False)
                self.agree(want, self.manager.add_adapter, self.request(name, 0))
        by_name = [name for name in dict.fromkeys(asked) if isinstance(name, str)]
        missing = [name for name in by_name if self.books.get(name) is None]
        if len(missing) > 1:
            return  # several would be loaded at once, in any order
        want = self.crowded(asked, items) if missing else None
        if want is None:
            want = self.recalled(by_name)
        if want is None:
            items = [self.books.get(a) if isinstance(a, str) else item for a, item in zip(asked, items, strict=True)]
            distinct = [item for item in dict.fromkeys(items) if item is not None]
            want = self.books.activate(distinct)
        if want is jlora.AdapterNotFoundError:
            self.agree(want, self.manager.fits, asked)
        else:
            before = self.manager.list_adapters(), self.manager.stats()
            assert self.manager.fits(asked) is (want is not jlora.NoFreeSlotError)
            assert (self.manager.list_adapters(), self.manager.stats()) == before
        meanwhile = [(batch, self.step(batch)) for batch in self.batches if batch.thread != self.turn]
        batch = self.agree(want, self.poll, asked, timeout)
        for other, logits in meanwhile:
            np.testing.assert_array_equal(self.result(other.thread, logits), other.logits[0])
        if batch is None:
            return
        assert batch.versions == tuple(None if item is None else item.version for item in items)
        self.batches.append(Open(self.turn, batch, items))
        self.books.open.append([item for item in items if item is not None])

    @rule(first=NAMES, second=st.none() | NAMES, data=st.data(), timeout=TIMEOUTS)
    def serve(self, first: str, second: str | None, data: st.DataObject, timeout: float | None) -> None:
        """A batch that is closed after a step."""
        before = len(self.batches)
        self.prepare(names=[first, None, second], data=data, timeout=timeout)
        if len(self.batches) > before:
            self.logits_agree()
            self.books.open.pop()
            self.batches.pop().batch.close()

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), how=st.sampled_from(["close", "close twice", "forget"]))
    def end(self, data: st.DataObject, how: str) -> None:
        i = data.draw(st.integers(0, len(self.batches) - 1))
        batch = self.batches.pop(i)
        self.books.open.pop(i)
        if how == "forget":
            return
        batch.batch.close()
        if how == "close twice":
            batch.batch.close()
        with pytest.raises(jlora.LoRAError, match="closed"):
            self.world.logits(batch.batch)

    # --- handles ----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        name = self.pick(data, [*self.books.known, *(item.name for item in self.books.host)])
        want = self.recalled([name])
        handle = self.agree(want, self.manager.hold, name)
        if handle is not None:
            item = self.books.get(name)
            assert item is not None
            assert (handle.name, handle.version) == (name, item.version)
            self.handles.append(handle)
            self.books.handles.append(item)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def hold_a_batch(self, data: st.DataObject) -> None:
        batch = self.one(data)
        handles = self.manager.handles(batch.batch)
        found = [None if handle is None else (handle.name, handle.version) for handle in handles]
        assert found == [None if item is None else (item.name, item.version) for item in batch.items]
        self.handles += [handle for handle in handles if handle is not None]
        self.books.handles += [item for item in batch.items if item is not None]

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), forget=st.booleans())
    def let_go(self, data: st.DataObject, forget: bool) -> None:
        i = data.draw(st.integers(0, len(self.handles) - 1))
        handle = self.handles.pop(i)
        self.books.handles.pop(i)
        if not forget:
            handle.close()

    # --- invariants after each rule --------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        listed, books = self.manager.list_adapters(), self.books
        assert list(listed) == [*books.known, *(item.name for item in books.host)]
        assert {name for name, info in listed.items() if info.level == "evicted"} == books.known.keys()
        newest = [item.name if item in books.host else None for item in books.slots]
        assert list(slot_names(self.manager)) == newest
        for item in books.host:
            info = listed[item.name]
            slot = books.slots.index(item) if item in books.slots else None
            found = (info.name, info.rank, info.slot, info.pinned, info.leases, info.version)
            leases = sum(item in batch for batch in books.open)
            assert found == (item.name, item.adapter.rank, slot, item.name in books.pinned, leases, item.version)
        stats = self.manager.stats()
        leased = len({item.name for batch in books.open for item in batch})
        active = sum(name is not None for name in books.names())
        assert (stats.registered, stats.active, stats.leased) == (len(books.host), active, leased)
        assert stats.unevictable == sum(map(books.stays, books.host))
        assert len(self.manager.leases()) == len(self.batches)

    @invariant()
    def logits_agree(self) -> None:
        """Every open batch gets its first logits bitwise, and they equal those of NumPy."""
        for batch, step in [(batch, self.step(batch)) for batch in self.batches]:
            logits = self.result(batch.thread, step)
            if not batch.logits:
                for row, item in enumerate(batch.items):
                    assert self.judge.right(logits[row], row, None if item is None else item.adapter)
                batch.logits.append(logits)
            np.testing.assert_array_equal(logits, batch.logits[0])


@pytest.fixture(autouse=True, scope="module")
def machine_world() -> Iterator[None]:
    world = make_world()
    ManagerMachine.world, ManagerMachine.judge = world, Judge(world)
    Books.last = {}
    yield
    gc.collect()  # a batch that a failed example left in a traceback
    world.manager.remove_all_adapters(timeout=PATIENCE)
    assert len(world.traces) == world.manager.stats().compilations == 1


# `make test-slow` has 75 of them.
ManagerMachine.TestCase.settings = settings(max_examples=3 * settings().max_examples // 2, stateful_step_count=40)
TestManager = ManagerMachine.TestCase
