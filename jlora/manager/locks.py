"""The locks of a manager, which defer SIGINT, and `Bell`, which wakes threads that wait for a change.

A KeyboardInterrupt in the middle of a change would leave the host cache and the slots inconsistent. SIGINT is therefore
deferred while the main thread holds the state lock, and raised when the lock is released. Code under the lock never
reads a file, compiles or calls a user's function. It blocks only on the device, if a write requires it.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from jlora._interrupts import sigint

_MOMENT = 0.05  # seconds to wait for the lock before handling a SIGINT
_LOOK_AGAIN = 0.05  # longest wait of `Bell.wait`, in seconds


class StateLock:
    """A reentrant lock, which the thread that holds it can release for a while (`released`).

    SIGINT is deferred while the main thread holds it, but not while it waits for the lock.

    Attributes:
      step: the step lock, acquired before the state lock, or alone while a step of `jit` is dispatched.
      writing: a context that holds both locks.
    """

    def __init__(self) -> None:
        self.step = threading.RLock()
        self.writing = _Writing(self)
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._writes = False

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            sigint.begin()
            _acquire(self._lock.acquire)
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if self._owner == threading.get_ident():  # else a SIGINT ended `released`
            self._depth -= 1
            if self._depth == 0:
                self._release()

    def enter_to_write(self) -> None:
        """Acquire the step lock, then the state lock; see `writing`."""
        me = threading.get_ident()
        if self._owner != me:
            sigint.begin()
            _acquire(self.step.acquire)
            self._lock.acquire()
            self._owner, self._writes = me, True
        assert self._writes, "the step lock is acquired before the state lock"
        self._depth += 1

    def _release(self) -> None:
        writes, self._writes, self._owner, self._depth = self._writes, False, None, 0
        self._lock.release()
        if writes:
            self.step.release()
        sigint.end()

    @contextmanager
    def released(self) -> Generator[None, None, None]:
        """Release the locks that the calling thread holds, and acquire them again at the end.

        If a SIGINT ends the wait for them, KeyboardInterrupt is raised and none is held. The contexts around then have
        no effect at their end.
        """
        if self._owner != threading.get_ident():
            yield
            return
        depth, enter = self._depth, self.enter_to_write if self._writes else self.__enter__
        self._release()
        try:
            yield
        finally:
            enter()
            self._depth = depth


class _Writing:
    """The step lock and the state lock, held by a thread that writes slots."""

    def __init__(self, lock: StateLock):
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.enter_to_write()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()


def _acquire(acquire: Callable[..., bool]) -> None:
    """Acquire a lock. A SIGINT is raised if it is not free at once."""
    if not acquire(False):
        while not acquire(timeout=_MOMENT):
            sigint.end()
            sigint.begin()


class Bell:
    """Wake threads that wait for a change of a lease, a load or a slot.

    Attributes:
      rings: number of calls of `ring`.
    """

    def __init__(self) -> None:
        self.rings = 0
        # Entered directly: `Condition.__enter__` is a Python function, and a SIGINT inside would leave it locked.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)

    def ring(self) -> None:
        """Wake all waiting threads."""
        with self._lock:
            self.rings += 1
            self._condition.notify_all()

    def wait(self, seen: int, deadline: float | None = None) -> None:
        """Wait for a ring, at most until `_LOOK_AGAIN` seconds have passed or the deadline is reached.

        Some changes do not ring: a lease that is garbage collected without being closed, since a finalizer must not
        take a lock, and a cancelled future. `State.wait` therefore checks its condition again after each return.

        Args:
          seen: value of `rings` before the caller checked its condition. Return at once if it has changed.
          deadline: `time.monotonic()` at which to stop waiting; None for no deadline.
        """
        left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - time.monotonic())
        with self._lock:
            if self.rings == seen and left > 0:
                self._condition.wait(left)
