"""Reads of adapter files in small steps, and a record of them."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from jlora import _threads
from jlora.adapters import tensor_data
from jlora.adapters.files import StableFile


@contextlib.contextmanager
def reading(piece: int = 1 << 19, part: int = 1 << 25, whole: int = 1 << 26, threads: bool = False) -> Iterator[None]:
    """Set the bytes that are read at a time, so that a small file takes the path of a large one.

    Args:
      piece: Bytes of one read.
      part: Bytes of one thread's work item.
      whole: Bytes at which an array takes no further tensor.
      threads: Use several threads however few bytes there are.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_PIECE", piece), ("_PART", part), ("_WHOLE", whole)):
            patch.setattr(tensor_data, name, size)
        if threads:
            patch.setattr(_threads, "_WORTHWHILE", 0)
        yield


def hook_reads(patch: pytest.MonkeyPatch, act: Callable[[int, int], None]) -> None:
    """Call `act(offset, size)` before each read of an adapter's files, until `patch` is undone."""
    original = StableFile.read_into

    def read_into(self, offset, buffer):
        act(offset, len(buffer))
        original(self, offset, buffer)

    patch.setattr(StableFile, "read_into", read_into)


@contextlib.contextmanager
def before_each_read(act: Callable[[int, int], None]) -> Iterator[None]:
    """Call `act(offset, size)` before each read of an adapter's files inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        hook_reads(patch, act)
        yield
