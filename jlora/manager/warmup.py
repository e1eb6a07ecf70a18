"""Compile the programs that write slots, and a step for one batch shape, before serving."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jlora.adapters import Adapter
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.lease import Lease
from jlora.layers.forward.make_batch import make_batch
from jlora.manager.batch_arguments import BatchArguments
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.prepare import prepare
from jlora.manager.state import State
from jlora.slots.blocks import Block, Chunk, Entry, pack
from jlora.slots.codec import Encoded, encode
from jlora.slots.packed import PackedAdapter
from jlora.slots.packing import rank_values, with_scales


def warm_up(state: State, step: Callable[[LoRABatch], Any] | None, shape: BatchShape) -> None:
    """See `LoRAManager.warmup`."""
    slot_arrays, policy, wrapped = state.slot_arrays, state.policy, state.wrapped
    slot_arrays.compile()
    none = len(slot_arrays.occupants)
    about, ranks = Adapter(name="(warm-up)", modules={}), rank_values(slot_arrays.sites, ())
    blank = LoadedAdapter(PackedAdapter(about, (), ranks, 0, _blank_blocks(slot_arrays.chunks)))
    lease = Lease([blank], ((),) * shape.num_sequences, threading.get_ident(), shape)
    try:
        with state.lock.writing:
            wrapped.check()
            policy.sweep()
            slot = next((slot for slot, adapter in enumerate(slot_arrays.occupants) if adapter is None), none)
            state.leases.add(lease)
            if slot < none:
                policy.write(slot, blank)
        if step is not None:
            index, unserved = [0] * shape.num_sequences, wrapped.unserved.sites
            batch = make_batch([[(slot, 0, 1.0)]], index, shape, wrapped.sites, lease, none=none, unserved=unserved)
            jax.block_until_ready(step(batch))
            with state.peers.turn("warmup"):
                batch = prepare(state, BatchArguments((None,) * shape.num_sequences, shape), None)
            with batch:
                jax.block_until_ready(step(batch))
    finally:
        lease.close()


def _blank_blocks(chunks: Sequence[Chunk]) -> tuple[Block, ...]:
    """Return zero blocks for the chunks that all slots have. Expert blocks are left out: they would take gigabytes."""
    entries: dict[Entry, Encoded] = {}
    for chunk in chunks:
        if chunk.spec.experts is None and chunk.spec.whole:
            entries |= dict.fromkeys(chunk.entries, encode(chunk.spec, [(None, ())], 1, np))
    return with_scales(pack(chunks, entries), ())
