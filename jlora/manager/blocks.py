"""How slots are cut into blocks: what is packed on the host, moved in one piece, and written by one program.

A row is one site, or one layer of a stacked site, or one expert of either. Rows of equal `SlotSpec` are cut into
chunks; a block holds the factors of a chunk, or of one row of it, for `rank_step` ranks. So an adapter moves what it
brings: chunks whose rows it all brings in one block (of experts at least half of them), others row by row, and of the
ranks only the blocks that it has.
"""

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jlora._memory import fresh
from jlora.layers.site import Site, SlotSpec, as_brought

RANK_STEP = 16  # ranks are padded to this; the kernels mask what lies past it
MAX_ROWS = 64  # rows a chunk: enough that dispatch does not count, few enough to compile quickly

Row = tuple[Site, int]
_BFLOAT16, _UINT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)
_Bits = tuple[int, np.ndarray, np.ndarray]  # the first rank of a block, and its arrays as `bits_of` has them


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows that one program writes.

    Attributes:
      spec: of all of its sites.
      sites: several, of one row each; or one site of several rows, which is a stack of layers or has experts.
      first: the first row of such a site; where its experts are split over a mesh, among those of a shard.
      count: how many rows; of split experts, as many of each shard, side by side.
    """

    spec: SlotSpec
    sites: tuple[Site, ...]
    first: int
    count: int

    @property
    def together(self) -> int:
        """How many rows follow each other in the site, and then again: all, or those of a shard."""
        return self.count // self.spec.expert_shards

    @property
    def rows(self) -> tuple[Row, ...]:
        if not self.spec.rows:
            return tuple((site, 0) for site in self.sites)
        shards, own = self.spec.expert_shards, self.spec.rows[-1] // self.spec.expert_shards
        layer, first = divmod(self.first, own)
        starts = range(layer * shards * own + first, (layer + 1) * shards * own, own)
        return tuple((self.sites[0], start + i) for start in starts for i in range(self.together))

    def place(self, row: int | None) -> tuple[int, int]:
        """(the first row that a block is written to, the shard of experts that has it), of all or one of `rows`."""
        if row is None or not self.spec.rows:
            return self.first, 0
        return self.first + row % self.together, row // self.together


@dataclass(frozen=True, eq=False)
class Block:
    """The factors of a chunk (or of one row of it) for `rank_step` ranks from `start` on.

    Attributes:
      chunk: whose rows.
      row: index of the one row, or None for all of them.
      start: the first rank.
      a: [rows, n, rank_step, K] in slot dtype, on the host or on a device; K as it is stored (`SlotSpec.in_blocks`).
      b: [rows, rank_step, N], N as it is stored.
    """

    chunk: Chunk
    row: int | None
    start: int
    a: Any
    b: Any

    @property
    def held(self) -> list[Any]:
        """Those of A and B that the sites hold; the other one is empty."""
        return [(self.a, self.b)[j] for j in self.chunk.spec.factors]

    @functools.cached_property
    def nbytes(self) -> int:
        """Of all rows; where processes have some of them each, of the process that has most."""
        spec = self.chunk.spec
        if self.row is not None:
            return row_nbytes(spec)
        return self.chunk.count * row_nbytes(spec) // spec.expert_shards * spec.most_shards


def rank_step(spec: SlotSpec) -> int:
    return min(RANK_STEP, spec.max_rank)


def rank_starts(spec: SlotSpec, rank: int) -> list[int]:
    """First ranks of the blocks that hold `rank` ranks. The last block of a slot may overlap the one before."""
    step = rank_step(spec)
    return sorted({min(start, spec.max_rank - step) for start in range(0, rank, step)})


def row_nbytes(spec: SlotSpec) -> int:
    """Bytes of one block of one row."""
    values = rank_step(spec) * (spec.slices * spec.stored_in + spec.stored_out)
    return values * np.dtype(spec.dtype).itemsize


def cut(sites: Sequence[Site], max_bytes: int) -> tuple[Chunk, ...]:
    """Cut the rows of all sites into chunks of at most `MAX_ROWS` rows, and at most `max_bytes` a block.

    Sites of one module name lie side by side, for adapters bring a module in all layers or in none.
    """
    groups: dict[SlotSpec, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.spec, []).append(site)
    chunks: list[Chunk] = []
    for spec, members in groups.items():
        most = max(1, max_bytes // row_nbytes(spec))
        if not spec.rows:
            most = min(MAX_ROWS, most)
            members = sorted(members, key=lambda site: re.sub(r"\d+", "", site.path))  # stable: layers stay in order
            start = 0
            for count in _even(len(members), most):
                chunks.append(Chunk(spec, tuple(members[start : start + count]), 0, count))
                start += count
        else:
            shards = spec.expert_shards
            inner = spec.rows[-1] // shards  # a block lies within one layer where there are experts
            for site in members:
                for first in range(0, math.prod(spec.rows) // shards, inner):
                    for count in _even(inner, max(1, most // shards)):
                        chunks.append(Chunk(spec, (site,), first, count * shards))
                        first += count
    return tuple(chunks)


def _even(total: int, most: int) -> list[int]:
    """`total` in as few parts as can be, none over `most`, of at most two sizes."""
    parts = -(-total // most)
    return [total // parts + (i < total % parts) for i in range(parts)]


class Packing:
    """The blocks of an adapter as zeros, and where each of its rows lies in them.

    Rows of experts that lie on devices of other processes stay zeros, which take no memory.

    Attributes:
      blocks: in slot dtype, in the order of the chunks.
    """

    def __init__(self, chunks: Iterable[Chunk], ranks: Mapping[Row, int]):
        """`chunks` are all of the pool; `ranks` say which rows the adapter brings, and how many ranks of each."""
        blocks: list[Block] = []
        self._places: dict[Row, tuple[int, int, list[_Bits]]] = {}  # its index, and how many rows follow there
        for chunk in chunks:
            rows = chunk.rows
            brought = [i for i, row in enumerate(rows) if row in ranks]
            own = [i // chunk.together in chunk.spec.own_shards for i in range(chunk.count)]
            # Where experts are missing, their rows of a block are zeros: many small writes would take longer.
            whole = 2 * len(brought) >= chunk.count if chunk.spec.experts else len(brought) == chunk.count
            for indices in [range(chunk.count)] if whole else [[i] for i in brought]:
                zeros = _zeros if whole or own[indices[0]] else _no_memory
                parts = [
                    Block(chunk, None if whole else indices[0], start, *zeros(chunk.spec, len(indices)))
                    for start in rank_starts(chunk.spec, max(ranks.get(rows[i], 0) for i in indices))
                ]
                blocks += parts
                bits = [
                    (block.start, *(half.view(bits_of(half.dtype)) for half in (block.a, block.b))) for block in parts
                ]
                together = chunk.together if whole else 1
                self._places.update(
                    (rows[i], (at, together - at % together, bits if own[i] else []))
                    for at, i in enumerate(indices)
                    if rows[i] in ranks
                )
        self.blocks = tuple(blocks)

    def runs(self, site: Site, first: int, count: int) -> Iterator[tuple[slice, list[_Bits]]]:
        """The rows from `first` on that this process has, cut where their blocks are: which of them, counted from
        `first`, and for each of their blocks the first rank, A [rows, n, step, K] and B [rows, step, N] to be written,
        as `bits_of` has them."""
        at = 0
        while at < count:
            i, follow, parts = self._places[site, first + at]
            more = min(follow, count - at)
            if parts:
                yield slice(at, at + more), [(start, a[i : i + more], b[i : i + more]) for start, a, b in parts]
            at += more


def _zeros(spec: SlotSpec, rows: int) -> tuple[np.ndarray, np.ndarray]:
    of_a, of_b = _shapes(spec, rows)
    sparse = rows > 1 and len(spec.own_shards) < spec.expert_shards
    # In one piece: the larger it is, the larger the pages that the system has for it.
    a, b = np.split(fresh(math.prod(of_a) + math.prod(of_b), np.dtype(spec.dtype), sparse=sparse), [math.prod(of_a)])
    return a.reshape(of_a), b.reshape(of_b)


def _no_memory(spec: SlotSpec, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Zeros that nobody writes to."""
    a, b = (np.broadcast_to(np.zeros((), spec.dtype), shape) for shape in _shapes(spec, rows))
    return a, b


def _shapes(spec: SlotSpec, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of A and B of a block."""
    step = rank_step(spec)
    return (rows, spec.slices, step, spec.stored_in), (rows, step, spec.stored_out)


def pack(chunks: Iterable[Chunk], factors: Mapping[Row, tuple[np.ndarray, np.ndarray]]) -> tuple[Block, ...]:
    """The blocks of an adapter.

    Args:
      chunks: all chunks of the pool.
      factors: row -> (A [n, r, K], B [r, N]) of each row that the adapter brings, in slot dtype. Ranks may differ.
    """
    packing = Packing(chunks, {row: len(b) for row, (_, b) in factors.items()})
    for (site, row), (a, b) in factors.items():
        for _, parts in packing.runs(site, row, 1):
            for start, into_a, into_b in parts:
                part = b[start : start + into_b.shape[1]].view(into_b.dtype)
                of_a = a[:, start : start + len(part)].view(into_a.dtype)
                for features, stored in site.spec.in_runs:
                    into_a[0, :, : len(part), stored] = of_a[:, :, features]
                for features, stored in site.spec.out_runs:
                    into_b[0, : len(part), stored] = part[:, features]
    return packing.blocks


def bits_of(dtype: np.dtype) -> np.dtype:
    """What to copy arrays of a dtype as: NumPy holds the interpreter while it copies those of a foreign dtype."""
    return _UINT16 if dtype == _BFLOAT16 else dtype


def unpack(blocks: Iterable[Block], wanted: Collection[Row]) -> dict[Row, tuple[np.ndarray, np.ndarray]]:
    """Row -> (A [n, r, K], B [r, N]) of the wanted rows, zero-padded to the blocks' ranks: what `pack` takes."""
    parts: dict[Row, list[tuple[int, Any, Any]]] = {}
    for block in blocks:
        rows = block.chunk.rows if block.row is None else (block.chunk.rows[block.row],)
        if any(row in wanted for row in rows):
            a, b = jax.device_get((block.a, block.b))
            for i, row in enumerate(rows):
                if row in wanted:
                    parts.setdefault(row, []).append((block.start, a[i], b[i]))
    found: dict[Row, tuple[np.ndarray, np.ndarray]] = {}
    for row, pieces in parts.items():
        spec = row[0].spec
        rank = max(start for start, _, _ in pieces) + rank_step(spec)
        a = np.zeros((spec.slices, rank, spec.in_features), spec.dtype)
        b = np.zeros((rank, spec.out_features), spec.dtype)
        for start, own_a, own_b in pieces:
            a[:, start : start + own_a.shape[1]] = as_brought(own_a, spec.in_features, spec.in_runs)
            b[start : start + len(own_b)] = as_brought(own_b, spec.out_features, spec.out_runs)
        found[row] = (a, b)
    return found
