"""The adapters of an engine: who uses which version, what is being loaded, and what is to go.

A sequence holds the version that it began with (`LoRAManager.hold`), so a name can be replaced or removed while it
runs. A request that waits still needs the name; a name that is unloaded meanwhile is refused to new requests at once,
and removed when the last of those has begun.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from jlora import LoRABatch, LoRAManager, LoRARequest
from jlora.errors import AdapterInUseError, AdapterNotFoundError, LoRAError, LoRAUsageError, NoFreeSlotError
from jlora.serve.engine.request import AdapterExistsError, RegisteredLoRA
from jlora.serve.engine.resolver_pool import ResolverPool, check_name
from jlora.serve.engine.scheduler import SlotUse
from jlora.serve.engine.sequence import HeldAdapter, Sequence

_LOADS_AT_ONCE = 4
_AHEAD = 8  # adapters of waiting requests that are loaded before their turn
_PAUSE = 0.05  # seconds before a load is tried again that found no room


class NotLoaded(Exception):
    """An adapter has been evicted just now."""


class Loras:
    """See the module. `wake` is called when a load is done; `resolver_pool` knows of names that nobody added."""

    def __init__(self, manager: LoRAManager, wake: Callable[[], None], resolver_pool: ResolverPool | None = None):
        self._manager = manager
        self._wake = wake
        self._resolver_pool = resolver_pool
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()  # requests that have not begun, by name
        # What the manager does not know of its adapters; the one book of the server beside the manager's own.
        self._registered: dict[str, RegisteredLoRA] = {}
        self._going: set[str] = set()  # unloaded, but some that wait need them
        self._coming: Counter[str] = Counter()  # being added by callers
        self._held: dict[tuple[str, int], HeldAdapter] = {}
        self._ended = 0  # how often the last sequence with an adapter has ended
        self._loads: dict[str, tuple[Future[bool], int]] = {}  # and how often it had when the load began
        self._not_before: dict[str, float] = {}

    # --- any thread ---------------------------------------------------------------------------------------------

    def add(self, request: LoRARequest, timeout: float | None, path: str | None, parent: str | None) -> None:
        """Load an adapter; see `Engine.add_lora`."""
        name = request.name
        with self._lock:
            known = self._known(name)
            if known and not request.load_inplace:
                raise AdapterExistsError(
                    f"adapter {name!r} is loaded already; unload it first, or say load_inplace to replace it"
                )
            inplace = self._manager.level(name) is not None
            self._coming[name] += 1
        try:
            # Loaded from the host's memory it would come back as it was, and it must not be forgotten in between.
            loaded = self._manager.add_adapter(request, load_inplace=inplace, timeout=timeout)
            if not loaded and not known:
                raise AdapterExistsError(f"adapter {name!r} was loaded by another call meanwhile")
            with self._lock:
                self._going.discard(name)
                self._registered[name] = RegisteredLoRA(path or request.path, int(time.time()), parent)
        finally:
            with self._lock:
                _one_less(self._coming, name)
            self._wake()

    def remove(self, name: str) -> None:
        """Refuse a name from now on, and remove it as soon as no request waits for it."""
        with self._lock:
            self._check(name)
            self._going.add(name)
            self._registered.pop(name, None)
            self._let_go()

    def pin(self, name: str) -> None:
        with self._lock:
            self._check(name)
        self._manager.pin_adapter(name)

    def unpin(self, name: str) -> None:
        with self._lock:
            self._check(name)
        self._manager.unpin_adapter(name)
        self._wake()

    def list(self) -> dict[str, RegisteredLoRA]:
        """Those that requests may name: of the host first, then those that were evicted."""
        with self._lock:
            evicted, infos = self._manager.list_evicted(), self._manager.list_adapters()
            found: dict[str, RegisteredLoRA] = {}
            for name in dict.fromkeys((*infos, *evicted, *self._registered)):
                if name in self._going or not (name in infos or name in evicted or self._known(name)):
                    continue
                if name not in self._registered:  # by a resolver, or beside the engine
                    path = infos[name].path if name in infos else evicted[name].path
                    self._registered[name] = RegisteredLoRA(path or "", int(time.time()))
                found[name] = replace(self._registered[name], info=infos.get(name))
            self._registered = {name: self._registered[name] for name in found}
            return found

    def unloading(self) -> frozenset[str]:
        """Those that requests may not name any more, though some that wait still need them."""
        with self._lock:
            return frozenset(self._going)

    def wanted(self, lora: str | LoRARequest) -> tuple[str, LoRARequest | None, bool]:
        """Count one more request that waits for an adapter.

        Returns:
          Its name, where it is loaded from if the request says so, and whether it is to be looked up.

        Raises:
          AdapterNotFoundError: the name is unknown, and cannot be looked up; or it is being unloaded.
        """
        if isinstance(lora, LoRARequest) and lora.load_inplace:
            raise LoRAUsageError(f"adapter {lora.name!r}: a request cannot replace it (load_inplace); add_lora can")
        name, request = (lora, None) if isinstance(lora, str) else (lora.name, lora)
        with self._lock:
            unknown = self._resolver_pool is not None and request is None and self._manager.level(name) is None
            if unknown:
                check_name(name)
            elif request is None or name in self._going:
                self._check(name)
            self._waiting[name] += 1
        return name, request, unknown

    def not_wanted(self, name: str) -> None:
        """One request less waits for it: it has begun, or it has ended before."""
        with self._lock:
            if not _one_less(self._waiting, name):
                if self._resolver_pool is not None:
                    self._resolver_pool.forget(name)
                self._let_go()

    def _known(self, name: str) -> bool:
        return name not in self._going and self._manager.level(name) is not None

    def _check(self, name: str) -> None:
        if not self._known(name):
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")

    def _let_go(self) -> None:
        for name in tuple(self._going):
            if self._waiting[name] or self._coming[name]:
                continue
            if (begun := self._loads.get(name)) is not None:  # or it would come back
                begun[0].cancel()
            try:
                self._manager.remove_adapter(name, timeout=0)
            except AdapterInUseError:  # a batch of somebody else; asked for again
                continue
            self._going.discard(name)

    # --- the dispatching thread ---------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        return len(self._held)

    def slots(self) -> SlotUse:
        """What the slots are used for now."""
        resident = [name for name in self._manager.slot_names if name is not None]
        pinned = {name for name in resident if self._stays(name)}
        names = {name for name, _ in self._held}
        return SlotUse(
            total=self._manager.config.max_loras,
            running=names | pinned,
            resident=set(resident),
            taken=len(self._held) + len(pinned - names),
        )

    def all_pinned(self) -> set[str] | None:
        """The pinned adapters, where they take every slot: no other can run until somebody unpins one."""
        names = {name for name in self._manager.slot_names if name is not None}
        return names if len(names) == self._manager.config.max_loras and all(map(self._stays, names)) else None

    def _stays(self, name: str) -> bool:
        return name not in self._going and self._manager.pinned(name)

    def loaded(self, name: str) -> bool:
        return self._manager.level(name) in ("slot", "host")

    def look(self, waiting: Iterable[Sequence]) -> dict[str, LoRAError]:
        """Remove what could not be removed before, and load the adapters of those that wait longest.

        Args:
          waiting: requests, in their order.

        Returns:
          The adapters whose requests cannot be served, and why.
        """
        if self._going:
            with self._lock:
                self._let_go()
        failed: dict[str, LoRAError] = {}
        for name, (load, ended) in tuple(self._loads.items()):
            if not load.done():
                if not self._waiting[name]:  # those that asked for it have left: it may hang, and others need its place
                    del self._loads[name]
                    load.cancel()
                continue
            del self._loads[name]
            if self._resolver_pool is not None:
                self._resolver_pool.forget(name)
            error = None if load.cancelled() else load.exception()
            if isinstance(error, NoFreeSlotError) and (self._held or self._ended > ended):
                # There was no room for it, and running sequences will make some, or have made it since.
                self._not_before[name] = time.monotonic() + _PAUSE
            elif error is not None:
                failed[name] = _as_error(name, error)
        for name, request in self._ahead(waiting, {*self._loads, *failed}):
            try:
                if request is None:
                    raise AdapterNotFoundError(f"adapter {name!r} was removed before its request began")
                load = self._manager.prefetch(request)
            except Exception as error:  # as where there is no thread for it
                failed[name] = _as_error(name, error)
                continue
            self._loads[name] = load, self._ended
            load.add_done_callback(lambda _: self._wake())
        return failed

    def _ahead(self, waiting: Iterable[Sequence], coming: Collection[str]) -> Iterator[tuple[str, LoRARequest | None]]:
        """The adapters that are to be loaded now, `coming` ones left out; with None where nobody knows from where."""
        room = max(1, min(_AHEAD, (self._manager.config.max_cpu_loras or 1) - len(self._held)))
        now, seen = time.monotonic(), set[str]()
        for sequence in waiting:
            name = sequence.lora
            if name is None or name in seen:
                continue
            if self._resolver_pool is not None and self._resolver_pool.under_way(name) and sequence.request is None:
                continue
            seen.add(name)
            if len(seen) > room or len(self._loads) >= _LOADS_AT_ONCE:
                break
            if name in coming or self.loaded(name) or now < self._not_before.get(name, 0.0):
                continue
            request = self._manager.evicted(name) or sequence.request
            if request is None and self._manager.level(name) is not None:  # since just now
                continue
            self._not_before.pop(name, None)
            yield name, request

    def begin(self, name: str | None) -> tuple[HeldAdapter | None, LoRABatch]:
        """The newest version of an adapter for one more sequence, and a batch of one with it. Loads nothing.

        Raises:
          NotLoaded: it was evicted meanwhile.
          NoFreeSlotError: every slot is taken.
          AdapterNotFoundError: it is gone.
        """
        if name is None:
            return None, self._manager.prepare([None])
        # Leased first, then held: so it cannot be evicted in between, and nothing waits.
        batch, ready = self._manager.prepare([name], wait=False)
        try:
            if not ready[0]:
                if self.loaded(name):
                    raise NoFreeSlotError(f"adapter {name!r} needs a slot, and each is pinned or in use")
                raise NotLoaded(name)
            handle = self._manager.hold(name)
            held = self._held.get((name, handle.version))
            if held is None:
                held = HeldAdapter(handle)
            else:
                handle.close()
            if held.handle.version != batch.versions[0] or held.users:
                batch.close()
                batch = self._manager.prepare([held.handle])
        except BaseException:
            batch.close()
            raise
        self._held[name, held.handle.version] = held
        held.users += 1
        return held, batch

    def end(self, held: HeldAdapter) -> None:
        """One sequence less with it."""
        held.users -= 1
        if not held.users:
            self._held.pop((held.handle.name, held.handle.version), None)
            self._ended += 1
            held.handle.close()


def _as_error(name: str, error: BaseException) -> LoRAError:
    """What a load raised."""
    return error if isinstance(error, LoRAError) else LoRAError(f"adapter {name!r}: {error!r:.300}")


def _one_less(counts: Counter[str], name: str) -> int:
    """How many are left; of none nothing is kept."""
    counts[name] -= 1
    return counts[name] or counts.pop(name)
