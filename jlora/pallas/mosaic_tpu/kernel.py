"""The Mosaic kernel of `lora`: copy the weights of visited bundles from HBM, shrink, expand."""

from dataclasses import dataclass, fields
from functools import partial, reduce
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int, Real

LANES = 128
NOBODY = -1  # group of a row without an adapter
VACANT = -2  # group of an empty place in a bundle; differs from every row's group
_VMEM_LIMIT = 58 << 20  # limit for the compiler, its own temporaries included; tpu7x has 64 MiB


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Static sizes of the list of visits. Calls with equal ones share the list.

    Attributes:
      rows, groups: M and G of the operands.
      bundle: Number of groups that are processed together.
      tile_m: Rows of a grid step.
      chunk: Row tiles whose intermediate h is in VMEM at the same time.
      by_group: True if rows must be sorted by group, because the visits in any other order might not fit into SMEM or
        because there are many groups.
    """

    rows: int
    groups: int
    bundle: int
    tile_m: int
    chunk: int
    by_group: bool

    @property
    def row_tiles(self) -> int:
        """Number of tiles of the rows."""
        return -(-self.rows // self.tile_m)

    @property
    def chunks(self) -> int:
        """Number of chunks of row tiles."""
        return -(-self.row_tiles // self.chunk)

    @property
    def max_visits(self) -> int:
        """Bound on the visits of a chunk, for any order of rows."""
        return min(-(-self.groups // self.bundle), self.tile_m) * self.chunk

    @property
    def listed(self) -> int:
        """Length of the list of visits.

        For rows in any order it is `max_visits` for each chunk. Sorted rows have at most `min(groups, rows) + row_tiles
        - 1` pairs of a tile and a group, plus a spare visit for each chunk.
        """
        if not self.by_group:
            return self.chunks * self.max_visits
        return min(self.groups, self.rows) + self.row_tiles - 1 + self.chunks

    def visit(self, c, v, first=None):
        """Return the index of visit v of chunk c in the list of visits.

        With `first`, a visit past the chunk's last one gives the index of the chunk's spare visit.
        """
        if first is None:
            return c * self.max_visits + v
        return first[c] + jnp.minimum(v, first[c + 1] - first[c] - 1)


@dataclass(frozen=True, kw_only=True)
class Sizes(Listing):
    """Static sizes of a call.

    Attributes:
      k, n, rank: K, N and R of the operands.
      slices: Column counts of the n output slices.
      step: Ranks of one copy.
      tile_k, tile_n: In-features and out-features of a grid step.
    """

    k: int
    n: int
    rank: int
    slices: tuple[int, ...]
    step: int
    tile_k: int
    tile_n: int

    @property
    def listing(self) -> Listing:
        """The sizes of the list of visits."""
        return Listing(**{one.name: getattr(self, one.name) for one in fields(Listing)})

    @property
    def width(self) -> int:
        """Ranks of a bundle."""
        return self.bundle * self.rank

    @property
    def edges(self) -> tuple[int, ...]:
        """Columns at which slices start and end."""
        return (0, *accumulate(self.slices))

    @property
    def k_tiles(self) -> int:
        """Number of tiles of the in-features."""
        return self.k // self.tile_k

    @property
    def n_tiles(self) -> int:
        """Number of tiles of the out-features."""
        return -(-self.n // self.tile_n)


def overlaps(slices, i, tile, tile_n):
    """Return True if slice i has columns in the given N tile."""
    start = sum(slices[:i])
    return (start < (tile + 1) * tile_n) & (tile * tile_n < start + slices[i])


@partial(jax.jit, static_argnames=("s", "interpret"), inline=True)
def call(
    s: Sizes,
    base: Float[jax.Array, "M N"],
    x: Float[jax.Array, "M K"],
    a: Real[jax.Array, "G n R K"],
    b: Real[jax.Array, "G R N"],
    group: Int[jax.Array, "M"],
    ranks: Float[jax.Array, "G n s"],
    row_scales: Float[jax.Array, "M"] | None,
    visits: tuple[jax.Array, ...],
    *,
    interpret: bool | pltpu.InterpretParams,
) -> Float[jax.Array, "M N"]:
    """Compute base + scale (x a[group]ᵀ) b[group], written over base.

    `visits` is the result of `schedule.visits`. A row with group < 0 has no adapter.
    """
    count, *schedule = visits
    scalars = (*schedule[:3], ranks[..., :2].ravel(), *schedule[3:])
    interpret = pltpu.InterpretParams() if interpret is True else interpret
    padding = 0, s.row_tiles * s.tile_m - s.rows
    group = jnp.pad(group, padding, constant_values=NOBODY)[:, None]
    row_scales = None if row_scales is None else jnp.pad(row_scales, padding)[:, None]
    if ranks.shape[2] > 2:  # SMEM would not hold the scales of all ranks, so rows bring their own: [n, M, width]
        scales = jnp.moveaxis(ranks[jnp.maximum(group[:, 0], 0), :, 1:], 1, 0)
        scales = scales if row_scales is None else scales * row_scales[None]
        row_scales = jnp.tile(scales, (1, 1, s.bundle))
    loose = s.n % LANES if s.n_tiles > 1 else 0  # trailing columns, which no aligned copy can reach
    b_loose = jnp.pad(b[:, :, s.n - loose :], ((0, 0), (0, 0), (0, LANES - loose))) if loose else b

    def group_index(c, j, v, tile, _active, _fresh, _ranks, *first):
        return tile[s.visit(c, v, *first)], 0

    def x_index(c, j, v, tile, _active, _fresh, _ranks, *first):  # stays at the last block during the expand
        v = jnp.where(j < s.k_tiles, v, pl.num_programs(2) - 1)
        return tile[s.visit(c, v, *first)], jnp.minimum(j, s.k_tiles - 1)

    def base_index(c, j, v, tile, _active, _fresh, _ranks, *first):  # stays at the first block during the shrink
        v = jnp.where(j < s.k_tiles, 0, v)
        return tile[s.visit(c, v, *first)], jnp.maximum(j - s.k_tiles, 0)

    row_spec = scale_spec = pl.BlockSpec((s.tile_m, 1), group_index)
    if row_scales is not None and row_scales.ndim == 3:
        scale_spec = pl.BlockSpec((len(s.slices), s.tile_m, s.width), lambda *at: (0, *group_index(*at)))
    base_spec = pl.BlockSpec((s.tile_m, s.tile_n), base_index)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # Without the constraint, XLA may move the weights of all slots into VMEM before the kernel starts.
    weights = [pltpu.with_memory_space_constraint(w, pltpu.HBM) for w in (a, b, b_loose)]
    if interpret:  # the interpreter requires aliased operands to fill their last blocks
        rest = s.row_tiles * s.tile_m - s.rows, s.n_tiles * s.tile_n - s.n
        base = jnp.pad(base, ((0, rest[0]), (0, rest[1])), constant_values=jnp.nan)
    total = pl.pallas_call(
        partial(_kernel, s),
        out_shape=jax.ShapeDtypeStruct(base.shape, base.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(s.chunks, s.k_tiles + s.n_tiles, count),
            in_specs=[
                row_spec,
                None if row_scales is None else scale_spec,
                pl.BlockSpec((s.tile_m, s.tile_k), x_index),
                *(hbm, hbm, hbm),
                base_spec,
            ],
            out_specs=base_spec,
            scratch_shapes=[
                pltpu.VMEM((2, len(s.slices), *_places(s, a), s.tile_k), a.dtype),
                pltpu.VMEM((2, *_places(s, b), s.tile_n), b.dtype),
                pltpu.VMEM((s.chunk, len(s.slices), s.tile_m, s.width), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(scalars) + 5 + (row_scales is not None): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        interpret=interpret,
        name="jlora_add_lora",
    )(*scalars, group, row_scales, x, *weights, base)
    return total[: s.rows, : s.n] if interpret else total


def _places(s: Sizes, factor):
    """Return the axes of a bundle's ranks in a buffer.

    A place of int8 is an array of its own, because tiles of 8-bit values have up to 32 rows.
    """
    return (s.bundle, s.rank) if factor.dtype == jnp.int8 else (s.width,)


def _kernel(s: Sizes, tile, active, fresh, ranks, *refs):
    """Run one grid step: one K tile of the shrink or one N tile of the expand, for one visit.

        grid (chunk c, phase j, visit v), v fastest; chunks are independent

                    v0    v1    v2
            j  k0 |  h  |  h  |  h  |    h[tile] = own group's (x[tile, k] @ a[bundle, :, k]ᵀ), summed over k
               n0 | out | out | out |    out[tile, n] = base[tile, n] + h[tile] @ b[bundle, n]
               n1 | out | out | out |

    The shrink is complete for all visits of the chunk before the expand starts, so h of a whole chunk is kept in VMEM.
    The visits of a tile are consecutive, so a block of `out` stays in VMEM until it is complete. The weights of the
    next step are copied while the current one computes.

    `state` holds the index of the weight buffer in use (0 or 1), and 1 if the buffer of b holds a non-finite value,
    else 0.
    """
    first, refs = (refs[:1], refs[1:]) if s.by_group else ((), refs)
    group, row_scales, x, a, b, b_loose, base, out, a_buf, b_buf, h, state, sem = refs
    c, j, v = (pl.program_id(i) for i in range(3))
    visit = s.visit(c, v, *first)
    place = partial(_place, s, active, ranks, visit)

    @pl.when((j == 0) & (v == 0))
    def _():
        state[0] = 1
        b_buf[...] = jnp.zeros_like(b_buf)  # a stray NaN in an uncopied part would disable the fast expand below

    new = (v == 0) | (fresh[visit] != 0)
    slot = jnp.where(new, 1 - state[0], state[0])
    state[0] = slot
    _bring(s, (active, ranks, fresh, *first), (a, b, b_loose), (a_buf, b_buf), sem, slot)
    row_tile = tile[visit]
    h_tile = h.at[row_tile - c * s.chunk]

    @pl.when(j < s.k_tiles)
    def _():
        _shrink(s, place, group, row_scales, x, a_buf.at[slot], h_tile, j == 0)

    @pl.when((j >= s.k_tiles) & ((v == 0) | (tile[jnp.maximum(visit - 1, 0)] != row_tile)))
    def _():
        out[...] = base[...]

    @pl.when((j >= s.k_tiles) & new)
    def _():
        state[1] = 0 if b_buf.dtype == jnp.int8 else _has_nonfinite(b_buf.at[slot])

    @pl.when(j >= s.k_tiles)
    def _():
        dtype = b.dtype
        if dtype == jnp.int8:
            dtype = min(x.dtype, out.dtype, key=lambda one: one.itemsize)
        _expand(s, place, group, h_tile, b_buf.at[slot], out, dtype, j - s.k_tiles, state[1] != 0)


def _place(s: Sizes, active, ranks, visit, p, i):
    """Return the group at place p of a visit's bundle, and its rank and scale in slice i.

    Group and rank are (VACANT, 0) if the place is empty.
    """
    group = active[visit * s.bundle + p]
    entry = 2 * (jnp.maximum(group, 0) * len(s.slices) + i)
    rank = jnp.where(group < 0, 0, ranks[entry].astype(jnp.int32))
    return jnp.where(rank > 0, group, VACANT), rank, ranks[entry + 1]


def _bring(s: Sizes, schedule, weights, buffers, sem, slot):
    """Wait for the copies of this step's weights, and start those of the next step in this chunk.

    The copies of this step were started by the previous one.
    """
    active, ranks, fresh, *first = schedule
    c, j, v = (pl.program_id(i) for i in range(3))
    phases, visits = pl.num_programs(1), pl.num_programs(2)

    def copies(j, v, slot, verb):
        visit = s.visit(c, v, *first)
        member = partial(
            _copy_member, s, partial(_place, s, active, ranks, visit), weights, buffers, sem, slot, j, verb
        )

        @pl.when((v == 0) | (fresh[visit] != 0))
        def _():
            jax.lax.fori_loop(0, s.bundle, member, None)

    last = v == visits - 1
    next_j, next_v = jnp.where(last, j + 1, j), jnp.where(last, 0, v + 1)
    pl.when((j == 0) & (v == 0))(lambda: copies(j, v, slot, "start"))
    pl.when(next_j < phases)(lambda: copies(next_j, next_v, 1 - slot, "start"))
    copies(j, v, slot, "wait")


def _copy_member(s: Sizes, place, weights, buffers, sem, slot, j, verb, p, _):
    """Copy the group at place p: a[g, i, :rank, K tile j] for every slice i, or b[g, :rank, N tile j - k_tiles]."""
    (a, b, b_loose), (a_buf, b_buf) = weights, buffers
    copy = partial(_copy_ranks, s, sem.at[slot], verb, p)
    places = [place(p, i) for i in range(len(s.slices))]

    @pl.when(j < s.k_tiles)
    def _():
        columns = slice(None) if s.k_tiles == 1 else pl.ds(pl.multiple_of(j * s.tile_k, LANES), s.tile_k)
        for i, (group, rank, _) in enumerate(places):
            copy(rank, a.at[group, i, :, columns], a_buf.at[slot, i])

    n_tile = j - s.k_tiles
    used = [jnp.where(overlaps(s.slices, i, n_tile, s.tile_n), rank, 0) for i, (_, rank, _) in enumerate(places)]
    rank = reduce(jnp.maximum, used)
    group = reduce(jnp.maximum, [group for group, *_ in places])
    rest = s.n - (s.n_tiles - 1) * s.tile_n
    aligned = rest // LANES * LANES

    @pl.when((j >= s.k_tiles) & (n_tile < s.n_tiles - (rest < s.tile_n)))
    def _():
        columns = slice(None) if s.n_tiles == 1 else pl.ds(pl.multiple_of(n_tile * s.tile_n, LANES), s.tile_n)
        copy(rank, b.at[group, :, columns], b_buf.at[slot])

    if rest < s.tile_n:

        @pl.when(n_tile == s.n_tiles - 1)
        def _():
            if aligned:
                copy(rank, b.at[group, :, pl.ds(s.n - rest, aligned)], b_buf.at[slot, ..., pl.ds(0, aligned)])
            if aligned < rest:
                copy(rank, b_loose.at[group], b_buf.at[slot, ..., pl.ds(aligned, LANES)])


def _copy_ranks(s: Sizes, sem, verb, p, rank, source, target):
    """Copy rows 0..rank of `source` to place p of `target`, in whole steps."""
    step, start = s.step, p * s.rank
    if target.dtype == jnp.int8:
        step, start, target = 32 if s.rank % 32 == 0 else s.rank, 0, target.at[p]
    if step == s.rank == target.shape[0]:
        pl.when(rank > 0)(getattr(pltpu.make_async_copy(source, target, sem), verb))
        return

    def body(r, _):
        rows = [pl.ds(pl.multiple_of(first + r * step, step), step) for first in (0, start)]
        getattr(pltpu.make_async_copy(source.at[rows[0]], target.at[rows[1]], sem), verb)()

    jax.lax.fori_loop(0, jax.lax.div(rank + step - 1, step), body, None)


def _matrix(factor, dtype):
    """Return the ranks of a bundle [width, columns] as they are, or int8 in `dtype`."""
    if factor.dtype != jnp.int8:
        return factor[...]
    return factor[...].astype(jnp.float32).reshape(-1, factor.shape[-1]).astype(dtype)


def _shrink(s: Sizes, place, group, row_scales, x, a, h, first):
    """Add scale * x @ a[i]ᵀ to h[i], masked to the ranks of each row's own group.

    Rows of other bundles keep their h.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, s.width), 1)
    mine = reduce(jnp.logical_or, [group[...] == place(p, i)[0] for p in range(s.bundle) for i in range(len(s.slices))])
    for i in range(len(s.slices)):
        owner, scales = jnp.full((1, s.width), VACANT, jnp.int32), jnp.zeros((1, s.width), jnp.float32)
        for p in range(s.bundle):
            g, rank, scale = place(p, i)
            own = (lane >= p * s.rank) & (lane < p * s.rank + rank)
            owner, scales = jnp.where(own, g, owner), jnp.where(own, scale, scales)
        if row_scales is not None:
            scales = scales * row_scales[...] if len(row_scales.shape) == 2 else row_scales[i]
        part = jnp.where(group[...] == owner, scales * dot(x[...], _matrix(a.at[i], x.dtype), transpose=True), 0.0)
        before = jnp.where(first & mine, 0.0, h[i])
        h[i] = before + part


def _expand(s: Sizes, place, group, h, b, out, dtype, n_tile, tainted):
    """Add h[i] in `dtype` @ b to out for each slice i in this N tile, in the rows whose group is in the bundle."""
    column = n_tile * s.tile_n + jax.lax.broadcasted_iota(jnp.int32, (1, s.tile_n), 1)
    rank_row = jax.lax.broadcasted_iota(jnp.int32, (s.width, 1), 0)

    def add(i, touched, weights):
        total = (out[...].astype(jnp.float32) + dot(h[i].astype(dtype), weights)).astype(out.dtype)
        if any(edge % s.tile_n for edge in s.edges[1:-1]):
            touched &= (column >= s.edges[i]) & (column < s.edges[i + 1])
        out[...] = jnp.where(touched, total, out[...])

    def add_slice(i):
        @pl.when(jnp.logical_not(tainted))
        def _():
            touched = [group[...] == place(p, i)[0] for p in range(s.bundle)]
            add(i, reduce(jnp.logical_or, touched), _matrix(b, dtype))

        if b.dtype == jnp.int8:
            return

        @pl.when(tainted)  # NaN and infinities must not reach the other groups of the bundle
        def _():
            def alone(p, _):
                g, rank, _ = place(p, i)
                own = (rank_row >= p * s.rank) & (rank_row < p * s.rank + rank)
                add(i, group[...] == g, jnp.where(own, b[...], 0))

            jax.lax.fori_loop(0, s.bundle, alone, None)

    for i in range(len(s.slices)):
        pl.when(overlaps(s.slices, i, n_tile, s.tile_n))(partial(add_slice, i))


def _has_nonfinite(ref):
    """Return 1 if a value of `ref` is NaN or infinite, else 0.

    Adding one to an exponent of all ones carries out of it.
    """
    if ref.dtype == jnp.bfloat16 and ref.shape[0] % 16 == 0:
        bits = pltpu.bitcast(ref[...], jnp.int32)  # each int32 holds a pair of rows
        exponent, one, carry = 0x7F807F80, 0x00800080, -0x7FFF8000
    else:
        bits = pltpu.bitcast(ref[...].astype(jnp.float32), jnp.int32)
        exponent, one, carry = 0x7F800000, 0x00800000, -0x80000000
    found = (bits & exponent) + one
    while found.shape[0] % 16 == 0:
        found = found[: found.shape[0] // 2] | found[found.shape[0] // 2 :]
    return jnp.max(jnp.where((found & carry) != 0, 1, 0))


def dot(left, right, transpose=False):
    """Return the float32 product: exact products of bfloat16, full precision for float32."""
    dtype = left.dtype if left.dtype == right.dtype else jnp.dtype(jnp.float32)
    if transpose and right.shape[0] == 1:  # a vector, which Mosaic multiplies and sums in float32 only
        dtype = jnp.dtype(jnp.float32)
    return jax.lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((1,), (1 if transpose else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
