"""What a manager tells about itself: `AdapterInfo`, `Stats`, the list of adapters, and what it knows when a name is
unknown."""

import difflib
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jlora.layers.forward.batch import Served
from jlora.manager.histogram import HistogramCounts
from jlora.manager.lru import LRU
from jlora.manager.packed_adapter import PackedAdapter


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter of the host cache, as `list_adapters` shows it. `slot` is None where it is in no slot."""

    name: str
    rank: int
    modules: int
    nbytes: int
    slot: int | None
    pinned: bool
    leased: bool
    path: str | None
    base_model_name: str | None
    version: int


@dataclass(frozen=True)
class Stats:
    """Counts since the manager was made, and what is held now.

    Attributes:
      host_loads, host_evictions: adapters brought into and pushed out of the host cache.
      slot_loads, slot_evictions: adapters written into and pushed out of a slot to make room.
      slot_hits: adapters that a `prepare` or `activate_adapter` found in a slot.
      compilations: how often the programs that write slots were compiled; stays at 1.
      registered, active, leased: adapters now on the host, in slots, in open batches.
      slot_bytes: bytes of one slot over all layers, of the first: slots without experts, or with experts that share
        factors, take less (`LoRAManager.layers`). On a mesh of all devices together: what several hold counts once.
      host_bytes: bytes of the host cache; adapters of the same weights share theirs.
      open_leases: open batches, those of the base model alone among them.
      load_seconds: of loads from a folder or repository, the first ones and those of adapters that had been evicted:
        (upper bounds, counts, sum) of a histogram, seconds; the last count is of those above all bounds.
      swap_seconds: of writing one adapter into a slot, as long as it keeps the thread that does it; the same.
    """

    host_loads: int
    host_evictions: int
    slot_loads: int
    slot_evictions: int
    slot_hits: int
    compilations: int
    registered: int
    active: int
    leased: int
    slot_bytes: int
    host_bytes: int
    open_leases: int
    load_seconds: HistogramCounts
    swap_seconds: HistogramCounts


def listed(
    contents: LRU[PackedAdapter], table: Sequence[PackedAdapter | None], leased: Collection[Served]
) -> dict[str, AdapterInfo]:
    """The adapters of the host cache, in its order; under the manager's lock.

    Args:
      contents: of the host cache.
      table: what each slot holds.
      leased: what open batches hold.
    """
    slots = {content: slot for slot, content in enumerate(table) if content is not None}
    return {
        name: AdapterInfo(
            name=name,
            rank=content.rank,
            modules=len(content.placements),
            nbytes=content.nbytes,
            slot=slots.get(content),
            pinned=contents.pinned(name),
            leased=content in leased,
            path=None if content.request is None else content.request.path,
            base_model_name=None if content.about is None else content.about.base_model_name,
            version=content.version,
        )
        for name, content in ((name, contents[name]) for name in contents)
    }


def unknown_name(name: str, *known: Iterable[str]) -> str:
    """The message for a name that was not added, with the nearest few of the first thousand that were."""
    names = list(itertools.chain(*known))
    near = difflib.get_close_matches(name[:100], names[:1000], n=3)  # 30 us a name
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"{len(names)} others are"
    return f"adapter {name[:200]!r} is not loaded; add_adapter it first ({hint})"
