"""Query the size of memory, and allocate memory that returns to the system as soon as it is freed."""

import contextlib
import mmap
import os
from typing import cast

import jax
import numpy as np

from jlora._compat import Device

_MAPPED = 1 << 20  # bytes from which an array has its own memory mapping


def machine_bytes() -> int:
    """Return the bytes of memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_bytes(device: Device) -> int | None:
    """Return the bytes of a device that JAX can use, or None if unknown. For a CPU, return the machine's memory."""
    return machine_bytes() if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


def staging_bytes() -> int:
    """Return the largest number of bytes of adapters in transfer to slots: 256 MiB, at most 1/32 of the device."""
    most = device_bytes(cast("Device", jax.local_devices()[0]))
    return 256 * 2**20 if most is None else min(256 * 2**20, most // 32)


def page_locked_bytes() -> int:
    """Return the largest number of bytes of adapters in page-locked memory: 4 GiB, at most 1/8 of the machine."""
    return min(4 * 2**30, machine_bytes() // 8)


def fresh(count: int, dtype: np.dtype, *, sparse: bool = False) -> np.ndarray:
    """Return a one-dimensional array of zeros whose memory returns to the system when it is freed.

    malloc keeps freed blocks of some megabytes in the arena of a thread. If every load runs in a new thread, adapters
    of gigabytes would leave as much memory behind.

    Args:
      count: Number of elements.
      dtype: Dtype of the elements.
      sparse: True if much of the array is never written. It then uses small pages, which take memory once written.
    """
    nbytes = count * dtype.itemsize
    if nbytes < _MAPPED or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(count, dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_NOHUGEPAGE" if sparse else "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
    return np.frombuffer(memory, np.uint8).view(dtype)
