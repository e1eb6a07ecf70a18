"""The host side: adapters are loaded, let into the host cache, updated there, evicted and recalled."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import jax

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
from jlora.manager.multihost import Coordinator, itself
from jlora.manager.names import SiteIndex
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.report import unknown_name
from jlora.manager.slot_table import SlotTable
from jlora.manager.stage import pack_files, pack_in_memory
from jlora.manager.update import to_host, updated

D = TypeVar("D")
R = TypeVar("R")

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
        coordinator: Coordinator,
    ):
        self._config = config
        self._wrapped = wrapped
        self._target = (wrapped, index, slots.pool)  # which adapters are packed for
        self._cache = cache
        self._leases = leases
        self._slots = slots
        self._counts = counts
        self._state_lock = state_lock
        self._changed = changed
        self._resolve = resolve
        self._coordinator = coordinator
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
            raise AdapterNotFoundError(unknown_name(name, self._cache))
        return content

    def request_of(self, name: str) -> LoRARequest:
        """What a name is loaded from again that was evicted. Raises AdapterNotFoundError."""
        if (known := self._cache.known.get(name)) is None:
            raise AdapterNotFoundError(unknown_name(name, self._cache))
        return known

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
            return self.loader.start(request, again=True, anew=request.load_inplace, ahead=True).future()

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
                if name in self._cache.contents:
                    return
                load = self.loader.start(self.request_of(name), again=True)
                load.wanted += 1
            self.wait(load, None)

    # --- loading, on any thread -------------------------------------------------------------------------------------

    def _load(self, load: Load) -> bool:
        """The work of one load, on its thread."""
        request = load.request
        result = False
        if request.load_inplace or not self.touch(request.name):
            started = time.monotonic()
            with _logged(request.name, request.path):
                content = self._agreed(partial(self._read, request, load))
                result = self.admit(content, request.load_inplace, load.patience, load)
            with self._state_lock:
                self.load_seconds.add(time.monotonic() - started)
        if load.ahead:
            with self._state_lock:
                newest = self._cache.contents.get(request.name)
            if newest is not None:
                self._slots.move_ahead(newest, self._state_lock, self._config.max_staging_bytes)
        return result

    def _read(self, request: LoRARequest, load: Load | None = None) -> PackedAdapter:
        """Find, read and pack an adapter; no lock is held."""
        found = self._find(request, load)
        with self.loader.turn:
            if load is not None:
                self.loader.check_wanted(load)
            return pack_files(request, found, *self._target, allow_nonfinite=self.allow_nonfinite)

    def _agreed(self, read: Callable[[], PackedAdapter]) -> PackedAdapter:
        """Return what `read` gives, the same in all processes; in page-locked memory, if there is room."""
        content, keys = self._coordinator.agree(
            read, same=lambda content: [content.name, content.digest()], own=lambda content: content.key
        )
        if len(keys) > 1:  # new files in one process make a new version in all
            content.key = None if None in keys else " ".join(keys)
        content.blocks = self.pinned(content.blocks)
        return content

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

    def add(self, adapter: Adapter, replace: bool, patience: Patience) -> bool:
        """Stage and admit an adapter that is in memory."""
        with _logged(adapter.name, None):
            pack = partial(pack_in_memory, adapter, *self._target, allow_nonfinite=self.allow_nonfinite)
            return self.admit(self._agreed(pack), replace, patience)

    def _find(self, request: LoRARequest, load: Load | None = None) -> AdapterFolder:
        """The local folder of a request, fetched if need be, unless nobody wants that load any more."""
        if self._resolve is None and os.path.exists(os.path.expanduser(request.path)):
            return resolve(request.path, request.name)
        with nullcontext() if load is None else self.loader.fetching(load):
            path = request.path if self._resolve is None else self._resolve(request)
            return resolve(path, request.name, request.revision, local_only=request.local_only)

    def read(self, request: LoRARequest) -> PackedAdapter:
        """Read and pack an adapter. It is not put into the host cache, nor into page-locked memory."""
        with _logged(request.name, request.path):
            return self._read(request)

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

        def decide() -> list[str] | None:
            self._wrapped.check()
            if load is not None:
                self.loader.check_wanted(load)
            old = self._cache.contents.get(name)
            if old is not None:
                if not replace:
                    return None
                if load is not None:
                    load.in_use = self.held(old)
                self.check_free(old, "replacing", patience)
            return self._cache.victims_for(content, self.busy)

        def put(victims: list[str] | None) -> bool:
            if victims is None:
                self._cache.contents.touch(name)
                return False
            self.put(content, victims, self._cache.version(content))
            return True

        return self.commit(decide, put, patience)

    def put(self, content: PackedAdapter, victims: Iterable[str], version: int) -> None:
        for victim in victims:
            self.evict(victim)
        content.version = version
        self._cache.put(content)
        self._counts["host_loads"] += 1

    def update(self, name: str, arrays: Mapping[str, Any], patience: Patience) -> int:
        """See `LoRAManager.update_adapter`."""
        self.recall(name)
        with self._state_lock:
            old = self.newest(name)
        pool = self._slots.pool

        def read() -> tuple[PackedAdapter, tuple[Block, ...]]:
            if isinstance(arrays, Mapping) and any(isinstance(array, jax.Array) for array in arrays.values()):
                self._coordinator.refuse("update_adapter from device arrays", "give it NumPy arrays, the same in each")
            return updated(old, arrays, pool, allow_nonfinite=self.allow_nonfinite)

        (content, written), _ = self._coordinator.agree(read, same=lambda new: [name, new[0].digest()])
        pool.compile()

        def decide() -> list[str]:
            self._wrapped.check()
            if not self._cache.newest(old):
                raise AdapterInUseError(f"adapter {name!r} was replaced or removed while it was updated; try again")
            self.check_free(old, "updating", patience)
            return self._cache.victims_for(content, self.busy)

        def put(victims: list[str]) -> None:
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

        self.commit(decide, put, patience, writes=True)
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

    def check_free(self, content: PackedAdapter, doing: str, patience: Patience, *, handled: bool = False) -> None:
        """Check that no open batch is in the way of a call. Under the manager's lock.

        Args:
          handled: whether batches with a version that handles keep are in the way, too.

        Raises:
          AdapterInUseError: one is, and there is no time to wait, or it is this thread's own. Over several processes
            none is waited for: when it is closed may differ.
          Held: one is, and there is time (see `commit`).
        """
        if not (content in self._leases.leased() if handled else self.held(content)):
            return
        own = patience.thread is not None and patience.thread in self._leases.threads(content)
        if own or patience.over or self._coordinator.several:
            raise in_use(content.name, doing)
        raise Held

    def commit(
        self,
        decide: Callable[[], D],
        do: Callable[[D], R],
        patience: Patience,
        *,
        same: Callable[[D], Any] = itself,
        writes: bool = False,
    ) -> R:
        """Decide and do (`Coordinator.commit`), once `decide` finds no open batch in the way (`check_free`)."""
        while True:
            seen = self._changed.rings
            try:
                return self._coordinator.commit(decide, do, same, writes=writes)
            except Held:
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


class Held(Exception):
    """Open batches hold an adapter, and a call that waits for them has time left."""


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
