"""What the tests of interrupts, threads and long runs share: an injector of exceptions, and a check of everything."""

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import jlora
from tests.manager.tiny import World, expected, make_adapter

JLORA = str(Path(jlora.__file__).parent)
# Code of the standard library that runs between two lines of ours, with our locks held. (Not `threading`: at lines
# where no signal can come, a trace function would leave the one lock taken that threads need to start and to end.)
BORROWED = (contextlib.__file__,)
PATIENCE = 20.0  # seconds until what does not answer is said to hang; it takes milliseconds


class Injector:
    """Counts the lines that run inside jlora, and raises at one of them.

    Attributes:
      lines: lines seen so far.
      fired: "file:line" where it raised; None before that.
    """

    def __init__(self, at: int | None, error: type[BaseException] = KeyboardInterrupt):
        self.at = at
        self.error = error
        self.lines = 0
        self.fired: str | None = None
        self._counting = threading.Lock()

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """A trace function, for `sys.settrace` and `threading.settrace`."""
        name = frame.f_code.co_filename
        if frame.f_code.co_name == "__del__":
            return None  # Python lets nothing out of a finalizer
        if name.startswith(JLORA):
            return self._local
        back = frame.f_back
        if name in BORROWED and back is not None and back.f_code.co_filename.startswith(JLORA):
            return self._local
        return None

    def _local(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            with self._counting:
                self.lines += 1
                fire = self.lines == self.at and self.fired is None
                if fire:
                    self.fired = f"{frame.f_code.co_filename.removeprefix(JLORA)}:{frame.f_lineno}"
            if fire:
                raise self.error
        return self._local

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """In the thread that calls."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)

    @contextlib.contextmanager
    def in_new_threads(self) -> Iterator[None]:
        """In the threads that start meanwhile: the loading ones."""
        before = threading.gettrace()
        threading.settrace(self.trace)
        try:
            yield
        finally:
            threading.settrace(before)  # type: ignore[arg-type]


@functools.cache
def adapter(name: str, version: int = 0) -> jlora.Adapter:
    return make_adapter(name, version)


class Judge:
    """Says whether a world serves what it should, knows what it has, and lets go of everything.

    The checks run in a thread of their own: a lock that was left held hangs them, and that is found.
    """

    def __init__(self, world: World):
        self.world = world
        self._known: dict[Any, tuple[np.ndarray, jlora.Adapter | None]] = {}
        self._threads = ThreadPoolExecutor(1)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def want(self, served: jlora.Adapter | None, row: int) -> np.ndarray:
        """Logits [L, V] of one sequence by the NumPy model."""
        key = (None if served is None else id(served), row)
        if key not in self._known:  # the adapter is kept beside it, so that its id stays its own
            self._known[key] = expected(self.world.model, served, np.asarray(self.world.tokens)[row]), served
        return self._known[key][0]

    def right(self, logits: np.ndarray, row: int, served: jlora.Adapter | None) -> bool:
        want = self.want(served, row)
        return bool(np.abs(logits - want).max() <= 4e-6 * np.abs(want).max())

    def check(self, versions: Callable[[str], list[jlora.Adapter]]) -> None:
        """Everything that must hold when nothing is open any more, and the world empty afterwards.

        Args:
          versions: name -> the adapters that may be served under it.
        """
        self._threads.submit(self._check, versions).result(PATIENCE)

    def _check(self, versions: Callable[[str], list[jlora.Adapter]]) -> None:
        m = self.world.manager
        for thread in threading.enumerate():  # a load that nobody waits for may still evict others
            if thread.name.startswith("jlora-"):
                thread.join(PATIENCE / 2)
                assert not thread.is_alive(), "a loading thread hangs"
        gc.collect()
        assert m.leases() == (), "leaked a lease"
        self.books_agree()
        listed = list(m.list_adapters())
        # Pairs, so that both slots are used, and every adapter goes through a slot.
        for first, second in zip(listed, [*listed[1:], *listed[:1]], strict=True):
            for name in m.list_adapters():
                m.unpin_adapter(name)
            self.serve([first, None, second], versions)
        if not listed:
            self.serve([None, None, None], versions)
        self.books_agree()
        for name in ("new 1", "new 2"):
            assert m.add_adapter(adapter(name)), "a new adapter was taken for a known one"
        self.serve(["new 2", "new 1", None], lambda name: [adapter(name)])
        assert m.remove_adapter("new 1")
        while m.remove_oldest_adapter():
            pass
        assert m.list_adapters() == {}, "some adapter cannot be evicted"
        m.remove_all_adapters()
        assert m.slot_names == (None,) * m.config.max_loras
        assert m.stats().compilations == 1

    def serve(self, names: list[str | None], versions: Callable[[str], list[jlora.Adapter]]) -> None:
        with self.world.manager.prepare(names) as batch:
            logits = self.world.logits(batch)
        for row, name in enumerate(names):
            may = [None] if name is None else versions(name)
            assert any(self.right(logits[row], row, one) for one in may), f"wrong answer for {name!r}"

    def books_agree(self) -> None:
        m = self.world.manager
        listed, names, stats = m.list_adapters(), m.slot_names, m.stats()
        for slot, name in enumerate(names):
            assert name is None or (name in listed and listed[name].slot == slot), (slot, name, listed)
        assert all(info.slot is None or names[info.slot] == name for name, info in listed.items())
        assert stats.registered == len(listed)
        assert stats.active == sum(name is not None for name in names)
        assert stats.host_bytes == sum(info.nbytes for info in listed.values())
