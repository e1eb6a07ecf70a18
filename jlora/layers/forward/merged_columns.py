"""Assign the columns of a shard to output slices, for a merged projection that is split over a mesh."""

import functools
from dataclasses import dataclass

import numpy as np

from jlora.layers.forward.mesh import split_of
from jlora.layers.site import SlotSpec

MOST_PIECES = 64  # maximum number of pieces in a shard's columns


@dataclass(frozen=True)
class MergedColumns:
    """The columns of a shard by output slice. Padding belongs to the adjacent slice, so that it does not cut a piece.

    Attributes:
      sizes: columns of each slice, if every shard has the same number of columns of all slices, in order; else None.
      size: otherwise, the size of pieces that each belong to one slice; 0 if `sizes` is set.
      pieces: otherwise, the slice of each piece, for each shard.
    """

    sizes: tuple[int, ...] | None
    size: int
    pieces: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=1024)
def merged_columns(spec: SlotSpec) -> MergedColumns:
    """Return the columns of the output slices that each shard holds."""
    sharding = split_of(spec)
    slices = np.full(spec.stored_out, -1, np.int64)
    of_feature = np.repeat(np.arange(spec.slices), spec.out_sizes)
    for features, stored in spec.out_runs:
        slices[stored] = of_feature[features]
    shards = _filled(slices.reshape(sharding.size(sharding.b[2]), -1))
    if (shards == shards[0]).all():
        starts = np.flatnonzero(np.diff(shards[0], prepend=np.int64(-1)))
        if np.array_equal(shards[0][starts], np.arange(spec.slices)):
            return MergedColumns(tuple(np.diff(starts, append=np.int64(shards.shape[1])).tolist()), 0, ())
        shards = shards[:1]
    changes = [np.flatnonzero(np.diff(row)) + 1 for row in shards]
    size = int(np.gcd.reduce(np.concatenate([*changes, np.array([shards.shape[1]])])))
    return MergedColumns(None, size, tuple(tuple(row[::size].tolist()) for row in shards))


def _filled(shards: np.ndarray) -> np.ndarray:
    """Replace padding (-1) by the slice before it in its shard, else by the slice after it, else by slice 0."""
    real = shards >= 0
    columns = np.arange(int(shards.shape[1]), dtype=np.int64)
    before = np.maximum.accumulate(np.where(real, columns, np.int64(-1)), axis=1)
    first = real.argmax(axis=1)[:, None]
    return np.maximum(np.take_along_axis(shards, np.where(before < 0, first, before), axis=1), 0)


def too_many_pieces(spec: SlotSpec) -> str | None:
    """Return the reason why a layer's output slices cannot be served with this split of its columns, or None."""
    merged = merged_columns(spec)
    if not merged.pieces or len(merged.pieces[0]) <= MOST_PIECES:
        return None
    return (
        f"its outputs, slices of {spec.out_sizes}, are split so that a shard's columns are {len(merged.pieces[0])} "
        f"pieces of {merged.size}; at most {MOST_PIECES} are served. Split it into fewer shards, or order its columns "
        "so that each shard has a part of every slice, and say so by out_blocks"
    )
