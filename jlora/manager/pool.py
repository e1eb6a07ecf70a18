"""The slot arrays of a model, and what each slot holds. Written by the dispatching thread only, between steps."""

import collections
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jlora._compat import is_committed, raw_value, set_raw_value
from jlora.layers.site import Site, SlotSpec
from jlora.manager.blocks import Block, Chunk, cut, pack, rank_step
from jlora.manager.content import Content
from jlora.manager.locks import Lock

# Where an array lies: as its sharding says, or, where nobody chose, on a device that a computation may take it from.
Where = Sharding | jax.Device

_exhaust = collections.deque(maxlen=0).extend


class Pool:
    """Slots on the device.

    A write cannot be undone half way, so it is made to be found out: a slot is marked dirty before its first array is
    written and clean after the last, and `heal` writes dirty slots again. Between the device program that consumes the
    old arrays and the model's variables that take the new ones no line of Python runs.

    Attributes:
      table: what each slot holds; None for nothing.
      dirty: slots whose arrays may not hold what the table says.
      chunks: how the rows of a slot are cut into blocks.
      pins: whether the host cache is page-locked memory that the device reads by itself.
      compilations: how often the programs that write slots were made: once.
    """

    def __init__(self, modules: Mapping[Site, nnx.Module], num_slots: int, max_staging_bytes: int):
        self.table: list[Content | None] = [None] * num_slots
        self.dirty: set[int] = set()
        self.sites = tuple(modules)
        # A block is at most a quarter of what may be on its way, so that moving and writing can overlap.
        self.chunks = cut(self.sites, max(1, max_staging_bytes // 4))
        self.compilations = 0
        device = jax.devices()[0]
        self.pins = device.platform != "cpu" and "pinned_host" in {m.kind for m in device.addressable_memories()}
        self._max_bytes = max_staging_bytes
        variables = {site: [vars(modules[site])[name] for name in site.attributes] for site in self.sites}
        self._variables = [v for site in self.sites for v in variables[site]]
        self._known = [raw_value(v) for v in self._variables]
        self._place = {site: 3 * i for i, site in enumerate(self.sites)}  # of A; B and the ranks follow
        self._unsynced: set[tuple[int, ...]] = set()
        self._in_flight: list[tuple[int, jax.Array]] = []
        self._indices: dict[tuple[int, int, int], jax.Array] = {}
        self._compiling = Lock()
        self._programs: dict[Any, Callable[..., Any]] = {}

    @property
    def rank_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of one slot's ranks of each site; flattened one after the other they are `Content.ranks`."""
        return [(*site.spec.stack, site.spec.slices) for site in self.sites]

    def arrays(self) -> list[jax.Array]:
        """The arrays that the model has now: A, B and ranks of every site."""
        return list(map(raw_value, self._variables))

    def pin(self, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """The blocks in page-locked host memory, from where they move several times as fast; as they are without it."""
        device = next(iter(self._known[0].devices()))
        if not self.pins or isinstance(_where(self._known[0]), NamedSharding):
            return blocks
        place = SingleDeviceSharding(device, memory_kind="pinned_host")
        moved = jax.device_put([array for block in blocks for array in (block.a, block.b)], place)
        return tuple(replace(block, a=moved[2 * i], b=moved[2 * i + 1]) for i, block in enumerate(blocks))

    def blank_blocks(self) -> tuple[Block, ...]:
        """A block of zeros for every chunk."""
        rows = {
            row: (
                np.zeros((chunk.spec.slices, 1, chunk.spec.in_features), chunk.spec.dtype),
                np.zeros((1, chunk.spec.out_features), chunk.spec.dtype),
            )
            for chunk in self.chunks
            for row in chunk.rows
        }
        return pack(self.chunks, rows)

    def slot_of(self, content: Content) -> int | None:
        """The slot that holds `content`, clean."""
        for slot, held in enumerate(self.table):
            if held is content:
                return None if slot in self.dirty else slot
        return None

    # --- what is on the device --------------------------------------------------------------------------------------

    def intact(self) -> bool:
        """Whether the model still has the arrays that were written, and no slot is dirty."""
        return (
            not self.dirty
            and not self._unsynced
            and all(map(operator.is_, map(raw_value, self._variables), self._known))
            and not any(map(_is_deleted, self._known))
        )

    def heal(self, alive: Callable[[Content], bool], *, donate: bool) -> None:
        """Write again what an interrupt, a device error or a stranger left in doubt. What is not `alive` is dropped.

        Args:
          alive: whether a content means anything still.
          donate: as in `write`.
        """
        for places in tuple(self._unsynced):
            self._adopt(places)
        lost = [
            i
            for i, (variable, known) in enumerate(zip(self._variables, self._known, strict=True))
            if raw_value(variable) is not known or known.is_deleted()
        ]
        if lost:
            self.dirty.update(slot for slot, content in enumerate(self.table) if content is not None)
            for i in lost:
                self._renew(i)
        for slot in sorted(self.dirty):
            content = self.table[slot]
            if content is None or not alive(content):
                self.clear(slot)
            else:
                self.write(slot, content, donate=donate)

    def _adopt(self, places: tuple[int, ...]) -> None:
        """Take the arrays that a write left in the variables, where they are whole; else they stay lost."""
        for i in places:
            found = raw_value(self._variables[i])
            if not found.is_deleted():
                self._known[i] = found
        self._unsynced.discard(places)

    def _renew(self, i: int) -> None:
        """Zeros in the place of an array that was lost, where a foreign one lies if there is one."""
        found, known = raw_value(self._variables[i]), self._known[i]
        foreign = isinstance(found, jax.Array) and found.shape == known.shape and found.dtype == known.dtype
        where = _where(found if foreign else known)
        with jax.default_device(where if isinstance(where, jax.Device) else None):
            zeros = np.zeros(known.shape, known.dtype)
            fresh = jax.device_put(zeros) if isinstance(where, jax.Device) else jax.device_put(zeros, where)
        self._known[i] = fresh
        set_raw_value(self._variables[i], fresh)

    def clear(self, slot: int) -> None:
        """Forget what a slot holds. Nothing is written: a batch names slots, and none will name this one."""
        self.table[slot] = None
        self.dirty.discard(slot)

    # --- writing ----------------------------------------------------------------------------------------------------

    def move(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """The blocks on the device, in one call."""
        targets = [self._target(block.chunk) for block in blocks]
        moved = _put(
            [array for block in blocks for array in (block.a, block.b)], [target for target in targets for _ in "ab"]
        )
        return tuple(replace(block, a=moved[2 * i], b=moved[2 * i + 1]) for i, block in enumerate(blocks))

    def write(self, slot: int, content: Content, *, donate: bool = True, only: Sequence[Block] | None = None) -> None:
        """Write `content` into a slot of every layer. An exception leaves the slot as it was, or dirty.

        Args:
          slot: which.
          content: what; only the blocks that it has are moved, the ranks say that the rest is not there.
          only: the blocks to write, where the slot holds the others already.
          donate: whether the old arrays may be consumed; if not, they are copied first and stay valid.
        """
        self.compile()
        waves = self._waves(only or content.ahead or content.blocks)
        ready = self.move(waves[0]) if waves else ()
        (ranks,) = _put([content.ranks], [_whole(_where(self._known[2]))])
        self.dirty.add(slot)
        self.table[slot] = content
        for wave in itertools.count():
            for block in ready:
                self._write_block(slot, block, donate)
            if wave + 1 >= len(waves):
                break
            jax.block_until_ready([raw_value(self._variables[i]) for i in self._places(ready[-1])[:1]])
            ready = self.move(waves[wave + 1])
        places = tuple(range(2, len(self._variables), 3))
        self._run(("ranks",), places, (ranks, self._index(slot, 0, 0)), donate)
        self.dirty.discard(slot)
        content.ahead = None
        self._in_flight.append((sum(block.nbytes for block in ready), self._known[2]))

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
        self._in_flight = [
            (n, array) for n, array in self._in_flight if not array.is_deleted() and not array.is_ready()
        ]
        while self._in_flight and sum(n for n, _ in self._in_flight) + first > self._max_bytes:
            jax.block_until_ready(self._in_flight.pop(0)[1])
        return waves

    def _write_block(self, slot: int, block: Block, donate: bool) -> None:
        chunk = block.chunk
        layer = chunk.first + (block.row or 0)
        key = _key(chunk, block.row is None)
        where = self._index(slot, layer if chunk.spec.layers is not None else 0, block.start)
        self._run(key, self._places(block), (block.a, block.b, where), donate)

    def _places(self, block: Block) -> tuple[int, ...]:
        """Indices of the variables that a block is written to: all A, then all B."""
        chunk = block.chunk
        sites = chunk.sites if block.row is None or chunk.spec.layers is not None else (chunk.sites[block.row],)
        return (*(self._place[site] for site in sites), *(self._place[site] + 1 for site in sites))

    def _run(self, key: Any, places: tuple[int, ...], operands: tuple[Any, ...], donate: bool) -> None:
        """Run one program on some of the arrays, and give its results to the model's variables."""
        variables = [self._variables[i] for i in places]
        arrays = tuple(map(raw_value, variables))
        if not donate:
            arrays = tuple(map(jnp.copy, arrays))
        program = self._program(key, tuple(map(_where, arrays)))
        self._unsynced.add(places)
        # One call from the program to the variables: an interrupt comes before it or after it, never in between.
        results = itertools.chain.from_iterable(itertools.starmap(program, ((arrays, *operands),)))
        _exhaust(map(set_raw_value, variables, results))
        self._adopt(places)

    def _index(self, *where: int) -> jax.Array:
        """[slot, layer, rank] on the device; kept, for it would be moved at every write."""
        if where not in self._indices:
            (self._indices[where],) = _put([np.array(where, np.int32)], [_whole(_where(self._known[0]))])
        return self._indices[where]

    def _target(self, chunk: Chunk) -> Where:
        return _whole(_where(self._known[self._place[chunk.sites[0]]]))

    # --- programs ---------------------------------------------------------------------------------------------------

    def compile(self) -> None:
        """Make the programs that write slots, for the arrays as they lie now. The first call compiles, in parallel."""
        if self._programs:
            return
        with self._compiling():
            if self._programs:
                return
            jobs: dict[Any, tuple[Where, ...]] = {}
            for chunk in self.chunks:
                for whole in (True, False):
                    sites = chunk.sites if whole or chunk.spec.layers is not None else chunk.sites[:1]
                    places = [self._place[site] + j for j in (0, 1) for site in sites]
                    jobs[_key(chunk, whole)] = tuple(_where(self._known[i]) for i in places)
            jobs["ranks",] = tuple(map(_where, self._known[2::3]))
            with ThreadPoolExecutor() as threads:
                made = dict(zip(jobs, threads.map(self._program, jobs, jobs.values()), strict=True))
            programs = {(key, jobs[key]): program for key, program in made.items()}
            self._programs, self.compilations = programs, self.compilations + 1

    def _program(self, key: Any, lie: tuple[Where, ...]) -> Callable[..., Any]:
        found = self._programs.get((key, lie))
        if found is not None:
            return found
        if self._programs:  # the arrays lie elsewhere than when the programs were made
            self.compilations += 1
        if key == ("ranks",):
            specs = tuple(site.spec for site in self.sites)
            program = _compiled_ranks(specs, lie)
        else:
            program = _compiled_write(*key, lie)
        if self._programs:
            self._programs[key, lie] = program
        return program


_is_deleted = operator.methodcaller("is_deleted")


def _where(array: jax.Array) -> Where:
    return array.sharding if is_committed(array) else next(iter(array.sharding.device_set))  # of a deleted one, too


def _whole(where: Where) -> Where:
    """Where an operand lies that every device needs whole."""
    return NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where


def _put(arrays: Sequence[Any], where: Sequence[Where]) -> list[jax.Array]:
    """Move operands of the programs, in one call."""
    return jax.device_put(arrays, [SingleDeviceSharding(w) if isinstance(w, jax.Device) else w for w in where])


def _key(chunk: Chunk, whole: bool) -> tuple[SlotSpec, int]:
    """Spec and number of rows: chunks of equal keys are written by one program."""
    return chunk.spec, chunk.count if whole else 1


@lru_cache(maxsize=256)
def _compiled_write(spec: SlotSpec, rows: int, lie: tuple[Where, ...]) -> Callable[..., Any]:
    """`write(arrays, a, b, [slot, layer, rank])`: the arrays (donated), all A and then all B, with a block written."""
    step = rank_step(spec)
    count = len(lie) // 2

    def write(arrays: tuple[jax.Array, ...], a: jax.Array, b: jax.Array, where: jax.Array) -> tuple[jax.Array, ...]:
        slot, layer, start = where
        zero = jnp.zeros((), jnp.int32)
        lead = (slot,) if spec.layers is None else (layer, slot)
        written = []
        for i, array in enumerate(arrays):
            block, tail = (a, (zero, start, zero)) if i < count else (b, (start, zero))
            if spec.layers is None:
                block = block[i % count]
                update = block[None]
            else:
                update = block[:, None]
            written.append(lax.dynamic_update_slice(array, update, (*lead, *tail)))
        return tuple(written)

    shape_a, shape_b, _ = spec.shapes
    arrays = [(shape_a if i < count else shape_b, spec.dtype) for i in range(2 * count)]
    blocks = [(rows, spec.slices, step, spec.in_features), (rows, step, spec.out_features)]
    return _compile(write, arrays, lie, [*((shape, spec.dtype) for shape in blocks), ((3,), "int32")])


@lru_cache(maxsize=32)
def _compiled_ranks(specs: tuple[SlotSpec, ...], lie: tuple[Where, ...]) -> Callable[..., Any]:
    """`write(arrays, ranks, [slot, 0, 0])`: the ranks of every site (donated) with one slot's written."""

    def write(arrays: tuple[jax.Array, ...], ranks: jax.Array, where: jax.Array) -> tuple[jax.Array, ...]:
        start, written = 0, []
        for spec, array in zip(specs, arrays, strict=True):
            shape = (*spec.stack, spec.slices)
            size = int(np.prod(shape))
            block = lax.slice(ranks, (start,), (start + size,)).reshape(shape)
            written.append(lax.dynamic_update_index_in_dim(array, block, where[0], axis=len(spec.stack)))
            start += size
        return tuple(written)

    total = sum(int(np.prod((*spec.stack, spec.slices))) for spec in specs)
    return _compile(write, [(spec.shapes[2], "int32") for spec in specs], lie, [((total,), "int32"), ((3,), "int32")])


def _compile(write: Callable[..., Any], arrays: Any, lie: tuple[Where, ...], operands: Any) -> Callable[..., Any]:
    """Compiled ahead of time: `jax.jit` would compile again in a context of another precision or debugging option."""
    devices = {where for where in lie if isinstance(where, jax.Device)}
    whole = _whole(lie[0])

    def struct(shape: tuple[int, ...], dtype: str, where: Where) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if isinstance(where, jax.Device) else where)

    donated = tuple(struct(*array, where) for array, where in zip(arrays, lie, strict=True))
    others = [struct(*operand, whole) for operand in operands]
    jitted = jax.jit(write, donate_argnums=0, out_shardings=tuple(array.sharding for array in donated))
    with jax.default_device(next(iter(devices), None)):
        return jitted.lower(donated, *others).compile()
