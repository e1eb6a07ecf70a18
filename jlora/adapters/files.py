"""Files that may change under us: read without a memory map, and refused when they did."""

import hashlib
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from jlora.adapters.escaping import printable
from jlora.errors import AdapterFormatError

# Time stamps of files move in ticks of up to 10 ms: within one, a second change leaves no trace.
_TICK_NS = 20_000_000


class StableFile:
    """One open regular file. Leaving the `with` block raises if it changed since it was opened.

    Attributes:
      size: in bytes, when it was opened.

    Raises:
      AdapterFormatError: not readable, not a regular file, shorter than asked for, or changed while it was read.
    """

    def __init__(self, file: Path, where: str):
        self._where = where
        try:
            # A pipe put in the file's place must not hang the load.
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
        self._digests: dict[int, bytes] = {}  # offset -> SHA-256 of the bytes that were read there
        self.size = self._before.st_size

    def __enter__(self) -> "StableFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._io:  # closes it
            # What was read may be wrong because of the change: that is then the better reason.
            if (kind is None or isinstance(error, AdapterFormatError)) and self._changed():
                raise self._moved() from error

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`."""
        buffer = bytearray(size)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills a buffer of bytes with those from `offset`. Threads may do so at once."""
        left, at = buffer, offset
        try:
            while left:
                if not (got := self._read_at(at, left)):
                    raise self._moved()
                left = left[got:]
                at += got
        except OSError as error:
            raise self._unreadable(error) from error
        self._digests[offset] = hashlib.sha256(buffer).digest()

    def digest(self) -> bytes:
        """Return a SHA-256 of all bytes that were read: of the digests of the reads, in the order of their offsets."""
        return hashlib.sha256(b"".join(self._digests[offset] for offset in sorted(self._digests))).digest()

    def _read_at(self, offset: int, buffer: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._fd, [buffer], offset)
        with self._seeking:  # Windows, where threads share one place in the file
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


def content_key(files: Sequence[Path]) -> str:
    """Return a text that differs whenever the content of an adapter's files may have changed.

    It holds the size, times of modification and of change, inode and device of each. The time of change cannot be set
    back, so a rewrite that restores the time of modification shows too. A file that changed within the last 20 ms is
    waited for: file systems date changes in ticks, and a second change within one would not show. (On one that counts
    in whole seconds it still can go unseen.)

    Args:
      files: as `adapter_files` gives them.

    Raises:
      OSError: a file is gone.
    """
    return " ".join(map(_file_key, files))


def _file_key(file: Path) -> str:
    found = file.stat()
    if (age := time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns)) < _TICK_NS and age >= 0:
        time.sleep((_TICK_NS - age) / 1e9)
        found = file.stat()
    return f"{file.name}:" + "-".join(map(str, _signature(found)))


def in_hub_cache(folder: Path, target: Path) -> bool:
    """Whether a folder is a snapshot of Hugging Face's cache, `snapshots/<commit>`, and the target a blob beside it."""
    home = folder.resolve()
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
