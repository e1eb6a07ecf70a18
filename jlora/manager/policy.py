"""Assign adapters to slots: choose victims, write slots, and repair slots after a device error."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import jax

from jlora.errors import NoFreeSlotError
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import Leases
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.locks import StateLock
from jlora.manager.report import Histogram
from jlora.slots.arrays import SlotArrays
from jlora.slots.blocks import Block

_log = logging.getLogger("jlora")


class SlotPolicy:
    """The slots of a manager.

    All methods except `prefetch` are called under the state lock. Methods that write also need the step lock.

    Attributes:
      slot_arrays: the slot arrays.
      takes_turns: True if the steps of all threads are those of `LoRAManager.jit`, so that none is dispatched during
        a write.
      seconds: histogram of the durations of writes.
    """

    def __init__(self, slot_arrays: SlotArrays[LoadedAdapter], cache: HostCache, leases: Leases, counts: Counter[str]):
        self.slot_arrays = slot_arrays
        self.takes_turns = False
        self.seconds = Histogram()
        self._cache = cache
        self._leases = leases
        self._counts = counts
        self._prefetched: dict[LoadedAdapter, None] = {}  # on the device, in no slot yet; oldest first
        self._spent: list[tuple[jax.Array, ...]] = []  # arrays that writes consumed; see `let_go`

    def alive(self) -> Callable[[LoadedAdapter], bool]:
        """Return a predicate of adapters: True if a batch may still use the adapter.

        This holds for the newest version of a name, and for versions that an open batch or a handle holds.
        """
        held = self._leases.leased() | self._leases.handled()
        return lambda adapter: self._cache.newest(adapter) or adapter in held

    @property
    def copying(self) -> bool:
        """True if an adapter in a slot is being copied to the host; its slot can be evicted afterwards."""
        return any(adapter is not None and adapter.copying for adapter in self.slot_arrays.occupants)

    @property
    def num_in_slots(self) -> int:
        """The number of slots that hold an adapter which a batch may still use."""
        alive = self.alive()
        return sum(adapter is not None and alive(adapter) for adapter in self.slot_arrays.occupants)

    def by_use(self) -> list[LoadedAdapter]:
        """Return the adapters in slots, least recently used first; older versions of a name come before all others."""
        order = {adapter: i for i, adapter in enumerate(self._cache.loaded.values())}
        return sorted(filter(None, self.slot_arrays.occupants), key=lambda adapter: order.get(adapter, -1))

    def touch(self, adapter: LoadedAdapter) -> None:
        """Mark a use of an adapter. Slots and the host cache share one order."""
        if self._cache.newest(adapter):
            self._cache.loaded.move_to_end(adapter.name)

    def hit(self, loaded: Iterable[LoadedAdapter]) -> None:
        """Mark a use of adapters that were found in slots, and count the hits."""
        for adapter in loaded:
            self.touch(adapter)
            self._counts["slot_hits"] += 1

    def release(self, adapter: LoadedAdapter) -> None:
        """Remove an adapter from its slot, unless an open batch holds it there."""
        self._drop_prefetched(adapter)
        if adapter in self._leases.leased():
            return
        for slot, other in enumerate(self.slot_arrays.occupants):
            if other is adapter:
                self.slot_arrays.clear(slot)

    def _drop_prefetched(self, adapter: LoadedAdapter) -> None:
        """Free the blocks of an adapter that were moved to the device before they were needed."""
        adapter.prefetched = None
        self._prefetched.pop(adapter, None)

    def let_go(self) -> None:
        """Free the arrays and blocks that writes have consumed. Called on threads that no step waits for."""
        self._spent.clear()
        self.slot_arrays.let_go()

    def _may_donate(self) -> bool:
        """Return True if no step can be using the slot arrays. Another thread with an open batch may be in its step."""
        return self.takes_turns or not self._leases.threads() - {threading.get_ident()}

    def _heal(self) -> None:
        """Repair the slots if necessary."""
        if not self.slot_arrays.intact():
            alive = self.alive()
            self.slot_arrays.heal(
                lambda adapter: adapter.to_write() if alive(adapter) else None, donate=self._may_donate()
            )
            for adapter in self.slot_arrays.occupants:
                if adapter is not None:
                    self._drop_prefetched(adapter)

    def sweep(self) -> None:
        """Repair the slots if necessary, and clear slots of adapters that no batch can use."""
        self._heal()
        for slot in self._dead():
            self.slot_arrays.clear(slot)

    def _dead(self) -> list[int]:
        """Return the slots of adapters that no batch can use."""
        alive, pins, occupants = self.alive(), self._cache.pins, self.slot_arrays.occupants
        # A pinned name keeps its slot until the new version is written there.
        return [slot for slot, c in enumerate(occupants) if c is not None and not alive(c) and c.name not in pins]

    def choose(self, wanted: Sequence[LoadedAdapter]) -> dict[LoadedAdapter, int]:
        """Return adapter -> slot to write, so that distinct adapters are all in slots. Nothing is changed.

        Raises:
          NoFreeSlotError: the adapters do not fit.
        """
        missing = [adapter for adapter in wanted if adapter not in self.slot_arrays.occupants]
        if not missing:
            return {}
        slots_of = self._slots_for(missing, wanted)
        if None in slots_of:
            missing, slots_of = self._make_room(missing, slots_of, wanted)
        if None in slots_of:
            raise NoFreeSlotError(self._no_room(missing, wanted))
        return dict(zip(missing, cast("list[int]", slots_of), strict=True))

    def carry_out(self, chosen: Mapping[LoadedAdapter, int], wanted: Sequence[LoadedAdapter]) -> None:
        """Repair the slots, write the chosen ones, and mark a use of all wanted adapters."""
        self.sweep()
        for adapter, slot in chosen.items():
            self.write(slot, adapter)
        self.hit(adapter for adapter in wanted if adapter not in chosen)
        for adapter in chosen:
            self.touch(adapter)

    def _slots_for(self, missing: Sequence[LoadedAdapter], wanted: Sequence[LoadedAdapter]) -> list[int | None]:
        """Return a slot for each missing adapter; None if no slot is left.

        An adapter takes the slot of its own older version, else a free slot (smallest first, then lowest index), else
        the least recently used slot. Adapters that fit into fewer slots are assigned first.
        """
        alive = self.alive()
        stale = {
            c.name: slot
            for slot, c in enumerate(self.slot_arrays.occupants)
            if c is not None and not alive(c) and c.name in self._cache.pins
        }
        slots_of: dict[LoadedAdapter, int | None] = {}
        for adapter in missing:
            slot = stale.get(adapter.name) if self._cache.newest(adapter) else None
            if slot is not None and slot in adapter.packed.slots:
                slots_of[adapter] = stale.pop(adapter.name)
        rest = sorted(self._free(), key=self.slot_arrays.slot_nbytes.__getitem__) + self._evictable(wanted)
        for adapter in sorted(missing, key=lambda c: len(c.packed.slots)):
            if adapter not in slots_of:
                slot = next((s for s in rest if s in adapter.packed.slots), None)
                slots_of[adapter] = slot
                if slot is not None:
                    rest.remove(slot)
        return [slots_of[adapter] for adapter in missing]

    def _make_room(
        self, missing: list[LoadedAdapter], slots_of: list[int | None], wanted: Sequence[LoadedAdapter]
    ) -> tuple[list[LoadedAdapter], list[int | None]]:
        """Move wanted adapters to other slots if more missing adapters fit then.

        Only adapters that fit into more slots are moved.

        Returns:
          The adapters to write, with the moved ones, and their slots; `missing` and `slots_of` if moving does not help.
        """
        occupants, leased = self.slot_arrays.occupants, self._leases.leased()
        left = [adapter.packed.slots for adapter, slot in zip(missing, slots_of, strict=True) if slot is None]
        present = {occupants.index(c): c for c in wanted if c in occupants and c not in leased}
        movable = [c for at, c in present.items() if any(at in s and len(s) < len(c.packed.slots) for s in left)]
        more = [*missing, *movable]
        others = self._slots_for(more, [c for c in wanted if c not in movable])
        return (missing, slots_of) if others.count(None) >= slots_of.count(None) else (more, others)

    def _no_room(self, missing: Sequence[LoadedAdapter], wanted: Sequence[LoadedAdapter]) -> str:
        total, limits = len(self.slot_arrays.occupants), ["max_loras"]
        free, evictable = self._free(), self._evictable(wanted)
        names, these = ", ".join(repr(c.name) for c in missing[:8]), ""
        for slots, count in Counter(c.packed.slots for c in missing if len(c.packed.slots) < total).items():
            which, key = ("experts that share factors", "shared") if slots.start else ("experts", "per_expert")
            these += f", {count} of them one of the {len(slots)} for {which}"
            limits.append(f"expert_slots[{key!r}]")
        return (
            f"{len(missing)} adapters need a slot ({names}){these}, but of {total} slots {len(free)} are free and "
            f"{len(evictable)} can be evicted; the others are pinned, held by an open batch or part of this one. Raise "
            f"{' or '.join(limits)}, close batches, or wait for them with prepare(..., timeout=)"
        )

    def _free(self) -> list[int]:
        return sorted(
            [slot for slot, adapter in enumerate(self.slot_arrays.occupants) if adapter is None] + self._dead()
        )

    def _evictable(self, wanted: Sequence[LoadedAdapter]) -> list[int]:
        """Return the slots whose adapters may be evicted, least recently used first."""
        alive, busy = self.alive(), self._leases.leased() | set(wanted)
        return [
            self.slot_arrays.occupants.index(adapter)
            for adapter in self.by_use()
            if alive(adapter) and adapter not in busy and adapter.on_host
            and not (adapter.name in self._cache.pins and self._cache.newest(adapter))
        ]  # fmt: skip

    def replace(self, old: LoadedAdapter, new: LoadedAdapter, changed: tuple[Block, ...]) -> None:
        """Write a new version into the slot of the old one, if the old one is in a slot and is no longer held.

        Only the blocks in `changed` differ between `new` and `old`.
        """
        self._heal()
        slot = self.slot_arrays.slot_of(old)
        if slot is not None and not self.alive()(old):
            self.write(slot, new, changed)
            self.touch(new)

    def write(self, slot: int, adapter: LoadedAdapter, only: tuple[Block, ...] | None = None) -> None:
        """Write an adapter into a slot, replacing the adapter there.

        Args:
          slot: index of the slot.
          adapter: the adapter.
          only: blocks to write, if the slot already holds the others; None writes all.
        """
        started = time.monotonic()
        victim = self.slot_arrays.occupants[slot]
        # Arrays are freed on a loading thread, or on the thread that copies an update to the host, if there is one.
        later = adapter.prefetched is not None or adapter.copying
        self.slot_arrays.write(
            slot, adapter, adapter.to_write(only), self._spent if later else [], donate=self._may_donate()
        )
        self._drop_prefetched(adapter)
        for other, old in enumerate(self.slot_arrays.occupants):
            if old is adapter and other != slot:  # it was moved to make room
                self.slot_arrays.clear(other)
        if victim is not None and victim.name != adapter.name:
            self._counts["slot_evictions"] += 1
            _log.info("evicted %r from slot %d", victim.name, slot)
        seconds = time.monotonic() - started
        if adapter.packed.placements:
            self._counts["slot_loads"] += 1
            self.seconds.add(seconds)
        _log.info("wrote %r (version %d) into slot %d in %.4f s", adapter.name, adapter.version, slot, seconds)
        if _log.isEnabledFor(logging.DEBUG):
            brought = {placement.site for placement in adapter.packed.placements}
            for site in self.slot_arrays.sites:
                _log.debug("slot %d: %s %r", slot, "filled" if site in brought else "cleared", site.path)

    def prefetch(self, adapter: LoadedAdapter, lock: StateLock) -> None:
        """Move an adapter to the device before it is needed. Called on a loading thread, without locks.

        At most `SlotArrays.max_bytes` of such adapters are on the device; the oldest are dropped first.
        """
        size, most = sum(block.nbytes for block in adapter.packed.blocks), self.slot_arrays.max_bytes
        with lock:
            if size > most or adapter in self.slot_arrays.occupants or adapter in self._prefetched:
                return
            self._prefetched[adapter] = None
            while sum(other.nbytes for other in self._prefetched) > most and len(self._prefetched) > 1:
                self._drop_prefetched(next(iter(self._prefetched)))
            self.let_go()  # freed here, because no step waits for this thread
        moved, _ = self.slot_arrays.move(adapter.packed.blocks)
        jax.block_until_ready([array for block in moved for array in (block.a, block.b)])
        with lock:
            if adapter in self._prefetched and adapter not in self.slot_arrays.occupants:
                adapter.prefetched = moved
            else:
                self._drop_prefetched(adapter)
