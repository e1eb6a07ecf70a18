"""Locks for `with` that no exception leaves held, wherever it comes from.

Between the last line of a `with` block and the release, and around a Python `__enter__`, there is room for an
exception: a trace function may raise there, and a signal handler in the second. `with lock():` has a guard of its own,
which only the frame that runs the block refers to. A guard that goes without having been left gives back what it took,
so that the lock is free as soon as the block is left. Taking, leaving and going are one call of C each: no Python frame
refers to the guard, for a traceback that somebody keeps would keep the frame, and with it the lock.

`with within(context):` is the same for settings of JAX and NumPy: one that stayed would have steps compiled anew.
"""

import collections
import io
import operator
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from typing import Any

_exhaust = collections.deque[Any](maxlen=0).extend
_acquire = operator.methodcaller("acquire")
_release = operator.methodcaller("release")
_enter = operator.methodcaller("__enter__")
_leave = operator.methodcaller("__exit__", None, None, None)
_NOTHING = object()


class _Guard(io.BytesIO):
    """One `with` block. That of `BytesIO` calls `close` in the end, and so does its finalizer; both are C.

    Args:
      take: gives what was taken; read when the block begins.
      give: gives it back; called once.
    """

    def __init__(self, take: Iterator[Any], give: Callable[[Any], object]):
        super().__init__()
        taken = [_NOTHING]
        self._begin = partial(taken.extend, take)
        self.close = partial(_exhaust, map(give, iter(taken.pop, _NOTHING)))

    __enter__ = property(operator.attrgetter("_begin"))  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


class Lock:
    """A reentrant lock: `with lock():`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __call__(self) -> _Guard:
        return _Guard(compress((self._lock,), map(_acquire, (self._lock,))), _release)


def within(context: AbstractContextManager[None]) -> _Guard:
    """A guard of a context that gives nothing and looks at no exception."""
    return _Guard(compress((context,), map(operator.is_, map(_enter, (context,)), (None,))), _leave)


class Turns:
    """Lets `count` threads in at a time: `with turns():`."""

    def __init__(self, count: int):
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for turn in range(count):
            self._free.put(turn)

    def __call__(self) -> _Guard:
        return _Guard(map(operator.call, (self._free.get,)), self._free.put)
