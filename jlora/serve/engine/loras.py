"""The adapters of an engine: versions in use, loads under way, and pending removals.

A sequence holds the version that it began with (`LoRAManager.hold`), so a name can be replaced or removed while it
runs. A waiting request still needs the name. A name that is unloaded meanwhile is refused to new requests at once, and
removed when the last waiting request has begun.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain

from jlora import AdapterHandle, AdapterInfo, LoRABatch, LoRAManager, LoRARequest
from jlora.errors import AdapterInUseError, AdapterNotFoundError, LoRAError, LoRAUsageError, NoFreeSlotError
from jlora.serve.engine.request import AdapterExistsError, RegisteredLoRA
from jlora.serve.engine.resolver_pool import ResolverPool, check_name
from jlora.serve.engine.scheduler import SlotUse
from jlora.serve.engine.sequence import HeldAdapter, Sequence

_LOADS_AT_ONCE = 4
_AHEAD = 8  # adapters of waiting requests to load before their turn
_PAUSE = 0.05  # seconds before a load that found no room is retried


class Loras:
    """The adapters of an engine. See the module.

    Args:
      manager: the model's manager.
      wake: called when a load is done. Must not block.
      resolver_pool: resolves unknown names; None without a resolver.
    """

    def __init__(self, manager: LoRAManager, wake: Callable[[], None], resolver_pool: ResolverPool | None = None):
        self._manager = manager
        self._wake = wake
        self._resolver_pool = resolver_pool
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()  # requests that have not begun, by name
        # State of adapters that the manager does not keep, by name.
        self._registered: dict[str, RegisteredLoRA] = {}
        self._going: set[str] = set()  # unloaded, but needed by waiting requests
        self._coming: Counter[str] = Counter()  # calls of `add` under way, by name
        self._held: dict[tuple[str, int], HeldAdapter] = {}
        self._ended = 0  # number of times that an adapter lost its last sequence
        self._loads: dict[str, tuple[Future[bool], int]] = {}  # and `_ended` when the load began
        self._loaded: set[str] = set()  # names that were loaded since an adapter last lost its last sequence
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
            inplace = self._info(name) is not None
            self._coming[name] += 1
        try:
            # A plain load would return the old version from host memory, so replace it in place, without a gap.
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
        """Refuse a name from now on, and remove its adapter once no request waits for it."""
        with self._lock:
            self._check(name)
            self._going.add(name)
            self._registered.pop(name, None)
            self._let_go()

    def pin(self, name: str) -> None:
        """Keep an adapter in a slot."""
        with self._lock:
            self._check(name)
        self._manager.pin_adapter(name)

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again."""
        with self._lock:
            self._check(name)
        self._manager.unpin_adapter(name)
        self._wake()

    def list(self) -> dict[str, RegisteredLoRA]:
        """Return the adapters that requests may name: those in memory first, then the evicted ones."""
        with self._lock:
            infos = self._manager.list_adapters()
            found: dict[str, RegisteredLoRA] = {}
            for name, info in sorted(infos.items(), key=lambda item: item[1].level == "evicted"):
                if name in self._going:
                    continue
                if name not in self._registered:  # added by a resolver, or to the manager directly
                    path = "" if info.request is None else info.request.path
                    self._registered[name] = RegisteredLoRA(path, int(time.time()))
                found[name] = replace(self._registered[name], info=info)
            self._registered = {name: self._registered[name] for name in found}
            return found

    def unloading(self) -> frozenset[str]:
        """Return the names that are refused to new requests but needed by waiting ones."""
        with self._lock:
            return frozenset(self._going)

    def wanted(self, lora: str | LoRARequest) -> tuple[str, LoRARequest | None, bool]:
        """Count one more request that waits for an adapter.

        Returns:
          Its name, its source if the request has one, and whether the name must be resolved.

        Raises:
          AdapterNotFoundError: the name is unknown and cannot be resolved, or it is being unloaded.
        """
        if isinstance(lora, LoRARequest) and lora.load_inplace:
            raise LoRAUsageError(f"adapter {lora.name!r}: a request cannot replace it (load_inplace); add_lora can")
        name, request = (lora, None) if isinstance(lora, str) else (lora.name, lora)
        with self._lock:
            unknown = self._resolver_pool is not None and request is None and self._info(name) is None
            if unknown:
                check_name(name)
            elif request is None or name in self._going:
                self._check(name)
            self._waiting[name] += 1
        return name, request, unknown

    def not_wanted(self, name: str) -> None:
        """Count one less request that waits for an adapter, since it has begun or ended."""
        with self._lock:
            if not _one_less(self._waiting, name):
                if self._resolver_pool is not None:
                    self._resolver_pool.forget(name)
                self._let_go()

    def _known(self, name: str) -> bool:
        return name not in self._going and self._info(name) is not None

    def _info(self, name: str) -> AdapterInfo | None:
        return self._manager.list_adapters([name]).get(name)

    def _check(self, name: str) -> None:
        if not self._known(name):
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")

    def _let_go(self) -> None:
        for name in tuple(self._going):
            if self._waiting[name] or self._coming[name]:
                continue
            if (begun := self._loads.get(name)) is not None:  # else the load would bring it back
                begun[0].cancel()
            try:
                self._manager.remove_adapter(name, timeout=0)
            except AdapterInUseError:  # an open batch of another caller needs it; `look` retries
                continue
            self._going.discard(name)

    # --- the dispatching thread ---------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Number of versions that running sequences hold."""
        return len(self._held)

    def slots(self) -> SlotUse:
        """Return the current use of the slots."""
        resident = self._manager.list_adapters(level="slot")
        pinned = {name for name, info in resident.items() if self._stays(info)}
        names = {name for name, _ in self._held}
        return SlotUse(
            total=self._manager.config.max_loras,
            running=names | pinned,
            resident=set(resident),
            taken=len(self._held) + len(pinned - names),
        )

    def all_pinned(self) -> set[str] | None:
        """Return the pinned adapters if they take every slot, so that no other can run; else None."""
        infos = self._manager.list_adapters(level="slot")
        full = len(infos) == self._manager.config.max_loras and all(map(self._stays, infos.values()))
        return set(infos) if full else None

    def _places(self) -> int:
        """Return the number of adapters of the host cache that can be evicted, or are not there yet."""
        return (self._manager.config.max_cpu_loras or 1) - self._manager.stats().unevictable

    def _stays(self, info: AdapterInfo) -> bool:
        return info.pinned and info.name not in self._going

    def loaded(self, name: str) -> bool:
        """Return whether an adapter is in host memory or in a slot."""
        info = self._info(name)
        return info is not None and _is_loaded(info)

    def look(self, waiting: Iterable[Sequence]) -> dict[str, LoRAError]:
        """Retry pending removals, and load the adapters of the requests that wait longest.

        Args:
          waiting: requests in the order of the queue.

        Returns:
          Adapter name -> error, for adapters whose requests cannot be served.
        """
        if self._going:
            with self._lock:
                self._let_go()
        failed: dict[str, LoRAError] = {}
        for name, (load, ended) in tuple(self._loads.items()):
            if not load.done():
                if not self._waiting[name]:  # its requests have left, and a load that hangs would block others
                    del self._loads[name]
                    load.cancel()
                continue
            del self._loads[name]
            if self._resolver_pool is not None:
                self._resolver_pool.forget(name)
            error = None if load.cancelled() else load.exception()
            if error is None and self._ended == ended:
                self._loaded.add(name)
            if isinstance(error, NoFreeSlotError) and self._places() > 0 and (self._held or self._ended > ended):
                # Found no room, but running sequences have made some since, or will.
                self._not_before[name] = time.monotonic() + _PAUSE
            elif error is not None:
                failed[name] = _as_error(name, error)
        for name, request in self._ahead(waiting, {*self._loads, *failed}):
            try:
                if request is None:
                    raise AdapterNotFoundError(f"adapter {name!r} was removed before its request began")
                load = self._manager.prefetch(request)
            except Exception as error:  # such as a failure to start a thread
                failed[name] = _as_error(name, error)
                continue
            self._loads[name] = load, self._ended
            load.add_done_callback(lambda _: self._wake())
        return failed

    def _ahead(self, waiting: Iterable[Sequence], coming: Collection[str]) -> Iterator[tuple[str, LoRARequest | None]]:
        """Yield the adapters to load now, except for those in `coming`, with their sources (None if unknown).

        They must not evict each other before their requests begin, or they would be loaded again without end. So only
        places of the host cache are counted whose adapters can be evicted. As sizes are unknown, an adapter that was
        evicted nevertheless is loaded again when it is the first, or once a running adapter has ended.
        """
        waiting = iter(waiting)
        first = next((sequence for sequence in waiting if sequence.lora is not None), None)
        if first is None:  # most steps
            return
        running = {name for name, _ in self._held}
        held = self._manager.list_adapters(running).values()
        places = self._places()
        room = places - sum(_is_loaded(info) and not _is_kept(info) for info in held)
        if room < 1 <= places and self._held:
            return  # a load would find no room before a running sequence ends
        room = max(1, min(_AHEAD, room))
        now, seen = time.monotonic(), set[str]()
        for sequence in chain((first,), waiting):
            name = sequence.lora
            if name is None or name in seen:
                continue
            if self._resolver_pool is not None and self._resolver_pool.under_way(name) and sequence.request is None:
                continue
            info = self._info(name)
            loaded = info is not None and _is_loaded(info)
            if info is not None and loaded and (_is_kept(info) or name in running):
                continue  # takes no other place
            seen.add(name)
            if len(seen) > room or len(self._loads) >= _LOADS_AT_ONCE:
                break
            if name in self._loaded and len(seen) > 1:
                continue
            if name in coming or loaded or now < self._not_before.get(name, 0.0):
                continue
            request = sequence.request if info is None else info.request
            self._not_before.pop(name, None)
            yield name, request

    def begin(self, name: str | None) -> tuple[HeldAdapter | None, LoRABatch]:
        """Hold the newest version of an adapter for one more sequence. Loads no files.

        Returns:
          The held adapter, None for the base model, and a batch of one sequence with it.

        Raises:
          LoadTimeoutError: it was evicted meanwhile.
          NoFreeSlotError: every slot is taken.
          AdapterNotFoundError: it was removed.
        """
        if name is None:
            return None, self._manager.prepare([None])
        batch = self._manager.prepare([name], timeout=0)
        try:
            (handle,) = self._manager.handles(batch)
            assert isinstance(handle, AdapterHandle)
            held = self._held.setdefault((name, handle.version), HeldAdapter(handle))
            if held.handle.packed is not handle.packed:  # evicted and loaded again since, maybe into another slot
                batch.close()
                batch = self._manager.prepare([held.handle])
        except BaseException:
            batch.close()
            raise
        held.users += 1
        return held, batch

    def end(self, held: HeldAdapter) -> None:
        """Release an adapter for one sequence."""
        held.users -= 1
        if not held.users:
            self._held.pop((held.handle.name, held.handle.version), None)
            self._ended += 1
            self._loaded.clear()
            held.handle.close()


def _is_loaded(info: AdapterInfo) -> bool:
    return info.level != "evicted"


def _is_kept(info: AdapterInfo) -> bool:
    """Return True if the host cache never evicts a loaded adapter, see `Stats.unevictable`."""
    return info.pinned or info.request is None


def _as_error(name: str, error: BaseException) -> LoRAError:
    """Return the error of a load as a LoRAError."""
    return error if isinstance(error, LoRAError) else LoRAError(f"adapter {name!r}: {error!r:.300}")


def _one_less(counts: Counter[str], name: str) -> int:
    """Decrement a count and return it. Counts of 0 are dropped."""
    counts[name] -= 1
    return counts[name] or counts.pop(name)
