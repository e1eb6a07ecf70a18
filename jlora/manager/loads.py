"""The loads of a manager: one thread for each load, and one load at a time for each adapter."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from jlora.config import LoRARequest
from jlora.errors import AdapterNotFoundError

AT_ONCE = 4  # largest number of loads that fetch, and of those that read and cast, at the same time
_FAILED = 64  # failed loads kept for the next caller; bounded, since clients can invent names
_QUIET = 1.0  # seconds after its last timeout until a load takes no turn of the others; it may hang


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


@dataclass(eq=False)
class Load:
    """One load of an adapter.

    Attributes:
      request: the request to load.
      deadline: limit of the wait for open batches with the version that it replaces.
      outcome: True if the adapter was loaded, False if it was in the host cache, the exception of a failed load, or
        None while it runs. A signal can leave a `Future` locked, so calls wait for this attribute instead.
      calls: number of calls that wait for the load.
      futures: futures of `prefetch` that are neither set nor cancelled; each removes itself. With one, the adapter is
        also moved to the device.
      timed_out: `time.monotonic()` of the last call that timed out and left the load running; None if there is none.
    """

    request: LoRARequest
    deadline: Deadline
    outcome: bool | BaseException | None = None
    calls: int = 0
    futures: set["Future[bool]"] = field(default_factory=set["Future[bool]"])
    timed_out: float | None = None

    @property
    def abandoned(self) -> bool:
        """True if the load is done, or no call waits for it or timed out, and all its futures are cancelled.

        This is final, since no call waits for such a load again.
        """
        return self.outcome is not None or not (self.calls or self.futures or self.timed_out)

    @property
    def quiet(self) -> bool:
        """True if the load is abandoned, or runs on for calls that timed out and were not repeated lately."""
        recent = self.timed_out is not None and time.monotonic() - self.timed_out < _QUIET
        return self.abandoned or not (self.calls or self.futures or recent)

    def check_wanted(self) -> None:
        """Raise CancelledError if the load is abandoned."""
        if self.abandoned:
            raise CancelledError


def notify(loads: Iterable[Load]) -> None:
    """Set the pending futures of loads. Called without locks, because futures run callbacks. May be called again."""
    for load in loads:
        for future in list(load.futures):
            with suppress(InvalidStateError):  # it has just been cancelled, or set by another thread
                if isinstance(load.outcome, BaseException):
                    future.set_exception(load.outcome)
                else:
                    future.set_result(load.outcome is True)


class Loads:
    """The loads that run or have failed. All methods are called under the state lock.

    Attributes:
      own: `load` is the load that runs on the calling thread; absent on other threads.
      reading: semaphore, acquired while a load reads and casts.
      fetching: loads that use the network or the `resolve` callback, in order of arrival.
      queues: name -> its running loads, in the order of their requests.
      failed: request -> (error, True if a call had timed out) of a load that failed while no call waited.
    """

    def __init__(self) -> None:
        self.reading = threading.Semaphore(AT_ONCE)
        self.fetching: list[Load] = []
        self.own = threading.local()
        self.queues: dict[str, list[Load]] = {}
        self.failed: dict[LoRARequest, tuple[BaseException, bool]] = {}

    def raise_error(self, request: LoRARequest, *, ran_on: bool = False) -> None:
        """Raise the error of a load that failed while no call waited, once. `ran_on`: only if a call had timed out."""
        error, timed_out = self.failed.pop(request, (None, False))
        if error is not None and (timed_out or not ran_on):
            raise error

    def finish(self, load: Load, outcome: bool | BaseException) -> None:
        """Set the outcome of a load, unless it was removed. The caller then rings and calls `notify`."""
        if load.outcome is not None:
            return
        if isinstance(outcome, BaseException) and not load.calls and not load.abandoned:
            self.failed[load.request] = outcome, load.timed_out is not None
            if len(self.failed) > _FAILED:
                del self.failed[next(iter(self.failed))]
        load.outcome = outcome
        self.queues[load.request.name].remove(load)
        if not self.queues[load.request.name]:
            del self.queues[load.request.name]

    def remove(self, name: str | None) -> list[Load]:
        """End the running loads of a name (None: of all names) with AdapterNotFoundError, and return them."""
        names = list(self.queues) if name is None else [name]
        loads = [load for each in names for load in self.queues.pop(each, [])]
        for load in loads:
            load.outcome = AdapterNotFoundError(f"adapter {load.request.name!r} was removed while it was loaded")
        return loads
