"""A check of all invariants, shared by the tests of interrupts, threads and long runs."""

import faulthandler
import functools
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

import jlora
from tests.manager.tiny import World, expected, make_adapter
from tests.records import evict, on_host, slot_names

PATIENCE = 20.0  # seconds until a check counts as hung; it takes milliseconds


class Harm(AssertionError):
    """A violated invariant.

    Attributes:
      kind: "wrong" (an answer, or records that disagree), "dead" (a call that must work fails), "leaked" (an unused
        object is never freed), "hung", "lost" (an interrupt that was swallowed) or "compiled" (too often).
    """

    def __init__(self, kind: str, what: str):
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@functools.cache
def adapter(name: str, version: int = 0) -> jlora.Adapter:
    return make_adapter(name, version)


class Judge:
    """Check that a world serves the right values, lists its adapters and frees everything.

    The checks run in their own thread, so a lock that is still held is found as a hang.

    Attributes:
      answers: number of answers compared with the NumPy model.
    """

    def __init__(self, world: World):
        self.world = world
        self.answers = 0
        self._known: dict[Any, tuple[np.ndarray, jlora.Adapter | None]] = {}

    def want(self, served: jlora.Adapter | None, row: int) -> np.ndarray:
        """Logits [L, V] of one sequence by the NumPy model."""
        key = (None if served is None else id(served), row)
        if key not in self._known:  # the adapter is kept beside it, so that its id stays its own
            self._known[key] = expected(self.world.model, served, np.asarray(self.world.tokens)[row]), served
        return self._known[key][0]

    def right(self, logits: np.ndarray, row: int, served: jlora.Adapter | None) -> bool:
        want = self.want(served, row)
        self.answers += 1
        return bool(np.abs(logits - want).max() <= 4e-6 * np.abs(want).max())

    def check(self, versions: Callable[[str], list[jlora.Adapter]]) -> None:
        """Check all invariants once every batch is closed, and empty the world.

        Args:
          versions: name -> the adapters that may be served under it.

        Raises:
          Harm: an invariant is violated.
        """
        done: Future[None] = Future()

        def check() -> None:
            try:
                done.set_result(self._check(versions))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=check, name="judge", daemon=True).start()  # a daemon, for it may hang
        try:
            done.result(PATIENCE)
        except Harm:
            raise
        except BaseException as error:
            if done.done():
                raise Harm("dead", repr(error)) from error
            faulthandler.dump_traceback()  # of all threads
            raise Harm("hung", f"the check took more than {PATIENCE:g} s") from None

    def _check(self, versions: Callable[[str], list[jlora.Adapter]]) -> None:
        m = self.world.manager
        for thread in threading.enumerate():  # a load in the background may still evict others
            # A KeyboardInterrupt inside `Thread.start` may leave one that never runs in Python's list.
            if thread.name.startswith("jlora-") and thread.ident is not None:
                thread.join(PATIENCE / 2)
                self.must(not thread.is_alive(), "hung", f"the thread {thread.name}")
        gc.collect()
        self.must(m.leases() == (), "leaked", "a lease")
        self.books_agree()
        listed = on_host(m)
        # Pairs, so that both slots are used, and every adapter goes through a slot.
        for first, second in zip(listed, [*listed[1:], *listed[:1]], strict=True):
            for name in on_host(m):
                m.unpin_adapter(name)
            self.serve([first, None, second], versions)
        if not listed:
            self.serve([None, None, None], versions)
        self.books_agree()
        for name in on_host(m):
            if m.list_adapters([name])[name].request is None:  # it is never evicted
                m.remove_adapter(name)
        for name in ("new 1", "new 2"):
            self.must(m.add_adapter(adapter(name)), "wrong", "a new adapter was taken for a known one")
        self.serve(["new 2", "new 1", None], lambda name: [adapter(name)])
        for name in ("new 1", "new 2"):
            self.must(m.remove_adapter(name), "wrong", "an adapter that was served is not known")
        while evict(m):
            pass
        self.must(on_host(m) == [], "leaked", "some adapter cannot be evicted")
        m.remove_all_adapters()
        self.must(slot_names(m) == (None,) * m.config.max_loras, "leaked", "a slot")
        self.must(m.stats().compilations == 1, "compiled", f"the write, {m.stats().compilations} times")
        traces = len(self.world.traces)
        self.must(traces <= 1, "compiled", f"the step, {traces} times")

    def must(self, holds: bool, kind: str, what: str) -> None:
        if not holds:
            raise Harm(kind, what)

    def serve(self, names: list[str | None], versions: Callable[[str], list[jlora.Adapter]]) -> None:
        with self.world.manager.prepare(names) as batch:
            logits = self.world.logits(batch)
        for row, name in enumerate(names):
            may = [None] if name is None else versions(name)
            self.must(any(self.right(logits[row], row, one) for one in may), "wrong", f"an answer for {name!r}")

    def books_agree(self) -> None:
        m = self.world.manager
        listed, stats = m.list_adapters(), m.stats()
        slots = [info.slot for info in listed.values() if info.level == "slot"]
        self.must(len(set(slots)) == len(slots), "wrong", f"two adapters have one slot: {listed}")
        hosted = [listed[name] for name in on_host(m)]
        counted = (stats.registered, stats.active, stats.host_bytes)
        seen = len(hosted), len(slots), sum(info.nbytes for info in hosted)
        self.must(counted == seen, "wrong", f"the counts are {counted}, and it has {seen}")
