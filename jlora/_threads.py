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

    Items are begun in their order. Once one has raised no other is taken, and the first in order that raised is what is
    raised: the same that a loop would have met. What settings of NumPy `act` needs, it makes: a thread has its own.
    """
    threads = min(_MOST, len(items), _processors()) if nbytes >= _WORTHWHILE else 1
    if threads <= 1:
        return [act(item) for item in items]
    found: dict[int, R] = {}
    failed: dict[int, BaseException] = {}
    turn = itertools.count()  # `next` of it is atomic

    def work() -> None:
        i = -1
        try:
            # What is taken is begun, whatever failed meanwhile: it comes before what failed, or at the same time.
            while not failed and (i := next(turn)) < len(items):
                found[i] = act(items[i])
        except BaseException as error:
            failed[i if isinstance(error, Exception) else -1] = error  # an interrupt goes first

    helpers = [threading.Thread(target=work, name="jlora-work", daemon=True) for _ in range(threads - 1)]
    try:
        for helper in helpers:
            helper.start()
        work()
    except BaseException as error:  # an interrupt, or the system has no more threads
        failed[-1] = error
    for helper in helpers:
        if helper.is_alive():
            helper.join()
    try:
        if failed:
            raise failed[min(failed)]
        return [found[i] for i in range(len(items))]
    finally:
        failed.clear()  # their tracebacks lead to this frame: a circle that would keep `items` in memory


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
