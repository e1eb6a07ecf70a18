"""Adapters loaded in the background: one thread a load, one load an adapter, and nothing that a step waits for."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from jlora.config import LoRARequest
from jlora.manager.locks import Bell, StateLock

_AT_ONCE = 4  # loads that read and cast at the same time; the rest wait for their turn
_FAILED = 64  # loads whose errors are kept for who asks next: names may be made up, and nobody ask again


class LoadCancelled(Exception):
    """Inside a load: it was given up."""


@dataclass(frozen=True)
class Patience:
    """How long a call waits.

    Attributes:
      deadline: `time.monotonic()` at which it gives up; None for as long as it takes.
      thread: a thread whose own open batches it does not wait for: they cannot close while it waits.
    """

    deadline: float | None
    thread: int | None = None

    @property
    def over(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


class Load:
    """One load under way. `done` is set last: then `result` or `error` is there.

    Attributes:
      request: what is loaded.
      patience: how long it waits for open batches to let go of what it replaces.
      ahead: whether to move it to the device too.
      result: True where it was loaded, False where it was there.
      wanted: how many calls wait for it.
      in_use: whether it only waits for open batches now.
      before: loads of the same name that were under way when it was started; it begins when they are over.
    """

    def __init__(self, request: LoRARequest, patience: Patience, before: Sequence["Load"] = ()):
        self.request = request
        self.patience = patience
        self.ahead = False
        self.done = False
        self.result = False
        self.error: BaseException | None = None
        self.wanted = 0
        self.in_use = False
        self.before = before
        self._futures: list[Future[bool]] = []

    @property
    def given_up(self) -> bool:
        """Whether nothing comes of what its thread still does: every caller has left, or it has its outcome. It stays
        so: `Loader.start` gives nobody such a load."""
        return self.done or (self.wanted <= 0 and all(future.cancelled() for future in list(self._futures)))

    def future(self) -> "Future[bool]":
        """A future of the load. Cancelling it, also while the load runs, gives up this one's wish for it."""
        future: Future[bool] = Future()
        if self.done:
            self._tell(future)
        else:
            self._futures.append(future)
        return future

    def finish(self, result: bool, error: BaseException | None) -> None:
        """Set the outcome, once; under the manager's lock."""
        if not self.done:
            self.result, self.error = result, error
            self.done = True

    def tell(self) -> None:
        """Give the outcome to the futures; under no lock, for they call back. What is told already is passed over."""
        for future in self._futures:
            self._tell(future)

    def _tell(self, future: "Future[bool]") -> None:
        if future.done() or not (future.running() or future.set_running_or_notify_cancel()):
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.result)


class Loader:
    """Runs loads on daemon threads. `start` and `forget` are called under the manager's lock.

    Args:
      work: loads what a `Load` asks for; returns its result.
      lock: of the manager's state.
      changed: rung when a load ends, or may go on.

    Attributes:
      turn: held while a load reads and casts.
    """

    def __init__(self, work: Callable[[Load], bool], lock: StateLock, changed: Bell):
        self.turn = threading.Semaphore(_AT_ONCE)
        self._work = work
        self._lock = lock
        self._changed = changed
        self._loads: dict[LoRARequest, Load] = {}
        self._fetching: list[Load] = []  # that ask a network or a callback, or wait until they may, in their order
        self._own = threading.local()

    @property
    def own(self) -> Load | None:
        """The load whose thread this is; None on a thread of a user."""
        return getattr(self._own, "load", None)

    @contextmanager
    def fetching(self, load: Load) -> Generator[None, None, None]:
        """Held while a load asks a network or a callback, which may take long or hang: others read meanwhile.

        One that is given up cannot be stopped, but the next one takes its turn.

        Raises:
          LoadCancelled: the load was given up while it waited.
        """
        with self._lock:
            self._fetching.append(load)
        try:
            while True:
                seen = self._changed.rings
                self.check_wanted(load)
                with self._lock:
                    first = self._fetching[: self._fetching.index(load)]
                if sum(not other.given_up for other in first) < _AT_ONCE:
                    break
                self._changed.wait(seen)
            yield
        finally:
            with self._lock:
                self._fetching.remove(load)
            self._changed.ring()

    def start(
        self,
        request: LoRARequest,
        *,
        again: bool = False,
        anew: bool = False,
        ahead: bool = False,
        patience: Patience | None = None,
    ) -> Load:
        """The load of a request: the one under way, or a new one.

        Args:
          request: what to load.
          again: start a new one where the last one is done. If not, a load that failed is returned, for its error.
          anew: start a new one also where one is under way, which may have read older files.
          ahead: move it to the device too.
          patience: of a new load.
        """
        load = self._loads.get(request)
        over = load is not None and (load.given_up if not load.done else again)
        if load is None or over or anew:
            load = Load(request, patience or Patience(None), self.under_way(request.name))
            load.wanted += 1  # until the thread runs, and the caller has said that it wants it
            threading.Thread(target=self._run, args=(load,), name="jlora-load", daemon=True).start()
            self._loads[request] = load
        load.ahead |= ahead
        return load

    def named(self, name: str) -> list[Load]:
        """The loads of this name that are under way, or done and not forgotten."""
        return [load for load in self._loads.values() if load.request.name == name]

    def under_way(self, name: str | None = None) -> list[Load]:
        """The loads of this name, or of all, that are not done, with those that they wait for."""
        found = list(self._loads.values()) if name is None else self.named(name)
        for load in found:
            found += [other for other in load.before if other not in found]
        return [load for load in found if not load.done]

    def forget(self, load: Load) -> None:
        """Let a finished load be started again."""
        if load.done:
            self.abandon(load)

    def abandon(self, load: Load) -> None:
        """Let a load be started again though it may be under way; what becomes of that one is of no use then."""
        if self._loads.get(load.request) is load:
            del self._loads[load.request]

    def check_wanted(self, load: Load) -> None:
        """Raises LoadCancelled where a load was given up."""
        with self._lock:
            if load.given_up:
                self.abandon(load)
                raise LoadCancelled

    def _run(self, load: Load) -> None:
        self._own.load = load
        try:
            with self._lock:  # the caller has left it, and counts itself now
                load.wanted -= 1
            seen = self._changed.rings
            for other in load.before:  # in the order in which they were asked for
                while not other.given_up:
                    self._changed.wait(seen)
                    seen = self._changed.rings
            load.before = ()
            self.finish(load, self._work(load), None)
        except BaseException as error:  # whatever it was, those who wait must hear of it
            self.finish(load, False, error)

    def finish(self, load: Load, result: bool, error: BaseException | None) -> None:
        with self._lock:
            load.finish(result, error)
            if load.error is None or isinstance(load.error, LoadCancelled):
                self.forget(load)
            failed = [other for other in self._loads.values() if other.done and other.error is not None]
            for other in failed[:-_FAILED]:
                self.forget(other)
        self._changed.ring()
        load.tell()
