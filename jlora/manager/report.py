"""What a manager tells about itself: `AdapterInfo` and `Stats`."""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Stats:
    """Counts since the manager was made, and what is held now.

    Attributes:
      host_loads, host_evictions: adapters brought into and pushed out of the host cache.
      slot_loads, slot_evictions: adapters written into and pushed out of a slot to make room.
      slot_hits: adapters that a `prepare` or `activate_adapter` found in a slot.
      compilations: traces of the slot write; stays at 1.
      registered, active, leased: adapters now on the host, in slots, in open batches.
      slot_bytes: bytes of one slot over all layers; the pool takes `max_loras` times that.
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
