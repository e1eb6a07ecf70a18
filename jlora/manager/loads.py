"""The loads of a manager: one thread for each load, and one load at a time for each adapter."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from jlora.config import LoRARequest

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
      prefetches: True if the adapter is also moved to the device.
      done: True once `result` and `error` are final; set last.
      result: True if the adapter was loaded, False if it was in the host cache.
      error: the exception of a failed load; None otherwise.
      wanted: number of calls that wait for the load.
      timed_out: `time.monotonic()` of the last call that timed out and left the load running; None if there is none.
      read: True once the files are read, so that only open batches can delay a load that replaces an adapter.
      before: loads of the same name that were running when this one started; it begins after them, unless they hang.
    """

    def __init__(self, request: LoRARequest, deadline: Deadline, before: Sequence["Load"] = ()):
        self.request = request
        self.deadline = deadline
        self.prefetches = False
        self.done = False
        self.result = False
        self.error: BaseException | None = None
        self.wanted = 0
        self.timed_out: float | None = None
        self.read = False
        self.before = before
        self._futures: list[Future[bool]] = []

    @property
    def given_up(self) -> bool:
        """True if the load is done, or no call waits for it or timed out, and all its futures are cancelled.

        This is final, since no call waits for such a load again.
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
        """See `notify`."""
        for future in self._futures:
            self._notify(future)

    def _notify(self, future: "Future[bool]") -> None:
        if future.done() or not (future.running() or future.set_running_or_notify_cancel()):
            return
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(self.result)


def notify(loads: Sequence[Load]) -> None:
    """Set the pending futures of loads. Called without locks, because futures run callbacks. May be called again."""
    for load in loads:
        load.notify()


class Loads:
    """The loads that run or have failed. All methods are called under the state lock.

    Attributes:
      own: `load` is the load that runs on the calling thread; absent on other threads.
      reading: semaphore, acquired while a load reads and casts.
      fetching: loads that use the network or the `resolve` callback, in order of arrival.
    """

    def __init__(self) -> None:
        self.reading = threading.Semaphore(AT_ONCE)
        self.fetching: list[Load] = []
        self.own = threading.local()
        self._loads: dict[LoRARequest, Load] = {}

    def running(self, request: LoRARequest) -> Load | None:
        """Return the load of a request that a further call may wait for; None if there is none."""
        load = self._loads.get(request)
        return None if load is None or load.given_up else load

    def add(self, load: Load) -> None:
        self._loads[load.request] = load

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
        """Drop a load, finished or running, so that the next call starts a new one."""
        if self._loads.get(load.request) is load:
            del self._loads[load.request]

    def check_wanted(self, load: Load) -> None:
        """Raise LoadCancelled if a load was abandoned."""
        if load.given_up:
            self.drop(load)
            raise LoadCancelled

    def finish(self, load: Load, result: bool, error: BaseException | None) -> None:
        """Set the outcome of a load, and drop it unless it failed. The caller then rings and calls `Load.notify`."""
        load.finish(result, error)
        if load.error is None or isinstance(load.error, LoadCancelled):
            self.drop(load)
        failed = [other for other in self._loads.values() if other.done]
        for other in failed[:-_FAILED]:
            self.drop(other)
