"""Deferral of SIGINT during changes that a KeyboardInterrupt must not divide."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from jlora._compat import get_handler, set_handler


class Deferral:
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


sigint = Deferral()  # one for the process, like the signal handler


@contextmanager
def sigint_deferred() -> Generator[None, None, None]:
    """Defer SIGINT in the main thread until the end of the context."""
    sigint.begin()
    try:
        yield
    finally:
        sigint.end()
