"""Short forms of the state of a manager, for tests."""

import jax

import jlora
from jlora.manager.loaded_adapter import LoadedAdapter


def slot_names(manager: jlora.LoRAManager) -> tuple[str | None, ...]:
    """Return the adapter of each slot; None for a free slot, or one with a version that is no longer the newest."""
    names: list[str | None] = [None] * manager.config.max_loras
    for name, info in manager.list_adapters(level="slot").items():
        assert info.slot is not None
        names[info.slot] = name
    return tuple(names)


def on_host(manager: jlora.LoRAManager) -> list[str]:
    """Return the adapters in the host cache, least recently used first."""
    return [name for name, info in manager.list_adapters().items() if info.level != "evicted"]


def evicted(manager: jlora.LoRAManager) -> dict[str, jlora.LoRARequest]:
    """Return the evicted adapters and the requests that load them again."""
    return {name: info.request for name, info in manager.list_adapters(level="evicted").items()}


def content_of(manager: jlora.LoRAManager, name: str) -> LoadedAdapter:
    """Return the adapter of the newest version of a name."""
    with manager.hold(name) as handle:
        return handle.adapter


def evict(manager: jlora.LoRAManager) -> bool:
    """Evict the adapter that a full host cache evicts next. Return False if there is none."""
    state = manager._state
    with state.lock:
        name = next(state.cache.evictable(state.leases.leased()), None)
        if name is not None:
            state.evict(name)
        return name is not None


def waiting(manager: jlora.LoRAManager) -> int:
    """Return the number of calls that wait for a slot. No public call counts them."""
    return len(manager._state.queue)


def write_programs(manager: jlora.LoRAManager) -> list[jax.stages.Compiled]:
    """Return the compiled programs that write slots. No public name leads to them."""
    return [program.compiled for program in manager._state.slot_arrays._programs.values()]
