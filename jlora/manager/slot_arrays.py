"""The slot arrays of a model, and what each slot holds. Written by the dispatching thread only, between steps."""

import gc
import itertools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlora._compat import Device, Launch, is_ready, raw_value, set_raw_value
from jlora.layers.site import Site
from jlora.manager.array_placement import (
    ArrayPlacement,
    as_said,
    as_sharded,
    everywhere,
    lies,
    of_blocks,
    own_device,
    pinned,
    place_of,
    put_operands,
)
from jlora.manager.blocks import Block, Chunk, cut
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.programs import Key, Part, compiled_ranks, compiled_write
from jlora.sharding.put import put

_RANKS: Key = ()  # of the program that writes ranks


@dataclass(frozen=True, eq=False)
class _Job:
    """A program that writes slots, the variables whose arrays it takes and returns, and their indices."""

    places: tuple[int, ...]
    variables: tuple[nnx.Variable[jax.Array], ...]
    program: Launch


class SlotArrays:
    """Slots on the device.

    A write that a device error cuts short is found out: a slot is marked dirty before its first array is written and
    clean after the last, and `heal` writes dirty slots again.

    Attributes:
      table: what each slot holds; None for nothing.
      dirty: slots whose arrays may not hold what the table says.
      writes: how many programs have written each slot. The stamps count the same on the device, so that a copy of the
        model which missed one is told.
      chunks: how the rows of a slot are cut into blocks.
      pins: whether the host cache is page-locked memory that the device reads by itself.
      joined: the chunks that one program writes where an adapter brings all of them; see `_joins`.
      slot_nbytes: bytes of each slot over all layers: the first can hold weights of experts, maybe not all.
      compilations: how often the programs that write slots were made: once.
    """

    def __init__(self, modules: Mapping[Site, nnx.Module], num_slots: int, max_staging_bytes: int):
        self.table: list[PackedAdapter | None] = [None] * num_slots
        self.dirty: set[int] = set()
        self.writes = [0] * num_slots
        self.sites = tuple(modules)
        # A block is at most a quarter of what may be on its way, so that moving and writing can overlap.
        self.chunks = cut(self.sites, max(1, max_staging_bytes // 4))
        self.slot_nbytes = [0] * num_slots
        for slots, nbytes in ((site.spec.slots, site.slot_nbytes) for site in self.sites):
            for slot in slots:
                self.slot_nbytes[slot] += nbytes
        self.compilations = 0
        self._max_bytes = max_staging_bytes
        self._variables: list[nnx.Variable[jax.Array]] = []
        self._places: dict[Site, range] = {}  # of its factors and ranks, among the variables
        for site in self.sites:
            start = len(self._variables)
            self._variables += [vars(modules[site])[name] for name in site.attributes]
            self._places[site] = range(start, len(self._variables))
        stamped = next(site for site in self.sites if site.stamped)
        stamps = vars(modules[stamped])[stamped.stamps]
        self._stamps = tuple(raw_value(stamps).shape)
        self._variables.append(stamps)
        self._known = [raw_value(v) for v in self._variables]
        self._lie = [place_of(array) for array in self._known]
        device = own_device(self._lie[0])
        self.pins = device.platform != "cpu" and "pinned_host" in {m.kind for m in device.addressable_memories()}
        dense = tuple(chunk for chunk in self.chunks if chunk.spec.experts is None and chunk.spec.whole)
        self.joined = dense if _joins(device) and len(dense) > 1 else ()
        self._renumbering = False  # whether stamps and `writes` may disagree
        self._jobs: dict[tuple[tuple[Chunk, int | None], ...], _Job] = {}
        self._in_flight: list[Block] = []
        self._spent: list[tuple[jax.Array, ...]] = []  # what writes consumed: see `let_go`
        self._written = self._variables[0]  # a variable that the last write wrote
        self._ranks: list[np.ndarray | None] = [None] * num_slots  # as they were written last
        self._indices: dict[tuple[int, ...], jax.Array] = {}
        self._compiling = threading.RLock()
        self._programs: dict[Any, Launch] = {}

    def arrays(self) -> list[jax.Array]:
        """The arrays that the model has now: A, B and ranks of every site, and the stamps."""
        return list(map(raw_value, self._variables))

    def pin(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """The blocks in page-locked host memory, from where they move several times as fast; as they are without it."""
        if not self.pins:
            return blocks
        arrays, targets = self._pieces(blocks)
        arrays = [
            array if lies(array, target) else jax.device_get(array)
            for array, target in zip(arrays, targets, strict=True)
        ]
        moved = put(arrays, list(map(pinned, targets)))
        jax.block_until_ready(moved)
        # What JAX has copied from it gives back at a collection, in whatever thread. That is not to be a step's.
        gc.collect(0)
        return tuple(replace(block, a=moved[2 * i], b=moved[2 * i + 1]) for i, block in enumerate(blocks))

    def slot_of(self, content: PackedAdapter) -> int | None:
        """The slot that holds `content`, clean."""
        for slot, held in enumerate(self.table):
            if held is content:
                return None if slot in self.dirty else slot
        return None

    # --- what is on the device --------------------------------------------------------------------------------------

    def intact(self) -> bool:
        """Whether the model still has the arrays that were written, and no slot is dirty."""
        return (
            not (self.dirty or self._renumbering)
            and all(map(operator.is_, map(raw_value, self._variables), self._known))
            and not any(map(_is_deleted, self._known))
        )

    def heal(self, alive: Callable[[PackedAdapter], bool], *, donate: bool) -> None:
        """Write again what a device error or a stranger left in doubt. What is not `alive` is dropped.

        A slot that was whole gets the number of its last write back: batches that are open need that one.

        Args:
          alive: whether a content means anything still.
          donate: as in `write`.
        """
        lost = {
            i
            for i, (variable, known) in enumerate(zip(self._variables, self._known, strict=True))
            if raw_value(variable) is not known or known.is_deleted()
        }
        whole = {slot for slot, content in enumerate(self.table) if content is not None} - self.dirty
        numbers = {slot: self.writes[slot] for slot in whole}
        if lost:
            self.dirty |= whole
            self._ranks = [None] * len(self.table)
        if lost or self._renumbering:
            self._renumbering = True
            lost.add(len(self._variables) - 1)  # with the numbers that follow
            self.writes = [count + 2 for count in self.writes]  # more than any copy has seen
            for i in sorted(lost):
                self._renew(i)
        for slot in sorted(self.dirty):
            content = self.table[slot]
            if content is None or not alive(content):
                self.clear(slot)
            else:
                self.write(slot, content, donate=donate)
        if self._renumbering:
            self.writes = [numbers.get(slot, count) for slot, count in enumerate(self.writes)]
            self._renew(len(self._variables) - 1)
            self._renumbering = False

    def _renew(self, i: int) -> None:
        """A new array in the place of one that was lost, where a foreign one lies if there is one: zeros, or the stamps
        as they are counted here."""
        found, known = raw_value(self._variables[i]), self._known[i]
        foreign = isinstance(found, jax.Array) and found.shape == known.shape and found.dtype == known.dtype
        where = as_said(self._lie[i], found if foreign else known)
        with jax.default_device(where if isinstance(where, Device) else None):
            stamps = i == len(self._variables) - 1
            values = np.broadcast_to(np.asarray(self.writes if stamps else 0, known.dtype), known.shape)
            fresh = jax.device_put(values) if isinstance(where, Device) else put([values], [where])[0]
        if where != self._lie[i]:  # moved elsewhere: other programs, made together when the next write asks
            self._lie[i] = where
            self._programs, self._jobs, self._indices = {}, {}, {}
        self._known[i] = fresh
        set_raw_value(self._variables[i], fresh)

    def clear(self, slot: int) -> None:
        """Forget what a slot holds. Nothing is written: a batch names slots, and none will name this one."""
        self.table[slot] = None
        self.dirty.discard(slot)

    # --- writing ----------------------------------------------------------------------------------------------------

    def move(self, blocks: Sequence[Block], operands: Sequence[Any] = ()) -> tuple[tuple[Block, ...], list[jax.Array]]:
        """The blocks on the device, as they are where they lie there already; and in the same call what every device
        needs whole."""
        arrays, targets = self._pieces(blocks)
        if all(lies(array, target) for array, target in zip(arrays, targets, strict=True)):
            arrays, targets = [], []
        if not (arrays or operands):
            return tuple(blocks), []
        moved = put_operands([*arrays, *operands], [*targets, *[everywhere(self._lie[-1])] * len(operands)])
        count = len(arrays)
        if count:
            blocks = [replace(block, a=moved[2 * i], b=moved[2 * i + 1]) for i, block in enumerate(blocks)]
        return tuple(blocks), moved[count:]

    def write(
        self, slot: int, content: PackedAdapter, *, donate: bool = True, only: Sequence[Block] | None = None
    ) -> None:
        """Write `content` into a slot of every layer. An exception leaves the slot as it was, or dirty.

        Args:
          slot: which.
          content: what; only the blocks that it has are moved, the ranks say that the rest is not there.
          only: the blocks to write, where the slot holds the others already.
          donate: whether the old arrays may be consumed; if not, they are copied first and stay valid.
        """
        self.compile()
        waves = self._waves(only or content.ahead or content.blocks)
        # Most adapters of a deployment have the same ranks: then the slot has them already.
        held = None if slot in self.dirty else self._ranks[slot]
        new_ranks = held is None or not np.array_equal(held, content.ranks)
        ready, ranks = self.move(waves[0] if waves else [], [content.ranks] if new_ranks else [])
        # Hundreds of objects, whose end takes 0.2 ms: a thread that loads sees to that, or the one that copies an
        # update back, where there is one.
        spent = self._spent if content.ahead is not None or content.copying else []
        self.dirty.add(slot)
        if new_ranks:
            self._ranks[slot] = None
        self.table[slot] = content
        for wave in itertools.count():
            for blocks in self._together(ready):
                operands = [operand for block in blocks for operand in (*block.held, self._where(slot, block))]
                spent.append(self._run(slot, self._job(blocks), operands, donate))
            if wave + 1 >= len(waves):
                break
            jax.block_until_ready(self._last())
            ready = blocks = operands = ()  # lets go of this wave before the next is moved
            ready, _ = self.move(waves[wave + 1])
        if new_ranks:
            self._run(slot, self._job(()), [*ranks, self._index(slot, 0, 0, 0)], donate)
            self._ranks[slot] = content.ranks
        self.dirty.discard(slot)
        content.ahead = None
        # The blocks are kept until the write is over: to let go of what is in use takes longer.
        self._in_flight.extend(ready)

    def _waves(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """The blocks in groups of at most `max_staging_bytes`. Waits until what is still on its way leaves room."""
        waves: list[list[Block]] = []
        size = self._max_bytes + 1
        for block in blocks:
            if size + block.nbytes > self._max_bytes:
                waves.append([])
                size = 0
            waves[-1].append(block)
            size += block.nbytes
        first = sum(block.nbytes for block in waves[0]) if waves else 0
        # Writes come one after the other, so all are over when the last is.
        full = sum(block.nbytes for block in self._in_flight) + first > self._max_bytes
        if full and self._in_flight:
            jax.block_until_ready(self._last())
        self._let_blocks_go()
        return waves

    def let_go(self) -> None:
        """Give back the memory of what writes left behind; for a thread that no step waits for."""
        self._spent.clear()
        self._let_blocks_go()

    def _let_blocks_go(self) -> None:
        """Give back the memory of blocks that were written, if they are."""
        if self._in_flight and _is_done(self._last()):
            self._in_flight.clear()

    def _together(self, blocks: Sequence[Block]) -> list[tuple[Block, ...]]:
        """The blocks that a program each writes: those of the same ranks of all `joined` chunks, or one."""
        groups: list[tuple[Block, ...]] = []
        for start in dict.fromkeys(block.start for block in blocks) if self.joined else ():
            of = {block.chunk: block for block in blocks if block.start == start and block.row is None}
            if of.keys() >= set(self.joined):
                groups.append(tuple(of[chunk] for chunk in self.joined))
        taken = {id(block) for group in groups for block in group}
        return groups + [(block,) for block in blocks if id(block) not in taken]

    def _where(self, slot: int, block: Block) -> jax.Array:
        row, owner = block.chunk.place(block.row)
        return self._index(slot, row, block.start, owner)

    def _job(self, blocks: Sequence[Block]) -> "_Job":
        """The program that writes some blocks, and the variables that it writes; of no block: that of the ranks."""
        at = tuple((block.chunk, block.row) for block in blocks)
        if at not in self._jobs:
            key, places = self._task(at) if at else (_RANKS, self._of_ranks())
            program = self._program(key, tuple(self._lie[i] for i in places))
            self._jobs[at] = _Job(places, tuple(self._variables[i] for i in places), program)
        return self._jobs[at]

    def _task(self, at: Sequence[tuple[Chunk, int | None]]) -> tuple[Key, tuple[int, ...]]:
        """What a program that writes these rows of chunks (None: all) is made for, and the variables that it writes."""
        key: list[Part] = []
        places: list[int] = []
        for chunk, row in at:
            sites = chunk.sites if row is None or chunk.spec.rows else (chunk.sites[row],)
            key.append((chunk.spec, chunk.count if row is None else 1, len(sites)))
            places += self._of_factors(sites)
        return tuple(key), (*places, len(self._variables) - 1)

    def _run(self, slot: int, job: "_Job", operands: Sequence[jax.Array], donate: bool) -> tuple[jax.Array, ...]:
        """Run one program on some of the arrays, which writes a slot, and give its results to the model's variables.
        Returns what it consumed."""
        arrays = tuple(map(raw_value, job.variables))
        if not donate:
            arrays = tuple(map(jnp.copy, arrays))
        for i, variable, result in zip(job.places, job.variables, job.program([*arrays, *operands]), strict=True):
            set_raw_value(variable, result)
            self._known[i] = result
        self.writes[slot] += 1
        self._written = job.variables[0]
        return arrays

    def _last(self) -> jax.Array:
        return raw_value(self._written)

    def _index(self, *where: int) -> jax.Array:
        """[slot, row, rank, shard] on the device; kept, for it would be moved at every write."""
        if where not in self._indices:
            (self._indices[where],) = put_operands([np.array(where, np.int32)], [everywhere(self._lie[0])])
        return self._indices[where]

    def _pieces(self, blocks: Sequence[Block]) -> tuple[list[Any], list[ArrayPlacement]]:
        """A and B of every block, and where each lies when it is written."""
        arrays = [array for block in blocks for array in (block.a, block.b)]
        return arrays, [target for block in blocks for target in self._targets(block)]

    def _targets(self, block: Block) -> tuple[ArrayPlacement, ArrayPlacement]:
        """Where a block's A and B lie when they are written: split as the slots are."""
        spec, lie = block.chunk.spec, [self._lie[i] for i in self._of_factors(block.chunk.sites[:1])]
        if as_sharded(spec, lie):
            return of_blocks(spec, whole=block.row is None)
        whole = everywhere(lie[0])
        return whole, whole

    def _of_factors(self, sites: Sequence[Site]) -> tuple[int, ...]:
        """Indices of all A and then all B of some sites of one spec, as far as they hold them."""
        return tuple(self._places[site][j] for j in range(len(sites[0].spec.factors)) for site in sites)

    def _of_ranks(self) -> tuple[int, ...]:
        """Indices of the ranks of all sites, and of the stamps."""
        return *(self._places[site][-1] for site in self.sites), len(self._variables) - 1

    # --- programs ---------------------------------------------------------------------------------------------------

    def compile(self) -> None:
        """Make the programs that write slots, for the arrays as they lie now. The first call compiles, in parallel."""
        if self._programs:
            return
        with self._compiling:
            if self._programs:
                return
            self._lie = list(map(as_said, self._lie, self.arrays()))  # it may have been moved since it was wrapped
            wanted = self._wanted()
            with ThreadPoolExecutor() as threads:
                made = list(threads.map(self._program, *zip(*wanted, strict=True)))
            programs = dict(zip(wanted, made, strict=True))
            self._programs, self.compilations = programs, self.compilations + 1

    def _wanted(self) -> set[tuple[Key, tuple[ArrayPlacement, ...]]]:
        """The programs that write slots, and where the arrays lie that each takes: chunks, rows of chunks, ranks."""
        tasks = [self._task([(chunk, row)]) for chunk in self.chunks for row in (None, *self._kinds(chunk))]
        tasks += [self._task([(chunk, None) for chunk in self.joined])] if self.joined else []
        tasks.append((_RANKS, self._of_ranks()))
        return {(key, tuple(self._lie[i] for i in places)) for key, places in tasks}

    def _kinds(self, chunk: Chunk) -> range:
        """Rows of a chunk among which those of every site are."""
        return range(1) if chunk.spec.rows else range(chunk.count)

    def _program(self, key: Key, lie: tuple[ArrayPlacement, ...]) -> Launch:
        found = self._programs.get((key, lie))
        if found is not None:
            return found
        if key == _RANKS:
            return compiled_ranks(tuple(site.spec for site in self.sites), self._stamps, lie)
        return compiled_write(key, self._stamps, lie)


_is_deleted = operator.methodcaller("is_deleted")


def _is_done(array: jax.Array) -> bool:
    """Whether what makes an array is over; also of one that a step of another thread donates just now."""
    try:
        return is_ready(array)
    except RuntimeError:  # of a deleted array, which is no use any more
        return True


def _joins(device: Device) -> bool:
    """Whether one program is to write what several could: to start each takes an accelerator longer than to write. A
    CPU would only compile one more."""
    return device.platform != "cpu"
