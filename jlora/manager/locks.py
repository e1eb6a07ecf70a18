"""The lock of a manager's state, which defers SIGINT, and a bell that wakes threads which wait for a change.

A KeyboardInterrupt in the middle of a change would leave books and slots in disagreement. So SIGINT is deferred while
the main thread holds the state's lock: it is noted, and raised when the lock is free again. No code under the lock
reads a file, compiles, or calls a user's function; it waits for nothing but the device, where a write must.
"""

import signal
import threading
import time
from types import FrameType

_MOMENT = 0.05  # seconds that a thread waits for the lock before it answers a SIGINT
_LOOK_AGAIN = 0.05  # seconds


class _Deferral:
    """Defers SIGINT in the main thread, where the handler is Python's default; asyncio's, say, raises nothing here."""

    def __init__(self) -> None:
        self._depth = 0
        self._noted = False

    def begin(self) -> None:
        """Note SIGINT instead of raising. Calls nest."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth == 0:
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return
            self._noted = False
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def end(self) -> None:
        """Raise KeyboardInterrupt from now on, and at once if a SIGINT was noted."""
        if self._depth == 0 or threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if self._depth == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._noted:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


_sigint = _Deferral()  # of the process, as its handler is


class StateLock:
    """A reentrant lock. SIGINT is deferred while the main thread holds it, but not while that waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        _sigint.begin()
        while not self._lock.acquire(timeout=_MOMENT):
            _sigint.end()
            _sigint.begin()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        _sigint.end()


class Bell:
    """Wakes threads that wait for a change of a lease, a load or a slot.

    Attributes:
      rings: how often it rang.
    """

    def __init__(self) -> None:
        self.rings = 0
        # Entered as it is: the condition's own `__enter__` is a Python function, in which a SIGINT would leave it held.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)

    def ring(self) -> None:
        """Wake every thread that waits."""
        with self._lock:
            self.rings += 1
            self._condition.notify_all()

    def wait(self, seen: int, deadline: float | None = None) -> None:
        """Wait for a ring, and no longer than `_LOOK_AGAIN` or the deadline.

        A lease that is collected without having been closed does not ring, since a finalizer must not take a lock. Nor
        does a future that is cancelled. So the caller looks again after `_LOOK_AGAIN`.

        Args:
          seen: `rings` before the caller found that it must wait; if it rang since, this returns at once.
          deadline: `time.monotonic()` at which to give up.
        """
        left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - time.monotonic())
        with self._lock:
            if self.rings == seen and left > 0:
                self._condition.wait(left)
