"""The host side: adapters are loaded, let into the host cache, updated there, evicted and recalled."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

from jlora.adapters import Adapter
from jlora.adapters.resolve import AdapterFolder, resolve
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import AdapterInUseError, AdapterNotFoundError, LoadTimeoutError
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager.blocks import Block
from jlora.manager.histogram import Histogram
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import Leases
from jlora.manager.loader import Load, LoadCancelled, Loader, Patience
from jlora.manager.locks import Bell, StateLock
from jlora.manager.names import SiteIndex
from jlora.manager.packed_adapter import PackedAdapter, Placement
from jlora.manager.report import unknown_name
from jlora.manager.slot_table import SlotTable
from jlora.manager.stage import pack_files, pack_in_memory
from jlora.manager.update import to_host, updated

_log = logging.getLogger("jlora")


class Host:
    """The host cache of a manager, and the loads that fill it."""

    def __init__(
        self,
        config: LoRAConfig,
        wrapped: WrappedModel,
        index: SiteIndex,
        cache: HostCache,
        leases: Leases,
        slots: SlotTable,
        counts: Counter[str],
        state_lock: StateLock,
        changed: Bell,
        resolve: Callable[[LoRARequest], str] | None,
    ):
        self._config = config
        self._wrapped = wrapped
        self._index = index
        self._cache = cache
        self._leases = leases
        self._slots = slots
        self._counts = counts
        self._state_lock = state_lock
        self._changed = changed
        self._resolve = resolve
        self.loader = Loader(self._load, state_lock, changed)
        self.load_seconds = Histogram()

    @property
    def allow_nonfinite(self) -> bool:
        return self._config.allow_nonfinite

    # --- asking for adapters ----------------------------------------------------------------------------------------

    def newest(self, name: str) -> PackedAdapter:
        """The newest content of a name that is on the host. Raises AdapterNotFoundError."""
        content = self._cache.contents.get(name)
        if content is None:
            raise AdapterNotFoundError(unknown_name(name, self._cache.contents, self._cache.known))
        return content

    def touch(self, name: str) -> bool:
        """Mark a use; False where the name is not on the host."""
        with self._state_lock:
            if name not in self._cache.contents:
                return False
            self._cache.contents.touch(name)
            return True

    def load(self, request: LoRARequest, patience: Patience) -> bool:
        """Load what a request asks for, and wait. True if it was loaded, False if it was there."""
        while True:
            with self._state_lock:
                load = self.loader.start(request, again=True, anew=request.load_inplace, patience=patience)
                load.wanted += 1
            if self.wait(load, patience.deadline):
                return load.result

    def prefetch(self, request: LoRARequest) -> "Future[bool]":
        with self._state_lock:
            return self.loader.start(request, again=True, anew=self._anew(request), ahead=True).future()

    def _anew(self, request: LoRARequest) -> bool:
        """Whether a prefetch is not to join a load that is under way: that one may have read older files."""
        return request.load_inplace

    def wait(self, load: Load, deadline: float | None) -> bool:
        """Wait for a load that the caller wants (it has counted itself in `load.wanted`). Raises what it raised.

        Returns:
          Whether there is a result. If not, it was given up before the caller came, and is to be started again.
        """
        name = load.request.name
        try:
            seen = self._changed.rings
            while not load.done:
                if deadline is not None and time.monotonic() >= deadline:
                    if load.in_use:
                        raise in_use(name, "replacing")
                    raise LoadTimeoutError(f"adapter {name!r}: loading it from {load.request.path!r} took too long")
                self._changed.wait(seen, deadline)
                seen = self._changed.rings
        finally:
            with self._state_lock:
                load.wanted -= 1
            self._changed.ring()
        if load.error is None:
            return True
        with self._state_lock:
            self.loader.forget(load)
        if isinstance(load.error, LoadCancelled):
            return False
        raise load.error

    def recall(self, name: str) -> None:
        """Load a name again that was evicted from the host cache. Raises AdapterNotFoundError for an unknown one."""
        while True:
            with self._state_lock:
                known = self._cache.known.get(name)
                if name in self._cache.contents or known is None:
                    self.newest(name)
                    return
                load = self.loader.start(known, again=True)
                load.wanted += 1
            self.wait(load, None)

    # --- loading, on any thread -------------------------------------------------------------------------------------

    def _load(self, load: Load) -> bool:
        """The work of one load, on its thread."""
        request = load.request
        result = False
        if request.load_inplace or not self._found(request.name):
            started = time.monotonic()
            with _logged(request.name, request.path):
                found = self._find(request, load)
                with self.loader.turn:
                    self.loader.check_wanted(load)
                    content = self._staged(self._pack(request, found))
                result = self._arrived(load, content)
            with self._state_lock:
                self.load_seconds.add(time.monotonic() - started)
        if load.ahead:
            with self._state_lock:
                newest = load.content or self._cache.contents.get(request.name)
            if newest is not None:
                self._slots.move_ahead(newest, self._state_lock, self._config.max_staging_bytes)
        return result

    def _found(self, name: str) -> bool:
        """Whether a load finds that its adapter is there already."""
        return self.touch(name)

    def _arrived(self, load: Load, content: PackedAdapter) -> bool:
        """What becomes of the content of a load."""
        return self.admit(content, load.request.load_inplace, load.patience, load)

    def give_up(self, name: str | None = None) -> list[Load]:
        """End what is loaded, or being loaded, and not let in yet: of a name or of all. Under the manager's lock.

        Returns:
          These loads; their futures are to be told outside of the lock (`Load.tell`).
        """
        loads = self.loader.under_way(name)
        for load in loads:
            load.finish(False, AdapterNotFoundError(f"adapter {load.request.name!r} was removed while it was loaded"))
            self.loader.abandon(load)
        return loads

    def give_up_request(self, request: LoRARequest, *, reading: bool) -> None:
        """See `LoRAManager.give_up`."""

    def add(self, adapter: Adapter, replace: bool, patience: Patience) -> bool:
        """Stage and admit an adapter that is in memory."""
        with _logged(adapter.name, None):
            return self.admit(self._in_memory(adapter), replace, patience)

    def _in_memory(self, adapter: Adapter) -> PackedAdapter:
        """Check and pack an adapter that is in memory."""
        return self._staged(
            pack_in_memory(
                adapter, self._wrapped, self._index, self._slots.pool, allow_nonfinite=self._config.allow_nonfinite
            )
        )

    def _find(self, request: LoRARequest, load: Load | None = None) -> AdapterFolder:
        """The local folder of a request, fetched if need be, unless nobody wants that load any more."""
        if self._resolve is None and os.path.exists(os.path.expanduser(request.path)):
            return resolve(request.path, request.name)
        with nullcontext() if load is None else self.loader.fetching(load):
            path = request.path if self._resolve is None else self._resolve(request)
            return resolve(path, request.name, request.revision, local_only=request.local_only)

    def _pack(self, request: LoRARequest, found: AdapterFolder) -> PackedAdapter:
        """Read and pack an adapter; no lock is held."""
        return pack_files(
            request,
            found,
            self._wrapped,
            self._index,
            self._slots.pool,
            allow_nonfinite=self._config.allow_nonfinite,
        )

    def _staged(self, content: PackedAdapter) -> PackedAdapter:
        content.fingerprint = self._fingerprint(content.placements, content.blocks)
        content.blocks = self.pinned(content.blocks)
        return content

    def read(self, request: LoRARequest) -> PackedAdapter:
        """Read and pack an adapter. It is not put into the host cache, nor into page-locked memory."""
        with _logged(request.name, request.path):
            return self._pack(request, self._find(request))

    def _fingerprint(self, placements: tuple[Placement, ...], blocks: tuple[Block, ...]) -> str:
        return ""

    def pinned(self, blocks: tuple[Block, ...], others: Collection[PackedAdapter] = ()) -> tuple[Block, ...]:
        """The blocks in page-locked memory, while there is `max_pinned_bytes` of room for that."""
        if not self._slots.pool.pins:
            return blocks
        with self._state_lock:
            contents = (*(self._cache.contents[name] for name in self._cache.contents), *others)
            taken = sum(content.nbytes for content in contents if content.pinned)
        fits = taken + sum(block.nbytes for block in blocks) <= self._config.max_pinned_bytes
        return self._slots.pool.pin(blocks) if fits else blocks

    def admit(self, content: PackedAdapter, replace: bool, patience: Patience, load: Load | None = None) -> bool:
        """Make `content` the newest of its name, once nothing holds what it replaces. False if the name is there."""
        name = content.name
        while True:
            seen = self._changed.rings
            with self._state_lock:
                self._wrapped.check()
                if load is not None:
                    self.loader.check_wanted(load)
                old = self._cache.contents.get(name)
                if old is not None and not replace:
                    self._cache.contents.touch(name)
                    return False
                if old is None or not self.held(old):
                    victims = self._cache.victims_for(content, self.busy)
                    self.put(content, victims, self._cache.version(content))
                    return True
            if load is not None:
                load.in_use = True
            self.wait_for(old, "replacing", patience, seen)

    def put(self, content: PackedAdapter, victims: Iterable[str], version: int) -> None:
        for victim in victims:
            self.evict(victim)
        content.version = version
        self._cache.put(content)
        self._counts["host_loads"] += 1

    def update(self, name: str, arrays: Mapping[str, Any], patience: Patience, step_lock: Any) -> int:
        """See `LoRAManager.update_adapter`."""
        self.recall(name)
        with self._state_lock:
            old = self.newest(name)
        pool = self._slots.pool
        content, written = updated(old, arrays, pool, allow_nonfinite=self._config.allow_nonfinite)
        pool.compile()

        while True:
            seen = self._changed.rings
            with step_lock, self._state_lock:
                self._wrapped.check()
                if not self._cache.newest(old):
                    raise AdapterInUseError(f"adapter {name!r} was replaced or removed while it was updated; try again")
                if not self.held(old):
                    victims = self._cache.victims_for(content, self.busy)
                    if not content.on_host:
                        # First, for a content that is never copied back is never evicted; it waits for this lock.
                        copying = threading.Thread(target=self._copy_back, args=(content,), name="jlora-copy-back")
                        copying.daemon = True
                        copying.start()
                        content.copying = True
                    for victim in victims:
                        self.evict(victim)
                    content.version = self._cache.version(content)
                    self._cache.put(content)
                    self._slots.replace(old, content, written)
                    break
            self.wait_for(old, "updating", patience, seen)
        _log.info("updated %r to version %d", name, content.version)
        return content.version

    def _copy_back(self, content: PackedAdapter) -> None:
        """The blocks of a device update into host memory, on a thread of its own, once the update is over."""
        try:
            with self._state_lock:
                blocks = content.blocks
            pinned = self.pinned(blocks)  # from the device, with no copy in between
            blocks = to_host(blocks) if pinned is blocks else pinned
            with self._state_lock:
                content.blocks = blocks
                content.on_host = True
        finally:
            with self._state_lock:
                content.copying = False
                self._slots.pool.let_go()
            self._changed.ring()

    # --- letting go -------------------------------------------------------------------------------------------------

    def held(self, content: PackedAdapter) -> bool:
        """Whether an open batch holds a content that no handle keeps."""
        return content in self._leases.leased() and content not in self._leases.handled()

    def busy(self, content: PackedAdapter) -> bool:
        """Whether it must stay on the host."""
        return not content.on_host or content in self._leases.leased()

    def wait_until_free(self, name: str, doing: str, patience: Patience, *, handled: bool = False) -> int | None:
        """Wait until no open batch holds an adapter. Returns its version, None where it is not on the host.

        Args:
          handled: whether to wait for batches with a version that handles keep, too.
        """
        while True:
            seen = self._changed.rings
            with self._state_lock:
                content = self._cache.contents.get(name)
                held = content is not None and (content in self._leases.leased() if handled else self.held(content))
                if content is None or not held:
                    return None if content is None else content.version
            self.wait_for(content, doing, patience, seen)

    def wait_for(self, content: PackedAdapter, doing: str, patience: Patience, seen: int) -> None:
        """Wait for a change since `seen`: open batches hold a content. Raises AdapterInUseError where that is in vain,
        or too late."""
        if patience.over or (patience.thread is not None and patience.thread in self._leases.threads(content)):
            raise in_use(content.name, doing)
        self._changed.wait(seen, patience.deadline)

    def evict(self, name: str) -> None:
        """Out of the host cache, and out of its slot."""
        content = self._cache.contents[name]
        self._cache.evict(name)
        self._slots.release(content)
        self._counts["host_evictions"] += 1
        _log.info("evicted %r from the host cache", name)

    def oldest(self) -> str | None:
        """The name that is evicted next."""
        contents = self._cache.contents
        return next(contents.evictable(lambda n: self.busy(contents[n])), None)


@contextmanager
def _logged(name: str, path: str | None) -> Generator[None, None, None]:
    """Log a load when it is done, or refused. Names and messages are escaped: they are other people's."""
    started = time.monotonic()
    source = "memory" if path is None else repr(path)
    try:
        yield
    except Exception as error:
        what = "gave up" if isinstance(error, LoadCancelled) else "refused"
        seconds = time.monotonic() - started
        _log.info(
            "%s %r from %s after %.3f s: %s %.300r", what, name, source, seconds, type(error).__name__, str(error)
        )
        raise
    _log.info("loaded %r from %s in %.3f s", name, source, time.monotonic() - started)


def in_use(name: str, doing: str) -> AdapterInUseError:
    return AdapterInUseError(f"adapter {name!r} is held by an open batch; close it before {doing} the adapter")
