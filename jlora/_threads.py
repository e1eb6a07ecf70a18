"""Spread work on large memory over threads, and report the time of long work. NumPy and XLA release the GIL."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WORTHWHILE = 128 << 20  # bytes from which threads are started
_MOST = 4  # threads; memory bandwidth is the limit
_REPORT_EVERY = 10.0  # seconds


def on_threads(act: Callable[[T], R], items: Sequence[T], nbytes: int) -> list[R]:
    """Return `[act(item) for item in items]`, computed on several threads if it moves at least 128 MiB.

    The exception of the first item that fails is raised, as in a loop. `act` must set the NumPy error state that it
    needs, because each thread has its own.

    Args:
      act: Function of one item.
      items: Items to process.
      nbytes: Bytes that all calls together move.
    """
    if nbytes < _WORTHWHILE:
        return [act(item) for item in items]
    threads = ThreadPoolExecutor(_MOST, thread_name_prefix="jlora-work")
    try:
        return list(threads.map(act, items))
    finally:
        threads.shutdown(cancel_futures=True)


@contextmanager
def elapsed(report: Callable[[float], object]) -> Generator[None, None, None]:
    """Call `report(seconds since the start)` on a thread, every 10 seconds until the block ends.

    A compilation can take minutes and has no other sign of life.
    """
    ended, started = threading.Event(), time.monotonic()

    def work() -> None:
        while not ended.wait(_REPORT_EVERY):
            report(time.monotonic() - started)

    thread = threading.Thread(target=work, name="jlora-elapsed", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
