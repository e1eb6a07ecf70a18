"""A folder that keeps what a server serves: what it has answered with 200 outlives it, however it ends."""

import fcntl
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from jlora import LoRAManager
from jlora.errors import LoRAError
from jlora.serve.http.log import log


class State:
    """What `LoRAManager.save` keeps of one server, in a folder that no other has while it runs.

    Args:
      folder: which; made if need be.

    Attributes:
      unloading: gives names that are saved as if they were removed already.
      behind: whether the last change is not on the disk.

    Raises:
      LoRAError: another server has it, or it cannot be written.
    """

    _manager: LoRAManager

    def __init__(self, folder: Path):
        self.unloading: Callable[[], Collection[str]] = frozenset
        self.behind = False
        self._folder = folder
        self._locks: list[int] = []
        try:
            made = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for one in made:
                _sync(one.parent)
            # Until this process ends. A file alone could be deleted; a folder on NFS is locked for one machine alone.
            for path, flags in ((folder, os.O_RDONLY), (folder / "server.lock", os.O_RDWR | os.O_CREAT)):
                self._locks.append(os.open(path, flags, 0o666))
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for number in self._locks:
                os.close(number)
            raise LoRAError(f"--lora-state {folder}: another server keeps its adapters there") from None
        except OSError as error:
            raise LoRAError(f"--lora-state {folder}: {error.strerror or error}") from error
        self._saving = threading.Lock()  # so that what is saved last is no older than what was saved before

    @property
    def saved(self) -> bool:
        """Whether a server before has left anything."""
        return (self._folder / "adapters.json").exists()

    def restore(self, manager: LoRAManager) -> frozenset[str]:
        """Give a new manager what was saved, if anything was. Returns every name that the server before knew.

        Raises:
          LoRAError: it cannot be restored; see `LoRAManager.restore`.
        """
        self._manager = manager
        return manager.restore(self._folder) if self.saved else frozenset()

    def changed(self) -> None:
        """Save the adapters. Raises LoRAError."""
        with self._saving:
            self.behind = True
            self._manager.save(self._folder, without=self.unloading())
            self.behind = False

    def close(self) -> None:
        """Save for the last time: orders of use have changed since."""
        try:
            self.changed()
        except LoRAError:
            log.exception("--lora-state: adapters could not be saved")


def _sync(folder: Path) -> None:
    """See that what a folder lists is on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
