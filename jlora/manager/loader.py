"""Load adapters in background threads: one thread for each load, and one load at a time for each adapter."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from jlora.config import LoRARequest
from jlora.manager.locks import Bell, StateLock

AT_ONCE = 4  # largest number of loads that fetch, and of those that read and cast, at the same time
_FAILED = 64  # failed loads kept for the next caller; bounded, since clients can invent names
_QUIET = 1.0  # seconds after its last timeout until a load takes no turn of the others; it may hang


class LoadCancelled(Exception):
    """Raised inside a load that was abandoned."""


@dataclass(frozen=True)
class Deadline:
    """The end of a wait.

    Attributes:
      at: `time.monotonic()` at which the call stops waiting; None for no limit.
      thread: identifier of the waiting thread. Its own open batches raise at once, since they cannot close while it
        waits.
    """

    at: float | None
    thread: int | None = None

    @property
    def over(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at


class Load:
    """One load of an adapter.

    Attributes:
      request: the request to load.
      deadline: limit of the wait for open batches with the version that it replaces.
      ahead: True if the adapter is also moved to the device.
      done: True once `result` and `error` are final; set last.
      result: True if the adapter was loaded, False if it was in the host cache.
      error: the exception of a failed load; None otherwise.
      wanted: number of calls that wait for the load.
      timed_out: `time.monotonic()` of the last call that timed out and left the load running; None if there is none.
      in_use: True if open batches hold the adapter to replace.
      before: loads of the same name that were running when this one started; it begins after them, unless they hang.
    """

    def __init__(self, request: LoRARequest, deadline: Deadline, before: Sequence["Load"] = ()):
        self.request = request
        self.deadline = deadline
        self.ahead = False
        self.done = False
        self.result = False
        self.error: BaseException | None = None
        self.wanted = 0
        self.timed_out: float | None = None
        self.in_use = False
        self.before = before
        self._futures: list[Future[bool]] = []

    @property
    def given_up(self) -> bool:
        """True if the load is done, or no call waits for it or timed out, and all its futures are cancelled.

        This is final, since `Loader.start` does not return such a load.
        """
        return self.done or (self.timed_out is None and not self._awaited)

    @property
    def quiet(self) -> bool:
        """True if the load is given up, or runs on for calls that timed out and were not repeated lately."""
        recent = self.timed_out is not None and time.monotonic() - self.timed_out < _QUIET
        return self.done or not (recent or self._awaited)

    @property
    def _awaited(self) -> bool:
        return self.wanted > 0 or not all(future.cancelled() for future in list(self._futures))

    def future(self) -> "Future[bool]":
        """Return a new future. The load is abandoned if all are cancelled and no call waits or timed out."""
        future: Future[bool] = Future()
        if self.done:
            self._notify(future)
        else:
            self._futures.append(future)
        return future

    def finish(self, result: bool, error: BaseException | None) -> None:
        """Set the result and the error, unless they are set already. Called under the state lock."""
        if not self.done:
            self.result, self.error = result, error
            self.done = True

    def notify(self) -> None:
        """Set the pending futures. Called without locks, because futures run callbacks. May be called again."""
        for future in self._futures:
            self._notify(future)

    def _notify(self, future: "Future[bool]") -> None:
        if future.done() or not (future.running() or future.set_running_or_notify_cancel()):
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.result)


class Loader:
    """Run loads on daemon threads. `start`, `take_error` and `drop` are called under the state lock.

    Args:
      work: runs a load and returns its result.
      lock: the state lock of the manager.
      changed: rung when a load ends or may continue.

    Attributes:
      turn: semaphore, acquired while a load reads and casts.
    """

    def __init__(self, work: Callable[[Load], bool], lock: StateLock, changed: Bell):
        self.turn = threading.Semaphore(AT_ONCE)
        self._work = work
        self._lock = lock
        self._changed = changed
        self._loads: dict[LoRARequest, Load] = {}
        self._fetching: list[Load] = []  # loads inside `fetching`, in order of arrival
        self._own = threading.local()

    @property
    def own(self) -> Load | None:
        """The load that runs on the calling thread; None on other threads."""
        return getattr(self._own, "load", None)

    @contextmanager
    def fetching(self, load: Load) -> Generator[None, None, None]:
        """Limit the number of loads that use the network or the `resolve` callback, which may be slow or hang.

        Other loads may read and cast meanwhile. An abandoned or quiet load cannot be stopped, but it does not count.

        Raises:
          LoadCancelled: the load was abandoned while it waited.
        """
        with self._lock:
            self._fetching.append(load)
        try:
            while True:
                seen = self._changed.rings
                self.check_wanted(load)
                with self._lock:
                    first = self._fetching[: self._fetching.index(load)]
                if sum(not other.quiet for other in first) < AT_ONCE:
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
        anew: bool = False,
        ahead: bool = False,
        deadline: Deadline | None = None,
    ) -> Load:
        """Return the running load of a request, or start a new one.

        Args:
          request: the request to load.
          anew: start a new load even if one is running, which may have read older files.
          ahead: also move the adapter to the device.
          deadline: deadline of a new load.
        """
        load = self._loads.get(request)
        if load is None or load.given_up or anew:
            load = Load(request, deadline or Deadline(None), self.under_way(request.name))
            load.wanted += 1  # until the thread starts; by then the caller has incremented it
            threading.Thread(target=self._run, args=(load,), name="jlora-load", daemon=True).start()
            self._loads[request] = load
        load.ahead |= ahead
        return load

    def take_error(self, request: LoRARequest, *, ran_on: bool = False) -> BaseException | None:
        """Return the error of a load that failed while no call waited, and drop it; None if there is none.

        Args:
          request: the request of the load.
          ran_on: only if a call had timed out.
        """
        load = self._loads.get(request)
        if load is None or load.error is None or (ran_on and load.timed_out is None):
            return None
        self.drop(load)
        return load.error

    def under_way(self, name: str | None = None) -> list[Load]:
        """Return the loads of a name (None: of all names) that are not done, including the loads that they follow."""
        found = [load for load in self._loads.values() if name in (None, load.request.name)]
        for load in found:
            found += [other for other in load.before if other not in found]
        return [load for load in found if not load.done]

    def drop(self, load: Load) -> None:
        """Drop a load, finished or running, so that `start` begins a new one."""
        if self._loads.get(load.request) is load:
            del self._loads[load.request]

    def check_wanted(self, load: Load) -> None:
        """Raise LoadCancelled if a load was abandoned."""
        with self._lock:
            if load.given_up:
                self.drop(load)
                raise LoadCancelled

    def _run(self, load: Load) -> None:
        self._own.load = load
        try:
            with self._lock:  # drop the count that `start` added
                load.wanted -= 1
            seen = self._changed.rings
            for other in load.before:  # loads of one name run in the order of their requests
                while not other.quiet:
                    self._changed.wait(seen)
                    seen = self._changed.rings
            load.before = ()
            self.finish(load, self._work(load), None)
        except BaseException as error:  # every load needs an outcome, or waiting calls hang
            self.finish(load, False, error)

    def finish(self, load: Load, result: bool, error: BaseException | None) -> None:
        with self._lock:
            load.finish(result, error)
            if load.error is None or isinstance(load.error, LoadCancelled):
                self.drop(load)
            failed = [other for other in self._loads.values() if other.done]
            for other in failed[:-_FAILED]:
                self.drop(other)
        self._changed.ring()
        load.notify()
