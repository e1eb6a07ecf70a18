"""The host cache: the newest version of each adapter in order of use, and the requests of evicted adapters."""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from jlora.config import LoRARequest
from jlora.errors import NoFreeSlotError
from jlora.layers.forward.lease import Served
from jlora.manager.loaded_adapter import LoadedAdapter

_STAYS = "pinned, held by an open batch, from memory or changed by update_adapter"


class HostCache:
    """Store the newest version of each adapter. All methods are called under the manager's state lock.

    An adapter without a request (from memory, or changed by `update_adapter`) is never evicted, since it could not be
    loaded again.

    Args:
      max_count: largest number of adapters.
      max_bytes: largest total size in bytes.

    Attributes:
      loaded: name -> newest version of the adapter, least recently used first.
      pins: the names in `loaded` that are pinned.
      nbytes: total size of `loaded` in bytes.
      known: name -> request, for each evicted adapter that was added from a request.
      commits: name -> commit of the repository that it was read from, for those of `known` that have one.
      last: name -> (last version, key of that version).
      floor: lower bound of the versions of new adapters.
      pin_when_loaded: names that were pinned in the restored state and are not loaded yet.
    """

    def __init__(self, max_count: int, max_bytes: int):
        self.loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self.pins: set[str] = set()
        self.nbytes = 0
        self.known: dict[str, LoRARequest] = {}
        self.commits: dict[str, str] = {}
        self.last: dict[str, tuple[int, str | None]] = {}
        self.floor = 0
        self.pin_when_loaded: set[str] = set()
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._own: set[str] = set()  # names in `loaded` without a request
        self._sizes: dict[str, int] = {}  # bytes of the last version of each name, loaded or evicted

    def version(self, adapter: LoadedAdapter) -> int:
        """Return the version for a new adapter: the last of its name if the same files are reloaded, else the next."""
        last = self.last.get(adapter.name)
        if last is None:
            return self.floor
        recalled = adapter.key is not None and adapter.key == last[1] and not adapter.in_place
        return last[0] if recalled else max(last[0] + 1, self.floor)

    def changed(self, adapter: LoadedAdapter) -> bool:
        """Return True if an adapter comes back from its request, and its files are others than those of its load."""
        _, key = self.last.get(adapter.name, (0, None))
        same = self.known.get(adapter.name, adapter.request) == adapter.request is not None and not adapter.in_place
        return same and key is not None and adapter.key != key

    def put(self, adapter: LoadedAdapter) -> str | None:
        """Store an adapter as the newest version of its name.

        Returns:
          A warning if adapters that are never evicted now take four fifths of the places, and took less before; else
          None.
        """
        limit, before = -(-self._max_count * 4 // 5), len(self._own)
        old = self.loaded.get(adapter.name)
        self.nbytes += adapter.nbytes - (0 if old is None else old.nbytes)
        self.last[adapter.name] = (adapter.version, adapter.key)
        self.loaded[adapter.name] = adapter
        self.loaded.move_to_end(adapter.name)
        self.known.pop(adapter.name, None)
        self.commits.pop(adapter.name, None)
        self._sizes[adapter.name] = adapter.nbytes
        (self._own.add if adapter.request is None else self._own.discard)(adapter.name)
        if adapter.name in self.pin_when_loaded:
            self.pin_when_loaded.discard(adapter.name)
            self.pins.add(adapter.name)
        if not before < limit <= len(self._own):
            return None
        return (
            f"{len(self._own)} of the {self._max_count} places of the host cache are taken by adapters from memory or "
            "changed by update_adapter, which are never evicted. Once they take all, no other adapter can be loaded: "
            "raise max_cpu_loras (--max-cpu-loras), or remove some"
        )

    def set_request(self, adapter: LoadedAdapter, request: LoRARequest) -> None:
        """Let an adapter of the cache be evicted, and loaded again from a request."""
        adapter.request = request
        self._own.discard(adapter.name)

    def pinned(self, name: str) -> bool:
        """Return True if an adapter is pinned, or will be once it is loaded after a restore."""
        return name in self.pins or name in self.pin_when_loaded

    def unpin(self, name: str) -> bool:
        """Let an adapter be evicted again. Return True if it was pinned."""
        was = self.pinned(name)
        self.pin_when_loaded.discard(name)
        self.pins.discard(name)
        return was

    def has_room(self, count: int, nbytes: int) -> bool:
        """Return True if an empty host cache has room for `count` adapters of `nbytes` bytes in total."""
        return count <= self._max_count and nbytes <= self._max_bytes

    def clear(self) -> None:
        """Remove all adapters, requests and versions."""
        for name in tuple(self.loaded):
            self._take_out(name)
        self.known.clear()
        self.commits.clear()
        self.last.clear()
        self._sizes.clear()
        self.pin_when_loaded.clear()
        self.floor = 0

    def newest(self, adapter: LoadedAdapter) -> bool:
        """Return True if `adapter` is the newest version of its name."""
        return self.loaded.get(adapter.name) is adapter

    def evict(self, name: str) -> None:
        """Remove an adapter from the cache. Its request is kept in `known`."""
        adapter = self.loaded[name]
        if adapter.request is not None:
            self.known[name] = adapter.request
        if adapter.commit is not None:
            self.commits[name] = adapter.commit
        self._take_out(name)

    def forget(self, name: str) -> bool:
        """Remove a name from the cache and from `known`. Return False if it was in neither.

        The last version is kept without its key, so an adapter added later under this name gets a new version.
        """
        if name in self.last:
            self.last[name] = (self.last[name][0], None)
        self.pin_when_loaded.discard(name)
        self._sizes.pop(name, None)
        self.commits.pop(name, None)
        found = self.known.pop(name, None) is not None
        if name in self.loaded:
            self._take_out(name)
            return True
        return found

    def _take_out(self, name: str) -> None:
        self.nbytes -= self.loaded.pop(name).nbytes
        self.pins.discard(name)
        self._own.discard(name)

    def unevictable(self) -> set[str]:
        """Return the names that are not evicted even if no batch holds them: pinned, or without a request."""
        return self._own | self.pins

    def evictable(self, leased: Collection[Served]) -> Iterator[str]:
        """Yield the names that may be evicted, least recently used first.

        The entries must not change during the iteration.

        Args:
          leased: the adapters that open batches hold.
        """
        own, pins = self._own, self.pins  # not `unevictable()`, which copies both at each call
        return (
            name
            for name, adapter in self.loaded.items()
            if name not in own and name not in pins and adapter not in leased
        )

    def victims_for(self, new: LoadedAdapter, leased: Collection[Served]) -> list[str]:
        """Return the names to evict, least recently used first, to make room for `new`.

        Raises:
          NoFreeSlotError: there is too little room even if all evictable adapters are evicted.
        """
        replaced = self.loaded.get(new.name)
        count = len(self.loaded) + (replaced is None) - self._max_count
        size = self.nbytes - (0 if replaced is None else replaced.nbytes) + new.nbytes - self._max_bytes
        victims: list[str] = []
        for candidate in self.evictable(leased):
            if count <= 0 and size <= 0:
                break
            if candidate != new.name:
                victims.append(candidate)
                count -= 1
                size -= self.loaded[candidate].nbytes
        if count > 0:
            raise NoFreeSlotError(
                f"adapter {new.name!r}: the host cache of {self._max_count} adapters is full, and each is {_STAYS}; "
                "unpin or remove one, or raise max_cpu_loras"
            )
        if size > 0:
            raise NoFreeSlotError(
                f"adapter {new.name!r} needs {new.nbytes} bytes of a host cache of {self._max_bytes}, and what else is "
                f"there is {_STAYS}; unpin or remove one, or raise max_cpu_bytes"
            )
        return victims

    def check_room(self, names: Collection[str], leased: Collection[Served]) -> None:
        """Check, before loads, that the cache has room for `names` beside the adapters that cannot be evicted.

        Else the loads would evict each other without end. A name that was never loaded counts as 0 bytes.

        Raises:
          NoFreeSlotError: there is too little room.
        """
        held = {adapter.name for adapter in leased if self.loaded.get(adapter.name) is adapter}
        stay = (self.unevictable() | held).difference(names)
        nbytes = sum(self._sizes.get(name, 0) for name in (*names, *stay))
        full: list[str] = []
        if len(names) + len(stay) > self._max_count:
            full.append(f"max_cpu_loras={self._max_count}")
        if nbytes > self._max_bytes:
            full.append(f"max_cpu_bytes={self._max_bytes}")
        if full:
            some = ", ".join(map(repr, sorted(stay)[:8]))
            others = f" and {len(stay)} others that are {_STAYS} ({some})" if stay else ""
            raise NoFreeSlotError(
                f"{len(names)} adapters of this batch{others} need {nbytes} bytes of the host cache, and exceed "
                f"{' and '.join(full)}; unpin or remove adapters, close batches, or raise it"
            )
