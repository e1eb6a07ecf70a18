"""Memory that goes back to the system as soon as it is free."""

import contextlib
import mmap

import numpy as np

_MAPPED = 1 << 20  # bytes from which an array has memory of its own


def fresh(count: int, dtype: np.dtype, *, sparse: bool = False) -> np.ndarray:
    """Zeros that go back to the system when they are freed.

    What malloc has for a thread's blocks of some megabytes it keeps for that thread's successors, and every load may be
    a thread of its own: adapters of gigabytes would leave as much memory behind.

    Args:
      count, dtype: of the array, which has one axis.
      sparse: whether much of it is never written: the system gives it memory page by page, and small pages.
    """
    nbytes = count * dtype.itemsize
    if nbytes < _MAPPED or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(count, dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_NOHUGEPAGE" if sparse else "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(advice)
    return np.frombuffer(memory, np.uint8).view(dtype)
