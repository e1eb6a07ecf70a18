"""How much memory there is, and memory that goes back to the system as soon as it is free."""

import contextlib
import mmap
import os

import numpy as np

from jlora._compat import Device

_MAPPED = 1 << 20  # bytes from which an array has memory of its own


def machine_bytes() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_bytes(device: Device) -> int | None:
    """Bytes that JAX may use of a device, where it says so; of a CPU, all of the machine's."""
    return machine_bytes() if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


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
