"""The schedule of `kernel`: the bundles that each row tile needs, as flat vectors for SMEM."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jlora.pallas.mosaic_tpu.kernel import NOBODY, VACANT, Listing


@partial(jax.jit, static_argnames="s")
def visits(s: Listing, group: Int[jax.Array, "M"]) -> tuple[jax.Array, ...]:
    """Return the visits of rows of these groups.

    The calls of a step that have equal arguments share them: this is one function of the lowered program, and XLA
    merges its calls, also those in a loop over layers.

    Args:
      s: Static sizes.
      group: [M] group of each row, below 0 for none. If `s.by_group`, it is sorted, with rows without a group last.

    Returns:
      count: [] number of visits of the chunk that has most, 0 if no row has a group.
      tile: [listed] row tile of each visit, rising within a chunk.
      active: [listed * bundle] groups of each visit's bundle, `VACANT` at empty places.
      fresh: [listed] 1 if the bundle differs from that of the previous visit in the chunk.
      first: [chunks + 1] index of each chunk's first visit, only if `s.by_group`. Its last visit is a spare one.
    """
    return _of_sorted_rows(s, group) if s.by_group else _of_any_order(s, group)


def _of_any_order(s: Listing, group):
    """Compare all rows with all groups. Every chunk lists `max_visits`."""
    blocks = -(-s.groups // s.bundle)
    ids = jnp.arange(blocks * s.bundle, dtype=jnp.int32)
    rows = jnp.pad(group, (0, s.chunks * s.chunk * s.tile_m - s.rows), constant_values=NOBODY)
    present = jnp.any(rows.reshape(-1, s.tile_m, 1) == ids[None, None, :], axis=1)  # [chunks * chunk, ids]
    present = present.astype(jnp.int32).reshape(-1, blocks, s.bundle)

    # 1. Assign groups of a tile that share a place to consecutive visits.
    nth = jnp.where(present > 0, jnp.cumsum(present, axis=1) - 1, -1)
    used = jnp.max(jnp.sum(present, axis=1), axis=1).reshape(s.chunks, s.chunk)
    end = jnp.cumsum(used, axis=1)

    # 2. Visit v belongs to the first tile whose visits end past v. Spare visits have no groups, and the chunk's last
    # tile.
    v = jnp.arange(s.max_visits, dtype=jnp.int32)
    tile = jnp.sum(v[None, :, None] >= end[:, None, :], axis=2, dtype=jnp.int32)
    tile = jnp.minimum(tile, s.chunk - 1) + s.chunk * jnp.arange(s.chunks, dtype=jnp.int32)[:, None]
    here = nth[tile] == (v[None, :] - (end - used).ravel()[tile])[:, :, None, None]  # [chunks, V, blocks, bundle]
    active = jnp.max(jnp.where(here, ids.reshape(1, 1, blocks, s.bundle), VACANT), axis=2)

    fresh = jnp.any(active != jnp.roll(active, 1, axis=1), axis=2) | (v == 0)[None, :]
    count = jnp.max(end[:, -1])
    tile = jnp.minimum(tile, s.row_tiles - 1)
    return count, tile.ravel(), active.ravel(), fresh.astype(jnp.int32).ravel()


def _of_sorted_rows(s: Listing, group):
    """Compute the same visits as `_of_any_order` from the groups that rows have.

    The cost and the length of the list depend on the number of rows, not of groups.
    """
    rows = jnp.pad(group, (0, s.row_tiles * s.tile_m - s.rows), constant_values=NOBODY).reshape(-1, s.tile_m)
    places = jnp.arange(s.bundle, dtype=jnp.int32)[None, :, None]
    nth_visit = jnp.arange(s.tile_m, dtype=jnp.int32)[None, None, :]

    # 1. Assign groups of a tile that share a place to consecutive visits. A group is counted at its first row in the
    # tile.
    before = jnp.pad(rows[:, :-1], ((0, 0), (1, 0)), constant_values=VACANT)
    leads = ((rows >= 0) & (rows != before))[:, None] & (rows[:, None] % s.bundle == places)  # [row_tiles, bundle, m]
    nth = jnp.cumsum(leads, axis=2, dtype=jnp.int32) - 1
    used = jnp.max(nth[:, :, -1], axis=1) + 1
    own_nth = jnp.max(jnp.where(leads, nth, -1), axis=1)
    # Select by a matrix product, exact for ids below 2^24, because comparing for every place costs the vector unit far
    # more.
    ids = jnp.where(leads, rows[:, None] - VACANT, 0).astype(jnp.float32)
    picks = (own_nth[:, :, None] == nth_visit).astype(jnp.float32)  # [row_tiles, m, nth_visit]
    table = jnp.einsum("ipm,imv->ivp", ids, picks, precision="highest").astype(jnp.int32) + VACANT
    table = table.reshape(-1, s.bundle)  # [row_tiles * tile_m, bundle]

    # 2. Visit v belongs to the first tile whose visits end past v. The last tile of a chunk has a spare visit.
    t = jnp.arange(s.row_tiles, dtype=jnp.int32)
    spare = (t % s.chunk == s.chunk - 1) | (t == s.row_tiles - 1)
    listed = used + spare.astype(jnp.int32)
    end = jnp.cumsum(listed)
    v = jnp.arange(s.listed, dtype=jnp.int32)
    tile = jnp.minimum(jnp.sum(v[:, None] >= end[None, :], axis=1, dtype=jnp.int32), s.row_tiles - 1)
    own = v - (end - listed)[tile]
    active = table[tile * s.tile_m + jnp.minimum(own, s.tile_m - 1)]
    active = jnp.where((own < used[tile])[:, None], active, VACANT)

    fresh = jnp.any(active != jnp.roll(active, 1, axis=0), axis=1)
    last = jnp.minimum(jnp.arange(1, s.chunks + 1, dtype=jnp.int32) * s.chunk, s.row_tiles) - 1
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), end[last]])
    count = jnp.max(jnp.diff(first)) - 1
    return count, tile, active.ravel(), fresh.astype(jnp.int32), first
