"""Work on much memory, shared out among threads: NumPy and file reads let go of the interpreter."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_WORTHWHILE = 128 << 20  # bytes from which threads are started
_MOST = 4  # threads: memory is what limits them


def on_threads(act: Callable[[T], R], items: Sequence[T], nbytes: int) -> list[R]:
    """`[act(item) for item in items]`, where they move `nbytes` bytes in all: on several threads if that is much.

    What is raised is what a loop would have met first. What settings of NumPy `act` needs, it makes: a thread has its
    own.
    """
    if nbytes < _WORTHWHILE:
        return [act(item) for item in items]
    threads = ThreadPoolExecutor(_MOST, thread_name_prefix="jlora-work")
    try:
        return list(threads.map(act, items))
    finally:
        threads.shutdown(cancel_futures=True)
