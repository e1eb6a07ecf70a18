"""Locks for `with` that no exception leaves held, wherever it comes from.

Between the last line of a `with` block and the release, and around a Python `__enter__`, there is room for an
exception: a trace function may raise there, and a signal handler in the second. `with lock():` has a guard of its own,
which only the frame that runs the block refers to. A guard that goes without having been left gives back what it took,
so that the lock is free as soon as the frame is left. Taking and giving back are one call of C each.
"""

import collections
import operator
import queue
import threading
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

_exhaust = collections.deque[Any](maxlen=0).extend
_acquire = operator.methodcaller("acquire")
_release = operator.methodcaller("release")


class _Spent:
    """One `with` block that was left. It has nothing to give, and no finalizer: an interrupt in there would be lost."""

    _taken: list[Any] = []  # noqa: RUF012 - until there is its own; this one stays empty
    _give: Callable[[Any], object] = operator.methodcaller("release")

    def __init__(self, take: Iterator[Any], give: Callable[[Any], object]):
        self._take = take
        self._give = give
        self._taken = []

    def __exit__(self, *_: object) -> None:
        _exhaust(map(self._give, map(list.pop, [self._taken] * len(self._taken))))
        self.__class__ = _Spent  # pyright: ignore[reportAttributeAccessIssue]


class _Guard(_Spent):
    """One `with` block."""

    def __enter__(self) -> None:
        self._taken.extend(self._take)

    def __del__(self) -> None:
        self.__exit__()


class Lock:
    """A reentrant lock: `with lock():`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __call__(self) -> _Guard:
        return _Guard(compress((self._lock,), map(_acquire, (self._lock,))), _release)


class Turns:
    """Lets `count` threads in at a time: `with turns():`."""

    def __init__(self, count: int):
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for turn in range(count):
            self._free.put(turn)

    def __call__(self) -> _Guard:
        return _Guard(map(operator.call, (self._free.get,)), self._free.put)
