"""The plan: the rows that use each group's weights, as a static number of tiles.

It is made once a step and shared by every layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas.tiles import max_tiles, plan_tile_m


@dataclass(frozen=True)
class Plan:
    """Rows sorted by group and cut into tiles of at most `tile_m` rows; all rows of a tile have the same group.

        sorted rows   | g0 g0 g0 | g2 g2 g2 g2 | drop drop |      tile_m = 2
        tiles         | t0   |t1 | t2   | t3   |             t4: empty

    A tile is the unit of work of the kernels: it reads one group's weights for up to `tile_m` rows. Rows without a
    group ("dropped") come last and belong to no tile, so no kernel touches them. The number of tiles T is a static
    bound, so that different mixes of adapters run the same compiled program; tiles beyond those needed are empty.

    For few rows, `plan_experts` makes an unsorted plan instead. Each row has a tile of its own, in the order of the
    rows, and the tile of a dropped row is empty.

    Attributes:
      row_order: [M] sorted position -> row. A permutation; rows of one group keep their order.
      row_slot: [M] row -> its place among the P places of all tiles. P for a dropped row.
      tile_rows: [P] row at each place of each tile, P = T * tile_m. M where a place is empty.
      tile_group: [T] group of each tile, 0 for an empty tile. Non-empty tiles come first, in rising order of groups.
      tile_start, tile_end: [T] the sorted positions of a tile, start <= p < end. An empty tile has start == end == M.
      tiles_used: [1] number of tiles to process, from the first on. All non-empty tiles are among them.
      num_groups, tile_m: Static sizes.
      experts: Static number of groups that share a slot, group = slot * experts + expert. 1 without experts.
      row_scales: [M] float32, the factor of each row; None if all are 1 (`scaled`).
    """

    row_order: Int[jax.Array, "M"]
    row_slot: Int[jax.Array, "M"]
    tile_rows: Int[jax.Array, "P"]
    tile_group: Int[jax.Array, "T"]
    tile_start: Int[jax.Array, "T"]
    tile_end: Int[jax.Array, "T"]
    tiles_used: Int[jax.Array, "1"]
    num_groups: int
    tile_m: int
    experts: int = 1
    row_scales: Float[jax.Array, "M"] | None = None

    def scaled(self, row_scales: Float[jax.Array | np.ndarray, "M"] | None) -> "Plan":
        """Return the plan with a factor of the delta of each row, which `expand` multiplies with the scale.

        It is a constant of the gradients. A row of factor 0 may lose the sign of a zero; a plan without the row leaves
        it unchanged.

        Args:
          row_scales: [M] float32; None for 1.

        Raises:
          LoRAError: It has another shape or dtype.
        """
        if row_scales is None:
            return self
        if row_scales.shape != (self.num_rows,) or row_scales.dtype != jnp.float32:
            raise LoRAError(
                f"row_scales must be float32 [M] = [{self.num_rows}] (the plan's rows), got "
                f"{row_scales.dtype}{list(row_scales.shape)}"
            )
        return replace(self, row_scales=jax.lax.stop_gradient(jnp.asarray(row_scales)))

    @property
    def num_rows(self) -> int:
        """Number of rows M, dropped ones included."""
        return self.row_order.shape[0]

    @property
    def num_tiles(self) -> int:
        """Number of tiles T, empty ones included."""
        return self.tile_group.shape[0]

    @property
    def row_groups(self) -> Int[jax.Array, "M"]:
        """Group of each row, `num_groups` for a dropped one."""
        tile = jnp.minimum(self.row_slot // self.tile_m, self.num_tiles - 1)
        found = self.row_slot < self.num_tiles * self.tile_m
        return jnp.where(found, self.tile_group[tile], self.num_groups)


INVARIANT_TILE_M = 16  # of plans for any number of rows: the fewest rows of a matrix unit
_COMPARED_AT_ONCE = 1 << 22  # comparisons of a search: covers every dense plan, for example 8192 rows and 512 tiles
_LEAVES = ("row_order", "row_slot", "tile_rows", "tile_group", "tile_start", "tile_end", "tiles_used", "row_scales")


_STATIC = ("num_groups", "tile_m", "experts")


def _flatten(plan: Plan) -> tuple[list[Any], tuple[int, ...]]:
    return [getattr(plan, name) for name in _LEAVES], tuple(getattr(plan, name) for name in _STATIC)


def _flatten_with_keys(plan: Plan) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
    leaves, static = _flatten(plan)
    return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in zip(_LEAVES, leaves, strict=True)], static


def _unflatten(static: tuple[int, ...], leaves: Iterable[Any]) -> Plan:
    """Build a plan without `__init__`, because JAX also unflattens shapes, shardings and batched leaves."""
    plan = object.__new__(Plan)
    for name, value in zip((*_LEAVES, *_STATIC), (*leaves, *static), strict=True):
        object.__setattr__(plan, name, value)
    return plan


jax.tree_util.register_pytree_with_keys(Plan, _flatten_with_keys, _unflatten, _flatten)


def make_plan(
    group_ids: Int[jax.Array, "B"],
    *,
    num_groups: int,
    tile_m: int | None = None,
    batch_invariant: bool = False,
    max_active: int | None = None,
    repeats: int | Int[jax.Array, "B"] = 1,
    num_rows: int | None = None,
    backend: Backend = "auto",
) -> Plan:
    """Sort rows by group and cut them into tiles. Pure jnp with static sizes, for use inside or outside jit.

    Args:
      group_ids: [B] integer group of each row, or of each run of rows (see `repeats`). An id outside [0, num_groups)
        means no adapter, and its rows are dropped.
      num_groups: Number of groups G of the weights (the slots).
      tile_m: Most rows of a tile. None chooses by `tiles.plan_tile_m` from the static sizes.
      batch_invariant: Make the plan for calls with `batch_invariant`, whose tiles have `INVARIANT_TILE_M` rows.
      max_active: Static bound on the number of distinct groups present. Fewer tiles mean less work for the XLA path.
        The default, min(B, num_groups), always holds. If a given bound does not hold, rows beyond the last tile are
        dropped, so pass a true bound.
      repeats: Number of rows of each id, as in `jnp.repeat`: the tokens of a sequence, an int or [B] integers. Ids of
        sequences are cheaper to sort than ids of rows.
      num_rows: Static number of rows M, required if `repeats` is an array. The sum of `repeats` must not exceed it.
        Rows past that sum are padding and are dropped.
      backend: Backend whose preferred `tile_m` is used. Any plan serves every backend.

    Returns:
      A `Plan` of M rows.

    Raises:
      LoRAError: group_ids is not a vector of integers, sizes are not positive, or `repeats` has another shape.
    """
    group_ids = jnp.asarray(group_ids)
    if group_ids.ndim != 1 or not jnp.issubdtype(group_ids.dtype, jnp.integer):
        raise LoRAError(
            f"make_plan: group_ids must be a vector of integers, got {group_ids.dtype}{list(group_ids.shape)}; "
            "flatten [batch, length] ids, or pass one id a sequence with repeats=length"
        )
    runs = group_ids.shape[0]
    uniform = isinstance(repeats, int | np.integer)
    if not uniform and (jnp.shape(repeats) != (runs,) or not jnp.issubdtype(jnp.asarray(repeats).dtype, jnp.integer)):
        raise LoRAError(f"make_plan: repeats must be an int or {runs} integers, got shape {jnp.shape(repeats)}")
    if num_rows is None:
        if not uniform:
            raise LoRAError("make_plan: pass num_rows, the static number of rows, when repeats is an array")
        num_rows = runs * int(repeats)
    bound = min(runs, num_groups) if max_active is None else min(max_active, runs, num_groups)
    if num_groups < 1 or (max_active is not None and max_active < 1) or (tile_m is not None and tile_m < 1):
        raise LoRAError(
            f"make_plan: num_groups, max_active and tile_m must be at least 1, got {num_groups}, {max_active}, {tile_m}"
        )
    if tile_m is None:
        tile_m = INVARIANT_TILE_M if batch_invariant else plan_tile_m(num_rows, bound, backend)
    if batch_invariant and tile_m != INVARIANT_TILE_M:
        raise LoRAError(f"make_plan: batch_invariant needs a tile_m of {INVARIANT_TILE_M}, got {tile_m}; leave it out")
    counts = np.int32(repeats) if uniform else jnp.asarray(repeats)
    return _build(group_ids, counts, uniform and int(repeats) == 1, num_rows, num_groups, tile_m, bound)


@partial(jax.jit, static_argnames=("single", "num_rows", "num_groups", "tile_m", "max_active"), inline=True)
def _build(group_ids, counts, single: bool, num_rows: int, num_groups: int, tile_m: int, max_active: int) -> Plan:
    if not num_rows:
        empty, one = jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32)
        return Plan(empty, empty, jnp.zeros(tile_m, jnp.int32), one, one, one, one, num_groups, tile_m)
    ids = jnp.where((group_ids >= 0) & (group_ids < num_groups), group_ids, num_groups).astype(jnp.int32)
    counts = jnp.broadcast_to(counts, ids.shape).astype(jnp.int32)
    if not len(ids):  # one run of no rows, so that no array below is empty
        ids, counts, single = jnp.full(1, num_groups, jnp.int32), jnp.zeros(1, jnp.int32), False
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)  # [B] runs sorted by group
    group, count = ids[order], counts[order]
    run_end = jnp.cumsum(count)  # sorted positions
    run_start = run_end - count

    # 1. Count the tiles of each group at the first run ("leader") of the group.
    edge, new_group = jnp.ones(1, bool), group[1:] != group[:-1]
    leader, last = jnp.concatenate([edge, new_group]), jnp.concatenate([new_group, edge])
    group_end = jax.lax.cummin(jnp.where(last, run_end, num_rows), reverse=True)
    tiles = jnp.where(leader & (group < num_groups), -(-(group_end - run_start) // tile_m), 0)
    tiles_end = jnp.cumsum(tiles)

    # 2. Assign tile t to the first leader whose tiles end past t.
    t = jnp.arange(max_tiles(num_rows, tile_m, max_active), dtype=jnp.int32)
    run, used = interval(tiles_end, t)
    start = run_start[run] + (t - (tiles_end[run] - tiles[run])) * tile_m
    tile_start = jnp.where(used, start, num_rows)
    tile_end = jnp.where(used, jnp.minimum(start + tile_m, group_end[run]), num_rows)
    tile_group = jnp.where(used, group[run], 0)

    # 3. Sorted position -> row. The rows of a run are consecutive; rows past the last run keep their place.
    p = jnp.arange(num_rows, dtype=jnp.int32)
    if single:
        row_order = order
    else:
        run, used = interval(run_end, p)
        first_row = (jnp.cumsum(counts) - counts)[order]
        row_order = jnp.where(used, first_row[run] + p - run_start[run], p)

    # 4. Non-empty tiles cover the sorted rows without gaps, so p belongs to the first tile that ends past p.
    tile, _ = interval(tile_end, p)
    inside = (tile_start[tile] <= p) & (p < tile_end[tile])
    slot = jnp.where(inside, tile * tile_m + p - tile_start[tile], len(t) * tile_m)
    row_slot = jnp.zeros(num_rows, jnp.int32).at[row_order].set(slot, unique_indices=True)
    place = jnp.arange(tile_m, dtype=jnp.int32)[None, :] + tile_start[:, None]
    rows = jnp.where(place < tile_end[:, None], row_order[jnp.minimum(place, num_rows - 1)], num_rows)
    tiles_used = jnp.minimum(tiles_end[-1:], len(t))
    return Plan(row_order, row_slot, rows.reshape(-1), tile_group, tile_start, tile_end, tiles_used, num_groups, tile_m)


class Segments(NamedTuple):
    """Consecutive rows of one group, for sums over the rows of every group.

    Attributes:
      order: [M] rows sorted by group; those without a group come last.
      pieces: [4, S] group of each segment, its sorted positions from a first to before a last, and its slot. A group of
        up to `length` rows is one segment, of slot -1. The segments of a longer one have slots of their own. Rows
        without a group are segments of group `num_groups`.
      long: [3, L] groups of several segments, the first slot of each, and the number of its segments, `num_groups` and
        0 past the last one.
      slots: Static bound on the number of slots.
    """

    order: Int[jax.Array, "M"]
    pieces: Int[jax.Array, "4 S"]
    long: Int[jax.Array, "3 L"]
    slots: int


def bounds(plan: Plan) -> tuple[Int[jax.Array, "M"], Int[jax.Array, "ends"]]:
    """Return the rows sorted by group, and the sorted position before which each group ends.

    Rows without a group come last, as group G.
    """
    order, group = plan.row_order, plan.row_groups
    if plan.experts > 1 and plan.num_tiles == plan.num_rows:  # the plan may be unsorted
        order = jnp.argsort(group, stable=True).astype(jnp.int32)
    return order, _count_up_to(group[order], jnp.arange(plan.num_groups + 1, dtype=jnp.int32))


def segments(plan: Plan, length: int) -> Segments:
    """Cut the rows of every group into segments of at most `length` rows."""
    groups, rows = plan.num_groups, plan.num_rows
    ids = jnp.arange(groups + 1, dtype=jnp.int32)
    order, end = bounds(plan)
    start = jnp.concatenate([jnp.zeros(1, jnp.int32), end[:-1]])
    count = jnp.maximum(1, -(-(end - start) // length))
    count_end = jnp.cumsum(count)
    several = (count > 1) & (ids < groups)
    slots = jnp.cumsum(jnp.where(several, count, 0))

    s = jnp.arange(groups + 1 + rows // length, dtype=jnp.int32)
    own, used = interval(count_end, s)
    nth = s - (count_end - count)[own]
    first = jnp.where(used, start[own] + nth * length, rows)
    last = jnp.where(used, jnp.minimum(first + length, end[own]), rows)
    slot = jnp.where(several[own], (slots - count)[own] + nth, -1)
    pieces = jnp.stack([jnp.where(used, own, groups), first, last, jnp.where(used, slot, -1)])

    most = rows // (length + 1)
    place = jnp.where(several, jnp.cumsum(several) - 1, most)
    long = [
        jnp.full(most, empty, jnp.int32).at[place].set(v, mode="drop")
        for v, empty in ((ids, groups), (slots - count, 0), (count, 0))
    ]
    return Segments(order, pieces.astype(jnp.int32), jnp.stack(long), most + rows // length if most else 0)


def interval(ends, values):
    """Return the index of the interval that contains each value, and whether there is one; `ends` must rise."""
    index = _count_up_to(ends, values)
    return jnp.minimum(index, len(ends) - 1), index < len(ends)


def _count_up_to(ends, values):
    """Return the number of `ends`, which must rise, that are at most each value.

    For few pairs, comparing all of them is one pass. A binary search is a chain of gathers.
    """
    method = "compare_all" if len(ends) * len(values) <= _COMPARED_AT_ONCE else "scan_unrolled"
    return jnp.searchsorted(ends, values, side="right", method=method).astype(jnp.int32)
