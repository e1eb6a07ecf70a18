"""Which content is in which slot: who is evicted, what is written, what a device error left to be mended."""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, cast

import jax

from jlora.errors import NoFreeSlotError
from jlora.manager.blocks import Block
from jlora.manager.histogram import Histogram
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import Leases
from jlora.manager.locks import StateLock
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.slot_arrays import SlotArrays

# The slot of each content that is to be written; None where it does not fit.
SlotPlan: TypeAlias = dict[PackedAdapter, int | None]

_log = logging.getLogger("jlora")


class SlotTable:
    """The slots of a manager. Every method but `move_ahead` is called under its lock; those that write, under both.

    Attributes:
      pool: the arrays.
      takes_turns: whether steps of other threads go through `LoRAManager.run`, so that no step is under way now.
      seconds: of writes.
    """

    def __init__(self, pool: SlotArrays, cache: HostCache, leases: Leases, counts: Counter[str]):
        self.pool = pool
        self.takes_turns = False
        self.seconds = Histogram()
        self._cache = cache
        self._leases = leases
        self._counts = counts
        self._used: dict[PackedAdapter, int] = {}  # tick of the last use of what is in a slot
        self._tick = 0
        self._ahead: OrderedDict[PackedAdapter, None] = OrderedDict()  # contents with blocks on the device already

    def alive(self) -> Callable[[PackedAdapter], bool]:
        """Whether a content in a slot means anything still: the newest of its name, or held."""
        held = self._leases.leased() | self._leases.handled()
        return lambda content: self._cache.newest(content) or content in held

    @property
    def copying(self) -> bool:
        """Whether a slot waits for an update to be copied back, and can be given away then."""
        return any(content is not None and content.copying for content in self.pool.table)

    def names(self) -> tuple[str | None, ...]:
        alive = self.alive()
        return tuple(c.name if c is not None and alive(c) else None for c in self.pool.table)

    def by_use(self) -> list[PackedAdapter]:
        """The contents in slots, least recently used first."""
        found = [content for content in self.pool.table if content is not None]
        return sorted(found, key=lambda content: self._used.get(content, 0))

    def touch(self, content: PackedAdapter) -> None:
        """Mark a use of a content, in its slot and on the host."""
        self._tick += 1
        self._used[content] = self._tick
        if self._cache.newest(content):
            self._cache.contents.touch(content.name)

    def hit(self, contents: Iterable[PackedAdapter]) -> None:
        """Mark a use of contents that were found in their slots."""
        for content in contents:
            self.touch(content)
            self._counts["slot_hits"] += 1

    def release(self, content: PackedAdapter) -> None:
        """Take a content out of its slot, unless an open batch holds it there."""
        content.ahead = None
        self._ahead.pop(content, None)
        if content in self._leases.leased():
            return
        for slot, held in enumerate(self.pool.table):
            if held is content:
                self.pool.clear(slot)
        self._used.pop(content, None)

    def _may_donate(self) -> bool:
        """Whether no step can be using the arrays. A thread with an open batch may be calling its step just now."""
        return self.takes_turns or not self._leases.threads() - {threading.get_ident()}

    def sweep(self) -> None:
        """Mend the slots, and forget contents that mean nothing any more."""
        if not self.pool.intact():
            self.pool.heal(self.alive(), donate=self._may_donate())
        alive = self.alive()
        for slot, content in enumerate(self.pool.table):
            # A pinned name keeps its slot while a new version is on its way into it.
            if content is not None and not alive(content) and not self._cache.contents.pinned(content.name):
                self.pool.clear(slot)
                self._used.pop(content, None)
        if len(self._used) > len(self.pool.table):  # a write failed, or its content was dropped
            held = set(self.pool.table)
            self._used = {content: tick for content, tick in self._used.items() if content in held}

    def activate(self, wanted: Sequence[PackedAdapter], *, partly: bool = False) -> list[PackedAdapter]:
        """Bring contents into slots. Returns those that were written.

        Args:
          wanted: distinct contents.
          partly: write as many as fit, in their order, instead of raising.

        Raises:
          NoFreeSlotError: there is no room; nothing has changed.
        """
        return self.carry_out(self.plan(wanted, partly=partly), wanted)

    def plan(self, wanted: Sequence[PackedAdapter], *, partly: bool = False) -> SlotPlan:
        """Which content is to be written into which slot, in that order; None for those that do not fit. See
        `activate`."""
        self.sweep()
        missing = [content for content in wanted if content not in self.pool.table]
        if not missing:
            return {}
        places = self._places(missing, wanted)
        if None in places:
            missing, places = self._make_room(missing, places, wanted)
        if None in places and not partly:
            raise NoFreeSlotError(self._no_room(missing, wanted))
        return dict(zip(missing, places, strict=True))

    def carry_out(self, plan: SlotPlan, wanted: Sequence[PackedAdapter]) -> list[PackedAdapter]:
        """Write what a plan says, and mark the use of all that is wanted. Returns what was written."""
        written = [content for content, slot in plan.items() if slot is not None]
        for content in written:
            self.write(cast("int", plan[content]), content)
        self.hit(content for content in wanted if content not in plan)
        for content in written:
            self.touch(content)
        return written

    def _places(self, missing: Sequence[PackedAdapter], wanted: Sequence[PackedAdapter]) -> list[int | None]:
        """A slot for each: that of its own older version, a free one (lowest first), or the least recently used.

        Those that few slots can hold choose first; the others leave the larger slots free while they can.
        """
        alive = self.alive()
        stale = {c.name: slot for slot, c in enumerate(self.pool.table) if c is not None and not alive(c)}
        places: dict[PackedAdapter, int | None] = {}
        for content in missing:
            slot = stale.get(content.name) if self._cache.newest(content) else None
            if slot is not None and slot in content.slots:
                places[content] = stale.pop(content.name)
        rest = sorted(self._free(), key=self.pool.slot_nbytes.__getitem__) + self._evictable(wanted)
        for content in sorted(missing, key=lambda c: len(c.slots)):
            if content not in places:
                slot = next((s for s in rest if s in content.slots), None)
                places[content] = slot
                if slot is not None:
                    rest.remove(slot)
        return [places[content] for content in missing]

    def _make_room(
        self, missing: list[PackedAdapter], places: list[int | None], wanted: Sequence[PackedAdapter]
    ) -> tuple[list[PackedAdapter], list[int | None]]:
        """The same with adapters that more slots can hold moved out of their way, if that helps."""
        table, leased = self.pool.table, self._leases.leased()
        left = [content.slots for content, slot in zip(missing, places, strict=True) if slot is None]
        held = {table.index(c): c for c in wanted if c in table and c not in leased}
        movable = [c for at, c in held.items() if any(at in slots and len(slots) < len(c.slots) for slots in left)]
        more = [*missing, *movable]
        others = self._places(more, [c for c in wanted if c not in movable])
        return (missing, places) if others.count(None) >= places.count(None) else (more, others)

    def _no_room(self, missing: Sequence[PackedAdapter], wanted: Sequence[PackedAdapter]) -> str:
        total, limits = len(self.pool.table), ["max_loras"]
        free, evictable = self._free(), self._evictable(wanted)
        names, these = ", ".join(repr(c.name) for c in missing[:8]), ""
        for slots, count in Counter(c.slots for c in missing if len(c.slots) < total).items():
            which, limit = (
                ("experts that share factors", "max_shared_expert_loras")
                if slots.start
                else ("experts", "max_expert_loras")
            )
            these += f", {count} of them one of the {len(slots)} for {which}"
            limits.append(limit)
        return (
            f"{len(missing)} adapters need a slot ({names}){these}, but of {total} slots {len(free)} are free and "
            f"{len(evictable)} can be evicted; the others are pinned, held by an open batch or part of this one. Raise "
            f"{' or '.join(limits)}, close batches, or wait for them with prepare(..., timeout=)"
        )

    def _free(self) -> list[int]:
        return [slot for slot, content in enumerate(self.pool.table) if content is None]

    def _evictable(self, wanted: Sequence[PackedAdapter]) -> list[int]:
        """Slots whose contents may go, the least recently used first."""
        alive, busy = self.alive(), self._leases.leased() | set(wanted)
        pinned = self._cache.contents.pinned
        slots = {
            slot: self._used.get(content, 0)
            for slot, content in enumerate(self.pool.table)
            if content is not None and alive(content) and content not in busy and content.on_host
            and not (pinned(content.name) and self._cache.newest(content))
        }  # fmt: skip
        return sorted(slots, key=lambda slot: slots[slot])

    def replace(self, old: PackedAdapter, new: PackedAdapter, changed: Sequence[Block]) -> None:
        """Bring a new version into the slot of the old one, if that is in one and nothing holds it any more.

        Of `new` only the blocks in `changed` differ from `old`.
        """
        if not self.pool.intact():
            self.pool.heal(self.alive(), donate=self._may_donate())
        slot = self.pool.slot_of(old)
        if slot is not None and not self.alive()(old):
            self.write(slot, new, changed)
            self.touch(new)

    def write(self, slot: int, content: PackedAdapter, only: Sequence[Block] | None = None) -> None:
        """Write one content into one slot; what was there is out. With `only`, the slot holds its other blocks."""
        started = time.monotonic()
        victim = self.pool.table[slot]
        self.pool.write(slot, content, donate=self._may_donate(), only=only)
        self._ahead.pop(content, None)
        for other, held in enumerate(self.pool.table):
            if held is content and other != slot:  # it made room for others
                self.pool.clear(other)
        if victim is not None and victim is not content:
            self._used.pop(victim, None)
            if victim.name != content.name:
                self._counts["slot_evictions"] += 1
                _log.info("evicted %r from slot %d", victim.name, slot)
        seconds = time.monotonic() - started
        if content.placements:
            self._counts["slot_loads"] += 1
            self.seconds.add(seconds)
        _log.info("wrote %r (version %d) into slot %d in %.4f s", content.name, content.version, slot, seconds)
        if _log.isEnabledFor(logging.DEBUG):
            brought = {placement.site for placement in content.placements}
            for site in self.pool.sites:
                _log.debug("slot %d: %s %r", slot, "filled" if site in brought else "cleared", site.path)

    def move_ahead(self, content: PackedAdapter, lock: StateLock, max_bytes: int) -> None:
        """Move a content to the device before it is asked for; on a loading thread, under no lock.

        At most `max_bytes` of such contents lie there; the first to come are the first to go.
        """
        size = sum(block.nbytes for block in content.blocks)
        with lock:
            if size > max_bytes or content in self.pool.table or content in self._ahead:
                return
            self._ahead[content] = None
            while sum(other.nbytes for other in self._ahead) > max_bytes and len(self._ahead) > 1:
                self._ahead.popitem(last=False)[0].ahead = None
            self.pool.let_go()  # here, where no step waits for it
        moved, _ = self.pool.move(content.blocks)
        jax.block_until_ready([array for block in moved for array in (block.a, block.b)])
        with lock:
            if content in self._ahead and content not in self.pool.table:
                content.ahead = moved
            else:
                self._ahead.pop(content, None)
