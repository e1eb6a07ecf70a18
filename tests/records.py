"""Short forms of what `LoRAManager.list_adapters` returns, for tests."""

import jlora


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
