"""Implementation of `prepare`: load the adapters of a batch, write them into slots, and lease the slots."""

import logging
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import AdapterMismatchError, LoRAUsageError, NoFreeSlotError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.lease import Lease, ServedParts
from jlora.layers.forward.make_batch import make_batch, renewed
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager.batch_arguments import BatchArguments, Name, Parts
from jlora.manager.host import Host
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import AdapterHandle, Leases
from jlora.manager.loader import Deadline, Load, LoadCancelled
from jlora.manager.locks import Bell, StateLock
from jlora.manager.multihost import Coordinator
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.slot_table import SlotPlan, SlotTable

_log = logging.getLogger("jlora.leases")

# Steady traffic alternates between few batches (prefill, decode), so their device arrays are cached.
_KEPT_BATCHES = 8


class _Sequences(NamedTuple):
    """The adapters of each sequence of a batch, with the fields of `Lease`."""

    parts: tuple[ServedParts, ...]
    shape: BatchShape


@dataclass(frozen=True, eq=False)
class _Kept:
    """A cached batch, and the conditions under which its arrays are valid.

    Attributes:
      batch: the batch, with a closed lease.
      arrays: the arrays of the batch.
      slots: adapter -> (slot, write count of the slot), for each adapter of the batch.
      newest: adapters that must still be the newest version of their name. The others were given by handles. The
        handles are not stored here, so that they can be garbage collected.
      sequences: the adapters of each sequence.
    """

    batch: LoRABatch
    arrays: tuple[jax.Array, ...]
    slots: dict[PackedAdapter, tuple[int, int]]
    newest: frozenset[PackedAdapter]
    sequences: _Sequences


class _Plan(NamedTuple):
    """The adapters of a batch and the slot writes that they need.

    Attributes:
      loaded: name, request or handle -> adapter.
      wanted: the distinct adapters.
      slots: adapter -> slot, for the adapters that must be written.
    """

    loaded: dict[Name, PackedAdapter]
    wanted: list[PackedAdapter]
    slots: SlotPlan

    def same(self) -> Any:
        """Return the value that all processes compare; None if no slot is written."""
        return [(packed.name, packed.version, slot) for packed, slot in self.slots.items()] or None


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
        lease = self._lease(kept.slots, kept.sequences)
        return renewed(kept.batch, lease)

    def prepare(self, args: BatchArguments, wait: bool, deadline: float | None) -> tuple[LoRABatch, tuple[bool, ...]]:
        """Return the batch, and True for each sequence whose adapter is ready. See `LoRAManager.prepare`."""
        with self._state_lock:
            self._wrapped.check()
            batch = self._again(args)
        if batch is not None:
            return batch, (True,) * len(args.names)
        return self._new(args, wait, deadline)

    def _new(self, args: BatchArguments, wait: bool, deadline: float | None) -> tuple[LoRABatch, tuple[bool, ...]]:
        """Prepare a batch that is not cached."""
        ticket = _Ticket(deadline)
        reloaded: set[Name] = set()
        try:
            while True:
                seen = self._changed.rings
                try:
                    if not wait:
                        self._missing(args, reloaded, None)
                    if (found := self._bring(args, reloaded, ticket, wait)) is not None:
                        return found
                    self._wait(self._missing(args, reloaded, ticket), reloaded, deadline)
                    continue
                except NoFreeSlotError:  # no room now, or another call took it during the loads
                    if not (self._slots.copying or self._lined_up(ticket)):
                        raise
                self._changed.wait(seen, deadline)
        finally:
            if ticket in self._queue:
                with self._state_lock:
                    self._queue.remove(ticket)
                self._changed.ring()

    def _bring(
        self, args: BatchArguments, reloaded: set[Name], ticket: "_Ticket", wait: bool
    ) -> tuple[LoRABatch, tuple[bool, ...]] | None:
        """Write the loaded adapters into slots and make the batch. Return None if a load must be awaited first."""

        def decide() -> _Plan:
            loaded = {} if wait and self._absent(args, reloaded) else self._loaded(args)
            if any(packed not in self._slots.pool.table for packed in loaded.values()):
                self._check_first(ticket)
            return self._plan(loaded, partly=not wait)

        def do(plan: _Plan) -> tuple[LoRABatch, tuple[bool, ...]] | None:
            self._slots.carry_out(plan.slots, plan.wanted)
            if wait and len(plan.loaded) < len(args.adapters):
                return None
            return self._batch(args, plan.loaded, keep=wait)

        self._slots.pool.compile()
        return self._coordinator.commit(decide, do, _Plan.same, writes=True)

    def activate(self, name: str, *, pin: bool) -> bool:
        """Write an adapter into a slot, reload it if necessary, and pin it if `pin`. Return True if it was written."""

        def decide() -> _Plan:
            packed = self._cache.loaded.get(name)
            return self._plan({} if packed is None else {name: packed})

        def do(plan: _Plan) -> bool | None:
            written = self._slots.carry_out(plan.slots, plan.wanted)
            if plan.loaded and pin:
                self._cache.loaded.pin(name)
            return bool(written) if plan.loaded else None  # evicted in the meantime

        self._slots.pool.compile()
        while True:
            seen = self._changed.rings
            self._host.recall(name)
            try:
                if (done := self._coordinator.commit(decide, do, _Plan.same, writes=True)) is not None:
                    return done
            except NoFreeSlotError:
                if not self._slots.copying:
                    raise
                self._changed.wait(seen)

    def _plan(self, loaded: dict[Name, PackedAdapter], *, partly: bool = False) -> "_Plan":
        self._wrapped.check()
        wanted = list(dict.fromkeys(loaded.values()))
        return _Plan(loaded, wanted, self._slots.plan(wanted, partly=partly))

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

    def _missing(self, args: BatchArguments, reloaded: set[Name], ticket: "_Ticket | None") -> list[Load]:
        """Start the missing loads of a batch and return them, with `wanted` incremented.

        With several processes only one load is started at a time, so that all processes admit them in the same order.

        Args:
          args: the arguments of `prepare`.
          reloaded: requests with `load_inplace` that this call has loaded already; new loads are added.
          ticket: None if the call does not wait for the loads.

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
            loads = [self._host.loader.start(request, deadline=deadline) for request in absent]
            for load in loads:
                if load.error is not None and not isinstance(load.error, LoadCancelled):  # kept for the next caller
                    self._host.loader.forget(load)
                    return [], load.error
            loads = [self._host.loader.start(request, again=True, deadline=deadline) for request in absent]
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

    def _wait(self, loads: Sequence[Load], reloaded: set[Name], deadline: float | None) -> None:
        """Wait for the loads from `_missing`. If one has no room, drop failed loads from `reloaded`."""
        left = list(loads)
        try:
            while left:
                self._host.wait(left.pop(0), deadline)
        except NoFreeSlotError:
            reloaded.difference_update(load.request for load in loads if load.error is not None)
            raise
        finally:
            with self._state_lock:
                for load in left:
                    load.wanted -= 1

    def _keep(self, args: BatchArguments, ticket: "_Ticket | None") -> None:
        """Check, before a load, that the batch fits, and mark a use of its adapters on the host.

        The load then evicts other adapters first. A call that does not wait (no ticket) takes what fits into the slots,
        and may be repeated once other batches are closed.

        Raises:
          NoFreeSlotError: the slots that are neither pinned nor leased are too few, or the places in the host cache.
        """
        loaded = self._loaded(args)
        names = {
            name if isinstance(name, str) else name.name
            for name in args.adapters
            if not isinstance(name, AdapterHandle)
        }
        if ticket is not None:
            self._check_first(ticket)
            self._check_slots(args, loaded)
        self._cache.check_room(names, () if ticket is None else self._leases.leased())
        for packed in loaded.values():
            if self._cache.newest(packed):
                self._cache.loaded.touch(packed.name)

    def _check_slots(self, args: BatchArguments, loaded: Mapping[Name, PackedAdapter]) -> None:
        """Raise NoFreeSlotError if the slots that are neither pinned nor leased are too few for the batch."""
        wanted = {loaded.get(name, name.name if isinstance(name, LoRARequest) else name) for name in args.adapters}
        leased, cache = self._leases.leased(), self._cache
        stay = [
            packed
            for packed in self._slots.pool.table
            if packed is not None and packed not in wanted
            and (packed in leased or (cache.newest(packed) and cache.loaded.pinned(packed.name)))
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
        if any(packed.magnitudes is not None or packed.saved_outputs for packed in found.values()):
            for parts in args.parts.values():
                _check_alone(found, parts)
        if any(packed.invocation_tokens for packed in found.values()):
            for parts in args.parts.values():
                _invocation(found, parts)
            _check_owners(found, args)
        return found

    def _check_served(self, packed: PackedAdapter) -> None:
        unserved = self._wrapped.unserved
        if not packed.sites.isdisjoint(unserved.sites):
            site = next(placement.site for placement in packed.placements if placement.site in unserved.sites)
            raise AdapterMismatchError(
                f"adapter {packed.name!r}: brings weights for {site.path!r}, which takes no adapter: "
                f"{unserved.reasons[site.path]}"
            )

    def _batch(
        self, args: BatchArguments, loaded: dict[Name, PackedAdapter], keep: bool
    ) -> tuple[LoRABatch, tuple[bool, ...]]:
        """Return a batch of the adapters that are in slots, and True for each sequence whose adapter is there."""
        slot_of = {name: slot for name, c in loaded.items() if (slot := self._slots.pool.slot_of(c)) is not None}
        served = {name: loaded[name] for name in slot_of}
        for packed in served.values():
            self._check_served(packed)  # `verify` may have changed `unserved` since
        none, writes = self._config.max_loras, self._slots.pool.writes
        entries, distinct, ready = [], [], []
        for given in args.parts.values():
            is_ready = all(name in slot_of for name, _ in given)
            parts = given if is_ready else ()  # several adapters take none until all are ready
            ready.append(is_ready)
            entries.append([(slot_of[name], writes[slot_of[name]], scale) for name, scale in parts])
            distinct.append(tuple([(served[name].name, served[name].version, scale) for name, scale in parts]))
        order = dict(zip(args.parts, range(len(args.parts)), strict=True))
        index = [order[name] for name in args.names]
        all_ready = tuple([ready[i] for i in index])
        sequences = _Sequences(tuple([distinct[i] for i in index]), args.shape)
        lease = self._lease(served.values(), sequences)
        unserved, absent = self._wrapped.unserved.sites, not all(all_ready)
        batch = make_batch(
            entries, index, args.shape, self._wrapped.sites, lease, none=none, unserved=unserved, absent=absent
        )
        if keep and not any(isinstance(name, LoRARequest) and name.load_inplace for name in served):
            # A cached batch must hold no adapter, so its lease is closed, and it has no handles.
            closed = Lease((), (), 0)
            closed.close()
            slots_of = {packed: (slot_of[name], writes[slot_of[name]]) for name, packed in served.items()}
            newest = frozenset(c for name, c in served.items() if not isinstance(name, AdapterHandle))
            arrays = tuple(jax.tree.leaves(batch.spaces))
            self._kept[args.key] = _Kept(renewed(batch, closed), arrays, slots_of, newest, sequences)
            self._kept.move_to_end(args.key)
            while len(self._kept) > _KEPT_BATCHES:
                self._kept.popitem(last=False)
        return batch, all_ready

    def _lease(self, loaded: Iterable[PackedAdapter], sequences: "_Sequences") -> Lease:
        where = "".join(traceback.format_stack()[:-3]) if _log.isEnabledFor(logging.DEBUG) else None
        distinct = tuple(dict.fromkeys(loaded))
        parts, shape = sequences
        thread = threading.get_ident()
        lease = Lease(distinct, parts, thread, where, self._changed.ring, shape=shape)
        self._leases.add(lease)
        return lease


def _check_alone(loaded: Mapping[Name, PackedAdapter], parts: Parts) -> None:
    """Raise LoRAUsageError if a DoRA adapter, or one with a saved head, has a factor or another adapter beside it."""
    for name, scale in parts:
        packed = loaded.get(name)
        if (
            packed is not None
            and (packed.magnitudes is not None or packed.saved_outputs)
            and (len(parts) > 1 or scale != 1)
        ):
            kind = "a DoRA adapter" if packed.magnitudes is not None else "an adapter with a saved head"
            raise LoRAUsageError(
                f"prepare: {packed.name!r} is {kind}, which is served alone and with the factor 1, and "
                f"the sequence takes {len(parts)} adapters with the factors {[scale for _, scale in parts]}"
            )


def _check_owners(loaded: Mapping[Name, PackedAdapter], args: BatchArguments) -> None:
    """Raise LoRAUsageError if an item of a row group belongs to a sequence with an aLoRA adapter."""
    for group, given in args.shape.items:
        for item, owner in enumerate(given.owners):
            if owner is not None and _invocation(loaded, args.parts[args.names[owner]]):
                raise LoRAUsageError(
                    f"prepare: item {item} of group {group!r} belongs to sequence {owner}, which has an aLoRA "
                    "adapter, and that one changes only rows after its invocation tokens; give None as the sequence of "
                    "that item"
                )


def _invocation(served: Mapping[Name, PackedAdapter], parts: Parts) -> tuple[int, ...]:
    """Return the invocation tokens of the aLoRA adapter of a sequence; () if it has none.

    Raises:
      LoRAUsageError: the sequence has aLoRA adapters with different tokens.
    """
    found = {tokens: name for name, _ in parts if name in served and (tokens := served[name].invocation_tokens)}
    if not found:
        return ()
    if len(found) > 1:
        names = ", ".join(repr(served[name].name) for name in found.values())
        raise LoRAUsageError(f"prepare: {names} of one Mix are aLoRA adapters with different invocation tokens")
    return next(iter(found))
