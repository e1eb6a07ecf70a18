"""The TPU backend: shrink and expand fused in one Mosaic kernel, with the rank-R intermediate h in VMEM.

Bundles. If groups are few, rows stay in their own order, because sorting would move the [M, N] base output through HBM
three more times. The matrix unit handles 128 ranks at the cost of one. The kernel therefore multiplies a tile of rows
with up to 128 / R groups at once (a "bundle"), and masks h so that each row keeps the result of its own group. The
place of a group in its bundle is its id modulo the bundle's size. A row is thus computed in the same way in every
batch.

Visits. A "visit" is a tile of rows with a bundle that occurs in it. Only the groups of visited bundles are read from
HBM, each up to its true rank in the slices that it has, and once for all consecutive row tiles that need the same
bundle. The list of visits follows from the plan and from sizes that the projections of a model share. XLA therefore
makes it once for all layers of a plan, and before a loop over layers. A call without any adapter has no visits.

VMEM. XLA keeps outputs and prefetches base weights in the VMEM that a kernel leaves, so a call is limited to what its
tiles take.

int8. The blocks of a and b that a step needs are converted in VMEM to the dtype of the products. The scales of ranks
reach the kernel as a scale for each row, slice and rank, gathered by XLA. Those of all groups would not fit into SMEM.

Layouts. The copies expect K, or N, as the innermost axis of the factors. XLA chooses the layout of an argument by its
shape, with the axis that needs the least padding innermost. If K is not a multiple of 128 but another axis is (slots,
experts or ranks), XLA makes the other axis the innermost one, and transposes the whole array before every call. This
happens with 128 slots, 128 experts or rank 128 of gpt-oss, whose hidden size is 2880. The results are the same, but the
factors of all slots are moved. With 127 or 129 slots the layout is the expected one. An expert cannot be added in this
way, because experts are divided among chips.

Experts. Rows of experts are sorted by group, which is a slot's expert. In any other order, neighbouring tiles of rows
would need the same groups and read their weights again. The size of the schedule depends on the number of rows, because
nearly all groups have none.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int, Real

from jlora.errors import LoRAError
from jlora.pallas import xla
from jlora.pallas.mosaic_tpu import backward as backward
from jlora.pallas.mosaic_tpu.kernel import LANES, MANY_GROUPS, NOBODY, SMEM_BYTES, Sizes, call, overlaps
from jlora.pallas.mosaic_tpu.schedule import visits
from jlora.pallas.plan import Plan

SEARCHING = "add_lora", "expand"  # functions that search b for NaN and infinity unless it is `finite`

_VMEM_BYTES = 44 << 20  # budget of the tiles; tpu7x has 64 MiB, and v5e, v5p and v6e have 128 MiB
_VMEM_MORE = 1 << 20  # for what the compiler adds to small tiles
_INVARIANT_TILE_M = 64  # of `batch_invariant` calls, which are padded to as many rows


def add_lora(
    base: Float[jax.Array, "M N"] | None,
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    ranks: Float[jax.Array, "G n s"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
    finite: bool = False,
    batch_invariant: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
    keep_h: bool = False,
) -> Any:
    """Implement `jlora.ops.add_lora`. With `keep_h`, return the result and h [1, M, n * R], from a pass of its own.

    The result takes the place of `base` if `base` may be overwritten.

    Between shrink and expand the intermediate is rounded to bfloat16 if b is bfloat16, as in PEFT.

    Raises:
      LoRAError: `unsupported_reason` returns a reason.
    """
    if keep_h:
        options: dict[str, Any] = {"ranks": ranks, "x_rows": x_rows, "interpret": interpret}
        options["batch_invariant"] = batch_invariant
        h = jnp.moveaxis(shrink(x, a, plan, **options), 0, 1).reshape(1, plan.num_rows, -1)
        h = checkpoint_name(h, xla.H)
        return add_lora(base, x, a, b, plan, slice_sizes=slice_sizes, finite=finite, **options), h
    base = jnp.full((plan.num_rows, b.shape[2]), -0.0) if base is None else base
    reason = unsupported_reason(base, x, a, b, slice_sizes=slice_sizes, batch_invariant=batch_invariant)
    if reason is not None:
        raise LoRAError(f"add_lora: backend 'mosaic_tpu' {reason}")
    s = _sizes(base, x, a, b, slice_sizes, batch_invariant)
    assert s is not None
    if ranks is None:
        ranks = xla.all_ranks(s.groups, len(s.slices), s.rank)
    if plan.experts > 1:  # an expert's groups may all have the same place in a bundle, so sort rows
        s = replace(s, by_group=True)
    group, order, row_scales = _row_groups(plan), plan.row_order, plan.row_scales
    if not s.by_group:
        x = x if x_rows is None else x[x_rows]
        return _call(s, base, x, a, b, group, ranks, row_scales, finite, interpret)
    group, x = group[order], x[order if x_rows is None else x_rows[order]]
    row_scales = None if row_scales is None else row_scales[order]
    total = _call(s, base[order], x, a, b, group, ranks, row_scales, finite, interpret)
    # Gather by the inverse permutation, because XLA makes two passes over [M, N] for a scatter.
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    return total[inverse]


def _call(s: Sizes, base, x, a, b, group, ranks, row_scales, finite, interpret):
    """Run the kernel on rows in its order, padded to `s.rows`."""
    rows = len(base)
    if rows < s.rows:
        more = 0, s.rows - rows
        base, x = (jnp.pad(array, (more, (0, 0))) for array in (base, x))
        group = jnp.pad(group, more, constant_values=NOBODY)
        row_scales = None if row_scales is None else jnp.pad(row_scales, more)
    listed = visits(s.listing, group)
    out = call(s, base, x, a, b, group, ranks, row_scales, listed, finite=finite, interpret=interpret)
    return out[:rows] if rows < s.rows else out


def shrink(
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Float[jax.Array, "G n s"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
    batch_invariant: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[jax.Array, "n M R"]:
    """Implement `jlora.ops.shrink` by the fused kernel, expanding by the identity, which is exact."""
    groups, n, rank, _ = a.shape
    ranks = None if ranks is None else ranks[..., :2].at[..., 1].set(1)  # h is scaled by `expand`
    plan = replace(plan, row_scales=None)
    identity = jnp.tile(jnp.eye(rank), (groups, 1, n))
    zeros, sizes = jnp.zeros((plan.num_rows, n * rank)), (rank,) * n
    h = add_lora(
        zeros, x, a, identity, plan, slice_sizes=sizes, ranks=ranks, x_rows=x_rows, finite=True,
        batch_invariant=batch_invariant, interpret=interpret,
    )  # fmt: skip
    return jnp.moveaxis(h.reshape(-1, n, rank), 1, 0)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    base: Float[jax.Array, "M N"] | None,
    ranks: Float[jax.Array, "G n s"] | None,
    finite: bool = False,
    batch_invariant: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[jax.Array, "M N"]:
    """Implement `jlora.ops.expand` by the fused kernel, shrinking by the identity, which is exact."""
    n, rows, rank = h.shape
    if ranks is not None:  # the identity would spread a NaN past a row's rank over the whole row
        group = _row_groups(plan)
        row_ranks = jnp.where(group < 0, 0, ranks[jnp.maximum(group, 0), :, 0].T)  # [n, M]
        h = jnp.where(jnp.arange(rank, dtype=jnp.float32)[None, None, :] < row_ranks[..., None], h, 0)
    identity = jnp.broadcast_to(jnp.eye(n * rank).reshape(n, rank, -1), (b.shape[0], n, rank, n * rank))
    x = jnp.moveaxis(h.astype(jnp.float32), 0, 1).reshape(rows, n * rank)
    base = jnp.full((rows, b.shape[2]), -0.0, xla.float_of(b)) if base is None else base
    return add_lora(
        base, x, identity, b, plan, slice_sizes=slice_sizes, ranks=ranks, finite=finite,
        batch_invariant=batch_invariant, interpret=interpret,
    )  # fmt: skip


def unsupported_reason(base, x, a, b, *, slice_sizes: tuple[int, ...], batch_invariant: bool = False) -> str | None:
    """Return why this backend cannot run `add_lora` on operands of these shapes and dtypes, or None if it can."""
    for name, array in (("base", base), ("x", x), ("a", a), ("b", b)):
        if array.dtype not in (jnp.bfloat16, jnp.float32) and not (name in "ab" and array.dtype == jnp.int8):
            return f"takes bfloat16 and float32, but {name} is {array.dtype}; cast it, or use backend='xla'"
    s = _sizes(base, x, a, b, slice_sizes, batch_invariant)
    if s is None:
        return (
            f"cannot tile R={a.shape[2]}, K={a.shape[3]}, N={b.shape[2]} into {_VMEM_BYTES >> 20} MiB of VMEM "
            "(a K that is no multiple of 128 cannot be divided); pad K, or use backend='xla'"
        )
    if _smem_bytes(s) > SMEM_BYTES:
        return (
            f"needs {_smem_bytes(s)} bytes of SMEM for the schedule of {s.rows} rows in {s.groups} groups, of "
            f"{SMEM_BYTES}; split the rows, or use backend='xla'"
        )
    return None


def _row_groups(plan: Plan) -> Int[jax.Array, "M"]:
    tile = xla.tile_of_rows(plan)
    return jnp.where(xla.has_group(plan), plan.tile_group[tile], NOBODY)


def _sizes(base, x, a, b, slice_sizes, batch_invariant: bool = False) -> Sizes | None:
    itemsizes = tuple(jnp.dtype(v.dtype).itemsize for v in (base, x, a, b))
    return _choose(base.shape[0], x.shape[1], *b.shape, tuple(slice_sizes), itemsizes, batch_invariant)


@lru_cache
def _choose(rows, k, groups, rank, n, slices, itemsizes, batch_invariant: bool = False) -> Sizes | None:
    bundle = 1 if rank % 8 else max(1, min(LANES // rank, groups, 16))
    if batch_invariant:
        bundle = 1 if groups > MANY_GROUPS else bundle
        return _tiled(max(rows, _INVARIANT_TILE_M), k, groups, rank, n, slices, itemsizes, bundle, (_INVARIANT_TILE_M,))
    s = _tiled(rows, k, groups, rank, n, slices, itemsizes, bundle)
    while s is not None and groups > MANY_GROUPS and _smem_bytes(s) > SMEM_BYTES and bundle > 1:
        bundle //= 2  # shortens the list of groups of every visit
        s = _tiled(rows, k, groups, rank, n, slices, itemsizes, bundle)
    return s


def _tiled(rows, k, groups, rank, n, slices, itemsizes, bundle: int, tiles_m=None) -> Sizes | None:
    width, lanes = bundle * rank, -(-bundle * rank // LANES) * LANES
    base_size, x_size, *sizes = itemsizes
    a_size, b_size = (x_size if size == 1 else size for size in sizes)  # int8 is converted to the dtype of x
    many = groups > MANY_GROUPS  # few rows each: a bundle seldom fills the 128 rows of the matrix unit
    for tile_m in tiles_m or ((128, 64, 32, 16) if many else (256, 128, 64, 32, 16)):
        tile_m = min(tile_m, rows)
        tile_k = _tile_k(k, min((4 << 20) // (len(slices) * width * a_size), (4 << 20) // (tile_m * x_size)))
        tile_n = _tile_n(slices, min((2 << 20) // (width * b_size), (2 << 20) // (tile_m * base_size)))
        fixed = 2 * tile_k * (len(slices) * width * a_size + tile_m * x_size) + 2 * tile_m * LANES * 4
        fixed += 2 * len(slices) * tile_m * lanes * 4 * (1 in sizes)  # scales of rows
        fixed += tile_n * (2 * width * b_size + tile_m * (4 * base_size + 8) + width * 4)
        per_tile = len(slices) * tile_m * lanes * 4
        row_tiles = -(-rows // tile_m)
        even = row_tiles if row_tiles < 8 else -(-row_tiles // 2)  # two chunks for chips of two cores (v5p)
        chunk = min((_VMEM_BYTES - fixed) // per_tile, even)
        if chunk >= 1:
            s = Sizes(
                rows=rows, groups=groups, bundle=bundle, tile_m=tile_m, chunk=chunk, by_group=many, k=k, n=n, rank=rank,
                slices=slices, tile_k=tile_k, tile_n=tile_n, vmem=fixed + chunk * per_tile + _VMEM_MORE,
            )  # fmt: skip
            return s if _smem_bytes(s) <= SMEM_BYTES else replace(s, by_group=True)
    return None


def _tile_k(k: int, most: int) -> int:
    """Return the largest divisor of K up to `most` that is a multiple of 128; K if it is small or has none."""
    if k <= most or k % LANES:
        return k
    return max(t for t in range(LANES, max(most, LANES) + 1, LANES) if k % t == 0)


def _tile_n(slices: tuple[int, ...], most: int) -> int:
    """Return the columns of a grid step.

    Few steps are best, and few tiles that span several slices, because these are multiplied once for each slice.
    """
    n, most = sum(slices), max(most, LANES)
    if n <= most:
        return n

    def cost(tile):
        columns = sum(tile for i in range(len(slices)) for j in range(-(-n // tile)) if overlaps(slices, i, j, tile))
        return columns + 1024 * -(-n // tile), -tile

    return min(range(LANES, most + 1, LANES), key=cost)


def _smem_bytes(s: Sizes) -> int:
    return 4 * (s.listed * (s.bundle + 2) + (s.chunks + 1) * s.by_group + 2 * s.groups * len(s.slices))
