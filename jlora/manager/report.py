"""Records of a manager: `AdapterInfo` and `Stats`, and the message for an unknown name."""

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jlora.config import LoRARequest
from jlora.layers.forward.batch import Served
from jlora.manager.histogram import HistogramCounts
from jlora.manager.host_cache import HostCache
from jlora.manager.packed_adapter import PackedAdapter

Level: TypeAlias = Literal["slot", "host", "evicted"]


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter, as `LoRAManager.list_adapters` returns it.

    Attributes:
      name: of the adapter.
      level: "slot" if its newest version is in a slot, "host" if only on the host, "evicted" if it is loaded again on
        demand.
      slot: index of its slot; None in no slot.
      version: its newest version; of an evicted one, the last that was loaded.
      pinned: whether it is never evicted from its slot and the host.
      leases: number of open batches that hold its newest version.
      request: its source; None if it came from memory or was changed by `update_adapter`.
      rank: largest rank of its modules; None if evicted.
      modules: number of its modules; None if evicted.
      nbytes: bytes in the host cache; None if evicted.
      base_model_name: as in its config; None if evicted or absent there.
    """

    name: str
    level: Level
    slot: int | None
    version: int
    pinned: bool
    leases: int
    request: LoRARequest | None
    rank: int | None = None
    modules: int | None = None
    nbytes: int | None = None
    base_model_name: str | None = None


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
      host_bytes: bytes of the host cache.
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


def list_records(
    cache: HostCache,
    table: Sequence[PackedAdapter | None],
    leases: Mapping[Served, int],
    names: Collection[str],
    level: Level | None,
) -> dict[str, AdapterInfo]:
    """Return the records of adapters; see `LoRAManager.list_adapters`. Called under the manager's lock.

    Args:
      cache: the host cache.
      table: the content of each slot.
      leases: content -> number of open leases that hold it.
      names, level: as in `LoRAManager.list_adapters`.
    """
    slots = {content: slot for slot, content in enumerate(table) if content is not None}
    if names:
        chosen: Iterable[str] = names
    elif level == "slot":
        chosen = (content.name for content in slots)
    else:
        chosen = itertools.chain(() if level == "evicted" else cache.contents, () if level == "host" else cache.known)
    records: dict[str, AdapterInfo] = {}
    for name in chosen:
        content = cache.contents.get(name)
        if content is not None:
            slot = slots.get(content)
            record = AdapterInfo(
                name=name,
                level="host" if slot is None else "slot",
                slot=slot,
                version=content.version,
                pinned=cache.contents.pinned(name),
                leases=leases.get(content, 0),
                request=content.request,
                rank=content.rank,
                modules=len(content.placements),
                nbytes=content.nbytes,
                base_model_name=None if content.about is None else content.about.base_model_name,
            )
        elif name in cache.known:
            record = AdapterInfo(name, "evicted", None, cache.last[name][0], False, 0, cache.known[name])
        else:
            continue
        if level is None or record.level == level:
            records[name] = record
    return records


def unknown_name(name: str, cache: HostCache) -> str:
    """Return the message for a name that was not added, with up to three similar ones.

    Only the thousand names that were used last are compared, at 30 us each.
    """
    names = [*cache.known, *cache.contents]
    near = difflib.get_close_matches(name[:100], names[-1000:], n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"{len(names)} others are"
    return f"adapter {name[:200]!r} is not loaded; add_adapter it first ({hint})"
