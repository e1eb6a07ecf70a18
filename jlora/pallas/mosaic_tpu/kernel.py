"""The Mosaic kernel of `lora`: copy the weights of visited bundles from HBM, shrink, expand."""

from dataclasses import dataclass, fields
from functools import partial, reduce
from itertools import accumulate, pairwise
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int, Real

LANES = 128
NOBODY = -1  # group of a row without an adapter
MANY_GROUPS = 256  # more groups than this come from experts, which have few rows each
SMEM_BYTES = 640 << 10  # budget of the scalars of a call; a core has 1 MiB
VACANT = -2  # group of an empty place in a bundle; differs from every row's group


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
      tile_k, tile_n: In-features and out-features of a grid step.
      vmem: Bytes of VMEM that the compiler may use.
    """

    k: int
    n: int
    rank: int
    slices: tuple[int, ...]
    tile_k: int
    tile_n: int
    vmem: int

    @property
    def listing(self) -> Listing:
        """The sizes of the list of visits."""
        return Listing(**{one.name: getattr(self, one.name) for one in fields(Listing)})

    @property
    def buffers(self) -> int:
        """Number of buffers for weights. Visits of sorted rows are so short that copies start two visits ahead."""
        return 3 if self.by_group else 2

    @property
    def parts(self) -> int:
        """Bound on the parts of the copies of a step: slices, or the aligned and the loose columns of the last tile."""
        return max(2, len(self.slices))

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

    @property
    def fixed(self) -> bool:
        """True if the only N tile holds every slice at columns that can be copied alone."""
        return self.n_tiles == 1 and (len(self.slices) == 1 or not any(size % LANES for size in self.slices))

    @property
    def mixed(self) -> bool:
        """True if an N tile may hold columns of several slices that are not copied alone."""
        return not self.fixed and any(edge % self.tile_n for edge in self.edges[1:-1])


def overlaps(slices, i, tile, tile_n):
    """Return True if slice i has columns in the given N tile."""
    start = sum(slices[:i])
    return (start < (tile + 1) * tile_n) & (tile * tile_n < start + slices[i])


@partial(jax.jit, static_argnames=("s", "finite", "interpret"), inline=True)
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
    finite: bool = False,
    interpret: bool | pltpu.InterpretParams,
) -> Float[jax.Array, "M N"]:
    """Compute base + scale (x a[group]ᵀ) b[group], written over base.

    `visits` is the result of `schedule.visits`. A row with group < 0 has no adapter. `finite` is as for
    `jlora.ops.add_lora`.
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
        partial(_kernel, s, finite or b.dtype == jnp.int8),
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
                pltpu.VMEM((s.buffers, len(s.slices), *_places(s, a), s.tile_k), a.dtype),
                pltpu.VMEM((s.buffers, *_places(s, b), s.tile_n), b.dtype),
                pltpu.VMEM((s.chunk, len(s.slices), s.tile_m, s.width), jnp.float32),
                pltpu.SMEM((3 + s.buffers * s.parts,), jnp.int32),
                pltpu.SemaphoreType.DMA((s.buffers,)),
            ],
        ),
        # Rows that no visit has keep the bits of base, which is the output.
        input_output_aliases={len(scalars) + 5 + (row_scales is not None): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=s.vmem * s.buffers // 2,
            disable_bounds_checks=True,  # a plan has groups in range only, and no more than R ranks are copied
        ),
        interpret=interpret,
        name="jlora_add_lora",
    )(*scalars, group, row_scales, x, *weights, base)
    return total[: s.rows, : s.n] if interpret else total


def _step(s: Sizes, factor) -> int | None:
    """Return the unit of ranks that are copied, the rows of a tile in memory; None if R must be copied whole."""
    rows = 32 // factor.dtype.itemsize
    return None if s.rank % rows else rows


def _places(s: Sizes, factor) -> tuple[int, ...]:
    """Return the axes of a bundle's ranks in a buffer: all in turn, or an array for each place if R is copied whole."""
    return (s.bundle, s.rank) if _step(s, factor) is None else (s.width,)


@dataclass(frozen=True)
class _Bundle:
    """The bundle of a visit: the groups at its places, their ranks and scales, all read from SMEM."""

    s: Sizes
    active: Any
    ranks: Any
    visit: Any

    def group(self, p):
        """Return the group at place p, `VACANT` at an empty one."""
        return self.active[self.visit * self.s.bundle + p]

    def rank(self, p, i):
        """Return the rank of slice i at place p, a float32."""
        return jnp.where(self.group(p) < 0, 0.0, self.ranks[self._entry(p, i)])

    def scale(self, p, i):
        """Return the scale of slice i at place p."""
        return self.ranks[self._entry(p, i) + 1]

    def has(self, p, i, group):
        """Return True for rows of the group at place p, and False if its rank in slice i is 0."""
        return group == jnp.where(self.rank(p, i) > 0, self.group(p), VACANT)

    def _entry(self, p, i):
        return 2 * (jnp.maximum(self.group(p), 0) * len(self.s.slices) + i)


def _kernel(s: Sizes, finite: bool, tile, active, fresh, ranks, *refs):
    """Run one grid step: one K tile of the shrink or one N tile of the expand, for one visit.

        grid (chunk c, phase j, visit v), v fastest; chunks are independent

                    v0    v1    v2
            j  k0 |  h  |  h  |  h  |    h[tile] = own group's (x[tile, k] @ a[bundle, :, k]ᵀ), summed over k
               n0 | out | out | out |    out[tile, n] = base[tile, n] + h[tile] @ b[bundle, n]
               n1 | out | out | out |

    The shrink is complete for all visits of the chunk before the expand starts, so h of a whole chunk is kept in VMEM.
    The visits of a tile are consecutive, so a block of `out` stays in VMEM until it is complete. The weights of the
    next steps are copied while the current one computes.

    `state` holds the index of the weight buffer in use, that of the last one whose copies were started, 1 if the buffer
    of b holds a non-finite value, else 0, and for each buffer the ranks that each part of its copies brings.
    """
    first, refs = (refs[:1], refs[1:]) if s.by_group else ((), refs)
    group, row_scales, x, a, b, b_loose, base, out, a_buf, b_buf, h, state, sem = refs
    c, j, v = (pl.program_id(i) for i in range(3))
    visit = s.visit(c, v, *first)
    new = (v == 0) | (fresh[visit] != 0)
    begins = (j == 0) & (v == 0)

    def after(slot):  # no remainder, which is no scalar instruction
        return jnp.where(slot == s.buffers - 1, 0, slot + 1)

    slot = state[0] = jnp.where(begins, 0, jnp.where(new, after(state[0]), state[0]))
    parts = partial(_parts, s, (a, b, b_loose), (a_buf, b_buf))

    def start(ahead):
        at_j, at_v = j, v + ahead
        for _once in range(s.buffers - 1):
            past = at_v >= pl.num_programs(2)
            at_j, at_v = jnp.where(past, at_j + 1, at_j), jnp.where(past, at_v - pl.num_programs(2), at_v)
        visit = s.visit(c, at_v, *first)

        @pl.when((at_j < pl.num_programs(1)) & ((at_v == 0) | (fresh[visit] != 0)))
        def _():
            to = state[1] = jnp.where(begins & (ahead == 0), 0, after(state[1]))
            _start(s, _Bundle(s, active, ranks, visit), parts(at_j, to), at_j, state, to, sem)

        @pl.when(begins & (ahead == 0) & (b.dtype != jnp.int8))
        def _():  # ranks that are not copied are multiplied by zero, and so must be finite
            b_buf[...] = jnp.zeros_like(b_buf)

    # 1. Start the copies of the last step that has a free buffer. At first, start those of all steps up to it.
    jax.lax.fori_loop(jnp.where(begins, 0, s.buffers - 1), s.buffers, lambda ahead, _: start(ahead), None)
    pl.when(new)(lambda: _wait(s, parts(j, slot), state, slot, sem))

    # 2. Compute.
    row_tile, bundle = tile[visit], _Bundle(s, active, ranks, visit)
    opens = (v == 0) | (tile[jnp.maximum(visit - 1, 0)] != row_tile)  # the first visit of the tile in this phase
    h_tile = h.at[row_tile - c * s.chunk]

    @pl.when(j < s.k_tiles)
    def _():
        _shrink(s, bundle, group, row_scales, x, a_buf.at[slot], h_tile, (j == 0) & opens)

    if not finite:

        @pl.when((j >= s.k_tiles) & new)
        def _():
            state[2] = _has_nonfinite(b_buf.at[slot])

    dtype = min(x.dtype, out.dtype, key=lambda one: one.itemsize) if b.dtype == jnp.int8 else b.dtype
    for when, source in ((opens, base), (jnp.logical_not(opens), out)):

        @pl.when((j >= s.k_tiles) & when)
        def _(source=source):
            tainted = None if finite else state[2] != 0
            _expand(s, bundle, group, h_tile, b_buf.at[slot], source, out, dtype, j - s.k_tiles, tainted)


def _parts(s: Sizes, weights, buffers, j, slot):
    """Return the copies of a step, as pairs of a condition and a list of (slice, source, target).

    A source [G, R, columns] holds all groups, and a target the places of a bundle. A slice of None stands for all that
    have columns in the tile.
    """
    (a, b, b_loose), (a_buf, b_buf) = weights, buffers
    n_tile = j - s.k_tiles
    columns = slice(None) if s.k_tiles == 1 else pl.ds(pl.multiple_of(j * s.tile_k, LANES), s.tile_k)
    shrinks = j < s.k_tiles, [(i, a.at[:, i, :, columns], a_buf.at[slot, i]) for i in range(len(s.slices))]
    if s.fixed:
        spans = enumerate(map(pl.ds, s.edges, s.slices))
        return [shrinks, (n_tile >= 0, [(i, b.at[:, :, at], b_buf.at[slot, ..., at]) for i, at in spans])]
    columns = slice(None) if s.n_tiles == 1 else pl.ds(pl.multiple_of(n_tile * s.tile_n, LANES), s.tile_n)
    rest = s.n - (s.n_tiles - 1) * s.tile_n
    aligned, full = rest // LANES * LANES, s.n_tiles - (rest < s.tile_n)
    found = [shrinks, ((n_tile >= 0) & (n_tile < full), [(None, b.at[:, :, columns], b_buf.at[slot])])]
    if rest < s.tile_n:
        ends = [(None, b.at[:, :, pl.ds(s.n - rest, aligned)], b_buf.at[slot, ..., pl.ds(0, aligned)])]
        ends += [(None, b_loose, b_buf.at[slot, ..., pl.ds(aligned, LANES)])] * (aligned < rest)
        found.append((n_tile == full, ends[not aligned :]))
    return found


def _start(s: Sizes, bundle: _Bundle, parts, j, state, slot, sem):
    """Start the copies of a step, each of a place's ranks that may be used, and store how many ranks each part has."""

    def rank(p, i):
        if i is not None:
            return bundle.rank(p, i)
        here = [overlaps(s.slices, i, j - s.k_tiles, s.tile_n) for i in range(len(s.slices))]
        return reduce(jnp.maximum, [jnp.where(found, bundle.rank(p, i), 0.0) for i, found in enumerate(here)])

    def start(copies):
        # All scalars are loaded first, because a load after a copy waits for it to be issued.
        groups = [bundle.group(p) for p in range(s.bundle)]
        found = [[rank(p, i) for p in range(s.bundle)] for i, *_ in copies]
        for k, ((_, source, target), used) in enumerate(zip(copies, found, strict=True)):
            step = _step(s, source)
            sizes = [_copied(s, step, one) for one in used]
            state[3 + s.parts * slot + k] = sum(sizes)
            for p, (group, size) in enumerate(zip(groups, sizes, strict=True)):
                if step is None:
                    copy = pltpu.make_async_copy(source.at[group], target.at[p], sem.at[slot])
                else:
                    rows = pl.ds(0, size), pl.ds(p * s.rank, size)
                    copy = pltpu.make_async_copy(source.at[group, rows[0]], target.at[rows[1]], sem.at[slot])
                pl.when(used[p] > 0)(copy.start)

    for when, copies in parts:
        pl.when(when)(partial(start, copies))


def _copied(s: Sizes, step: int | None, rank):
    """Return the ranks that are copied for a true rank, or 1 for all of them if R is copied whole."""
    if step is None or step == s.rank:
        return jnp.where(rank > 0, step or 1, 0)
    return pl.multiple_of(jnp.minimum((rank.astype(jnp.int32) + step - 1) & -step, s.rank), step)


def _wait(s: Sizes, parts, state, slot, sem):
    """Wait for the copies of a step: for the bytes of each part at once."""

    def wait(copies):
        for k, (_, _, target) in enumerate(copies):
            size = pl.multiple_of(state[3 + s.parts * slot + k], _step(s, target) or 1)
            brought = target.at[pl.ds(0, size)]
            pltpu.make_async_copy(brought, brought, sem.at[slot]).wait()

    for when, copies in parts:
        pl.when(when)(partial(wait, copies))


def _matrix(factor, dtype):
    """Return the ranks of a bundle [width, columns] as they are, or int8 in `dtype`."""
    values = factor[...].astype(dtype) if factor.dtype == jnp.int8 else factor[...]
    return values.reshape(-1, factor.shape[-1])


def _shrink(s: Sizes, bundle: _Bundle, group, row_scales, x, a, h, opens):
    """Add scale * x @ a[i]ᵀ to h[i], or to zeros if `opens`, masked to the ranks of each row's own group."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, s.width), 1)
    within, rows = jax.lax.rem(lane, s.rank).astype(jnp.float32), group[...]

    def spread(values):
        """Return [1, width]: the value of each lane's place."""
        found = jnp.full((1, s.width), values[0])
        for p, value in enumerate(values[1:], 1):
            found = jnp.where(lane >= p * s.rank, value, found)
        return found

    own = rows == spread([bundle.group(p) for p in range(s.bundle)])
    for i in range(len(s.slices)):
        scales = spread([bundle.scale(p, i) for p in range(s.bundle)])
        if row_scales is not None:
            scales = scales * row_scales[...] if len(row_scales.shape) == 2 else row_scales[i]
        below = within < spread([bundle.rank(p, i) for p in range(s.bundle)])
        part = jnp.where(own & below, scales * dot(x[...], _matrix(a.at[i], x.dtype), transpose=True), 0.0)
        h[i] = part + jnp.where(opens, 0.0, h[i])


def _expand(s: Sizes, bundle: _Bundle, group, h, b, source, out, dtype, n_tile, tainted):
    """Add h[i] in `dtype` @ b to `source` for each slice i in this N tile, in the rows whose group is in the bundle.

    `tainted` is None if b is finite.
    """
    rank_row = jax.lax.broadcasted_iota(jnp.int32, (s.width, 1), 0)
    # Ranks past the true one, rounded up to 16, may be NaN.
    masked = b.dtype != jnp.int8 and (s.mixed or (_step(s, b) is None and s.rank > 16))

    def add(i, at, source, places, own, columns):
        weights = _matrix(b.at[..., at], dtype)
        if own:
            starts = [(p * s.rank, bundle.rank(p, i).astype(jnp.int32)) for p in places]
            below = [(rank_row >= first) & (rank_row < first + rank) for first, rank in starts]
            weights = jnp.where(reduce(or_, below), weights, 0)
        before = source[:, at]
        total = (before.astype(jnp.float32) + dot(h[i].astype(dtype), weights)).astype(out.dtype)
        touched = reduce(or_, [bundle.has(p, i, group[...]) for p in places])
        out[:, at] = jnp.where(touched & columns, total, before)

    def add_slice(i, at, source, columns=True):
        def together():
            add(i, at, source, range(s.bundle), masked, columns)

        def apart():  # NaN and infinities must not reach the other groups of the bundle
            out[:, at] = source[:, at]
            jax.lax.fori_loop(0, s.bundle, lambda p, _: add(i, at, out, [p], True, columns), None)

        if tainted is None:
            together()
        else:
            pl.when(jnp.logical_not(tainted))(together)
            pl.when(tainted)(apart)

    if s.fixed:
        for i, (start, stop) in enumerate(pairwise(s.edges)):
            add_slice(i, slice(start, stop), source)
    elif not s.mixed:
        add_slice(sum((n_tile * s.tile_n >= edge).astype(jnp.int32) for edge in s.edges[1:-1]), slice(None), source)
    else:
        if source is not out:
            out[...] = source[...]
        column = n_tile * s.tile_n + jax.lax.broadcasted_iota(jnp.int32, (1, s.tile_n), 1)
        for i, (start, stop) in enumerate(pairwise(s.edges)):
            here = (column >= start) & (column < stop)
            pl.when(overlaps(s.slices, i, n_tile, s.tile_n))(partial(add_slice, i, slice(None), out, here))


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
