"""The TPU backend: shrink and expand fused in one Mosaic kernel, the rank-R intermediate kept in VMEM.

Where groups are few, rows stay in their own order: sorting them would move the [M, N] base output through HBM three
more times. Instead, the matrix unit, which handles 128 ranks at the price of one, takes up to 128 / R groups at once (a
"bundle"), and a mask on the small intermediate leaves each row its own group. A group's place in its bundle is its id
modulo the bundle's size, so that a row is computed alike whoever shares its batch.

A "visit" is a tile of rows together with a bundle that occurs in it. Only the groups of visited bundles are read from
HBM, each only up to its true rank, and once for all neighbouring row tiles that need the same.

The copies take the columns of a rank in order, as a [.., R, K] array has them. How an argument lies, XLA decides by its
shape: innermost comes the axis that needs the least padding. Where the columns are no multiple of 128 and another axis
is one (slots, experts or ranks), that is the other, and XLA turns the whole array around before every call: with 128
slots, 128 experts or rank 128 of gpt-oss, whose hidden size is 2880. Results are the same, at the price of moving all
slots. (127 or 129 slots lie in order. Experts cannot be one more, since they are divided among chips.)

Rows of experts are taken sorted by group, which is a slot's expert, since a tile of rows in any other order would need
the groups that the next needs too; and their schedule is sized by the rows, for nearly all groups have none.
"""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from jlora.errors import LoRAError
from jlora.pallas.mosaic_tpu.kernel import LANES, NOBODY, Sizes, call, overlaps
from jlora.pallas.mosaic_tpu.schedule import visits
from jlora.pallas.plan import Plan

_VMEM_BYTES = 44 << 20  # what we plan for, of the 64 MiB of tpu7x; v5e, v5p and v6e have 128 MiB
_SMEM_BYTES = 640 << 10  # of 1 MiB
_MANY_GROUPS = 256  # more than this are those of experts, not an adapter's slots


def add_lora(
    base: Float[jax.Array, "M N"],
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    ranks: Int[jax.Array, "G n"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
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
    assert s is not None
    if ranks is None:
        ranks = jnp.full((s.groups, len(s.slices)), s.rank, jnp.int32)
    if plan.experts > 1:  # rows of an expert stand together, and its groups may all have the same place in a bundle
        s = replace(s, by_group=True)
    group = _row_groups(plan)
    if not s.by_group:
        x = x if x_rows is None else x[x_rows]
        return call(s, base, x, a, b, group, ranks, visits(s, group), interpret=interpret)
    order = plan.row_order
    group, x = group[order], x[order if x_rows is None else x_rows[order]]
    total = call(s, base[order], x, a, b, group, ranks, visits(s, group), interpret=interpret)
    # Rows are read back by the inverse, since XLA makes two passes over [M, N] of a scatter.
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(s.rows, dtype=jnp.int32), unique_indices=True)
    return total[inverse]


def shrink(
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Int[jax.Array, "G n"] | None,
    x_rows: Int[jax.Array, "M"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[jax.Array, "n M R"]:
    """See `jlora.ops.shrink`. The fused kernel, expanding by the identity, which is exact."""
    groups, n, rank, _ = a.shape
    identity = jnp.tile(jnp.eye(rank), (groups, 1, n))
    zeros, sizes = jnp.zeros((plan.num_rows, n * rank)), (rank,) * n
    h = add_lora(zeros, x, a, identity, plan, slice_sizes=sizes, ranks=ranks, x_rows=x_rows, interpret=interpret)
    return jnp.moveaxis(h.reshape(-1, n, rank), 1, 0)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: tuple[int, ...],
    base: Float[jax.Array, "M N"] | None,
    ranks: Int[jax.Array, "G n"] | None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[jax.Array, "M N"]:
    """See `jlora.ops.expand`. The fused kernel, shrinking by the identity, which is exact."""
    n, rows, rank = h.shape
    if ranks is not None:  # the identity would spread a NaN past a row's rank over all of it
        group = _row_groups(plan)
        row_ranks = jnp.where(group < 0, 0, ranks[jnp.maximum(group, 0)].T)  # [n, M]
        h = jnp.where(jnp.arange(rank, dtype=jnp.int32)[None, None, :] < row_ranks[..., None], h, 0)
    identity = jnp.broadcast_to(jnp.eye(n * rank).reshape(n, rank, -1), (b.shape[0], n, rank, n * rank))
    x = jnp.moveaxis(h.astype(jnp.float32), 0, 1).reshape(rows, n * rank)
    base = jnp.zeros((rows, b.shape[2]), b.dtype) if base is None else base
    return add_lora(base, x, identity, b, plan, slice_sizes=slice_sizes, ranks=ranks, interpret=interpret)


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
    return jnp.where(plan.row_slot < plan.num_tiles * plan.tile_m, plan.tile_group[tile], NOBODY)


def _sizes(base, x, a, b, slice_sizes) -> Sizes | None:
    itemsizes = tuple(jnp.dtype(v.dtype).itemsize for v in (base, x, a, b))
    return _choose(base.shape[0], x.shape[1], *b.shape, tuple(slice_sizes), itemsizes)


@lru_cache
def _choose(rows, k, groups, rank, n, slices, itemsizes) -> Sizes | None:
    bundle = 1 if rank % 8 else max(1, min(LANES // rank, groups, 16))
    s = _tiled(rows, k, groups, rank, n, slices, itemsizes, bundle)
    while s is not None and groups > _MANY_GROUPS and _smem_bytes(s) > _SMEM_BYTES and bundle > 1:
        bundle //= 2  # a shorter list of groups for every visit
        s = _tiled(rows, k, groups, rank, n, slices, itemsizes, bundle)
    return s


def _tiled(rows, k, groups, rank, n, slices, itemsizes, bundle: int) -> Sizes | None:
    step = next((step for step in (16, 8) if rank % step == 0), rank)
    width, lanes = bundle * rank, -(-bundle * rank // LANES) * LANES
    base_size, x_size, a_size, b_size = itemsizes
    many = groups > _MANY_GROUPS  # few rows each: a bundle seldom has more in a tile than the matrix unit's 128
    for tile_m in (128, 64, 32, 16) if many else (256, 128, 64, 32, 16):
        tile_m = min(tile_m, rows)
        tile_k = _tile_k(k, min((4 << 20) // (len(slices) * width * a_size), (4 << 20) // (tile_m * x_size)))
        tile_n = _tile_n(slices, min((2 << 20) // (width * b_size), (2 << 20) // (tile_m * base_size)))
        fixed = 2 * tile_k * (len(slices) * width * a_size + tile_m * x_size) + 2 * tile_m * LANES * 4
        fixed += tile_n * (2 * width * b_size + tile_m * (4 * base_size + 8) + width * 4)
        per_tile = len(slices) * tile_m * lanes * 4
        row_tiles = -(-rows // tile_m)
        even = row_tiles if row_tiles < 8 else -(-row_tiles // 2)  # two chunks, for chips of two cores (v5p)
        chunk = min((_VMEM_BYTES - fixed) // per_tile, even)
        if chunk >= 1:
            s = Sizes(rows, k, n, rank, groups, slices, bundle, step, tile_m, tile_k, tile_n, chunk, by_group=many)
            return s if _smem_bytes(s) <= _SMEM_BYTES else replace(s, by_group=True)
    return None


def _tile_k(k: int, most: int) -> int:
    """The largest divisor of K in lanes up to `most`; all of K if it is small or has none."""
    if k <= most or k % LANES:
        return k
    return max(t for t in range(LANES, max(most, LANES) + 1, LANES) if k % t == 0)


def _tile_n(slices: tuple[int, ...], most: int) -> int:
    """Columns of a grid step: few steps, few tiles that straddle slices (those are multiplied once for each slice)."""
    n = sum(slices)

    def cost(tile):
        columns = sum(tile for i in range(len(slices)) for j in range(-(-n // tile)) if overlaps(slices, i, j, tile))
        return columns + 1024 * -(-n // tile), -tile

    tiles = [t for t in range(LANES, max(most, LANES) + 1, LANES) if t < n]
    return min(tiles + [n] * (n <= max(most, LANES)), key=cost)


def _smem_bytes(s: Sizes) -> int:
    return 4 * (s.listed * (s.bundle + 2) + (s.chunks + 1) * s.by_group + s.groups * len(s.slices))
