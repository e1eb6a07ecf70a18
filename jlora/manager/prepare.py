"""Implementation of `prepare`: load the adapters of a batch, write them into slots, and lease the slots."""

import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import AdapterMismatchError, LoadTimeoutError, LoRAUsageError, NoFreeSlotError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.lease import Lease, ServedParts
from jlora.layers.forward.make_batch import Entry, make_batch, renewed
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager.batch_arguments import BatchArguments, Name, check_adapters
from jlora.manager.host import Host
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import AdapterHandle, Leases
from jlora.manager.loader import Deadline, Load
from jlora.manager.locks import Bell, StateLock
from jlora.manager.multihost import Coordinator
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.slot_table import SlotPlan, SlotTable

_log = logging.getLogger("jlora.leases")

# Steady traffic alternates between few batches (prefill, decode), so their device arrays are cached.
_KEPT_BATCHES = 8

# The adapters of a batch by name, request or handle, and the slots of those that must be written.
_Decided: TypeAlias = tuple[dict[Name, PackedAdapter], SlotPlan]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A cached batch, and the conditions under which its arrays are valid.

    Attributes:
      batch: the batch, with a closed lease that holds no adapter.
      arrays: the arrays of the batch.
      slots: adapter -> (slot, write count of the slot), for each adapter of the batch.
      newest: adapters that must still be the newest version of their name. The others were given by handles. The
        handles are not stored here, so that they can be garbage collected.
    """

    batch: LoRABatch
    arrays: tuple[jax.Array, ...]
    slots: dict[PackedAdapter, tuple[int, int]]
    newest: frozenset[PackedAdapter]


@dataclass(eq=False)
class _Ticket:
    """A place in the queue for slots.

    Attributes:
      deadline: `time.monotonic()` at which the call stops waiting; None if it does not wait.
    """

    deadline: float | None

    @property
    def over(self) -> bool:
        """True if the call does not wait for slots, or its deadline has passed."""
        return self.deadline is None or time.monotonic() >= self.deadline


class Batches:
    """Prepare batches, and cache the device arrays of the last few."""

    def __init__(
        self,
        wrapped: WrappedModel,
        config: LoRAConfig,
        cache: HostCache,
        leases: Leases,
        slots: SlotTable,
        state_lock: StateLock,
        changed: Bell,
        host: Host,
        coordinator: Coordinator,
    ):
        self._wrapped = wrapped
        self._config = config
        self._cache = cache
        self._leases = leases
        self._slots = slots
        self._host = host
        self._coordinator = coordinator
        self._state_lock = state_lock
        self._changed = changed
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._queue: list[_Ticket] = []  # calls that wait for slots, in order of arrival

    def clear(self) -> None:
        self._kept.clear()

    def _again(self, args: BatchArguments) -> LoRABatch | None:
        """Return a batch with cached arrays and a new lease; None if no valid one is cached."""
        kept = self._kept.get(args.key)
        if kept is None:
            return None
        if any(isinstance(name, LoRARequest) and name.load_inplace for name in args.adapters):
            return None
        if not all(map(self._cache.newest, kept.newest)):
            return None
        if kept.batch.layout.unserved is not self._wrapped.unserved.sites:
            return None
        pool = self._slots.pool
        if any(pool.table[s] is not c or pool.writes[s] != write for c, (s, write) in kept.slots.items()):
            return None
        if not pool.intact() or any(array.is_deleted() for array in kept.arrays):
            return None  # the second: a step donated them
        self._slots.hit(kept.slots)
        self._kept.move_to_end(args.key)
        old = kept.batch.lease
        assert old is not None
        return renewed(kept.batch, self._lease(kept.slots, old.parts, old.shape))

    def prepare(self, args: BatchArguments, deadline: float | None) -> LoRABatch:
        """See `LoRAManager.prepare`."""
        with self._state_lock:
            self._wrapped.check()
            batch = self._again(args)
        return self._new(args, deadline) if batch is None else batch

    def _new(self, args: BatchArguments, deadline: float | None) -> LoRABatch:
        """Prepare a batch that is not cached."""
        ticket = _Ticket(deadline)
        reloaded: set[Name] = set()
        try:
            while True:
                seen, loads = self._changed.rings, list[Load]()
                try:
                    if (batch := self._bring(args, reloaded, ticket)) is not None:
                        return batch
                    loads = self._missing(args, reloaded, ticket)
                    self._host.wait(loads, deadline)
                    continue
                except NoFreeSlotError as error:  # no room now, or another call took it during the loads
                    reloaded.difference_update(load.request for load in loads if load.error is not None)
                    if not self._lined_up(ticket):
                        if not self._slots.copying:
                            raise
                        if deadline is not None:
                            raise LoadTimeoutError(f"an adapter is being copied from its slot: {error}") from error
                self._changed.wait(seen, deadline)
        finally:
            if ticket in self._queue:
                with self._state_lock:
                    self._queue.remove(ticket)
                self._changed.ring()

    def _bring(self, args: BatchArguments, reloaded: set[Name], ticket: "_Ticket") -> LoRABatch | None:
        """Write the loaded adapters into slots and make the batch. Return None if a load must be awaited first."""

        def decide() -> _Decided:
            loaded = {} if self._absent(args, reloaded) else self._loaded(args)
            if any(packed not in self._slots.pool.table for packed in loaded.values()):
                self._check_first(ticket)
            return self._plan(loaded)

        def do(decided: _Decided) -> LoRABatch | None:
            loaded, plan = decided
            self._slots.carry_out(plan, list(dict.fromkeys(loaded.values())))
            return self._batch(args, loaded) if len(loaded) == len(args.adapters) else None

        self._slots.pool.compile()
        return self._coordinator.commit(decide, do, _same, writes=True)

    def activate(self, name: str, *, pin: bool) -> bool:
        """Write an adapter into a slot, reload it if necessary, and pin it if `pin`. Return True if it was written."""

        def decide() -> _Decided:
            packed = self._cache.loaded.get(name)
            return self._plan({} if packed is None else {name: packed})

        def do(decided: _Decided) -> bool | None:
            loaded, plan = decided
            self._slots.carry_out(plan, list(loaded.values()))
            if loaded and pin:
                self._cache.pins.add(name)
            return bool(plan) if loaded else None  # evicted in the meantime

        self._slots.pool.compile()
        while True:
            seen = self._changed.rings
            self._host.recall(name)
            try:
                if (done := self._coordinator.commit(decide, do, _same, writes=True)) is not None:
                    return done
            except NoFreeSlotError:
                if not self._slots.copying:
                    raise
                self._changed.wait(seen)

    def _plan(self, loaded: dict[Name, PackedAdapter]) -> _Decided:
        self._wrapped.check()
        return loaded, self._slots.plan(list(dict.fromkeys(loaded.values())))

    def _lined_up(self, ticket: "_Ticket") -> bool:
        """Queue the ticket if it has time left. Return True if it is queued."""
        if ticket.over:
            return False
        with self._state_lock:
            if ticket not in self._queue:
                self._queue.append(ticket)
        return True

    def _check_first(self, ticket: "_Ticket") -> None:
        """Raise NoFreeSlotError if an earlier ticket still waits. Called under the state lock."""
        first = next((other for other in self._queue if not other.over), ticket)
        if first is not ticket:
            raise NoFreeSlotError("other batches wait for slots, and this one needs one too")

    def _missing(self, args: BatchArguments, reloaded: set[Name], ticket: "_Ticket") -> list[Load]:
        """Start the missing loads of a batch and return them, with `wanted` incremented.

        With several processes only one load is started at a time, so that all processes admit them in the same order.

        Args:
          args: the arguments of `prepare`.
          reloaded: requests with `load_inplace` that this call has loaded already; new loads are added.
          ticket: the place of the call in the queue for slots.

        Raises:
          NoFreeSlotError: there are not enough slots or places in the host cache for the batch now, or an earlier
            ticket waits. The loads would evict each other from the host cache and be repeated without end.
        """
        # A load that replaces an adapter must not wait for batches of this thread, which itself waits for the load.
        deadline = Deadline(None, threading.get_ident())

        def decide() -> list[LoRARequest]:
            absent = self._absent(args, reloaded)
            if absent:
                self._keep(args, ticket)
            return absent[:1] if self._coordinator.several else absent

        def start(absent: list[LoRARequest]) -> tuple[list[Load], BaseException | None]:
            for request in absent:
                if (error := self._host.loader.take_error(request)) is not None:
                    return [], error
            loads = [self._host.loader.start(request, deadline=deadline) for request in absent]
            for load in loads:
                load.wanted += 1
            reloaded.update(absent)
            return loads, None

        loads, error = self._coordinator.commit(
            decide, start, lambda absent: [request.name for request in absent] or None
        )
        if error is not None:  # raised here, since an error inside `commit` counts as a change cut short
            raise error
        return loads

    def _absent(self, args: BatchArguments, reloaded: set[Name]) -> list[LoRARequest]:
        """Return the requests that a batch must load.

        Raises:
          AdapterNotFoundError: a name is unknown.
        """
        absent: list[LoRARequest] = []
        for name in args.adapters:
            if isinstance(name, LoRARequest):
                if name.name not in self._cache.loaded or (name.load_inplace and name not in reloaded):
                    absent.append(name)
            elif isinstance(name, str) and name not in self._cache.loaded:
                absent.append(self._host.request_of(name))
        return absent

    def _keep(self, args: BatchArguments, ticket: "_Ticket") -> None:
        """Check, before a load, that the batch fits, and mark a use of its adapters on the host.

        The load then evicts other adapters first.

        Raises:
          NoFreeSlotError: the slots that are neither pinned nor leased are too few, or the places in the host cache.
        """
        loaded = self._loaded(args)
        names = {
            name if isinstance(name, str) else name.name
            for name in args.adapters
            if not isinstance(name, AdapterHandle)
        }
        self._check_first(ticket)
        self._check_slots(args, loaded)
        self._cache.check_room(names, self._leases.leased())
        for packed in loaded.values():
            if self._cache.newest(packed):
                self._cache.loaded.move_to_end(packed.name)

    def _check_slots(self, args: BatchArguments, loaded: Mapping[Name, PackedAdapter]) -> None:
        """Raise NoFreeSlotError if the slots that are neither pinned nor leased are too few for the batch."""
        wanted = {loaded.get(name, name.name if isinstance(name, LoRARequest) else name) for name in args.adapters}
        leased, cache = self._leases.leased(), self._cache
        stay = [
            packed
            for packed in self._slots.pool.table
            if packed is not None and packed not in wanted
            and (packed in leased or (cache.newest(packed) and packed.name in cache.pins))
        ]  # fmt: skip
        slots = len(self._slots.pool.table)
        if len(wanted) + len(stay) > slots:
            raise NoFreeSlotError(
                f"{len(wanted)} adapters need a slot, but of {slots} slots {len(stay)} are pinned or held by an open "
                "batch. Raise max_loras, close batches, or wait for them with prepare(..., timeout=)"
            )

    def _loaded(self, args: BatchArguments) -> dict[Name, PackedAdapter]:
        """Return the packed adapter of each name, request or handle of a batch. Adapters not loaded are left out.

        Raises:
          LoRAUsageError: a handle is closed, or belongs to another manager.
          AdapterMismatchError: an adapter has weights for a layer that serves no adapter.
        """
        found: dict[Name, PackedAdapter] = {}
        for name in args.adapters:
            if isinstance(name, AdapterHandle):
                packed = name.packed
                if packed is None:
                    raise LoRAUsageError(f"prepare: {name!r} is closed")
                if not self._leases.gave(name):
                    raise LoRAUsageError(f"prepare: {name!r} is of another manager")
            else:
                packed = self._cache.loaded.get(name.name if isinstance(name, LoRARequest) else name)
            if packed is not None:
                self._check_served(packed)
                found[name] = packed
        check_adapters(args, found)
        return found

    def _check_served(self, packed: PackedAdapter) -> None:
        unserved = self._wrapped.unserved
        if not packed.sites.isdisjoint(unserved.sites):
            site = next(placement.site for placement in packed.placements if placement.site in unserved.sites)
            raise AdapterMismatchError(
                f"adapter {packed.name!r}: brings weights for {site.path!r}, which takes no adapter: "
                f"{unserved.reasons[site.path]}"
            )

    def _batch(self, args: BatchArguments, served: dict[Name, PackedAdapter]) -> LoRABatch:
        """Return a batch of adapters that are in slots."""
        slot_of = {name: self._slots.pool.table.index(packed) for name, packed in served.items()}
        for packed in served.values():
            self._check_served(packed)  # `verify` may have changed `unserved` since
        none, writes = self._config.max_loras, self._slots.pool.writes
        order = {given: i for i, given in enumerate(args.parts)}
        index = [order[name] for name in args.names]
        entries: list[Entry] = []
        parts: list[ServedParts] = []
        for own in args.parts.values():
            entries.append([(slot_of[name], writes[slot_of[name]], scale) for name, scale in own])
            parts.append(tuple([(served[name].name, served[name].version, scale) for name, scale in own]))
        lease = self._lease(served.values(), [parts[i] for i in index], args.shape)
        sites, unserved = self._wrapped.sites, self._wrapped.unserved.sites
        batch = make_batch(entries, index, args.shape, sites, lease, none=none, unserved=unserved)
        if not any(isinstance(name, LoRARequest) and name.load_inplace for name in served):
            closed = Lease((), lease.parts, 0, shape=args.shape)
            closed.close()
            slots_of = {packed: (slot_of[name], writes[slot_of[name]]) for name, packed in served.items()}
            newest = frozenset(c for name, c in served.items() if not isinstance(name, AdapterHandle))
            arrays = tuple(jax.tree.leaves(batch.spaces))
            self._kept[args.key] = _Kept(renewed(batch, closed), arrays, slots_of, newest)
            self._kept.move_to_end(args.key)
            while len(self._kept) > _KEPT_BATCHES:
                self._kept.popitem(last=False)
        return batch

    def _lease(self, loaded: Iterable[PackedAdapter], parts: Sequence[ServedParts], shape: BatchShape | None) -> Lease:
        where = "".join(traceback.format_stack()[:-3]) if _log.isEnabledFor(logging.DEBUG) else None
        distinct = tuple(dict.fromkeys(loaded))
        lease = Lease(distinct, parts, threading.get_ident(), where, self._changed.ring, shape=shape)
        self._leases.add(lease)
        return lease


def _same(decided: _Decided) -> Any:
    """Return the value that all processes compare before they write slots; None if no slot is written."""
    return [(packed.name, packed.version, slot) for packed, slot in decided[1].items()] or None
