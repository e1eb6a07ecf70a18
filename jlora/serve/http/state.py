"""Persistent state of a server in a folder. Every change answered with 200 survives any end of the process."""

import fcntl
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from jlora import LoRAManager
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError
from jlora.serve.http.log import log


class State:
    """The state of one server (`LoRAManager.save`), in a folder locked by it.

    Names, requests and pins are on disk when `changed` returns. A thread saves the weights later.

    Args:
      folder: the folder, created if missing.

    Attributes:
      unloading: returns names to save as removed.
      behind: True if the last change is not on disk.

    Raises:
      LoRAError: another server uses the folder, or it cannot be written.
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
            # Held until the process ends. A lock file alone could be deleted; a folder on NFS locks one host only.
            for path, flags in ((folder, os.O_RDONLY), (folder / "server.lock", os.O_RDWR | os.O_CREAT)):
                self._locks.append(os.open(path, flags, 0o666))
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for number in self._locks:
                os.close(number)
            raise LoRAError(f"--lora-state {folder}: another server keeps its adapters there") from None
        except OSError as error:
            raise LoRAError(f"--lora-state {folder}: {error.strerror or error}") from error
        self._saving = threading.Lock()  # one save at a time; only a save that begins later makes up for a failed one
        self._work = threading.Condition()
        self._dirty = self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def saved(self) -> bool:
        """True if an earlier server has saved its state."""
        return (self._folder / "names.json").exists()

    def restore(self, manager: LoRAManager) -> frozenset[str]:
        """Restore the saved state, if any, into a new manager.

        Weights that are damaged or no longer fit (another dtype or model) are skipped, and their adapters are loaded
        anew when requested.

        Returns:
          Every name known to the earlier server.

        Raises:
          LoRAError: names and requests cannot be read, or a pinned adapter cannot be loaded.
        """
        self._manager = manager
        if not self.saved:
            return frozenset()
        try:
            return manager.restore(self._folder)
        except (AdapterFormatError, AdapterMismatchError) as error:
            log.warning("--lora-state: adapters are loaded anew: %s", error)
        return manager.restore(self._folder, weights=False)

    def changed(self) -> None:
        """Save names, requests and pins to disk before returning. Raises LoRAError."""
        with self._saving:
            self.behind = True
            self._manager.save(self._folder, weights=False, without=self.unloading)
            self.behind = False
        with self._work:
            self._dirty = True
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._save_weights, name="jlora-state", daemon=True)
                self._thread.start()
            self._work.notify()

    def close(self) -> None:
        """Save everything for the last time."""
        with self._work:
            self._closing = self._dirty = True
            self._work.notify()
            thread = self._thread
        if thread is None:
            self._save()
        else:
            thread.join()

    def _save_weights(self) -> None:
        while True:
            with self._work:
                while not self._dirty:
                    self._work.wait()
                self._dirty, last = False, self._closing
            self._save()
            if last:
                return

    def _save(self) -> None:
        try:
            self._manager.save(self._folder, without=self.unloading)
        except Exception:  # names are saved, and the next change retries
            log.exception("--lora-state: weights of adapters could not be saved")


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
