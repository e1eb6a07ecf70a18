"""Work on much memory, shared out among threads: NumPy and file reads let go of the interpreter."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WORTHWHILE = 128 << 20  # bytes from which threads are started
_MOST = 4  # threads: memory is what limits them


def on_threads(act: Callable[[T], R], items: Sequence[T], nbytes: int) -> list[R]:
    """`[act(item) for item in items]`, where they move `nbytes` bytes in all: on several threads if that is much.

    Items are begun in their order. When one raises no other is begun, and the first in order that raised is what is
    raised: the same that a loop would have met.
    """
    threads = min(_MOST, len(items), _processors()) if nbytes >= _WORTHWHILE else 1
    if threads <= 1:
        return [act(item) for item in items]
    found: dict[int, R] = {}
    failed: dict[int, BaseException] = {}
    turn = itertools.count()  # `next` of it is atomic

    def work() -> None:
        for i in turn:
            if i >= len(items) or failed:
                return
            try:
                found[i] = act(items[i])
            except BaseException as error:
                failed[i] = error

    helpers = [threading.Thread(target=work, name="jlora-work", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[min(failed)]
    return [found[i] for i in range(len(items))]


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
