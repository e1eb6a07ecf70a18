"""Read files by offset, without a memory map, from a disk or from memory.

A file on a disk may change during the read, and is then refused.
"""

import bisect
import hashlib
import itertools
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from jlora.errors import AdapterFormatError, printable

# Time stamps of files advance in ticks of up to 10 ms. A second change within one tick is not visible.
_TICK_NS = 20_000_000


F = TypeVar("F", bound="ReadFile")


class ReadFile:
    """A file that is open for reads by offset. Several threads may read at the same time.

    Attributes:
      size: Size in bytes.
    """

    size: int

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}  # offset of a read -> SHA-256 of its bytes

    def __enter__(self: F) -> F:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`."""
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from `offset`."""
        self._fill(offset, buffer)
        self._digests[offset] = hashlib.sha256(buffer).digest()

    def digest(self) -> bytes:
        """Return a SHA-256 of all bytes read, computed from the digests of the reads in order of offset."""
        return hashlib.sha256(b"".join(self._digests[offset] for offset in sorted(self._digests))).digest()

    def _fill(self, offset: int, buffer: memoryview) -> None:
        raise NotImplementedError


class MemoryFile(ReadFile):
    """The bytes of one file in memory.

    Args:
      name: Name of the file, for messages.
      parts: Its bytes in order, as C-contiguous buffers. They are not copied.

    Attributes:
      parts: The same, without those of no bytes.
    """

    def __init__(self, name: str, *parts: bytes | bytearray | memoryview):
        super().__init__()
        self._name = name
        self.parts = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        self._starts = list(itertools.accumulate((part.nbytes for part in self.parts), initial=0))
        self.size = self._starts[-1]

    def __str__(self) -> str:
        return self._name

    def _fill(self, offset: int, buffer: memoryview) -> None:
        at, end, i = offset, offset + len(buffer), bisect.bisect_right(self._starts, offset) - 1
        while at < end:
            upto = min(end, self._starts[i + 1])
            buffer[at - offset : upto - offset] = self.parts[i][at - self._starts[i] : upto - self._starts[i]]
            at, i = upto, i + 1


class StableFile(ReadFile):
    """One open regular file. Leaving the `with` block raises if the file changed since it was opened.

    Attributes:
      size: Size in bytes when the file was opened.

    Raises:
      AdapterFormatError: The file cannot be read, is not a regular file, is shorter than a read, or has changed.
    """

    def __init__(self, file: Path, where: str):
        super().__init__()
        self._where = where
        try:
            # O_NONBLOCK: opening a named pipe must not block the load.
            self._fd = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._before = os.fstat(self._fd)
        except OSError as error:
            os.close(self._fd)
            raise self._unreadable(error) from error
        if not stat.S_ISREG(self._before.st_mode):
            os.close(self._fd)
            raise AdapterFormatError(f"{where}: is not a regular file")
        self._io = os.fdopen(self._fd, "rb", buffering=0)
        self._seeking = threading.Lock()
        self.size = self._before.st_size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._io:  # closes it
            # The change may have caused a format error; report the change instead.
            if (kind is None or isinstance(error, AdapterFormatError)) and self._changed():
                raise self._moved() from error

    def _fill(self, offset: int, buffer: memoryview) -> None:
        left, at = buffer, offset
        try:
            while left:
                if not (got := self._read_at(at, left)):
                    raise self._moved()
                left = left[got:]
                at += got
        except OSError as error:
            raise self._unreadable(error) from error

    def _read_at(self, offset: int, buffer: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [buffer], offset)
        with self._seeking:  # Windows has no positioned read, so threads share one file position
            self._io.seek(offset)
            return self._io.readinto(buffer) or 0

    def _changed(self) -> bool:
        try:
            return _signature(os.fstat(self._fd)) != _signature(self._before)
        except OSError as error:
            raise self._unreadable(error) from error

    def _moved(self) -> AdapterFormatError:
        return AdapterFormatError(f"{self._where}: changed while it was read; load it again when it is complete")

    def _unreadable(self, error: OSError) -> AdapterFormatError:
        return AdapterFormatError(f"{self._where}: cannot be read: {printable(error.strerror or str(error))}")


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def open_file(file: Path | MemoryFile, where: str) -> ReadFile:
    """Return a file that is open for reads. `where` describes it in messages."""
    return file if isinstance(file, MemoryFile) else StableFile(file, where)


def content_key(files: Sequence[Path]) -> str:
    """Return a string that differs whenever the content of an adapter's files may have changed.

    It contains the size, mtime, ctime, inode and device of each file. The ctime cannot be set back, so a rewrite that
    restores the mtime is detected too. If a file changed within the last 20 ms, the call sleeps until that time has
    passed, because a second change within one tick of the file system's clock would not be visible. A file system that
    counts in whole seconds can still hide a change.

    Args:
      files: Paths returned by `adapter_files`.

    Raises:
      OSError: A file no longer exists.
    """
    return " ".join(map(_file_key, files))


def _file_key(file: Path) -> str:
    found = file.stat()
    if (age := time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns)) < _TICK_NS and age >= 0:
        time.sleep((_TICK_NS - age) / 1e9)
        found = file.stat()
    return f"{file.name}:" + "-".join(map(str, _signature(found)))


def in_hub_cache(folder: Path, target: Path) -> bool:
    """Return True if `folder` is `snapshots/<commit>` of a Hugging Face cache and `target` a blob of the same repo."""
    home = folder.resolve()
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
