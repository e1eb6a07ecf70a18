"""Which output slices the columns of a shard are of, where a merged projection is split over a mesh."""

import functools
from dataclasses import dataclass

import numpy as np

from jlora.layers.forward.mesh import split_of
from jlora.layers.site import SlotSpec

MOST_PIECES = 64  # of a shard's columns, by the output slices that they are of


@dataclass(frozen=True)
class Pieces:
    """The columns of a shard, by output slice. Padding counts to the slice beside it: it cuts no piece in two.

    Attributes:
      sizes: of the slices, where all shards have all of them in order, as many columns of each; else None.
      size: else, of pieces that are of one slice each.
      table: for each shard the slices of its pieces.
    """

    sizes: tuple[int, ...] | None
    size: int
    table: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=1024)
def pieces_of(held: SlotSpec) -> Pieces:
    sharding = split_of(held)
    slices = np.full(held.stored_out, -1, np.int64)
    of_feature = np.repeat(np.arange(held.slices), held.out_sizes)
    for features, stored in held.out_runs:
        slices[stored] = of_feature[features]
    shards = _filled(slices.reshape(sharding.size(sharding.b[2]), -1))
    if (shards == shards[0]).all():
        starts = np.flatnonzero(np.diff(shards[0], prepend=np.int64(-1)))
        if np.array_equal(shards[0][starts], np.arange(held.slices)):
            return Pieces(tuple(np.diff(starts, append=np.int64(shards.shape[1])).tolist()), 0, ())
        shards = shards[:1]
    changes = [np.flatnonzero(np.diff(row)) + 1 for row in shards]
    size = int(np.gcd.reduce(np.concatenate([*changes, np.array([shards.shape[1]])])))
    return Pieces(None, size, tuple(tuple(row[::size].tolist()) for row in shards))


def _filled(shards: np.ndarray) -> np.ndarray:
    """Slices with padding, -1, as the slice before it in its shard, else the one after it, else slice 0."""
    real = shards >= 0
    columns = np.arange(int(shards.shape[1]), dtype=np.int64)
    before = np.maximum.accumulate(np.where(real, columns, np.int64(-1)), axis=1)
    first = real.argmax(axis=1)[:, None]
    return np.maximum(np.take_along_axis(shards, np.where(before < 0, first, before), axis=1), 0)


def too_many_pieces(held: SlotSpec) -> str | None:
    """Why the output slices of a layer cannot be served as its columns are split, or None."""
    pieces = pieces_of(held)
    if not pieces.table or len(pieces.table[0]) <= MOST_PIECES:
        return None
    return (
        f"its outputs, slices of {held.out_sizes}, are split so that a shard's columns are {len(pieces.table[0])} "
        f"pieces of {pieces.size}; at most {MOST_PIECES} are served. Split it into fewer shards, or order its columns "
        "so that each shard has a part of every slice, and say so by out_blocks"
    )
