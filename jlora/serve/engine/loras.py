"""The adapters of an engine: one record for each name, with all that the manager does not keep.

A name passes through these states, on behalf of the requests that wait for it:

    resolving   it is unknown, and the resolver is called for its source (`unresolved`)
    loading     its load is under way (`load`)
    loaded      requests may begin; each holds the version that it began with, so that its name can be replaced or
                removed while it runs
    removed     refused to new requests, and removed from the manager once the last waiting request has begun
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Set
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jlora import Adapter, AdapterInfo, LoRAManager, LoRARequest
from jlora.errors import AdapterInUseError, AdapterNotFoundError, LoRAError, NoFreeSlotError
from jlora.models import Pooling
from jlora.serve.engine.poolings import Poolings, read_own_pooling
from jlora.serve.engine.request import AdapterExistsError, EngineBusyError, RegisteredLoRA
from jlora.serve.engine.resolvers import Resolve, check_name, resolved
from jlora.serve.engine.scheduler import SlotUse
from jlora.serve.engine.sequence import Sequence, Version

_AHEAD = 8  # adapters of waiting requests to load before their turn; the manager limits the loads that read at a time
_PAUSE = 0.05  # seconds before a load that found no room is retried
_RESOLVERS = 8  # threads that call the resolver
_RETRY = 1.0  # seconds until a request may be sent again if too many wait for the resolver


@dataclass
class _Record:
    """The state of one adapter name. A record with only these default values is dropped.

    Attributes:
      listed: The adapter as `Loras.list` returns it; None before that.
      adding: Number of calls of `Loras.add` under way.
      removed: True from `Loras.remove` until the adapter is removed from the manager.
      waiting: Number of requests that have not begun. All fields below serve them.
      unresolved: Those of them that wait for the resolver; None if it is not called for this name.
      source: Result of the resolver, until the load of it has ended.
      load: The load under way.
      running: The versions that ran when the last load began, unless it failed; None before.
      retry_at: `time.monotonic()` before which no load begins.
    """

    listed: RegisteredLoRA | None = None
    adding: int = 0
    removed: bool = False
    waiting: int = 0
    unresolved: list[Sequence] | None = None
    source: LoRARequest | None = None
    load: Future[bool] | None = None
    running: Set[Version] | None = None
    retry_at: float = 0.0


class Loras:
    """The adapters of an engine. See the module.

    Args:
      manager: The model's manager.
      wake: Called when a load is done or a name is resolved. Must not block.
      resolve: Resolver of unknown names; None for none.
      most: Number of requests that may wait for the resolver.
      fail: Called with a request and the error that ends it, if its name cannot be resolved. Must not block.
      pooling: The pooling of an embedding model; None for another.

    Attributes:
      poolings: Of the adapters of an embedding model; None for another.
    """

    def __init__(
        self,
        manager: LoRAManager,
        wake: Callable[[], None],
        resolve: Resolve | None = None,
        most: int = 0,
        fail: Callable[[Sequence, LoRAError], None] = lambda sequence, error: None,
        pooling: Pooling | None = None,
    ):
        self.poolings = None if pooling is None else Poolings(pooling, wake)
        self._manager = manager
        self._wake = wake
        self._resolve = resolve
        self._most = most
        self._fail = fail
        self._lock = threading.RLock()
        self._records: dict[str, _Record] = {}
        self._retry_removals = False  # True if an open batch of another caller delays a removal
        self._line: deque[str] = deque()  # names that no thread has taken to the resolver
        self._unresolved = 0  # requests that wait for the resolver
        self._threads = 0

    @contextmanager
    def _record(self, name: str) -> Generator[_Record, None, None]:
        """Lock the records, and yield that of a name."""
        with self._lock:
            record = self._records.setdefault(name, _Record())
            try:
                yield record
            finally:
                if record == _Record():
                    del self._records[name]

    # --- changes, on any thread ---------------------------------------------------------------------------------

    def add(
        self,
        adapter: LoRARequest | Adapter,
        load_inplace: bool,
        timeout: float | None,
        path: str | None,
        parent: str | None,
    ) -> None:
        """Load an adapter; see `Engine.add_lora`."""
        name, source, listed = adapter.name, "", None
        if isinstance(adapter, LoRARequest):
            source, load_inplace = adapter.path, load_inplace or adapter.load_inplace
        with self._record(name) as record:
            inplace = self._info(name) is not None
            known = inplace and not record.removed
            if known and not load_inplace:
                raise AdapterExistsError(
                    f"adapter {name!r} is loaded already; unload it first, or say load_inplace to replace it"
                )
            record.adding += 1
        pooling: Pooling | None = None
        try:
            if self.poolings is not None and isinstance(adapter, LoRARequest):
                pooling = read_own_pooling(adapter, self.poolings.base)  # refused before it replaces another
            # A plain load would return the old version from host memory, so replace it in place, without a gap.
            loaded = self._manager.add_adapter(adapter, load_inplace=inplace, timeout=timeout)
            if not loaded and not known:
                raise AdapterExistsError(f"adapter {name!r} was loaded by another call meanwhile")
            listed = RegisteredLoRA(path or source, int(time.time()), parent)
            info = self._info(name)
            same = info is not None and info.request is not None and info.request.path == source
            if self.poolings is not None and info is not None and pooling is not None and same:
                self.poolings.loaded(info, pooling)
        finally:
            with self._record(name) as record:
                record.adding -= 1
                if listed is not None:
                    record.listed, record.removed = listed, False
                self._let_go(name, record)
            self._wake()

    def remove(self, name: str) -> None:
        """Refuse a name from now on, and remove its adapter once no request waits for it."""
        with self._record(name) as record:
            self._check(name, record)
            record.removed, record.listed = True, None
            self._let_go(name, record)

    def pin(self, name: str) -> None:
        """Keep an adapter in a slot."""
        with self._record(name) as record:
            self._check(name, record)
        self._manager.pin_adapter(name)

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again."""
        with self._record(name) as record:
            self._check(name, record)
        self._manager.unpin_adapter(name)
        self._wake()

    def list(self) -> dict[str, RegisteredLoRA]:
        """Return the adapters that requests may name: those in memory first, then the evicted ones."""
        with self._lock:
            infos = self._manager.list_adapters()
            for name in self._records.keys() - infos.keys():  # removed from the manager directly
                with self._record(name) as record:
                    record.listed = None
            found: dict[str, RegisteredLoRA] = {}
            for name, info in sorted(infos.items(), key=lambda item: item[1].level == "evicted"):
                if self._is_removed(name):
                    continue
                record = self._records.setdefault(name, _Record())
                if record.listed is None:  # added by a resolver, or to the manager directly
                    path = "" if info.request is None else info.request.path
                    record.listed = RegisteredLoRA(path, int(time.time()))
                found[name] = replace(record.listed, info=info)
            return found

    def unloading(self) -> frozenset[str]:
        """Return the names that are refused to new requests but needed by waiting ones."""
        with self._lock:
            return frozenset(name for name, record in self._records.items() if record.removed)

    def _info(self, name: str) -> AdapterInfo | None:
        return self._manager.list_adapters([name]).get(name)

    def _is_removed(self, name: str) -> bool:
        return (record := self._records.get(name)) is not None and record.removed

    def _check(self, name: str, record: _Record) -> None:
        if record.removed or self._info(name) is None:
            raise AdapterNotFoundError(f"adapter {name!r} is not loaded")

    def _let_go(self, name: str, record: _Record) -> None:
        """Remove an adapter from the manager if it is to be removed, and no request or call needs it."""
        if not record.removed or record.waiting or record.adding:
            return
        try:
            self._manager.remove_adapter(name, timeout=0)
            record.removed = False
        except AdapterInUseError:  # an open batch of another caller needs it
            self._retry_removals = True

    # --- waiting requests, on any thread ------------------------------------------------------------------------

    def wanted(self, sequences: Seq[Sequence]) -> None:
        """Count the sequences of one request, which wait for its adapter. If the name is unknown, start to resolve it.

        Raises:
          AdapterNotFoundError: the name is unknown and cannot be resolved, or it is being unloaded.
          EngineBusyError: too many requests wait for the resolver.
          LoRAError: no thread can be started for the resolver.
        """
        name, request = sequences[0].lora, sequences[0].request
        if name is None:
            return
        with self._record(name) as record:
            if self._resolve is not None and request is None and self._info(name) is None:
                check_name(name)
                self._look_up(name, record, sequences)
            elif request is None or record.removed:
                self._check(name, record)
            record.waiting += len(sequences)

    def not_wanted(self, sequence: Sequence) -> None:
        """Count a request that waits no more, since it has begun or ended."""
        if (name := sequence.lora) is None:
            return
        with self._record(name) as record:
            record.waiting -= 1
            if record.unresolved and sequence in record.unresolved:
                record.unresolved.remove(sequence)
                self._unresolved -= 1
            if not record.waiting:
                if record.load is not None:  # it may hang, or bring back an adapter that is to be removed
                    record.load.cancel()
                record.load = record.source = record.running = None
                record.retry_at = 0.0
                self._let_go(name, record)

    def _look_up(self, name: str, record: _Record, sequences: Seq[Sequence]) -> None:
        if record.source is not None:  # being loaded
            for sequence in sequences:
                sequence.request = record.source
            return
        if self._unresolved >= self._most:
            raise EngineBusyError(f"{self._unresolved} requests wait for names that are looked up", _RETRY)
        if record.unresolved is None:
            if self._threads < _RESOLVERS:
                try:
                    threading.Thread(target=self._resolve_names, name="jlora-serve-lookup", daemon=True).start()
                except RuntimeError as error:
                    raise LoRAError(f"adapter {name!r} cannot be looked up: {error}") from error
                self._threads += 1
            self._line.append(name)
            record.unresolved = []
        record.unresolved += sequences
        self._unresolved += len(sequences)

    def _resolve_names(self) -> None:
        """Resolve the names in line, each once for all requests that wait for it. Results are not cached.

        A call cannot be interrupted. One that hangs occupies this thread until it returns, and other names share the
        rest. Requests end by their own timeouts, or when they are cancelled.
        """
        assert self._resolve is not None
        while True:
            with self._lock:
                if not self._line:
                    self._threads -= 1
                    return
                name = self._line.popleft()
                with self._record(name) as record:
                    if not record.unresolved:  # they have ended
                        record.unresolved = None
                        continue
            answer = resolved(self._resolve, name)
            with self._record(name) as record:
                for sequence in record.unresolved or ():
                    if isinstance(answer, LoRAError):
                        self._fail(sequence, answer)
                    else:
                        sequence.request = record.source = answer
                self._unresolved -= len(record.unresolved or ())
                record.unresolved = None
            self._wake()

    # --- the dispatching thread ---------------------------------------------------------------------------------

    def slots(self, running: Set[Version]) -> SlotUse:
        """Return the use of the slots while sequences run with these versions."""
        resident = self._manager.list_adapters(level="slot")
        pinned = {name for name, info in resident.items() if self._stays(info)}
        names = {name for name, _ in running}
        return SlotUse(
            total=self._manager.config.max_loras,
            running=names | pinned,
            resident=set(resident),
            taken=len(running) + len(pinned - names),
        )

    def all_pinned(self) -> set[str] | None:
        """Return the pinned adapters if they take every slot, so that no other can run; else None."""
        infos = self._manager.list_adapters(level="slot")
        full = len(infos) == self._manager.config.max_loras and all(map(self._stays, infos.values()))
        return set(infos) if full else None

    def _stays(self, info: AdapterInfo) -> bool:
        return info.pinned and not self._is_removed(info.name)

    def loaded(self, name: str) -> bool:
        """Return whether an adapter is in host memory or in a slot, and its pooling known."""
        info = self._info(name)
        return info is not None and _is_loaded(info) and (self.poolings is None or self.poolings.ready(info))

    def look(self, waiting: Mapping[Sequence, str], running: Set[Version]) -> dict[str, LoRAError]:
        """Retry pending removals, and load the adapters of the requests that wait longest.

        Args:
          waiting: Requests with the names of their adapters, in the order of the queue.
          running: The versions that sequences run with.

        Returns:
          Adapter name -> error, for adapters whose requests cannot be served.
        """
        failed: dict[str, LoRAError] = {}
        with self._lock:
            if self._retry_removals:
                self._retry_removals = False
                for name in tuple(self._records):
                    with self._record(name) as record:
                        self._let_go(name, record)
            for name in set(waiting.values()):
                record = self._records[name]
                if record.load is None or not record.load.done():
                    continue
                error = None if record.load.cancelled() else record.load.exception()
                record.load = record.source = None
                if error is None:
                    continue
                before, record.running = record.running or frozenset(), None
                if isinstance(error, NoFreeSlotError) and self._places() > 0 and (running or before):
                    # Found no room, but running sequences have made some since, or will.
                    record.retry_at = time.monotonic() + _PAUSE
                else:
                    failed[name] = _as_error(name, error)
            self._load_ahead(waiting, running, failed)
        return failed

    def _load_ahead(self, waiting: Mapping[Sequence, str], running: Set[Version], failed: dict[str, LoRAError]) -> None:
        """Start the loads of the adapters that may be loaded now.

        They must not evict each other before their requests begin, or they would be loaded again without end. So only
        places of the host cache are counted whose adapters can be evicted. As sizes are unknown, an adapter that was
        evicted nevertheless is loaded again when it is the first, or once a running adapter has ended.
        """
        if not waiting:  # most steps
            return
        names = {name for name, _ in running}
        held = self._manager.list_adapters(names).values()
        places = self._places()
        room = places - sum(_is_loaded(info) and not _is_kept(info) for info in held)
        if room < 1 <= places and running:
            return  # a load would find no room before a running sequence ends
        room = max(1, min(_AHEAD, room))
        now, seen = time.monotonic(), set[str]()
        for sequence, name in waiting.items():
            record = self._records[name]
            if name in seen or (record.unresolved is not None and sequence.request is None):
                continue
            info = self._info(name)
            loaded = info is not None and _is_loaded(info)
            if info is not None and loaded and (_is_kept(info) or name in names):
                continue  # takes no other place
            seen.add(name)
            if len(seen) > room:
                break
            if record.running is not None and record.running <= running and len(seen) > 1:
                continue
            if record.load is not None or loaded or name in failed or now < record.retry_at:
                continue
            request = sequence.request if info is None else info.request
            try:
                if request is None:
                    raise AdapterNotFoundError(f"adapter {name!r} was removed before its request began")
                record.load = self._manager.prefetch(request)
            except Exception as error:  # such as a failure to start a thread
                failed[name] = _as_error(name, error)
                continue
            record.running = running
            record.load.add_done_callback(lambda _: self._wake())

    def _places(self) -> int:
        """Return the number of adapters of the host cache that can be evicted, or are not there yet."""
        return (self._manager.config.max_cpu_loras or 1) - self._manager.stats().unevictable


def _is_loaded(info: AdapterInfo) -> bool:
    return info.level != "evicted"


def _is_kept(info: AdapterInfo) -> bool:
    """Return True if the host cache never evicts a loaded adapter, see `Stats.unevictable`."""
    return info.pinned or info.request is None


def _as_error(name: str, error: BaseException) -> LoRAError:
    """Return the error of a load as a LoRAError."""
    return error if isinstance(error, LoRAError) else LoRAError(f"adapter {name!r}: {error!r:.300}")
