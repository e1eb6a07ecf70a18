"""Spread work on large memory over threads. NumPy and file reads release the GIL."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WORTHWHILE = 128 << 20  # bytes from which threads are started
_MOST = 4  # threads; memory bandwidth is the limit


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
