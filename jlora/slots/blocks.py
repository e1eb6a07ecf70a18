"""Division of slots into blocks, the unit that is packed on the host, transferred and written by one program.

An entry is one site, one layer of a stacked site, or one expert of either. Entries of equal `SlotSpec` are collected in
chunks. A block holds the factors of a chunk, or of one entry of it, for `rank_block` ranks.

An adapter transfers only the entries and ranks that it has. A chunk is transferred in one block if the adapter has all
of its entries, or at least half of them if they are experts. Otherwise each entry is a block.
"""

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jlora._memory import fresh
from jlora.layers.site import Site, SlotSpec
from jlora.slots.casting import bits_of
from jlora.slots.codec import Encoded, decode

RANK_BLOCK = 16  # ranks of a block: missing ranks are zeros, and the kernels mask them
MAX_ENTRIES = 64  # entries of a chunk: dispatch time is negligible, and programs still compile quickly

Entry = tuple[Site, int]
# First rank of a block, its A and B viewed as `bits_of`, and the quanta of int8.
_Bits = tuple[int, np.ndarray, np.ndarray, np.ndarray | None]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Entries that one program writes.

    Attributes:
      spec: The spec of all sites.
      sites: Several sites of one entry each, or one site of several entries (a stack of layers, or experts).
      first: The first entry of a site of several entries. If experts are sharded, it counts the entries of one shard.
      count: Number of entries. If experts are sharded, each shard has an equal part of them.
    """

    spec: SlotSpec
    sites: tuple[Site, ...]
    first: int
    count: int

    @property
    def together(self) -> int:
        """Number of consecutive entries: all entries, or the entries of each shard of experts."""
        return self.count // self.spec.expert_shards

    @property
    def entries(self) -> tuple[Entry, ...]:
        """(site, entry of the site) of each entry."""
        if not self.spec.entries:
            return tuple((site, 0) for site in self.sites)
        shards, experts = self.spec.expert_shards, self.spec.entries[-1] // self.spec.expert_shards
        layer, first = divmod(self.first, experts)
        starts = range(layer * shards * experts + first, (layer + 1) * shards * experts, experts)
        return tuple((self.sites[0], start + i) for start in starts for i in range(self.together))

    def origin(self, entry: int | None) -> tuple[int, int]:
        """Return (first entry that a block writes, shard of experts that holds it).

        Args:
          entry: Index into `entries`, or None for a block of all entries.
        """
        if entry is None or not self.spec.entries:
            return self.first, 0
        return self.first + entry % self.together, entry // self.together


@dataclass(frozen=True, eq=False)
class Block:
    """The factors of a chunk (or of one entry of it) for `rank_block` ranks from `start` on.

    Attributes:
      chunk: The chunk of the entries.
      entry: Index of the single entry in `chunk.entries`, or None for all entries.
      start: The first rank.
      a: [entries, n, rank_block, K] in slot dtype, on the host or on a device. K is `SlotSpec.stored_in`.
      b: [entries, rank_block, N] in slot dtype. N is `SlotSpec.stored_out`.
      quanta: For int8, the quanta of A and of each slice of B, float64 [2, entries, n, rank_block] on the host.
      scales: For int8, float32 [entries, n, rank_block] on the host or on a device; see `packing.with_scales`.
    """

    chunk: Chunk
    entry: int | None
    start: int
    a: Any
    b: Any
    quanta: Float[np.ndarray, "2 entries n rank_block"] | None = None
    scales: Any = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of the chunk that the block holds."""
        return self.chunk.entries if self.entry is None else (self.chunk.entries[self.entry],)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """A, B and, for int8, the scales."""
        return (self.a, self.b) if self.quanta is None else (self.a, self.b, self.scales)

    def with_arrays(self, arrays: Iterator[Any]) -> "Block":
        """Return the block with the next of `arrays` as its arrays, in their order."""
        return replace(self, **{name: next(arrays) for name in ("a", "b", "scales")[: len(self.arrays)]})

    @property
    def operands(self) -> list[Any]:
        """The arrays without a factor that the sites do not hold."""
        arrays = {"a": self.a, "b": self.b, "ranks": self.scales}
        return [arrays[array.name] for array in self.chunk.spec.of_blocks]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all entries. If experts are divided over processes, bytes of the process that has most of them."""
        spec = self.chunk.spec
        if self.entry is not None:
            return entry_nbytes(spec)
        return self.chunk.count * entry_nbytes(spec) // spec.expert_shards * spec.most_shards


def rank_block(spec: SlotSpec) -> int:
    """Return the number of ranks of each block."""
    return min(RANK_BLOCK, spec.max_rank)


def rank_starts(spec: SlotSpec, rank: int) -> list[int]:
    """Return the first ranks of the blocks that hold `rank` ranks. The last block of a slot can overlap another."""
    width = rank_block(spec)
    return sorted({min(start, spec.max_rank - width) for start in range(0, rank, width)})


def entry_nbytes(spec: SlotSpec) -> int:
    """Return the bytes of one block of one entry."""
    values = spec.slices * spec.stored_in + spec.stored_out
    scales = 4 * spec.slices if spec.dtype == "int8" else 0
    return rank_block(spec) * (values * np.dtype(spec.dtype).itemsize + scales)


def cut(sites: Sequence[Site], max_bytes: int) -> tuple[Chunk, ...]:
    """Cut the entries of all sites into chunks of at most `MAX_ENTRIES` entries, and at most `max_bytes` a block.

    Sites of one module name are adjacent, because adapters usually have a module in all layers or in none.
    """
    alike: dict[SlotSpec, list[Site]] = {}
    for site in sites:
        alike.setdefault(site.spec, []).append(site)
    chunks: list[Chunk] = []
    for spec, members in alike.items():
        most = max(1, max_bytes // entry_nbytes(spec))
        if not spec.entries:
            most = min(MAX_ENTRIES, most)
            members = sorted(members, key=lambda site: re.sub(r"\d+", "", site.path))  # stable: layers stay in order
            start = 0
            for count in _even(len(members), most):
                chunks.append(Chunk(spec, tuple(members[start : start + count]), 0, count))
                start += count
        else:
            shards = spec.expert_shards
            inner = spec.entries[-1] // shards  # with experts, a block is within one layer
            for site in members:
                for first in range(0, math.prod(spec.entries) // shards, inner):
                    for count in _even(inner, max(1, most // shards)):
                        chunks.append(Chunk(spec, (site,), first, count * shards))
                        first += count
    return tuple(chunks)


def _even(total: int, most: int) -> list[int]:
    """Divide `total` into the fewest shares of at most `most` each, with sizes that differ by at most 1."""
    shares = -(-total // most)
    return [total // shares + (i < total % shares) for i in range(shares)]


class Packing:
    """Zero-filled blocks of an adapter, and the position of each of its entries in them.

    Entries of experts on devices of other processes stay zeros, which take no memory.

    Attributes:
      blocks: The blocks in slot dtype, in the order of the chunks.
    """

    def __init__(self, chunks: Iterable[Chunk], ranks: Mapping[Entry, int]):
        """Allocate the blocks.

        Args:
          chunks: All chunks of the slot arrays.
          ranks: The rank of each entry that the adapter has.
        """
        blocks: list[Block] = []
        self._dtypes = {site: np.dtype(chunk.spec.dtype) for chunk in chunks for site in chunk.sites}
        self._runs: dict[Entry, tuple[int, int, list[_Bits]]] = {}  # (entry index, entries until the run ends, blocks)
        for chunk in chunks:
            entries = chunk.entries
            brought = [i for i, entry in enumerate(entries) if entry in ranks]
            is_own = [i // chunk.together in chunk.spec.own_shards for i in range(chunk.count)]
            # Entries of missing experts are written as zeros, because many small writes take longer.
            whole = 2 * len(brought) >= chunk.count if chunk.spec.experts else len(brought) == chunk.count
            for indices in [range(chunk.count)] if whole else [[i] for i in brought]:
                zeros = _zeros if whole or is_own[indices[0]] else _no_memory
                made = [
                    Block(
                        chunk,
                        None if whole else indices[0],
                        start,
                        *zeros(chunk.spec, len(indices)),
                        _no_quanta(chunk.spec, len(indices)),
                    )
                    for start in rank_starts(chunk.spec, max(ranks.get(entries[i], 0) for i in indices))
                ]
                blocks += made
                bits = [
                    (block.start, *(half.view(bits_of(half.dtype)) for half in (block.a, block.b)), block.quanta)
                    for block in made
                ]
                together = chunk.together if whole else 1
                self._runs.update(
                    (entries[i], (at, together - at % together, bits if is_own[i] else []))
                    for at, i in enumerate(indices)
                    if entries[i] in ranks
                )
        self.blocks = tuple(blocks)

    def dtype(self, site: Site) -> np.dtype:
        """Return the dtype of the blocks of a site."""
        return self._dtypes[site]

    def runs(self, site: Site, first: int, count: int) -> Iterator[tuple[slice, list[_Bits]]]:
        """Yield the runs of entries that are adjacent in the same blocks. Entries of other processes are skipped.

        Args:
          site: The site of the entries.
          first: The first entry.
          count: Number of entries.

        Yields:
          (entries of the run, counted from `first`; its blocks). Each block is (first rank,
          A [entries, n, rank_block, K], B [entries, rank_block, N], quanta [2, entries, n, rank_block] of int8). A and
          B are writable views of dtype `bits_of`.
        """
        at = 0
        while at < count:
            i, follow, bits = self._runs[site, first + at]
            more = min(follow, count - at)
            if bits:
                run = slice(i, i + more)
                yield (
                    slice(at, at + more),
                    [(start, a[run], b[run], None if s is None else s[:, run]) for start, a, b, s in bits],
                )
            at += more


def _zeros(spec: SlotSpec, entries: int) -> tuple[np.ndarray, np.ndarray]:
    of_a, of_b, _ = block_shapes(spec, entries).values()
    sparse = entries > 1 and len(spec.own_shards) < spec.expert_shards
    # One allocation for both, because the system uses larger pages for larger allocations.
    a, b = np.split(fresh(math.prod(of_a) + math.prod(of_b), np.dtype(spec.dtype), sparse=sparse), [math.prod(of_a)])
    return a.reshape(of_a), b.reshape(of_b)


def _no_quanta(spec: SlotSpec, entries: int) -> Float[np.ndarray, "2 entries n rank_block"] | None:
    return np.zeros((2, entries, spec.slices, rank_block(spec))) if spec.dtype == "int8" else None


def _no_memory(spec: SlotSpec, entries: int) -> tuple[np.ndarray, np.ndarray]:
    """Return read-only zeros that take no memory."""
    of_a, of_b, _ = block_shapes(spec, entries).values()
    a, b = (np.broadcast_to(np.zeros((), spec.dtype), shape) for shape in (of_a, of_b))
    return a, b


def block_shapes(spec: SlotSpec, entries: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a block of `entries` entries, by the name of the array that it is written into."""
    width = rank_block(spec)
    return {
        "a": (entries, spec.slices, width, spec.stored_in),
        "b": (entries, width, spec.stored_out),
        "ranks": (entries, spec.slices, width),
    }


def pack(chunks: Iterable[Chunk], entries: Mapping[Entry, Encoded]) -> tuple[Block, ...]:
    """Return the blocks of encoded entries of NumPy.

    Args:
      chunks: All chunks of the slot arrays.
      entries: The entries that the adapter has, each alone. Ranks can differ.
    """
    packing = Packing(chunks, {entry: encoded.b.shape[1] for entry, encoded in entries.items()})
    for (site, entry), (*halves, all_quanta) in entries.items():
        for _, bits in packing.runs(site, entry, 1):
            for start, *targets, quanta in bits:
                for target, half in zip(targets, halves, strict=True):
                    values = half[..., start : start + target.shape[-2], :].view(target.dtype)
                    target[..., : values.shape[-2], :] = values
                if quanta is not None:
                    values = all_quanta[..., start : start + quanta.shape[-1]]
                    quanta[..., : values.shape[-1]] = values
    return packing.blocks


def unpack(blocks: Iterable[Block], wanted: Collection[Entry]) -> dict[Entry, tuple[np.ndarray, np.ndarray]]:
    """Return entry -> (A [n, r, K], B [r, N]) of the wanted entries, the inverse of `pack`.

    The factors are NumPy arrays in the dtype of the blocks (float32 for int8), zero-padded to the ranks of the blocks.
    Entries without a block are left out.
    """
    stored: dict[Entry, list[tuple[int, Any, Any, Any]]] = {}
    specs: dict[Entry, SlotSpec] = {}  # of the blocks, whose dtype may be another than that of the slots
    for block in blocks:
        entries = block.entries
        if any(entry in wanted for entry in entries):
            a, b = jax.device_get((block.a, block.b))
            for i, entry in enumerate(entries):
                if entry in wanted:
                    quanta = None if block.quanta is None else block.quanta[:, i]
                    specs[entry] = block.chunk.spec
                    stored.setdefault(entry, []).append((block.start, a[i], b[i], quanta))
    found: dict[Entry, tuple[np.ndarray, np.ndarray]] = {}
    for entry, pieces in stored.items():
        spec = specs[entry]
        rank = max(start for start, *_ in pieces) + rank_block(spec)
        of_a, of_b = ((*half.shape[:-2], rank, half.shape[-1]) for half in pieces[0][1:3])
        joined = Encoded(
            np.zeros((1, *of_a), pieces[0][1].dtype),
            np.zeros((1, *of_b), pieces[0][2].dtype),
            np.zeros((2, 1, spec.slices, rank)),
        )
        for start, own_a, own_b, quanta in pieces:
            ranks = slice(start, start + len(own_b))
            joined.a[0, :, ranks], joined.b[0, ranks] = own_a, own_b
            joined.largest[:, 0, :, ranks] = 0 if quanta is None else quanta
        a, b = decode(spec, joined)
        found[entry] = a[0], b[0]
    return found
