"""Load adapters into the host cache, update, evict and reload them."""

import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from jlora._memory import pinned_bytes
from jlora.adapters import Adapter
from jlora.adapters.resolve import AdapterFolder, resolve
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoadTimeoutError,
)
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager.blocks import Block
from jlora.manager.extras import check_extras, slot_values
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import Leases
from jlora.manager.loader import Deadline, Load, LoadCancelled, Loader
from jlora.manager.locks import Bell, StateLock
from jlora.manager.multihost import Coordinator, itself
from jlora.manager.names import SiteIndex
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.report import Histogram, unknown_name
from jlora.manager.slot_table import SlotTable
from jlora.manager.stage import pack_files, pack_in_memory
from jlora.manager.update import to_host, updated

D = TypeVar("D")
R = TypeVar("R")

_log = logging.getLogger("jlora")


class Host:
    """Manage the host cache of a manager and the loads that fill it."""

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
        self._target = (wrapped, index, slots.pool)  # adapters are packed for these
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
    def config(self) -> LoRAConfig:
        return self._config

    # --- lookup and loads -------------------------------------------------------------------------------------------

    def newest(self, name: str) -> PackedAdapter:
        """Return the newest version of a name in the host cache.

        Raises:
          AdapterNotFoundError: the name is unknown or evicted.
        """
        packed = self._cache.loaded.get(name)
        if packed is None:
            raise AdapterNotFoundError(unknown_name(name, self._cache))
        return packed

    def request_of(self, name: str) -> LoRARequest:
        """Return the request that reloads an evicted name.

        Raises:
          AdapterNotFoundError: no such name was evicted.
        """
        if (known := self._cache.known.get(name)) is None:
            raise AdapterNotFoundError(unknown_name(name, self._cache))
        return known

    def touch(self, name: str) -> bool:
        """Mark a use of a name. Return False if it is not in the host cache."""
        with self._state_lock:
            if name not in self._cache.loaded:
                return False
            self._cache.loaded.move_to_end(name)
            return True

    def load(self, request: LoRARequest, deadline: Deadline) -> bool:
        """Load a request and wait for it. Return True if it was loaded, False if the name was in the host cache."""
        while True:
            with self._state_lock:
                if (error := self.loader.take_error(request, ran_on=True)) is not None:
                    raise error
                load = self.loader.start(request, anew=request.load_inplace, deadline=deadline)
                load.wanted += 1
            if self.wait([load], deadline.at):
                return load.result

    def prefetch(self, request: LoRARequest) -> "Future[bool]":
        with self._state_lock:
            return self.loader.start(request, anew=request.load_inplace, ahead=True).future()

    def wait(self, loads: Sequence[Load], deadline: float | None) -> bool:
        """Wait for loads until a deadline, then decrement `wanted` of each, which the caller has incremented.

        A load that has not finished at the deadline runs on. One that replaces an adapter is abandoned instead, since
        a later call must read the files anew.

        Returns:
          True if all loads have results. False if one was abandoned, and the caller must start it again.

        Raises:
          AdapterInUseError: at the deadline, open batches still held the adapter to replace.
          LoadTimeoutError: at the deadline, a load had not finished.
          Exception: the error of the first load that failed.
        """
        try:
            for load in loads:
                seen = self._changed.rings
                while not load.done:
                    if deadline is not None and time.monotonic() >= deadline:
                        self._time_out(loads)
                    self._changed.wait(seen, deadline)
                    seen = self._changed.rings
                if load.error is not None and not isinstance(load.error, LoadCancelled):
                    with self._state_lock:
                        self.loader.drop(load)
                    raise load.error
            return all(load.error is None for load in loads)
        finally:
            with self._state_lock:
                for load in loads:
                    load.wanted -= 1
            self._changed.ring()

    def _time_out(self, loads: Sequence[Load]) -> None:
        """Let loads run on, and raise the error of a call that waited for them, unless they have just finished."""
        with self._state_lock:
            late = [load for load in loads if not load.done]
            for load in late:
                if load.in_use:
                    raise in_use(load.request.name, "replacing")
                if not load.request.load_inplace:
                    load.timed_out = time.monotonic()
        if late:
            names = [
                f"{load.request.name!r} from {load.request.path!r}"
                + (" (with load_inplace, so a repeated call starts anew)" if load.request.load_inplace else "")
                for load in late
            ]
            raise LoadTimeoutError(
                f"loading took longer than the timeout: {', '.join(names)}; loads run on, so repeat the call"
            )

    def recall(self, name: str) -> PackedAdapter:
        """Return the newest version of a name, reloaded into the host cache if it was evicted.

        Raises:
          AdapterNotFoundError: the name is unknown.
          AdapterUnavailableError: it cannot be loaded again.
        """
        while True:
            with self._state_lock:
                if (packed := self._cache.loaded.get(name)) is not None:
                    return packed
                load = self.loader.start(self.request_of(name))
                load.wanted += 1
            self.wait([load], None)

    # --- loading, on any thread -------------------------------------------------------------------------------------

    def _load(self, load: Load) -> bool:
        """Run one load, on its thread. Return True if it was loaded, False if it was in the host cache."""
        request = load.request
        result = False
        if request.load_inplace or not self.touch(request.name):
            started = time.monotonic()
            with self._state_lock:
                known = self._cache.known.get(request.name) == request
            with _logged(request.name, request.path), _reloading(request) if known else nullcontext():
                packed = self._agreed(partial(self._read, request, load))
                result = self.admit(packed, request.load_inplace, load.deadline, load)
            with self._state_lock:
                self.load_seconds.add(time.monotonic() - started)
        if load.ahead:
            with self._state_lock:
                newest = self._cache.loaded.get(request.name)
            if newest is not None:
                self._slots.move_ahead(newest, self._state_lock)
        return result

    def _read(self, request: LoRARequest, load: Load | None = None) -> PackedAdapter:
        """Find, read and pack an adapter. Called without locks."""
        found = self._find(request, load)
        with self.loader.turn:
            if load is not None:
                self.loader.check_wanted(load)
            return pack_files(request, found, *self._target, config=self._config)

    def _agreed(self, read: Callable[[], PackedAdapter]) -> PackedAdapter:
        """Return the result of `read`, checked to be equal in all processes, in page-locked memory if there is room."""

        def checked() -> PackedAdapter:
            packed = read()
            check_extras(packed, self._wrapped)
            return packed

        packed, keys = self._coordinator.agree(
            checked, same=lambda packed: [packed.name, packed.digest()], own=lambda packed: packed.key
        )
        self._measure(packed)
        if len(keys) > 1:  # if the files of one process changed, all get a new version
            packed.key = None if None in keys else " ".join(keys)
        packed.blocks = self.pinned(packed.blocks)
        return packed

    def _measure(self, packed: PackedAdapter) -> None:
        """Set the values of its extras, checked to be equal in all processes."""
        if any(placement.extras for placement in packed.placements):
            wrapped, _, pool = self._target
            compute = partial(slot_values, packed, wrapped, pool.sites)
            packed.extras, _ = self._coordinator.agree(compute, same=_digest)

    def give_up(self, name: str | None = None) -> list[Load]:
        """Abandon the running loads of a name, or all running loads if None. Called under the state lock.

        Returns:
          The abandoned loads. The caller must call `Load.notify` on each after it releases the lock.
        """
        loads = self.loader.under_way(name)
        for load in loads:
            load.finish(False, AdapterNotFoundError(f"adapter {load.request.name!r} was removed while it was loaded"))
            self.loader.drop(load)
        return loads

    def add(self, adapter: Adapter, replace: bool, deadline: Deadline) -> bool:
        """Pack an adapter from memory and admit it to the host cache."""
        with _logged(adapter.name, None):
            pack = partial(pack_in_memory, adapter, *self._target, config=self._config)
            return self.admit(self._agreed(pack), replace, deadline)

    def _find(self, request: LoRARequest, load: Load | None = None) -> AdapterFolder:
        """Return the local folder of a request, downloading it if necessary.

        Raises:
          LoadCancelled: the load was abandoned before the download started.
        """
        if self._resolve is None and os.path.exists(os.path.expanduser(request.path)):
            return resolve(request.path, request.name)
        with nullcontext() if load is None else self.loader.fetching(load):
            path = request.path if self._resolve is None else self._resolve(request)
            return resolve(path, request.name, request.revision, local_only=request.local_only)

    def read_folder(self, found: AdapterFolder) -> PackedAdapter:
        """Read and pack a folder as an adapter without a request, without adding it to the host cache."""
        with _logged(found.name, str(found.folder)):
            packed = pack_files(LoRARequest(found.name, str(found.folder)), found, *self._target, config=self._config)
            packed.request = packed.key = None
            return self.measured(packed)

    def read(self, request: LoRARequest) -> PackedAdapter:
        """Read and pack an adapter, without adding it to the host cache or to page-locked memory."""
        with _logged(request.name, request.path):
            return self.measured(self._read(request))

    def measured(self, packed: PackedAdapter) -> PackedAdapter:
        """Return an adapter, with the values of its extras."""
        check_extras(packed, self._wrapped)
        self._measure(packed)
        return packed

    def pinned(self, blocks: tuple[Block, ...], others: Collection[PackedAdapter] = ()) -> tuple[Block, ...]:
        """Return the blocks in page-locked memory, or unchanged if all would exceed `pinned_bytes`."""
        if not self._slots.pool.pins:
            return blocks
        with self._state_lock:
            loaded = (*self._cache.loaded.values(), *others)
            taken = sum(packed.nbytes for packed in loaded if packed.pinned)
        fits = taken + sum(block.nbytes for block in blocks) <= pinned_bytes()
        return self._slots.pool.pin(blocks) if fits else blocks

    def admit(self, packed: PackedAdapter, replace: bool, deadline: Deadline, load: Load | None = None) -> bool:
        """Add an adapter to the host cache, once no open batch holds the version that it replaces.

        Returns:
          False if the name is in the host cache and `replace` is False, else True.

        Raises:
          AdapterInUseError: open batches held the old version for too long.
          LoadCancelled: the load was abandoned.
          NoFreeSlotError: the host cache is full of adapters that cannot be evicted.
        """
        name = packed.name

        def decide() -> list[str] | None:
            self._wrapped.check()
            if load is not None:
                self.loader.check_wanted(load)
            old = self._cache.loaded.get(name)
            if old is not None:
                if not replace:
                    return None
                if load is not None:
                    load.in_use = self.held(old)
                self.check_free(old, "replacing", deadline)
            return self._cache.victims_for(packed, self._leases.leased())

        def put(victims: list[str] | None) -> bool:
            if victims is None:
                self._cache.loaded.move_to_end(name)
                return False
            self.put(packed, victims, self._cache.version(packed))
            return True

        return self.commit(decide, put, deadline)

    def put(self, packed: PackedAdapter, victims: Iterable[str], version: int) -> None:
        for victim in victims:
            self.evict(victim)
        packed.version = version
        self._cache.put(packed)
        self._counts["host_loads"] += 1

    def update(self, name: str, arrays: Mapping[str, Any], deadline: Deadline) -> int:
        """See `LoRAManager.update_adapter`."""
        old = self.recall(name)
        pool = self._slots.pool

        def read() -> tuple[PackedAdapter, tuple[Block, ...]]:
            if isinstance(arrays, Mapping) and any(isinstance(array, jax.Array) for array in arrays.values()):
                self._coordinator.refuse("update_adapter from device arrays", "give it NumPy arrays, the same in each")
            new = updated(old, arrays, pool, allow_nonfinite=self._config.allow_nonfinite)
            check_extras(new[0], self._wrapped)
            return new

        (packed, written), _ = self._coordinator.agree(read, same=lambda new: [name, new[0].digest()])
        self._measure(packed)
        pool.compile()

        def decide() -> list[str]:
            self._wrapped.check()
            if not self._cache.newest(old):
                raise AdapterInUseError(
                    f"adapter {name!r} was replaced, removed or evicted while it was updated; try again"
                )
            self.check_free(old, "updating", deadline)
            return self._cache.victims_for(packed, self._leases.leased())

        def put(victims: list[str]) -> None:
            if not packed.on_host:
                # Start the thread before the cache changes: if it cannot start, the slot could never be evicted.
                # The thread blocks on the state lock, which this thread holds.
                copying = threading.Thread(target=self._copy_back, args=(packed,), name="jlora-copy-back")
                copying.daemon = True
                copying.start()
                packed.copying = True
            for victim in victims:
                self.evict(victim)
            packed.version = self._cache.version(packed)
            self._cache.put(packed)
            self._slots.replace(old, packed, written)

        self.commit(decide, put, deadline, writes=True)
        _log.info("updated %r to version %d", name, packed.version)
        return packed.version

    def _copy_back(self, packed: PackedAdapter) -> None:
        """Copy the blocks of a device update to host memory. Runs on its own thread, after the update."""
        try:
            with self._state_lock:
                blocks = packed.blocks
            pinned = self.pinned(blocks)  # directly from the device
            blocks = to_host(blocks) if pinned is blocks else pinned
            with self._state_lock:
                packed.blocks = blocks
                packed.on_host = True
        finally:
            with self._state_lock:
                packed.copying = False
                self._slots.pool.let_go()
            self._changed.ring()

    # --- eviction ---------------------------------------------------------------------------------------------------

    def held(self, packed: PackedAdapter) -> bool:
        """Return True if an open batch holds the adapter and no handle does."""
        return packed in self._leases.leased() and packed not in self._leases.handled()

    def check_free(self, packed: PackedAdapter, doing: str, deadline: Deadline, *, handled: bool = False) -> None:
        """Check that no open batch holds an adapter that a call changes. Called under the state lock.

        Args:
          packed: the adapter.
          doing: the action, for the error message.
          deadline: limit of the wait.
          handled: also check batches with a version that a handle holds.

        Raises:
          AdapterInUseError: an open batch holds the adapter, and the deadline has passed, the batch belongs to the
            calling thread, or the mesh spans several processes, where batches may close at different times.
          Held: an open batch holds the adapter, and there is time to wait (see `commit`).
        """
        if not (packed in self._leases.leased() if handled else self.held(packed)):
            return
        own = deadline.thread is not None and deadline.thread in self._leases.threads(packed)
        if own or deadline.over or self._coordinator.several:
            raise in_use(packed.name, doing)
        raise Held

    def commit(
        self,
        decide: Callable[[], D],
        do: Callable[[D], R],
        deadline: Deadline,
        *,
        same: Callable[[D], Any] = itself,
        writes: bool = False,
    ) -> R:
        """Run `Coordinator.commit`, again after each change while `decide` raises `Held`."""
        while True:
            seen = self._changed.rings
            try:
                return self._coordinator.commit(decide, do, same, writes=writes)
            except Held:
                self._changed.wait(seen, deadline.at)

    def evict(self, name: str) -> None:
        """Evict an adapter from the host cache and from its slot."""
        packed = self._cache.loaded[name]
        self._cache.evict(name)
        self._slots.release(packed)
        self._counts["host_evictions"] += 1
        _log.info("evicted %r from the host cache", name)

    def oldest(self) -> str | None:
        """Return the name that is evicted next; None if there is none."""
        return next(self._cache.evictable(self._leases.leased()), None)


def _digest(values: Mapping[str, np.ndarray]) -> list[int]:
    return [zlib.crc32(array.data) for array in values.values()]


class Held(Exception):
    """Raised if open batches hold an adapter and the deadline of the call has not passed."""


@contextmanager
def _logged(name: str, path: str | None) -> Generator[None, None, None]:
    """Log the end or the failure of a load. Names and messages are escaped, because they come from outside."""
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


@contextmanager
def _reloading(request: LoRARequest) -> Generator[None, None, None]:
    """Raise AdapterUnavailableError, with a warning in the log, if an evicted adapter cannot be read again."""
    try:
        yield
    except (AdapterNotFoundError, AdapterFormatError, AdapterMismatchError, OSError) as error:
        _log.warning("adapter %r is unavailable; its files are gone or damaged: %.500r", request.name, str(error))
        raise AdapterUnavailableError(
            f"adapter {request.name!r} was evicted and cannot be loaded again from {request.path!r}: {error}"
        ) from error


def in_use(name: str, doing: str) -> AdapterInUseError:
    return AdapterInUseError(f"adapter {name!r} is held by an open batch; close it before {doing} the adapter")
