"""Write the adapters of a batch into slots and lease them, or pin one adapter there."""

import logging
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence

import jax

from jlora.config import LoRARequest
from jlora.errors import AdapterMismatchError, LoadTimeoutError, LoRAUsageError, NoFreeSlotError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.lease import Lease, ServedTerms
from jlora.layers.forward.make_batch import make_batch, renewed
from jlora.manager.batch_arguments import BatchArguments, Name, check_adapters
from jlora.manager.leases import AdapterHandle
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.loading import await_loads, recall, start
from jlora.manager.loads import Deadline, Load
from jlora.manager.state import KeptBatch, State, Ticket

_log = logging.getLogger("jlora.leases")

# Steady traffic alternates between few batches (prefill, decode), so their device arrays are cached.
_KEPT_BATCHES = 8


def prepare(state: State, args: BatchArguments, deadline: float | None) -> LoRABatch:
    """See `LoRAManager.prepare`."""
    with state.lock:
        state.wrapped.check()
        if (batch := _again(state, args)) is not None:
            return batch
    state.slot_arrays.compile()
    ticket = Ticket(deadline)
    try:
        batch = state.wait(lambda: _attempt(state, args, ticket), deadline)
        assert batch is not None, "an attempt at the deadline returns a batch or raises"
        return batch
    finally:
        if ticket in state.queue:
            with state.lock:
                state.queue.remove(ticket)
            state.changed.ring()


def _attempt(state: State, args: BatchArguments, ticket: Ticket) -> LoRABatch | None:
    """Load the missing adapters, write all into slots and lease them. Return None if the call must wait for slots."""
    loads: list[Load] = []
    try:
        while True:
            with state.lock.writing:
                state.wrapped.check()
                if absent := _absent(state, args, ticket):
                    loads = _start(state, args, ticket, absent)
                else:
                    loaded = _loaded(state, args)
                    wanted = list(dict.fromkeys(loaded.values()))
                    if state.queue and any(adapter not in state.slot_arrays.occupants for adapter in wanted):
                        _check_first(state, ticket)
                    chosen = state.policy.choose(wanted)
                    state.peers.agree(_same(chosen))
                    with state.peers.change():
                        state.policy.carry_out(chosen, wanted)
                        return _make(state, args, loaded)
            await_loads(state, loads, ticket.deadline)
    except NoFreeSlotError as error:  # no room now, or another call took it during the loads
        ticket.reloaded.difference_update(load.request for load in loads if load.outcome is not True)
        if ticket.over:
            if not state.policy.copying:
                raise
            if ticket.deadline is not None:
                raise LoadTimeoutError(f"an adapter is being copied from its slot: {error}") from error
        elif ticket not in state.queue:
            with state.lock:
                state.queue.append(ticket)
        return None


def pin(state: State, name: str) -> bool:
    """See `LoRAManager.pin_adapter`."""
    state.slot_arrays.compile()

    def attempt() -> bool | None:
        with state.lock.writing:
            state.wrapped.check()
            adapter = recall(state, name)
            try:
                chosen = state.policy.choose([adapter])
            except NoFreeSlotError:
                if not state.policy.copying:
                    raise
                return None
            state.peers.agree([adapter.name, adapter.version, _same(chosen)])
            with state.peers.change():
                state.policy.carry_out(chosen, [adapter])
                state.cache.pins.add(name)
            return bool(chosen)

    written = state.wait(attempt)
    assert written is not None
    return written


def _same(chosen: Mapping[LoadedAdapter, int]) -> list[tuple[str, int, int]] | None:
    """Return the value that all processes compare before they write slots; None if no slot is written."""
    return [(adapter.name, adapter.version, slot) for adapter, slot in chosen.items()] or None


def _check_first(state: State, ticket: Ticket) -> None:
    """Raise NoFreeSlotError if an earlier ticket still waits. Called under the state lock."""
    first = next((other for other in state.queue if not other.over), ticket)
    if first is not ticket:
        raise NoFreeSlotError("other batches wait for slots, and this one needs one too")


def _start(state: State, args: BatchArguments, ticket: Ticket, absent: list[LoRARequest]) -> list[Load]:
    """Start the loads of a batch.

    With several processes only one load is started at a time, so that all processes admit them in the same order.

    Raises:
      NoFreeSlotError: there are not enough slots, or room in the host cache, for the batch now, or an earlier
        ticket waits. The loads would evict each other from the host cache and be repeated without end.
    """
    _check_room(state, args, ticket)
    absent = absent[:1] if state.peers.several else absent
    state.peers.agree([request.name for request in absent])
    for request in absent:
        state.loads.raise_error(request)
    # A load that replaces an adapter must not wait for batches of this thread, which itself waits for the load.
    deadline = Deadline(None, threading.get_ident())
    ticket.reloaded.update(absent)
    return [start(state, request, deadline) for request in absent]


def _absent(state: State, args: BatchArguments, ticket: Ticket) -> list[LoRARequest]:
    """Return the requests that a batch must load.

    Raises:
      AdapterNotFoundError: a name is unknown.
    """
    absent: list[LoRARequest] = []
    for name in args.adapters:
        if isinstance(name, LoRARequest):
            if name.name not in state.cache.loaded or (name.load_inplace and name not in ticket.reloaded):
                absent.append(name)
        elif isinstance(name, str) and name not in state.cache.loaded:
            absent.append(state.request_of(name))
    return absent


def _check_room(state: State, args: BatchArguments, ticket: Ticket) -> None:
    """Check, before a load, that the batch fits, and mark a use of its adapters on the host.

    The load then evicts other adapters first.

    Raises:
      NoFreeSlotError: the slots that are neither pinned nor leased are too few, or the host cache has no room.
    """
    loaded, leased, cache = _loaded(state, args), state.leases.leased(), state.cache
    _check_first(state, ticket)
    wanted = {loaded.get(name, name.name if isinstance(name, LoRARequest) else name) for name in args.adapters}
    slots = len(state.slot_arrays.occupants)
    others = [packed for packed in state.slot_arrays.occupants if packed is not None and packed not in wanted]
    stay = [c for c in others if c in leased or (cache.newest(c) and c.name in cache.pins)]
    if len(wanted) + len(stay) > slots:
        raise NoFreeSlotError(
            f"{len(wanted)} adapters need a slot, but of {slots} slots {len(stay)} are pinned or held by an open "
            "batch. Raise max_loras, close batches, or wait for them with prepare(..., timeout=)"
        )
    given = [name for name in args.adapters if not isinstance(name, AdapterHandle)]
    cache.check_room({name if isinstance(name, str) else name.name for name in given}, leased)
    for packed in loaded.values():
        state.policy.touch(packed)


def _loaded(state: State, args: BatchArguments) -> dict[Name, LoadedAdapter]:
    """Return the loaded adapter of each name, request or handle of a batch. Adapters not loaded are left out.

    Raises:
      LoRAUsageError: a handle is closed, or belongs to another manager.
      AdapterMismatchError: an adapter has weights for a layer that serves no adapter.
    """
    found: dict[Name, LoadedAdapter] = {}
    for name in args.adapters:
        if isinstance(name, AdapterHandle):
            adapter = name.adapter
            if adapter is None:
                raise LoRAUsageError(f"prepare: {name!r} is closed")
            if not state.leases.gave(name):
                raise LoRAUsageError(f"prepare: {name!r} is of another manager")
        else:
            adapter = state.cache.loaded.get(name.name if isinstance(name, LoRARequest) else name)
        if adapter is not None:
            _check_served(state, adapter)
            found[name] = adapter
    check_adapters(args, found)
    return found


def _check_served(state: State, adapter: LoadedAdapter) -> None:
    unserved = state.wrapped.unserved
    if not adapter.packed.sites.isdisjoint(unserved.sites):
        site = next(placement.site for placement in adapter.packed.placements if placement.site in unserved.sites)
        raise AdapterMismatchError(
            f"adapter {adapter.name!r}: brings weights for {site.path!r}, which takes no adapter: "
            f"{unserved.reasons[site.path]}"
        )


def _again(state: State, args: BatchArguments) -> LoRABatch | None:
    """Return a batch with cached arrays and a new lease; None if no valid one is cached."""
    kept = state.kept.get(args.key)
    if kept is None:
        return None
    if any(isinstance(name, LoRARequest) and name.load_inplace for name in args.adapters):
        return None
    if not all(map(state.cache.newest, kept.newest)):
        return None
    if kept.batch.layout.unserved is not state.wrapped.unserved.sites:
        return None
    slot_arrays = state.slot_arrays
    if any(slot_arrays.occupants[s] is not c or slot_arrays.writes[s] != write for c, (s, write) in kept.slots.items()):
        return None
    if not slot_arrays.intact() or any(array.is_deleted() for array in kept.arrays):
        return None  # the second: a step donated them
    state.policy.hit(kept.slots)
    state.kept.move_to_end(args.key)
    old = kept.batch.lease
    assert old is not None
    return renewed(kept.batch, _lease(state, kept.slots, old.terms, old.shape))


def _make(state: State, args: BatchArguments, served: dict[Name, LoadedAdapter]) -> LoRABatch:
    """Return a batch of adapters that are in slots."""
    slot_of = {name: state.slot_arrays.occupants.index(adapter) for name, adapter in served.items()}
    none, writes = state.config.max_loras, state.slot_arrays.writes
    order = {given: i for i, given in enumerate(args.terms)}
    index = [order[name] for name in args.names]
    entries: list[list[tuple[int, int, float]]] = []
    terms: list[ServedTerms] = []
    for own in args.terms.values():
        entries.append([(slot_of[name], writes[slot_of[name]], scale) for name, scale in own])
        terms.append(tuple([(served[name].name, served[name].version, scale) for name, scale in own]))
    lease = _lease(state, served.values(), [terms[i] for i in index], args.shape)
    sites, unserved = state.wrapped.sites, state.wrapped.unserved.sites
    batch = make_batch(entries, index, args.shape, sites, lease, none=none, unserved=unserved)
    if not any(isinstance(name, LoRARequest) and name.load_inplace for name in served):
        closed = Lease((), lease.terms, 0, args.shape)
        closed.close()
        slots_of = {adapter: (slot_of[name], writes[slot_of[name]]) for name, adapter in served.items()}
        newest = frozenset(c for name, c in served.items() if not isinstance(name, AdapterHandle))
        arrays = tuple(jax.tree.leaves(batch.spaces))
        state.kept[args.key] = KeptBatch(renewed(batch, closed), arrays, slots_of, newest)
        state.kept.move_to_end(args.key)
        while len(state.kept) > _KEPT_BATCHES:
            state.kept.popitem(last=False)
    return batch


def _lease(state: State, loaded: Iterable[LoadedAdapter], terms: Sequence[ServedTerms], shape: BatchShape) -> Lease:
    where = "".join(traceback.format_stack()[:-3]) if _log.isEnabledFor(logging.DEBUG) else None
    distinct = tuple(dict.fromkeys(loaded))
    lease = Lease(distinct, terms, threading.get_ident(), shape, where, state.changed.ring)
    state.leases.add(lease)
    return lease
