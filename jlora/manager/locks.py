"""The state lock of a manager, which defers SIGINT, and `Bell`, which wakes threads that wait for a change.

A KeyboardInterrupt in the middle of a change would leave the host cache and the slots inconsistent. SIGINT is therefore
deferred while the main thread holds the state lock, and raised when the lock is released. Code under the lock never
reads a file, compiles or calls a user's function. It blocks only on the device, if a write requires it.
"""

import signal
import threading
import time
from types import FrameType

from jlora._compat import get_handler, set_handler

_MOMENT = 0.05  # seconds to wait for the lock before handling a SIGINT
_LOOK_AGAIN = 0.05  # longest wait of `Bell.wait`, in seconds


class _Deferral:
    """Defer SIGINT in the main thread. Only Python's default handler is replaced, since others need not raise here."""

    def __init__(self) -> None:
        self._depth = 0
        self._noted = False

    def begin(self) -> None:
        """Record SIGINT instead of raising. Calls may be nested."""
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth == 0:
            if get_handler(signal.SIGINT) is not signal.default_int_handler:
                return
            self._noted = False
            set_handler(signal.SIGINT, self._note)
        self._depth += 1

    def end(self) -> None:
        """Restore the handler at the outermost call, and raise KeyboardInterrupt if a SIGINT was recorded."""
        if self._depth == 0 or threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if self._depth == 0:
            set_handler(signal.SIGINT, signal.default_int_handler)
            if self._noted:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


_sigint = _Deferral()  # one for the process, like the signal handler


class StateLock:
    """A reentrant lock. SIGINT is deferred while the main thread holds it, but not while it waits for the lock."""

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
        take a lock, and a cancelled future. Callers must therefore check again after each return.

        Args:
          seen: value of `rings` before the caller checked its condition. Return at once if it has changed.
          deadline: `time.monotonic()` at which to stop waiting; None for no deadline.
        """
        left = _LOOK_AGAIN if deadline is None else min(_LOOK_AGAIN, deadline - time.monotonic())
        with self._lock:
            if self.rings == seen and left > 0:
                self._condition.wait(left)
