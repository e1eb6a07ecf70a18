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
    packed, written = updated(old.packed, arrays, state.slot_arrays, allow_nonfinite=state.config.allow_nonfinite)
    if not (on_device or on_host):
        packed = packed.with_blocks(to_host(packed.blocks))
    state.peers.agree(lambda: [name, packed.digest()])
    adapter = LoadedAdapter(with_extras(state, packed), on_host=not on_device)
    state.slot_arrays.compile()

    def ready() -> bool | None:
        state.wrapped.check()
        if not state.cache.newest(old):
            raise AdapterInUseError(
                f"adapter {name!r} was replaced, removed or evicted while it was updated; try again"
            )
        return state.is_free(old, "updating", deadline) or None

    with state.lock.writing:
        state.wait(ready, deadline.at)
        victims = state.cache.victims_for(adapter, state.leases.leased())
        state.peers.agree(victims)
        with state.peers.change():
            if not adapter.on_host:
                # Start the thread before the cache changes: if it cannot start, the slot could never be evicted.
                # The thread blocks on the state lock, which this thread holds.
                copying = threading.Thread(target=_copy_back, args=(state, adapter), name="jlora-copy-back")
                copying.daemon = True
                copying.start()
                adapter.copying = True
            state.put(adapter, victims)
            state.policy.replace(old, adapter, written)
    _log.info("updated %r to version %d", name, adapter.version)
    return adapter.version


def _copy_back(state: State, adapter: LoadedAdapter) -> None:
    """Copy the blocks of a device update to host memory. Runs on its own thread, after the update."""
    try:
        with state.lock:
            blocks = adapter.packed.blocks
        locked = page_locked(state, blocks)  # directly from the device
        blocks = to_host(blocks) if locked is blocks else locked
        with state.lock:
            adapter.packed = adapter.packed.with_blocks(blocks)
            adapter.on_host = True
    finally:
        with state.lock:
            adapter.copying = False
            state.policy.let_go()
        state.changed.ring()
