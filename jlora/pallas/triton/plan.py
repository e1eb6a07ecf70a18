"""Sort rows by group and make the plan in a few launches on an NVIDIA GPU; XLA takes dozens for `plan`.

    up to `PAIRWISE` rows   rank: each row counts the rows before it  |  cut tiles
    above                   count, begin, move for each digit         |  flag, start, cut tiles

Above `PAIRWISE` rows, the sort is a stable counting sort of a few bits of the ids in each pass. All arithmetic is on
integers and there are no atomics, so the same rows give the same plan.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Int

from jlora.pallas.plan import Plan
from jlora.pallas.tiles import max_tiles
from jlora.pallas.triton.parts import compiler_params, load, store

PAIRWISE = 2048  # rows up to which all pairs are compared
ROW_TILES = 64  # rows up to which each may have its own tile; sorting takes longer than reading factors twice
MOST_ROWS = 1 << 18  # above this, reading the counts of all blocks in each program takes too long
_BLOCK = 256  # rows of a program of the sort
_BITS = 7  # bits of the ids in one pass
_SAMPLES = 512  # samples in the first step of a search
_TILES = 32  # tiles of a program, or rows of one in the pairwise sort


def plan(
    ids: Int[jax.Array, "M"], experts: int, num_groups: int, tile_m: int, max_active: int, *,
    pairwise: int = PAIRWISE, interpret: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan of `make_plan` for M >= 1 rows with ids in [0, num_groups]; num_groups means no group."""
    rows, tiles = len(ids), max_tiles(len(ids), tile_m, max_active)
    row_order, sorted_ids, first = _sort(ids, num_groups, pairwise, interpret)
    one, vector = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (1, tiles))
    outs = [vector, vector, vector, jax.ShapeDtypeStruct((tiles * tile_m,), jnp.int32)]
    cut = partial(_cut_kernel, groups=num_groups, tile_m=tile_m, tiles=tiles)
    call = partial(_call, interpret=interpret)
    if first is not None:
        group, start, end, tile_rows, used = call(
            partial(_cut_pairwise_kernel, cut=cut), pl.cdiv(tiles, _TILES), 4, [*outs, one], "lora_plan_cut",
            row_order, sorted_ids, first,
        )  # fmt: skip
    else:
        blocks = pl.cdiv(rows, _BLOCK)
        flag = partial(_flag_kernel, groups=num_groups, tile_m=tile_m)
        table = jax.ShapeDtypeStruct((blocks,), jnp.int32)
        counts, flags = call(flag, blocks, 8, [table, _like(ids)], "lora_plan_flag", sorted_ids)
        starts, used = call(_start_kernel, blocks, 4, [vector, one], "lora_plan_start", counts, flags)
        group, start, end, tile_rows = call(
            partial(_cut_many_kernel, cut=cut), pl.cdiv(tiles, _TILES), 4, outs, "lora_plan_cut",
            row_order, sorted_ids, starts, used,
        )  # fmt: skip
    places = jnp.arange(tiles * tile_m, dtype=jnp.int32)
    row_slot = jnp.full(rows, tiles * tile_m, jnp.int32).at[tile_rows].set(places, mode="drop")  # drops empty places
    return Plan(row_order, row_slot, tile_rows, group, start, end, used, num_groups, tile_m, experts)


def row_tiles(ids: Int[jax.Array, "M"], experts: int, num_groups: int, tile_m: int) -> Plan:
    """Return a plan without sorting, in which each row has its own tile, in the order of rows.

    The tiles of dropped rows are empty.
    """
    row = jnp.arange(len(ids), dtype=jnp.int32)
    live, none = ids < num_groups, len(ids)
    first = jnp.arange(tile_m, dtype=jnp.int32)[None] == 0
    tile_rows = jnp.where(first & live[:, None], row[:, None], none).reshape(-1)
    slot = jnp.where(live, row * tile_m, none * tile_m)
    start, end = jnp.where(live, row, none), jnp.where(live, row + 1, none)
    used = jnp.full(1, none, jnp.int32)
    return Plan(row, slot, tile_rows, jnp.where(live, ids, 0), start, end, used, num_groups, tile_m, experts)


def _like(ids):
    return jax.ShapeDtypeStruct(ids.shape, jnp.int32)


def _call(kernel, programs: int, warps: int, outs, name: str, *args, interpret: bool):
    return pl.pallas_call(
        kernel, grid=(programs,), out_shape=outs, compiler_params=compiler_params(warps), interpret=interpret, name=name
    )(*args)


def _sort(ids, largest: int, pairwise: int, interpret: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return rows in sorted order, their ids, and the start of each one's group.

    The starts are None unless all pairs were compared.
    """
    like = _like(ids)
    if len(ids) <= pairwise:
        programs = pl.cdiv(len(ids), _TILES)
        return _call(_rank_kernel, programs, 4, [like, like, like], "lora_sort_rank", ids, interpret=interpret)
    passes = max(1, pl.cdiv(largest.bit_length(), _BITS))
    bits = max(4, pl.cdiv(largest.bit_length(), passes))
    blocks = pl.cdiv(len(ids), _BLOCK)
    rows = jnp.arange(len(ids), dtype=jnp.int32)
    for shift in range(0, passes * bits, bits):
        digit = partial(_digit, shift=shift, bits=bits)
        table = jax.ShapeDtypeStruct((blocks, 1 << bits), jnp.int32)
        count = partial(_count_kernel, digit=digit)
        counts = _call(count, blocks, 4, table, "lora_sort_count", ids, interpret=interpret)
        begin = _call(_begin_kernel, (1 << bits) // 16, 8, table, "lora_sort_begin", counts, interpret=interpret)
        args = (begin, ids, rows) if shift else (begin, ids)
        move = partial(_move_kernel, digit=digit)
        rows, ids = _call(move, blocks, 8, [like, like], "lora_sort_move", *args, interpret=interpret)
    return rows, ids, None


def _digit(ids, shift: int, bits: int):
    return (ids >> shift) & ((1 << bits) - 1)


def _sum(mask, axis: int):
    return jnp.sum(mask.astype(jnp.int32), axis=axis)


def _scatter(ref, index, value, mask):
    """Store to computed indices. An index is out of range where the mask is False, as the interpreter requires."""
    store(ref, (jnp.where(mask, index, 2**30),), value, mask)


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _rank_kernel(ids_ref, row_ref, sorted_ref, first_ref):
    """Place each of `_TILES` rows at the number of rows that precede it in the sorted order.

    A row precedes another if its id is smaller, or if the ids are equal and its index is smaller.
    """
    rows = ids_ref.shape[0]
    i = pl.program_id(0) * _TILES + jnp.arange(_TILES, dtype=jnp.int32)
    mine = load(ids_ref, (i,), i < rows)
    width = min(512, _power(rows))

    def chunk(c, found):
        j = c * width + jnp.arange(width, dtype=jnp.int32)
        other = load(ids_ref, (j,), j < rows, other=2**30)
        smaller = other[None, :] < mine[:, None]
        earlier = (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
        return found[0] + _sum(smaller, 1), found[1] + _sum(earlier, 1)

    zeros = jnp.zeros(_TILES, jnp.int32)
    first, before = jax.lax.fori_loop(0, pl.cdiv(rows, width), chunk, (zeros, zeros))
    for ref, value in ((row_ref, i), (sorted_ref, mine), (first_ref, first)):
        _scatter(ref, first + before, value, i < rows)


def _count_kernel(ids_ref, counts_ref, *, digit):
    """Compute counts[block, bin], the number of ids in a block whose digit is the bin."""
    i = pl.program_id(0) * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    mine = jnp.where(i < ids_ref.shape[0], digit(load(ids_ref, (i,), i < ids_ref.shape[0])), -1)
    bins = jnp.arange(counts_ref.shape[1], dtype=jnp.int32)
    store(counts_ref, (pl.program_id(0), bins), _sum(mine[:, None] == bins[None, :], 0), bins >= 0)


def _begin_kernel(counts_ref, begin_ref):
    """Compute begin[block, bin], the sorted position of the first id in a block whose digit is the bin.

    It is the number of ids with a smaller digit, plus those with the same digit in earlier blocks. A program computes
    16 bins.
    """
    blocks, width = counts_ref.shape
    bins, step = jnp.arange(width, dtype=jnp.int32), min(_power(blocks), (1 << 14) // width)
    mine = pl.program_id(0) * 16 + jnp.arange(16, dtype=jnp.int32)

    def total(c, found):
        q = c * step + jnp.arange(step, dtype=jnp.int32)
        return found + jnp.sum(load(counts_ref, (q[:, None], bins[None, :]), (q < blocks)[:, None]), axis=0)

    totals = jax.lax.fori_loop(0, pl.cdiv(blocks, step), total, jnp.zeros(width, jnp.int32))
    smaller = jnp.sum(jnp.where(bins[None, :] < mine[:, None], totals[None, :], 0), axis=1)
    step = min(_power(blocks), 256)

    def place(c, begin):
        q = c * step + jnp.arange(step, dtype=jnp.int32)
        counts = load(counts_ref, (q[:, None], mine[None, :]), (q < blocks)[:, None])
        earlier = jnp.cumsum(counts, axis=0) - counts
        store(begin_ref, (q[:, None], mine[None, :]), begin[None, :] + earlier, (q < blocks)[:, None])
        return begin + jnp.sum(counts, axis=0)

    jax.lax.fori_loop(0, pl.cdiv(blocks, step), place, smaller)


def _move_kernel(begin_ref, ids_ref, *refs, digit):
    """Move the rows of a block to their sorted positions.

    A row comes after all rows with a smaller digit, then after those with the same digit in earlier blocks and earlier
    in this one.
    """
    *rows_refs, row_ref, sorted_ref = refs
    rows, begin = ids_ref.shape[0], pl.program_id(0) * _BLOCK
    i = begin + jnp.arange(_BLOCK, dtype=jnp.int32)
    ids = load(ids_ref, (i,), i < rows)
    mine = digit(ids)
    place = load(begin_ref, (pl.program_id(0), mine), i < rows)
    for first in range(0, _BLOCK, 64):
        j = begin + first + jnp.arange(64, dtype=jnp.int32)
        other = digit(load(ids_ref, (j,), j < rows))
        place += _sum((other[:, None] == mine[None, :]) & (j[:, None] < i[None, :]), 0)
    row = load(rows_refs[0], (i,), i < rows) if rows_refs else i
    _scatter(row_ref, place, row, i < rows)
    _scatter(sorted_ref, place, ids, i < rows)


def _flag_kernel(sorted_ref, counts_ref, flags_ref, *, groups: int, tile_m: int):
    """Compute flags[p], 1 if a tile starts at sorted position p, and counts, the number of starts in each block."""
    rows, begin = sorted_ref.shape[0], pl.program_id(0) * _BLOCK
    p = begin + jnp.arange(_BLOCK, dtype=jnp.int32)
    mine = load(sorted_ref, (p,), p < rows, other=groups)

    # 1. Find the start of the group of the block's first row, which may be in an earlier block: among every `stride`-th
    # id, then within one stride.
    stride = _power(pl.cdiv(rows, _SAMPLES))
    head = sorted_ref[begin]
    samples = jnp.arange(_SAMPLES, dtype=jnp.int32) * stride
    smaller = _sum(load(sorted_ref, (samples,), samples < begin, other=groups) < head, 0)
    near = jnp.maximum(smaller - 1, 0) * stride + jnp.arange(stride, dtype=jnp.int32)
    head_start = jnp.maximum(smaller - 1, 0) * stride
    head_start += _sum(load(sorted_ref, (near,), near < begin, other=groups) < head, 0)

    # 2. All other groups start in the block.
    first = jnp.where(mine == head, head_start, begin)
    for c in range(0, _BLOCK, 64):
        j = begin + c + jnp.arange(64, dtype=jnp.int32)
        other = load(sorted_ref, (j,), j < rows, other=groups)
        first += jnp.where(mine == head, 0, _sum(other[:, None] < mine[None, :], 0))
    flags = ((mine < groups) & (jax.lax.rem(p - first, tile_m) == 0)).astype(jnp.int32)
    store(flags_ref, (p,), flags, p < rows)
    counts_ref[pl.program_id(0)] = jnp.sum(flags)


def _start_kernel(counts_ref, flags_ref, starts_ref, used_ref):
    """Compute starts[t], the sorted position at which tile t starts. Entries of unused tiles are not written."""
    blocks, rows, here = counts_ref.shape[0], flags_ref.shape[0], pl.program_id(0)
    q = jnp.arange(_power(blocks), dtype=jnp.int32)
    counts = load(counts_ref, (q,), q < blocks)
    before = jnp.sum(jnp.where(q < here, counts, 0))
    p = here * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    flags = load(flags_ref, (p,), p < rows)
    tile = before + jnp.cumsum(flags) - flags
    _scatter(starts_ref, tile, p, (flags > 0) & (tile < starts_ref.shape[0]))

    @pl.when(here == 0)
    def _():
        used_ref[0] = jnp.minimum(jnp.sum(counts), starts_ref.shape[0])


def _cut_pairwise_kernel(order_ref, sorted_ref, first_ref, *refs, cut):
    """Count the sorted positions at which tiles start, then run `_cut_kernel`."""
    rows, tiles = order_ref.shape[0], refs[0].shape[0]
    tile = pl.program_id(0) * _TILES + jnp.arange(_TILES, dtype=jnp.int32)
    width = min(512, _power(rows))

    def chunk(c, found):
        start, total = found
        p = c * width + jnp.arange(width, dtype=jnp.int32)
        group = load(sorted_ref, (p,), p < rows, other=cut.keywords["groups"])
        since = p - load(first_ref, (p,), p < rows)
        flags = ((group < cut.keywords["groups"]) & (jax.lax.rem(since, cut.keywords["tile_m"]) == 0)).astype(jnp.int32)
        number = total + jnp.cumsum(flags) - flags
        mine = (number[None, :] == tile[:, None]) & (flags > 0)[None, :]
        return start + jnp.sum(jnp.where(mine, p[None, :], 0), axis=1), total + jnp.sum(flags)

    start, total = jax.lax.fori_loop(0, pl.cdiv(rows, width), chunk, (jnp.zeros(_TILES, jnp.int32), jnp.int32(0)))
    used = jnp.minimum(total, tiles)
    cut(order_ref, sorted_ref, *refs[:-1], tile=tile, start=start, used=used)

    @pl.when(pl.program_id(0) == 0)
    def _():
        refs[-1][0] = used


def _cut_many_kernel(order_ref, sorted_ref, starts_ref, used_ref, *refs, cut):
    """Read the sorted positions at which tiles start, then run `_cut_kernel`."""
    tile = pl.program_id(0) * _TILES + jnp.arange(_TILES, dtype=jnp.int32)
    used = used_ref[0]
    start = load(starts_ref, (tile,), tile < used)
    cut(order_ref, sorted_ref, *refs, tile=tile, start=start, used=used)


def _cut_kernel(
    order_ref, sorted_ref, group_ref, start_ref, end_ref, rows_ref, *, tile, start, used, groups: int, tile_m: int,
    tiles: int,
):  # fmt: skip
    """Write the plan's entries of `_TILES` tiles, given their starts.

    A tile extends over consecutive sorted rows of the same group.
    """
    del groups
    rows, here = order_ref.shape[0], tile < used
    group = load(sorted_ref, (start,), here)
    end = start
    for first in range(0, tile_m, 16):
        place = first + jnp.arange(16, dtype=jnp.int32)
        p = start[:, None] + place[None, :]
        inside = here[:, None] & (p < rows) & (place < tile_m)[None, :]
        inside &= load(sorted_ref, (p,), inside, other=-1) == group[:, None]
        row = load(order_ref, (p,), inside, other=rows)
        to = tile[:, None] * tile_m + place[None, :]
        store(rows_ref, (to,), row, (tile < tiles)[:, None] & (place < tile_m)[None, :])
        end += _sum(inside, 1)
    store(group_ref, (tile,), group, tile < tiles)
    store(start_ref, (tile,), jnp.where(here, start, rows), tile < tiles)
    store(end_ref, (tile,), jnp.where(here, end, rows), tile < tiles)
