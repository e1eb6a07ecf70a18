"""The host cache: the newest version of each adapter in order of use, and the requests of evicted adapters."""

from collections.abc import Callable

from jlora.config import LoRARequest
from jlora.errors import NoFreeSlotError
from jlora.manager.lru import LRU
from jlora.manager.packed_adapter import PackedAdapter


class HostCache:
    """Store the newest version of each adapter. All methods are called under the manager's state lock.

    Args:
      max_count: largest number of adapters.
      max_bytes: largest total size in bytes.

    Attributes:
      loaded: name -> newest version of the adapter.
      nbytes: total size of `loaded` in bytes.
      known: name -> request, for each evicted adapter that was added from a request.
      last: name -> (last version, key of that version).
      floor: lower bound of the versions of new adapters.
      pin_when_loaded: names that were pinned in the restored state and are not loaded yet.
    """

    def __init__(self, max_count: int, max_bytes: int):
        self.loaded: LRU[PackedAdapter] = LRU()
        self.nbytes = 0
        self.known: dict[str, LoRARequest] = {}
        self.last: dict[str, tuple[int, str | None]] = {}
        self.floor = 0
        self.pin_when_loaded: set[str] = set()
        self._max_count = max_count
        self._max_bytes = max_bytes

    def version(self, packed: PackedAdapter) -> int:
        """Return the version for a new adapter: the last of its name if the same files are reloaded, else the next."""
        last = self.last.get(packed.name)
        if last is None:
            return self.floor
        recalled = packed.key is not None and packed.key == last[1] and not packed.in_place
        return last[0] if recalled else max(last[0] + 1, self.floor)

    def put(self, packed: PackedAdapter) -> None:
        """Store an adapter as the newest version of its name."""
        old = self.loaded.get(packed.name)
        self.nbytes += packed.nbytes - (0 if old is None else old.nbytes)
        self.last[packed.name] = (packed.version, packed.key)
        self.loaded.put(packed.name, packed)
        self.known.pop(packed.name, None)
        if packed.name in self.pin_when_loaded:
            self.pin_when_loaded.discard(packed.name)
            self.loaded.pin(packed.name)

    def pinned(self, name: str) -> bool:
        """Return True if an adapter is pinned, or will be once it is loaded after a restore."""
        return self.loaded.pinned(name) or name in self.pin_when_loaded

    def unpin(self, name: str) -> bool:
        """Let an adapter be evicted again. Return True if it was pinned."""
        was = self.pinned(name)
        self.pin_when_loaded.discard(name)
        self.loaded.unpin(name)
        return was

    def has_room(self, count: int, nbytes: int) -> bool:
        """Return True if an empty host cache has room for `count` adapters of `nbytes` bytes in total."""
        return count <= self._max_count and nbytes <= self._max_bytes

    def clear(self) -> None:
        """Remove all adapters, requests and versions."""
        for name in self.loaded:
            self._take_out(name)
        self.known.clear()
        self.last.clear()
        self.pin_when_loaded.clear()
        self.floor = 0

    def newest(self, packed: PackedAdapter) -> bool:
        """Return True if `packed` is the newest version of its name."""
        return self.loaded.get(packed.name) is packed

    def evict(self, name: str) -> None:
        """Remove an adapter from the cache. Its request, if any, is kept in `known`."""
        if (request := self.loaded[name].request) is not None:
            self.known[name] = request
        self._take_out(name)

    def forget(self, name: str) -> bool:
        """Remove a name from the cache and from `known`. Return False if it was in neither.

        The last version is kept without its key, so an adapter added later under this name gets a new version.
        """
        if name in self.last:
            self.last[name] = (self.last[name][0], None)
        self.pin_when_loaded.discard(name)
        found = self.known.pop(name, None) is not None
        if name in self.loaded:
            self._take_out(name)
            return True
        return found

    def _take_out(self, name: str) -> None:
        self.nbytes -= self.loaded.remove(name).nbytes

    def victims_for(self, new: PackedAdapter | None, busy: Callable[[PackedAdapter], bool]) -> list[str]:
        """Return the names to evict, least recently used first, to make room for `new`.

        Args:
          new: the adapter to add; None if there is none.
          busy: returns True for an adapter that must not be evicted.

        Raises:
          NoFreeSlotError: there is too little room even if all evictable adapters are evicted.
        """
        name = None if new is None else new.name
        replaced = None if name is None else self.loaded.get(name)
        count = len(self.loaded) + (new is not None and replaced is None) - self._max_count
        size = self.nbytes - (0 if replaced is None else replaced.nbytes) - self._max_bytes
        size += 0 if new is None else new.nbytes
        victims: list[str] = []
        for candidate in self.loaded.evictable(lambda n: n == name or busy(self.loaded[n])):
            if count <= 0 and size <= 0:
                break
            victims.append(candidate)
            count -= 1
            size -= self.loaded[candidate].nbytes
        if count > 0:
            raise NoFreeSlotError(
                f"the host cache of {self._max_count} adapters is full, and each is pinned or held by an open batch; "
                "unpin or remove one, or raise max_cpu_loras"
            )
        if size > 0:
            raise NoFreeSlotError(
                f"adapter {name!r} needs {0 if new is None else new.nbytes} bytes of a host cache of "
                f"{self._max_bytes}, and what else is there is pinned or held by an open batch; raise max_cpu_bytes"
            )
        return victims
