"""The TPU backend: shrink and expand fused in one Mosaic kernel, the rank-R intermediate kept in VMEM.

Rows stay in their own order: sorting them would move the [M, N] base output through HBM three more times. Instead, the
matrix unit, which handles 128 ranks at the price of one, takes up to 128 / R groups at once (a "bundle"), and a mask on
the small intermediate leaves each row its own group. A group's place in its bundle is its id modulo the bundle's size,
so that a row is computed alike whoever shares its batch.

A "visit" is a tile of rows together with a bundle that occurs in it. Only the groups of visited bundles are read from
HBM, each only up to its true rank.
"""

from dataclasses import dataclass
from functools import lru_cache, partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from jlora.errors import LoRAError
from jlora.pallas.plan import Plan

_LANES = 128
_VMEM_BYTES = 44 << 20  # what we plan for, of the 64 MiB of tpu7x; v5e, v5p and v6e have 128 MiB
_VMEM_LIMIT = 58 << 20  # what the compiler may use, with its own temporaries
_SMEM_BYTES = 640 << 10  # of 1 MiB
_NOBODY = -1  # the group of a row without adapter
_VACANT = -2  # a place in a bundle that no group takes; differs from every row's group


@dataclass(frozen=True)
class _Sizes:
    """Static sizes of a call.

    rows (M), k (K), n (N), rank (R), groups (G), slices (the n output sizes) are the operands'.
    bundle: groups taken at once. step: ranks that one copy brings.
    tile_m, tile_k, tile_n: rows, in-features and out-features of a grid step.
    chunk: row tiles whose intermediate is in VMEM at once.
    by_group: rows must be given sorted by group, because visits in any other order might not fit in SMEM.
    """

    rows: int
    k: int
    n: int
    rank: int
    groups: int
    slices: tuple[int, ...]
    bundle: int
    step: int
    tile_m: int
    tile_k: int
    tile_n: int
    chunk: int
    by_group: bool

    @property
    def width(self) -> int:
        return self.bundle * self.rank

    @property
    def k_tiles(self) -> int:
        return self.k // self.tile_k

    @property
    def n_tiles(self) -> int:
        return -(-self.n // self.tile_n)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_m)

    @property
    def chunks(self) -> int:
        return -(-self.row_tiles // self.chunk)

    @property
    def max_visits(self) -> int:
        """Bound on the visits of a chunk."""
        any_order = min(-(-self.groups // self.bundle), self.tile_m) * self.chunk
        sorted_rows = self.chunk + min(self.groups, self.chunk * self.tile_m) - 1
        return min(any_order, sorted_rows) if self.by_group else any_order


def add_lora(
    base: Float[jax.Array, "M N"],
    x: Float[jax.Array, "M K"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    ranks: Int[jax.Array, "G n"] | None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[jax.Array, "M N"]:
    """See `jlora.ops.add_lora`. The result takes the place of `base` when `base` may be overwritten.

    Between shrink and expand the intermediate is rounded to bfloat16 if b is bfloat16, as PEFT does.

    Raises:
      LoRAError: with `unsupported_reason`.
    """
    reason = unsupported_reason(base, x, a, b, slice_sizes=slice_sizes)
    if reason is not None:
        raise LoRAError(f"add_lora: backend 'mosaic_tpu' {reason}")
    s = _sizes(base, x, a, b, slice_sizes)
    if ranks is None:
        ranks = jnp.full((s.groups, len(s.slices)), s.rank, jnp.int32)
    group = _row_groups(plan)
    if not s.by_group:
        return _call(s, base, x, a, b, group, ranks, interpret)
    order = plan.row_order
    total = _call(s, base[order], x[order], a, b, group[order], ranks, interpret)
    return base.at[order].set(total, unique_indices=True)


def unsupported_reason(base, x, a, b, *, slice_sizes: tuple[int, ...]) -> str | None:
    """Why this backend cannot run `add_lora` on operands of these shapes and dtypes, or None if it can."""
    for name, array in (("base", base), ("x", x), ("a", a), ("b", b)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"takes bfloat16 and float32, but {name} is {array.dtype}; cast it, or use backend='xla'"
    s = _sizes(base, x, a, b, slice_sizes)
    if s is None:
        return (
            f"cannot tile R={a.shape[2]}, K={a.shape[3]}, N={b.shape[2]} into {_VMEM_BYTES >> 20} MiB of VMEM "
            "(a K that is no multiple of 128 cannot be divided); pad K, or use backend='xla'"
        )
    if _smem_bytes(s) > _SMEM_BYTES:
        return (
            f"needs {_smem_bytes(s)} bytes of SMEM for the schedule of {s.rows} rows in {s.groups} groups, of "
            f"{_SMEM_BYTES}; split the rows, or use backend='xla'"
        )
    return None


def _row_groups(plan: Plan) -> Int[jax.Array, "M"]:
    tile = jnp.minimum(plan.row_slot // plan.tile_m, plan.num_tiles - 1)
    return jnp.where(plan.row_slot < plan.num_tiles * plan.tile_m, plan.tile_group[tile], _NOBODY)


# ---------------------------------------------------------------------------------------------------------- tile choice


def _sizes(base, x, a, b, slice_sizes) -> _Sizes | None:
    itemsizes = tuple(jnp.dtype(v.dtype).itemsize for v in (base, x, a, b))
    return _choose(*x.shape, *b.shape, tuple(slice_sizes), itemsizes)


@lru_cache
def _choose(rows, k, groups, rank, n, slices, itemsizes) -> _Sizes | None:
    step = next((step for step in (16, 8) if rank % step == 0), rank)
    bundle = 1 if rank % 8 else max(1, min(_LANES // rank, groups, 16))
    width, lanes = bundle * rank, -(-bundle * rank // _LANES) * _LANES
    base_size, x_size, a_size, b_size = itemsizes
    for tile_m in (256, 128, 64, 32, 16):
        tile_m = min(tile_m, rows)
        tile_k = _tile_k(k, min((4 << 20) // (len(slices) * width * a_size), (4 << 20) // (tile_m * x_size)))
        tile_n = _tile_n(slices, min((2 << 20) // (width * b_size), (2 << 20) // (tile_m * base_size)))
        fixed = 2 * tile_k * (len(slices) * width * a_size + tile_m * x_size) + 2 * tile_m * _LANES * 4
        fixed += tile_n * (2 * width * b_size + tile_m * (4 * base_size + 8) + width * 4)
        per_tile = len(slices) * tile_m * lanes * 4
        chunk = min((_VMEM_BYTES - fixed) // per_tile, -(-rows // tile_m))
        if chunk >= 1:
            s = _Sizes(rows, k, n, rank, groups, slices, bundle, step, tile_m, tile_k, tile_n, chunk, False)
            if _smem_bytes(s) > _SMEM_BYTES:
                s = _Sizes(rows, k, n, rank, groups, slices, bundle, step, tile_m, tile_k, tile_n, chunk, True)
            return s
    return None


def _tile_k(k: int, most: int) -> int:
    """The largest divisor of K in lanes up to `most`; all of K if it is small or has none."""
    if k <= most or k % _LANES:
        return k
    return max(t for t in range(_LANES, max(most, _LANES) + 1, _LANES) if k % t == 0)


def _tile_n(slices: tuple[int, ...], most: int) -> int:
    """Columns of a grid step: few steps, few tiles that straddle slices (those are multiplied once for each slice)."""
    n = sum(slices)

    def cost(tile):
        columns = sum(tile for i in range(len(slices)) for j in range(-(-n // tile)) if _overlaps(slices, i, j, tile))
        return columns + 1024 * -(-n // tile), -tile

    tiles = [t for t in range(_LANES, max(most, _LANES) + 1, _LANES) if t < n]
    return min(tiles + [n] * (n <= max(most, _LANES)), key=cost)


def _overlaps(slices, i, tile, tile_n):
    start = sum(slices[:i])
    return (start < (tile + 1) * tile_n) & (tile * tile_n < start + slices[i])


def _smem_bytes(s: _Sizes) -> int:
    return 4 * (s.chunks * s.max_visits * (s.bundle + 2) + s.groups * len(s.slices))


# ------------------------------------------------------------------------------------------------------------- schedule


def _visits(s: _Sizes, group: Int[jax.Array, "M"]):
    """Which bundles each row tile needs, as flat vectors for SMEM: V = max_visits a chunk, of which `count` are used.

    Returns:
      count: [] visits of the fullest chunk, at least 1.
      tile: [chunks * V] row tile of a visit, rising within a chunk.
      active: [chunks * V * bundle] groups of a visit's bundle; `_VACANT` where none.
      fresh: [chunks * V] 1 where the bundle differs from the visit before it.
    """
    blocks = -(-s.groups // s.bundle)
    row = jnp.arange(s.rows, dtype=jnp.int32)
    column = jnp.where(group < 0, blocks * s.bundle, group)
    present = jnp.zeros((s.chunks * s.chunk, blocks * s.bundle), jnp.int32)
    present = present.at[row // s.tile_m, column].set(1, mode="drop").reshape(s.chunks, s.chunk, blocks, s.bundle)

    # 1. Groups of a tile that share a place go to consecutive visits.
    nth = jnp.cumsum(present, axis=2) - present
    used = jnp.max(jnp.sum(present, axis=2), axis=2)  # [chunks, chunk]
    end = jnp.cumsum(used, axis=1)
    visit = jnp.where(present > 0, nth + (end - used)[:, :, None, None], s.max_visits)
    chunk, _, block, place = (jnp.arange(d, dtype=jnp.int32).reshape(e) for d, e in _axes(present.shape))
    active = jnp.full((s.chunks, s.max_visits, s.bundle), _VACANT, jnp.int32)
    active = active.at[chunk, visit, place].set(block * s.bundle + place, mode="drop")

    # 2. Visit v belongs to the first tile whose visits end past v; spare visits go to the last tile.
    v = jnp.arange(s.max_visits, dtype=jnp.int32)
    tile = jnp.sum(v[None, :, None] >= end[:, None, :], axis=2, dtype=jnp.int32)
    tile = jnp.minimum(tile, s.chunk - 1) + s.chunk * jnp.arange(s.chunks, dtype=jnp.int32)[:, None]
    tile = jnp.minimum(tile, s.row_tiles - 1)
    fresh = jnp.any(active != jnp.roll(active, 1, axis=1), axis=2).at[:, 0].set(True)
    count = jnp.maximum(jnp.max(end[:, -1]), 1)
    return count, tile.ravel(), active.ravel(), fresh.astype(jnp.int32).ravel()


def _axes(shape):
    """(size, shape that broadcasts) of each axis."""
    return [(size, [-1 if j == i else 1 for j in range(len(shape))]) for i, size in enumerate(shape)]


# --------------------------------------------------------------------------------------------------------------- kernel


def _call(s: _Sizes, base, x, a, b, group, ranks, interpret):
    count, tile, active, fresh = _visits(s, group)
    group = jnp.pad(group, (0, s.row_tiles * s.tile_m - s.rows), constant_values=_NOBODY)[:, None]
    loose = s.n % _LANES if s.n_tiles > 1 else 0  # last columns, which no aligned copy can reach
    b_loose = jnp.pad(b[:, :, s.n - loose :], ((0, 0), (0, 0), (0, _LANES - loose))) if loose else b

    def group_index(c, j, v, tile, *_):
        return tile[c * s.max_visits + v], 0

    def x_index(c, j, v, tile, *_):  # while expanding, stays at its last block
        v = jnp.where(j < s.k_tiles, v, pl.num_programs(2) - 1)
        return tile[c * s.max_visits + v], jnp.minimum(j, s.k_tiles - 1)

    def base_index(c, j, v, tile, *_):  # while shrinking, waits at its first block
        v = jnp.where(j < s.k_tiles, 0, v)
        return tile[c * s.max_visits + v], jnp.maximum(j - s.k_tiles, 0)

    base_spec = pl.BlockSpec((s.tile_m, s.tile_n), base_index)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(_kernel, s),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(s.chunks, s.k_tiles + s.n_tiles, count),
            in_specs=[
                pl.BlockSpec((s.tile_m, 1), group_index),
                pl.BlockSpec((s.tile_m, s.tile_k), x_index),
                *(hbm, hbm, hbm),
                base_spec,
            ],
            out_specs=base_spec,
            scratch_shapes=[
                pltpu.VMEM((2, len(s.slices), s.width, s.tile_k), a.dtype),
                pltpu.VMEM((2, s.width, s.tile_n), b.dtype),
                pltpu.VMEM((s.chunk, len(s.slices), s.tile_m, s.width), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={9: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=_VMEM_LIMIT),
        interpret=interpret,
        name="jlora_add_lora",
    )(tile, active, fresh, ranks.ravel(), group, x, a, b, b_loose, base)


def _kernel(s: _Sizes, tile, active, fresh, ranks, group, x, a, b, b_loose, base, out, a_buf, b_buf, h, state, sem):
    """A grid step: one K tile of the shrink, or one N tile of the expand, for one visit.

        grid (chunk c, phase j, visit v), v fastest

                    v0    v1    v2
            j  k0 |  h  |  h  |  h  |    h[tile] = own group's (x[tile, k] @ a[bundle, :, k]ᵀ), summed over k
               n0 | out | out | out |    out[tile, n] = base[tile, n] + h[tile] @ b[bundle, n]
               n1 | out | out | out |    visits of a tile are neighbours, so that a block of out is left only when done

    `state`: the weight buffer in use (0 or 1); whether b's holds a value that is not finite.
    """
    c, j, v = (pl.program_id(i) for i in range(3))
    visit = c * s.max_visits + v
    place = partial(_place, s, active, ranks, visit)

    @pl.when((c == 0) & (j == 0) & (v == 0))
    def _():
        state[0] = 1
        b_buf[...] = jnp.zeros_like(b_buf)  # h is zero wherever nothing is copied, and 0 * NaN would not be

    new = (v == 0) | (fresh[visit] != 0)
    slot = jnp.where(new, 1 - state[0], state[0])
    state[0] = slot
    _bring(s, (active, ranks, fresh), (a, b, b_loose), (a_buf, b_buf), sem, slot)
    row_tile = tile[visit]
    h_tile = h.at[row_tile - c * s.chunk]

    @pl.when(j < s.k_tiles)
    def _():
        _shrink(s, place, group, x, a_buf.at[slot], h_tile, j == 0)

    @pl.when((j >= s.k_tiles) & ((v == 0) | (tile[jnp.maximum(visit - 1, 0)] != row_tile)))
    def _():
        out[...] = base[...]

    @pl.when((j >= s.k_tiles) & new)
    def _():
        finite = jnp.abs(b_buf[slot].astype(jnp.float32)) < jnp.inf
        state[1] = jnp.max(jnp.where(finite, 0, 1))

    @pl.when(j >= s.k_tiles)
    def _():
        _expand(s, place, group, h_tile, b_buf.at[slot], out, j - s.k_tiles, state[1] != 0)


def _place(s: _Sizes, active, ranks, visit, p, i):
    """The group at place p of a visit's bundle and its rank in slice i; (_VACANT, 0) if it has none."""
    group = active[visit * s.bundle + p]
    rank = jnp.where(group < 0, 0, ranks[jnp.maximum(group, 0) * len(s.slices) + i])
    return jnp.where(rank > 0, group, _VACANT), rank


def _bring(s: _Sizes, schedule, weights, buffers, sem, slot):
    """Waits for this step's weights, which the step before asked for, and asks for the next step's."""
    active, ranks, fresh = schedule
    step = [pl.program_id(i) for i in range(3)]
    chunks, phases, visits = (pl.num_programs(i) for i in range(3))
    last_visit, last_phase = step[2] == visits - 1, step[1] == phases - 1
    v = jnp.where(last_visit, 0, step[2] + 1)
    j = jnp.where(last_visit, jnp.where(last_phase, 0, step[1] + 1), step[1])
    c = jnp.where(last_visit & last_phase, step[0] + 1, step[0])

    def copies(step, slot, verb):
        c, j, v = step
        place = partial(_place, s, active, ranks, c * s.max_visits + v)

        @pl.when((v == 0) | (fresh[c * s.max_visits + v] != 0))
        def _():
            jax.lax.fori_loop(0, s.bundle, partial(_copy_member, s, place, weights, buffers, sem, slot, j, verb), None)

    pl.when((step[0] == 0) & (step[1] == 0) & (step[2] == 0))(lambda: copies(step, slot, "start"))
    pl.when(c < chunks)(lambda: copies((c, j, v), 1 - slot, "start"))
    copies(step, slot, "wait")


def _copy_member(s: _Sizes, place, weights, buffers, sem, slot, j, verb, p, _):
    """Copies the group at place p: a[g, i, :rank, K tile j] for every slice i, or b[g, :rank, N tile j - k_tiles]."""
    (a, b, b_loose), (a_buf, b_buf) = weights, buffers
    copy = partial(_copy_ranks, s, sem.at[slot], verb, p)
    places = [place(p, i) for i in range(len(s.slices))]

    @pl.when(j < s.k_tiles)
    def _():
        columns = slice(None) if s.k_tiles == 1 else pl.ds(pl.multiple_of(j * s.tile_k, _LANES), s.tile_k)
        for i, (group, rank) in enumerate(places):
            copy(rank, a.at[group, i, :, columns], a_buf.at[slot, i])

    n_tile = j - s.k_tiles
    used = [jnp.where(_overlaps(s.slices, i, n_tile, s.tile_n), rank, 0) for i, (_, rank) in enumerate(places)]
    rank = reduce(jnp.maximum, used)
    group = reduce(jnp.maximum, [group for group, _ in places])
    rest = s.n - (s.n_tiles - 1) * s.tile_n
    aligned = rest // _LANES * _LANES

    @pl.when((j >= s.k_tiles) & (n_tile < s.n_tiles - (rest < s.tile_n)))
    def _():
        columns = slice(None) if s.n_tiles == 1 else pl.ds(pl.multiple_of(n_tile * s.tile_n, _LANES), s.tile_n)
        copy(rank, b.at[group, :, columns], b_buf.at[slot])

    if rest < s.tile_n:

        @pl.when(n_tile == s.n_tiles - 1)
        def _():
            if aligned:
                copy(rank, b.at[group, :, pl.ds(s.n - rest, aligned)], b_buf.at[slot, :, pl.ds(0, aligned)])
            if aligned < rest:
                copy(rank, b_loose.at[group], b_buf.at[slot, :, pl.ds(aligned, _LANES)])


def _copy_ranks(s: _Sizes, sem, verb, p, rank, source, target):
    """Copies rows 0..rank of `source` to place p of `target`, in whole steps."""
    if s.step == s.rank == s.width:
        pl.when(rank > 0)(getattr(pltpu.make_async_copy(source, target, sem), verb))
        return

    def body(r, _):
        rows = [pl.ds(pl.multiple_of(first + r * s.step, s.step), s.step) for first in (0, p * s.rank)]
        getattr(pltpu.make_async_copy(source.at[rows[0]], target.at[rows[1]], sem), verb)()

    jax.lax.fori_loop(0, jax.lax.div(rank + s.step - 1, s.step), body, None)


def _shrink(s: _Sizes, place, group, x, a, h, first):
    """h[i] (+)= x @ a[i]ᵀ, kept only at the ranks of a row's own group; rows of other bundles keep theirs."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, s.width), 1)
    mine = reduce(jnp.logical_or, [group[...] == place(p, i)[0] for p in range(s.bundle) for i in range(len(s.slices))])
    for i in range(len(s.slices)):
        owner = jnp.full((1, s.width), _VACANT, jnp.int32)
        for p in range(s.bundle):
            g, rank = place(p, i)
            owner = jnp.where((lane >= p * s.rank) & (lane < p * s.rank + rank), g, owner)
        part = jnp.where(group[...] == owner, _dot(x[...], a[i], transpose=True), 0.0)
        before = jnp.where(first & mine, 0.0, h[i])
        h[i] = before + part


def _expand(s: _Sizes, place, group, h, b, out, n_tile, tainted):
    """out += h[i] @ b for the slices i that this N tile touches, in the rows whose group is in the bundle."""
    column = n_tile * s.tile_n + jax.lax.broadcasted_iota(jnp.int32, (1, s.tile_n), 1)
    rank_row = jax.lax.broadcasted_iota(jnp.int32, (s.width, 1), 0)

    def add(i, touched, weights):
        total = (out[...].astype(jnp.float32) + _dot(h[i].astype(b.dtype), weights)).astype(out.dtype)
        start = sum(s.slices[:i])
        if any(size % s.tile_n for size in s.slices) and len(s.slices) > 1:
            touched &= (column >= start) & (column < start + s.slices[i])
        out[...] = jnp.where(touched, total, out[...])

    def add_slice(i):
        @pl.when(jnp.logical_not(tainted))
        def _():
            add(i, reduce(jnp.logical_or, [group[...] == place(p, i)[0] for p in range(s.bundle)]), b[...])

        @pl.when(tainted)  # NaN and infinities must not reach the bundle's other groups
        def _():
            def alone(p, _):
                g, rank = place(p, i)
                own = (rank_row >= p * s.rank) & (rank_row < p * s.rank + rank)
                add(i, group[...] == g, jnp.where(own, b[...], 0))

            jax.lax.fori_loop(0, s.bundle, alone, None)

    for i in range(len(s.slices)):
        pl.when(_overlaps(s.slices, i, n_tile, s.tile_n))(partial(add_slice, i))


def _dot(left, right, transpose=False):
    """float32 product; exact products of bfloat16, and float32 ones at full precision."""
    dtype = jnp.promote_types(left.dtype, right.dtype)
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
