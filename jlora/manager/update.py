"""Replace the weights of a served adapter by new arrays, as a new version."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jlora.errors import AdapterInUseError
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.loading import page_locked, recall, with_extras
from jlora.manager.loads import Deadline
from jlora.manager.state import State
from jlora.slots.new_weights import to_host, updated
from jlora.slots.packed import PackedAdapter

_log = logging.getLogger("jlora")


def update(
    state: State,
    name: str,
    arrays: Mapping[str, Any],
    deadline: Deadline,
    check: Callable[[PackedAdapter], None] | None = None,
) -> int:
    """See `LoRAManager.update_adapter`. `check` raises if it does not accept the version that is updated."""
    old = recall(state, name)
    if check is not None:
        check(old.packed)
    on_device = isinstance(arrays, Mapping) and any(isinstance(array, jax.Array) for array in arrays.values())
    if on_device:
        state.peers.refuse("update_adapter from device arrays", "give it NumPy arrays, the same in each")
    on_host = old.on_host  # read before the blocks, because a finished copy replaces them first
    values, written = updated(old.packed, arrays, state.pool, allow_nonfinite=state.config.allow_nonfinite)
    if not (on_device or on_host):
        values = values.with_blocks(to_host(values.blocks))
    state.peers.agree(lambda: [name, values.digest()])
    packed = LoadedAdapter(with_extras(state, values), on_host=not on_device)
    state.pool.compile()

    def ready() -> bool | None:
        state.wrapped.check()
        if not state.cache.newest(old):
            raise AdapterInUseError(
                f"adapter {name!r} was replaced, removed or evicted while it was updated; try again"
            )
        return state.is_free(old, "updating", deadline) or None

    with state.lock.writing:
        state.wait(ready, deadline.at)
        victims = state.cache.victims_for(packed, state.leases.leased())
        state.peers.agree(victims)
        with state.peers.change():
            if not packed.on_host:
                # Start the thread before the cache changes: if it cannot start, the slot could never be evicted.
                # The thread blocks on the state lock, which this thread holds.
                copying = threading.Thread(target=_copy_back, args=(state, packed), name="jlora-copy-back")
                copying.daemon = True
                copying.start()
                packed.copying = True
            state.put(packed, victims)
            state.slots.replace(old, packed, written)
    _log.info("updated %r to version %d", name, packed.version)
    return packed.version


def _copy_back(state: State, packed: LoadedAdapter) -> None:
    """Copy the blocks of a device update to host memory. Runs on its own thread, after the update."""
    try:
        with state.lock:
            blocks = packed.packed.blocks
        locked = page_locked(state, blocks)  # directly from the device
        blocks = to_host(blocks) if locked is blocks else locked
        with state.lock:
            packed.packed = packed.packed.with_blocks(blocks)
            packed.on_host = True
    finally:
        with state.lock:
            packed.copying = False
            state.slots.let_go()
        state.changed.ring()
