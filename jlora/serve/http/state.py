"""Persistent state of a server in a folder. Every change answered with 200 survives any end of the process."""

import fcntl
import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path

from jlora import LoRAManager
from jlora._disk import sync
from jlora.errors import LoRAError
from jlora.serve.http.log import log, log_event

_MOST_NAMES = 100  # in the log


class StateFolder:
    """The state of one server (`LoRAManager.save`), in a folder locked by it.

    Args:
      folder: The folder, created if missing.

    Attributes:
      unloading: Returns names to save as removed.
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
                sync(one.parent)
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
        self._saving = threading.Lock()  # one save at a time, so that a later save never writes an older state

    @property
    def saved(self) -> bool:
        """True if an earlier server has saved its state."""
        return (self._folder / "adapters.json").exists()

    def restore(self, manager: LoRAManager) -> frozenset[str]:
        """Restore the saved state, if any, into a new manager. Returns every name known to the earlier server.

        Raises:
          LoRAError: it cannot be restored; see `LoRAManager.restore`.
        """
        self._manager = manager
        if not self.saved:
            return frozenset()
        known = manager.restore(self._folder)
        found = manager.list_adapters()
        log_event(
            "restored by --lora-state",
            folder=str(self._folder),
            count=len(found),
            adapters=list(found)[:_MOST_NAMES],
            pinned=[name for name, info in found.items() if info.pinned],
            in_slots=[name for name, info in found.items() if info.level == "slot"],
            unloaded=sorted(known - found.keys())[:_MOST_NAMES],
        )
        return known

    def changed(self) -> None:
        """Save the adapters to disk before returning. Raises LoRAError."""
        with self._saving:
            self.behind = True
            self._manager.save(self._folder, without=self.unloading())
            self.behind = False

    def close(self) -> None:
        """Save for the last time, since orders of use have changed."""
        try:
            self.changed()
        except LoRAError:
            log.exception("--lora-state: adapters could not be saved")
