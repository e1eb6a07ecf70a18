"""The slot arrays of a model and the adapter in each slot. Only a thread that holds the step lock writes them."""

import gc
import itertools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlora._compat import Device, Launch, is_ready, raw_value, set_raw_value
from jlora.layers.site import Site, SlotSpec
from jlora.sharding.put import put
from jlora.slots.blocks import Block, Chunk, cut
from jlora.slots.packed import PackedAdapter
from jlora.slots.placement import (
    ArrayPlacement,
    as_sharded,
    everywhere,
    is_there,
    of_blocks,
    own_device,
    page_locked,
    placement_of,
    put_operands,
    refreshed,
)
from jlora.slots.programs import WriteKey, compiled_whole, compiled_write
from jlora.slots.values import empty_values

T = TypeVar("T")  # an adapter


@dataclass(frozen=True, eq=False)
class _Job:
    """A program that writes slots, the variables whose arrays it reads and returns, and their indices."""

    indices: tuple[int, ...]
    variables: tuple[nnx.Variable[jax.Array], ...]
    program: Launch


class SlotArrays(Generic[T]):
    """The slot arrays on the device.

    An interrupted write is detectable: a slot is marked dirty before its first array is written and clean after its
    last. `heal` rewrites dirty slots.

    Args:
      modules: site -> module with the slot variables.
      num_slots: number of slots.
      max_bytes: largest size of the blocks that are moved to the device at a time.

    Attributes:
      occupants: adapter in each slot, any object that is compared by identity; None for an empty slot.
      dirty: slots whose arrays may differ from `occupants`.
      writes: number of programs that have written each slot. The stamps have the same counts on the device, to detect
        copies of the model that missed a write.
      modules: as above.
      sites: the sites, in the order of the variables.
      chunks: how the entries of a slot are divided into blocks.
      page_locks: True if page-locked host memory is available, which the device reads directly.
      joined: chunks that one program writes if an adapter has all of them; see `_joins`.
      max_bytes: as above.
      slot_nbytes: bytes of each slot over all layers. The first slots may also have expert weights.
      compilations: number of times that the programs were compiled.
    """

    def __init__(self, modules: Mapping[Site, nnx.Module], num_slots: int, max_bytes: int):
        self.occupants: list[T | None] = [None] * num_slots
        self.dirty: set[int] = set()
        self.writes = [0] * num_slots
        self.modules, self.sites = modules, tuple(modules)
        # A block is at most a quarter of that size, so that transfers and writes can overlap.
        self.chunks = cut(self.sites, max(1, max_bytes // 4))
        self.slot_nbytes = [0] * num_slots
        for slots, nbytes in ((site.spec.slots, site.slot_nbytes) for site in self.sites):
            for slot in slots:
                self.slot_nbytes[slot] += nbytes
        self.compilations = 0
        self.max_bytes = max_bytes
        self._variables: list[nnx.Variable[jax.Array]] = []
        self._ranges: dict[Site, range] = {}  # indices of its arrays in the variables
        for site in self.sites:
            start = len(self._variables)
            self._variables += [vars(modules[site])[name] for name in site.attributes]
            self._ranges[site] = range(start, len(self._variables))
        stamped = next(site for site in self.sites if site.stamped)
        stamps = vars(modules[stamped])[stamped.stamps]
        self._stamps = tuple(raw_value(stamps).shape)
        self._variables.append(stamps)
        self._known = [raw_value(v) for v in self._variables]
        self._placements = [placement_of(array) for array in self._known]
        device = own_device(self._placements[0])
        self.page_locks = device.platform != "cpu" and "pinned_host" in {m.kind for m in device.addressable_memories()}
        dense = tuple(chunk for chunk in self.chunks if chunk.spec.experts is None and chunk.spec.whole)
        self.joined = dense if _joins(device) and len(dense) > 1 else ()
        self._renumbering = False  # True while stamps and `writes` may disagree
        self._jobs: dict[tuple[tuple[Chunk, int | None], ...] | str, _Job] = {}
        self._in_flight: list[Block] = []
        self._written = self._variables[0]  # a variable of the last write
        self._empty = empty_values(self.sites)  # extras of an adapter that brings none
        # Values of the ranks and of each extra last written to each slot; None if unknown.
        self._whole: dict[str, list[np.ndarray | None]] = {"ranks": [None] * num_slots}
        self._whole |= {name: [values] * num_slots for name, values in self._empty.items()}
        self._indices: dict[tuple[int, ...], jax.Array] = {}
        self._compiling = threading.RLock()
        self._programs: dict[Any, Launch] = {}

    def arrays(self) -> list[jax.Array]:
        """Return the current arrays of the model: those of each site (`SlotSpec.arrays`), then the stamps."""
        return list(map(raw_value, self._variables))

    def page_lock(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """Return the blocks in page-locked host memory, several times faster to move; unchanged if there is none."""
        if not self.page_locks:
            return blocks
        arrays, targets = self._operands(blocks)
        arrays = [
            array if is_there(array, target) else jax.device_get(array)
            for array, target in zip(arrays, targets, strict=True)
        ]
        moved = put(arrays, list(map(page_locked, targets)))
        jax.block_until_ready(moved)
        moved = iter(moved)
        # JAX frees the arrays that it copied from at a collection, in any thread. Collect here, not during a step.
        gc.collect(0)
        return tuple(block.with_arrays(moved) for block in blocks)

    def slot_of(self, adapter: T) -> int | None:
        """Return the clean slot that holds an adapter; None if there is none."""
        for slot, other in enumerate(self.occupants):
            if other is adapter:
                return None if slot in self.dirty else slot
        return None

    # --- repair -----------------------------------------------------------------------------------------------------

    def intact(self) -> bool:
        """Return True if the model still has the arrays that were written last, and no slot is dirty."""
        return (
            not (self.dirty or self._renumbering)
            and all(map(operator.is_, map(raw_value, self._variables), self._known))
            and not any(map(_is_deleted, self._known))
        )

    def heal(self, packed_of: Callable[[T], PackedAdapter | None], *, donate: bool) -> None:
        """Rewrite dirty slots, and all slots if arrays were lost, from the packed adapters.

        Slots of adapters that no batch can use are cleared. Slots that were not dirty keep their write counts, because
        open batches have these counts in their stamps.

        Args:
          packed_of: returns the values of an adapter that a batch may still use; None for others.
          donate: as in `write`.
        """
        lost = {
            i
            for i, (variable, known) in enumerate(zip(self._variables, self._known, strict=True))
            if raw_value(variable) is not known or known.is_deleted()
        }
        whole = {slot for slot, adapter in enumerate(self.occupants) if adapter is not None} - self.dirty
        numbers = {slot: self.writes[slot] for slot in whole}
        if lost:
            self.dirty |= whole
            self._whole = {name: [None] * len(self.occupants) for name in self._whole}
        if lost or self._renumbering:
            self._renumbering = True
            lost.add(len(self._variables) - 1)  # the stamps, for the counts that follow
            self.writes = [count + 2 for count in self.writes]  # larger than in any copy of the model
            for i in sorted(lost):
                self._renew(i)
        for slot in sorted(self.dirty):
            adapter = self.occupants[slot]
            if adapter is None or (packed := packed_of(adapter)) is None:
                self.clear(slot)
            else:
                self.write(slot, adapter, packed, [], donate=donate)
        if self._renumbering:
            self.writes = [numbers.get(slot, count) for slot, count in enumerate(self.writes)]
            self._renew(len(self._variables) - 1)
            self._renumbering = False

    def _renew(self, i: int) -> None:
        """Replace lost variable `i` by zeros, or, for the stamps, by the current write counts.

        The new array is placed like the array that replaced the lost one, if that has the same shape and dtype.
        """
        current, known = raw_value(self._variables[i]), self._known[i]
        foreign = isinstance(current, jax.Array) and current.shape == known.shape and current.dtype == known.dtype
        where = refreshed(self._placements[i], current if foreign else known)
        with jax.default_device(where if isinstance(where, Device) else None):
            stamps = i == len(self._variables) - 1
            values = np.broadcast_to(np.asarray(self.writes if stamps else 0, known.dtype), known.shape)
            fresh = jax.device_put(values) if isinstance(where, Device) else put([values], [where])[0]
        if where != self._placements[i]:  # other placement: the next write compiles all programs again
            self._placements[i] = where
            self._programs, self._jobs, self._indices = {}, {}, {}
        self._known[i] = fresh
        set_raw_value(self._variables[i], fresh)

    def clear(self, slot: int) -> None:
        """Mark a slot as empty. Its arrays are not written, because no new batch will refer to this slot."""
        self.occupants[slot] = None
        self.dirty.discard(slot)

    # --- writing ----------------------------------------------------------------------------------------------------

    def move(self, blocks: Sequence[Block], operands: Sequence[Any] = ()) -> tuple[tuple[Block, ...], list[jax.Array]]:
        """Move blocks to the device, unless they are there, and operands to all devices, in one transfer.

        Returns:
          The blocks and the operands on the device.
        """
        arrays, targets = self._operands(blocks)
        if all(is_there(array, target) for array, target in zip(arrays, targets, strict=True)):
            arrays, targets = [], []
        if not (arrays or operands):
            return tuple(blocks), []
        wanted = [*targets, *[everywhere(self._placements[-1])] * len(operands)]
        moved = iter(put_operands([*arrays, *operands], wanted))
        return tuple(block.with_arrays(moved) if arrays else block for block in blocks), list(moved)

    def write(
        self, slot: int, adapter: T, packed: PackedAdapter, spent: list[tuple[jax.Array, ...]], *, donate: bool = True
    ) -> None:
        """Write an adapter into a slot of all layers. After an exception the slot is unchanged or dirty.

        Args:
          slot: index of the slot.
          adapter: the new occupant.
          packed: its values. Only the blocks are moved, and may be left out if the slot already holds them; the ranks
            mark the other entries as unused.
          spent: list that keeps the arrays which the write consumes, since freeing these hundreds of buffers takes
            0.2 ms.
          donate: donate the old arrays. If False, they are copied first and stay valid.
        """
        self.compile()
        waves = self._waves(packed.blocks)
        # Most adapters of a deployment have the same ranks, so the slot often has them already.
        values = {"ranks": packed.ranks, **self._empty, **packed.extras}
        new = [name for name in self._whole if not self._holds(slot, name, values[name])]
        ready, arrays = self.move(waves[0] if waves else [], [values[name] for name in new])
        self.dirty.add(slot)
        for name in new:
            self._whole[name][slot] = None
        self.occupants[slot] = adapter
        for wave in itertools.count():
            for blocks in self._together(ready):
                operands = [operand for block in blocks for operand in (*block.operands, self._where(slot, block))]
                spent.append(self._run(slot, self._job(blocks), operands, donate))
            if wave + 1 >= len(waves):
                break
            jax.block_until_ready(self._last())
            ready = blocks = operands = ()  # free this wave before the next is moved
            ready, _ = self.move(waves[wave + 1])
        for name, moved in zip(new, arrays, strict=True):
            self._run(slot, self._whole_job(name), [moved, self._index(slot, 0, 0, 0)], donate)
            self._whole[name][slot] = values[name]
        self.dirty.discard(slot)
        # Keep the blocks until the write is done, because freeing arrays in use takes longer.
        self._in_flight.extend(ready)

    def _holds(self, slot: int, name: str, values: np.ndarray) -> bool:
        """Return True if a clean slot is known to hold these values of a whole array."""
        written = None if slot in self.dirty else self._whole[name][slot]
        return written is not None and np.array_equal(written, values)

    def _waves(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """Return the blocks in batches of at most `max_bytes`.

        Wait for earlier writes first, if their blocks and the first batch exceed this size together.
        """
        waves: list[list[Block]] = []
        size = self.max_bytes + 1
        for block in blocks:
            if size + block.nbytes > self.max_bytes:
                waves.append([])
                size = 0
            waves[-1].append(block)
            size += block.nbytes
        first = sum(block.nbytes for block in waves[0]) if waves else 0
        # Writes run in order, so all are done when the last one is.
        full = sum(block.nbytes for block in self._in_flight) + first > self.max_bytes
        if full and self._in_flight:
            jax.block_until_ready(self._last())
        self.let_go()
        return waves

    def let_go(self) -> None:
        """Free the blocks in flight if the last write is done."""
        if self._in_flight and _is_done(self._last()):
            self._in_flight.clear()

    def _together(self, blocks: Sequence[Block]) -> list[tuple[Block, ...]]:
        """Divide blocks into batches, one for each program: a block of each `joined` chunk, or a single block."""
        batches: list[tuple[Block, ...]] = []
        for start in dict.fromkeys(block.start for block in blocks) if self.joined else ():
            of = {block.chunk: block for block in blocks if block.start == start and block.entry is None}
            if of.keys() >= set(self.joined):
                batches.append(tuple(of[chunk] for chunk in self.joined))
        taken = {id(block) for batch in batches for block in batch}
        return batches + [(block,) for block in blocks if id(block) not in taken]

    def _where(self, slot: int, block: Block) -> jax.Array:
        entry, owner = block.chunk.origin(block.entry)
        return self._index(slot, entry, block.start, owner)

    def _job(self, blocks: Sequence[Block]) -> "_Job":
        """Return the program that writes the blocks, and its variables."""
        at = tuple((block.chunk, block.entry) for block in blocks)
        if at not in self._jobs:
            self._jobs[at] = self._make_job(*self._task(at))
        return self._jobs[at]

    def _whole_job(self, name: str) -> "_Job":
        """Return the program that writes the ranks or an extra, and its variables."""
        if name not in self._jobs:
            self._jobs[name] = self._make_job(name, self._of(name))
        return self._jobs[name]

    def _make_job(self, key: WriteKey | str, indices: tuple[int, ...]) -> "_Job":
        program = self._program(key, tuple(self._placements[i] for i in indices))
        return _Job(indices, tuple(self._variables[i] for i in indices), program)

    def _task(self, at: Sequence[tuple[Chunk, int | None]]) -> tuple[WriteKey, tuple[int, ...]]:
        """Return the compile key and variable indices of the program for these entries of chunks (None: all)."""
        key: list[tuple[SlotSpec, int, int]] = []
        indices: list[int] = []
        for chunk, entry in at:
            sites = chunk.sites if entry is None or chunk.spec.entries else (chunk.sites[entry],)
            key.append((chunk.spec, chunk.count if entry is None else 1, len(sites)))
            indices += self._of_blocks(sites)
        return tuple(key), (*indices, len(self._variables) - 1)

    def _run(self, slot: int, job: "_Job", operands: Sequence[jax.Array], donate: bool) -> tuple[jax.Array, ...]:
        """Run a program that writes a slot, and store its results in the model's variables.

        Returns:
          The arrays that the program consumed.
        """
        arrays = tuple(map(raw_value, job.variables))
        if not donate:
            arrays = tuple(map(jnp.copy, arrays))
        for i, variable, result in zip(job.indices, job.variables, job.program([*arrays, *operands]), strict=True):
            set_raw_value(variable, result)
            self._known[i] = result
        self.writes[slot] += 1
        self._written = job.variables[0]
        return arrays

    def _last(self) -> jax.Array:
        return raw_value(self._written)

    def _index(self, *where: int) -> jax.Array:
        """Return int32 [slot, entry, rank, shard] on the device. It is cached, to avoid a transfer at each write."""
        if where not in self._indices:
            (self._indices[where],) = put_operands([np.array(where, np.int32)], [everywhere(self._placements[0])])
        return self._indices[where]

    def _operands(self, blocks: Sequence[Block]) -> tuple[list[Any], list[ArrayPlacement]]:
        """Return the arrays of each block, and the placement of each for the write."""
        arrays = [array for block in blocks for array in block.arrays]
        return arrays, [target for block in blocks for target in self._targets(block)]

    def _targets(self, block: Block) -> tuple[ArrayPlacement, ...]:
        """Return the placements of a block's arrays for the write: sharded like the slots, else replicated."""
        spec, placements = block.chunk.spec, [self._placements[i] for i in self._of_blocks(block.chunk.sites[:1])]
        if as_sharded(spec, placements):
            return tuple(of_blocks(spec, whole=block.entry is None).values())[: len(block.arrays)]
        return (everywhere(placements[0]),) * len(block.arrays)

    def _of_blocks(self, sites: Sequence[Site]) -> tuple[int, ...]:
        """Return the variable indices of the arrays that blocks of sites with one spec are written into."""
        return tuple(self._ranges[site][j] for j in range(len(sites[0].spec.of_blocks)) for site in sites)

    def _of(self, name: str) -> tuple[int, ...]:
        """Return the variable indices of the ranks or an extra of all sites that hold it, and of the stamps."""
        having = [(site, list(site.spec.arrays)) for site in self.sites if name in site.spec.arrays]
        return *(self._ranges[site][names.index(name)] for site, names in having), len(self._variables) - 1

    # --- programs ---------------------------------------------------------------------------------------------------

    def compile(self) -> None:
        """Compile the programs that write slots, in parallel, for the current placement of the arrays.

        If they are compiled already, return at once.
        """
        if self._programs:
            return
        with self._compiling:
            if self._programs:
                return
            # The model may have moved since it was wrapped.
            self._placements = list(map(refreshed, self._placements, self.arrays()))
            wanted = self._wanted()
            with ThreadPoolExecutor() as threads:
                made = list(threads.map(self._program, *zip(*wanted, strict=True)))
            programs = dict(zip(wanted, made, strict=True))
            self._programs, self.compilations = programs, self.compilations + 1

    def _wanted(self) -> set[tuple[WriteKey | str, tuple[ArrayPlacement, ...]]]:
        """Return the keys of all programs (chunks, their entries, whole arrays), each with its arrays' placements."""
        tasks: list[tuple[WriteKey | str, tuple[int, ...]]]
        tasks = [self._task([(chunk, entry)]) for chunk in self.chunks for entry in (None, *self._kinds(chunk))]
        tasks += [self._task([(chunk, None) for chunk in self.joined])] if self.joined else []
        tasks += [(name, self._of(name)) for name in self._whole]
        return {(key, tuple(self._placements[i] for i in indices)) for key, indices in tasks}

    def _kinds(self, chunk: Chunk) -> range:
        """Return one entry of each site of a chunk."""
        return range(1) if chunk.spec.entries else range(chunk.count)

    def _program(self, key: WriteKey | str, placements: tuple[ArrayPlacement, ...]) -> Launch:
        found = self._programs.get((key, placements))
        if found is not None:
            return found
        if isinstance(key, str):
            specs = tuple(site.spec for site in self.sites if key in site.spec.arrays)
            return compiled_whole(key, specs, self._stamps, placements)
        return compiled_write(key, self._stamps, placements)


_is_deleted = operator.methodcaller("is_deleted")


def _is_done(array: jax.Array) -> bool:
    """Return True if an array is computed, or if a step of another thread has donated it."""
    try:
        return is_ready(array)
    except RuntimeError:  # the array was deleted
        return True


def _joins(device: Device) -> bool:
    """Return True if one program should write several chunks.

    On an accelerator, starting a program takes longer than the write. On CPU, this would only add a compilation.
    """
    return device.platform != "cpu"
