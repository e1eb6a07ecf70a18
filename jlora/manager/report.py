"""Records of adapters, counts and histograms of a manager, and the message for an unknown name."""

import bisect
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from jlora.config import LoRARequest
from jlora.errors import nearest
from jlora.layers.forward.lease import Served
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import Leases
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.slots.arrays import SlotArrays

Level: TypeAlias = Literal["slot", "host", "evicted"]
HistogramCounts = tuple[tuple[float, ...], tuple[int, ...], float]  # upper bounds, counts, sum
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)


class Histogram:
    """A histogram of seconds with the upper bounds `BOUNDS`. The last bucket counts values above all bounds.

    It has no lock of its own.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def read(self) -> HistogramCounts:
        return BOUNDS, tuple(self._counts), self._sum


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    """One adapter of a manager.

    Attributes:
      name: name of the adapter.
      level: "slot", "host" (in the host cache only), or "evicted" (loaded again from `request` when it is needed).
      slot: index of the slot that holds this version; None if there is none.
      version: version of the weights; for an evicted adapter, the last version.
      pinned: True if the adapter is never evicted; for an evicted adapter, True if it is pinned once it is loaded.
      leases: number of open batches that hold this version.
      rank: largest rank over the modules; None if evicted.
      modules: number of modules; None if evicted.
      nbytes: bytes in the host cache; 0 if evicted.
      request: source of the weights; None if they came from memory or were changed by `update_adapter`. The adapter is
        then never evicted.
      base_model_name: base model named in the adapter's files; None if unknown.
      invocation_tokens: token ids that activate an activated LoRA (`jlora.active_from`); empty for a plain adapter, and
        None if evicted.
      saved_outputs: module name -> number of outputs (labels) of its saved head; None if evicted.
      warnings: sentences of the warning that the load logged, such as factors of zeros, or targeted layers without
        weights; empty without one, after `update_adapter`, and if evicted.
    """

    name: str
    level: Level
    slot: int | None = None
    version: int
    pinned: bool
    leases: int = 0
    rank: int | None = None
    modules: int | None = None
    nbytes: int = 0
    request: LoRARequest | None
    base_model_name: str | None
    invocation_tokens: tuple[int, ...] | None = None
    saved_outputs: Mapping[str, int] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stats:
    """Counts since the manager was created, and current sizes.

    Attributes:
      host_loads, host_evictions: number of adapters added to and evicted from the host cache.
      slot_loads, slot_evictions: number of adapters written into slots, and evicted from slots to make room.
      slot_hits: number of adapters that `prepare` or `pin_adapter` found in a slot.
      compilations: number of times that the programs that write slots were compiled. It stays at 1, unless the slot
        arrays are moved to other devices.
      registered, active, leased: current number of adapters in the host cache, in slots and in open batches.
      unevictable: current number of adapters in the host cache that are pinned, came from memory or were changed by
        `update_adapter`. They are never evicted from it.
      slot_bytes: bytes of the first slot over all layers. Slots without experts, or with experts that share factors,
        are smaller (`LoRAManager.layers`). On a mesh this is the total over devices, with replicas counted once.
      host_bytes: current bytes of the host cache.
      open_leases: current number of open batches, including those of the base model only.
      load_seconds: histogram of the seconds of each load from a folder or repository, including reloads:
        (upper bounds, counts, sum). The last count is of values above all bounds.
      swap_seconds: histogram of the seconds that writing one adapter into a slot blocks the calling thread, in the
        same form.
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
    unevictable: int
    slot_bytes: int
    host_bytes: int
    open_leases: int
    load_seconds: HistogramCounts
    swap_seconds: HistogramCounts


def records(
    names: Collection[str] | None,
    level: Level | None,
    cache: HostCache,
    slot_arrays: SlotArrays[LoadedAdapter],
    leases: Leases,
) -> dict[str, AdapterInfo]:
    """See `LoRAManager.list_adapters`. Called under the state lock."""
    if names is None:
        in_slots = [adapter.name for adapter in slot_arrays.occupants if adapter is not None]
        names = in_slots if level == "slot" else [*cache.known, *cache.loaded]
    slots = {
        adapter: slot
        for slot, adapter in enumerate(slot_arrays.occupants)
        if adapter is not None and slot not in slot_arrays.dirty
    }
    leased = Counter(adapter for lease in leases.open() for adapter in lease.adapters)
    found = {name: _record(name, cache, slots, leased) for name in names if name in cache.loaded or name in cache.known}
    return found if level is None else {name: info for name, info in found.items() if info.level == level}


def _record(
    name: str, cache: HostCache, slots: Mapping[LoadedAdapter, int], leased: Mapping[Served, int]
) -> AdapterInfo:
    adapter = cache.loaded.get(name)
    if adapter is None:
        return AdapterInfo(
            name=name,
            level="evicted",
            version=cache.last[name][0],
            pinned=cache.pinned(name),
            request=cache.known[name],
            base_model_name=cache.known[name].base_model_name,
        )
    slot = slots.get(adapter)
    return AdapterInfo(
        name=name,
        level="host" if slot is None else "slot",
        slot=slot,
        version=adapter.version,
        pinned=cache.pinned(name),
        leases=leased.get(adapter, 0),
        rank=adapter.packed.rank,
        modules=len(adapter.packed.placements),
        nbytes=adapter.nbytes,
        request=adapter.request,
        base_model_name=adapter.packed.about.base_model_name,
        invocation_tokens=adapter.invocation_tokens,
        saved_outputs=adapter.packed.saved_outputs,
        warnings=adapter.warnings,
    )


def unknown_name(name: str, cache: HostCache) -> str:
    """Return the message for a name not in the host cache."""
    if name in cache.known:
        return f"adapter {name!r} was evicted from the host cache; prepare or pin_adapter loads it again"
    near = nearest(name, [*cache.known, *cache.loaded])
    return f"adapter {name[:200]!r} is not loaded; call add_adapter first{near}"
