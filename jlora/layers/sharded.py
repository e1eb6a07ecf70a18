"""The only place where kernels meet a mesh: every shard adds the LoRA of its own rows and features.

    column-parallel   x whole, A whole, B and y split by N: a shard does what one device does, for its columns
    row-parallel      x and A split by K: a shard has a part of x A^T. Where the base product is made here too
                      (`joined`), each expands its part into its part of the base output, and the one reduction that
                      the base model makes anyway sums both. Else the parts of x A^T, of rank size, are summed first
    fully sharded     besides, A is split by rank, and x A^T gathered; B of row-parallel by N: each shard expands the
                      sum of x A^T into its own columns

Rows that are split (over data) have plans of their own shard (`jlora.layers.rows_on_mesh`). Inside a `jax.shard_map`
of the user, arrays are those of a shard already, and what is computed is the same without another one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float

from jlora.errors import LoRAError
from jlora.layers.mesh import experts_reached, on_mesh, reached, split_of
from jlora.layers.pieces import pieces_of
from jlora.layers.rows_on_mesh import Lead
from jlora.layers.site import Blocks, Site, SlotSpec
from jlora.layers.specs import EmbedSpec, LinearSpec
from jlora.pallas.api import add_lora, expand, shrink
from jlora.pallas.plan import Plan
from jlora.sharding.rules import KernelSharding, Names, partition


class Held(NamedTuple):
    """The plan of a layer's rows, and the slot arrays that it is for."""

    plan: Plan
    a: Array
    b: Array
    ranks: Array

    @property
    def halves(self) -> "tuple[Half, Half]":
        return Half(self.plan, self.a, self.ranks), Half(self.plan, self.b, self.ranks)


class Half(NamedTuple):
    """The same with one of the factors: that of a site which holds no other, or is used by itself."""

    plan: Plan
    factor: Array
    ranks: Array


_Either = TypeVar("_Either", Held, Half)


def add_rows(
    site: Site,
    spec: LinearSpec,
    lead: Lead,
    base: Array,
    x: Array,
    held: Held,
    expert: Array | None = None,
    x_rows: Array | None = None,
    shared: Sequence[Half] = (),
) -> Float[Array, "*lead N"]:
    """`base` [*lead, N], which is complete, plus the LoRA of x [*lead, K].

    Of experts, row m goes to `expert`[m], and has x[x_rows[m]] for input where that is given; `shared` are the factors
    in the slots of `site.shared`. Where experts are split and no shard of them calls, each adds what its own give, and
    a row is then taken from the shard that has its expert.
    """
    sharding = split_of(site.spec)
    sums = () if experts_reached(site) else sharding.experts
    complete = not reached(site)  # of the calling code: inside `local` it always is

    def local(
        base: Array, x: Array, held: Held, expert: Array | None, x_rows: Array | None, shared: Sequence[Half]
    ) -> Array:
        out = _delta(site, spec, base, x, held, complete=complete, x_rows=x_rows, shared=shared)
        if not sums:
            return out
        assert expert is not None
        mine = expert.reshape(base.shape[:-1]) // (site.spec.rows[-1] // sharding.size(sums)) == lax.axis_index(sums)
        return _sum(jnp.where(mine[..., None], out, jnp.zeros_like(out)), sums)

    if sums and expert is not None:
        expert = jnp.where((expert >= 0) & (expert < site.spec.rows[-1]), expert, 0)  # somebody must have the base
    whole = PartitionSpec()
    of_base, of_x = partition(*lead.axes, sharding.outs), partition(*lead.axes, sharding.ins)
    of_x = of_x if x_rows is None else partition(*[()] * (x.ndim - 1), sharding.ins)
    of_held = _of_held(site.spec, lead, sums)
    of_shared = [_of_held(half.spec, lead, sums) for half in site.shared]
    mapped = on_mesh(sharding, local, (of_base, of_x, of_held, whole, whole, of_shared), of_base)
    return mapped(base, x, held, expert, x_rows, list(shared))


def joined(
    site: Site,
    product: Callable[[Array, Array], tuple[Array, Array, Callable[[Array], Array]]],
    spec: LinearSpec,
    specs: tuple[PartitionSpec, PartitionSpec, PartitionSpec],
    lead: Lead,
    x: Array,
    kernel: Array,
    held: Held,
) -> Array:
    """A row-parallel product and its LoRA, summed over the shards together.

    Args:
      site: of the layer.
      product: of what a shard has of x and the kernel: x and y as rows [*lead, features], and the way back from those.
      spec: of the layer.
      specs: of x, the kernel and y.
      lead: how the rows lie.
      x, kernel, held: operands.
    """
    sharding, (of_x, of_kernel, of_y) = split_of(site.spec), specs

    def local(x: Array, kernel: Array, held: Held) -> Array:
        flat, base, restore = product(x, kernel)
        return _sum(restore(_delta(site, spec, base, flat, held, complete=False)), sharding.ins)

    of_held = _of_held(site.spec, lead)
    return on_mesh(sharding, local, (of_x, of_kernel, of_held), of_y)(x, kernel, held)


def add_lookup(
    site: Site,
    spec: EmbedSpec,
    lead: Lead,
    base: Array,
    tokens: Array,
    ids: Array,
    held: Held,
) -> Float[Array, "*lead N"]:
    """`base` plus the LoRA of a lookup in a table whose rows, or features, may be split.

    `ids` are slots along the first of the axes before the features.
    """
    sharding = split_of(site.spec)
    if reached(site):
        raise LoRAError(
            f"{site.path}: a lookup in a table whose rows are split is not served inside a jax.shard_map over "
            f"{' and '.join(map(repr, sharding.ins))}: only you know which tokens a shard looks up there. Call it "
            "outside, or leave it out with LoRAConfig.exclude_modules"
        )

    def local(base: Array, tokens: Array, ids: Array, held: Held) -> Array:
        a = held.a
        rows = base.reshape(-1, base.shape[-1])
        found = tokens.reshape(-1)
        found = jnp.where(found < 0, found + spec.vocab, found)  # as the table itself is indexed
        real = found < spec.rows
        own = found - lax.axis_index(sharding.ins) * a.shape[-1] if sharding.ins else found
        slots = jnp.repeat(ids.reshape(-1), len(own) // max(1, ids.size)).clip(0, site.spec.num_slots - 1)
        h = a.at[slots, 0, :, own].get(mode="clip").astype(jnp.float32)
        if sharding.ins:
            h = jnp.where(((own >= 0) & (own < a.shape[-1]))[:, None], h, 0)
        h = (h if spec.scale == 1 else h * spec.scale)[None]
        out = _expand_whole(site.spec, site.backend, rows, h, held.halves[1], complete=True)
        return (out if spec.rows == spec.vocab else jnp.where(real[:, None], out, rows)).reshape(base.shape)

    of_base, of_rows = partition(*lead.axes, sharding.outs), partition(*lead.axes)
    of_ids = partition(*lead.axes[: ids.ndim])
    of_held = _of_held(site.spec, lead)
    return on_mesh(sharding, local, (of_base, of_rows, of_ids, of_held), of_base)(base, tokens, ids, held)


# --- what a shard computes --------------------------------------------------------------------------------------------


def _delta(
    site: Site,
    spec: LinearSpec,
    base: Array,
    x: Array,
    held: Held,
    *,
    complete: bool,
    x_rows: Array | None = None,
    shared: Sequence[Half] = (),
) -> Array:
    """`base` [*lead, own N] plus the LoRA of x [*lead, own K]; where K is split, base is a part of a sum unless
    `complete`."""
    sharding, backend = split_of(site.spec), site.backend
    held, shared = _merged(held), [_merged(half) for half in shared]
    all_rows = rows = base.reshape(-1, base.shape[-1])
    # PEFT casts the input to the adapter's dtype too (peft.tuners.lora.layer, _cast_input_dtype).
    x = x.reshape(-1, x.shape[-1]).astype(held.a.dtype)
    if sharding.ins:  # features that are padding may hold anything
        real = _real(sharding, sharding.ins, site.spec.in_blocks)
        x = x if real is None else jnp.where(real, x, 0)
    elif spec.columns_in is not None:
        x = spec.columns_in.take(x)
    columns = None if sharding.outs else spec.columns_out
    rows = rows if columns is None else columns.take(rows)
    pieces = pieces_of(site.spec)
    by_itself = not sharding.ins or not complete
    if by_itself and pieces.sizes is not None and not sharding.a[2] and sharding.b[2] == sharding.outs:
        plan, a, b, ranks = held
        out = add_lora(rows, x, a, b, plan, slice_sizes=pieces.sizes, ranks=ranks, x_rows=x_rows, backend=backend)
    else:
        of_a, of_b = held.halves
        h = _shrink_own(site.spec, backend, x, of_a, x_rows)
        out = _expand_whole(site.spec, backend, rows, h, of_b, complete=complete)
    if shared:  # a row has its adapter in slots of one kind, and those of the other leave it as it is
        (of_a, of_b), (a, b) = site.shared, shared
        h = _shrink_own(of_a.spec, backend, x, a, x_rows)
        out = _expand_whole(of_b.spec, backend, out, h, b, complete=complete)
    real = _real(sharding, sharding.outs, site.spec.out_blocks)
    out = out if real is None else jnp.where(real, out, rows)
    return (out if columns is None else columns.put(all_rows, out)).reshape(base.shape)


def _merged(held: _Either) -> _Either:
    """Arrays of slots and experts by group."""
    if held.ranks.ndim == 2:
        return held
    plan, *arrays = held
    return held._make((plan, *(array.reshape(-1, *array.shape[2:]) for array in arrays)))


def _shrink_own(slots: SlotSpec, backend: Any, x: Array, half: Half, x_rows: Array | None) -> Array:
    """[n, M, own R] of x [M or tokens, own K]: of the ranks that a shard has, and of sums its part."""
    plan, a, ranks = half
    size = a.shape[2]
    if (axes := split_of(slots).a[2]) and size:
        ranks = jnp.clip(ranks - lax.axis_index(axes) * size, 0, size)
    return shrink(x, a, plan, ranks=ranks, x_rows=x_rows, backend=backend)


def _expand_whole(slots: SlotSpec, backend: Any, rows: Array, h: Array, half: Half, *, complete: bool) -> Array:
    """`rows` [M, own N] plus the expanded `h` [n, M, own R], of which shards may have parts, of sums or of ranks."""
    sharding = split_of(slots)
    if sharding.a[2]:
        h = _gathered(h, sharding.a[2], 2)[:, :, : slots.max_rank]
    further = sharding.b[2][len(sharding.outs) :]  # axes that split the columns of B and not those of the layer
    if sharding.ins and (complete or further):
        h = _sum(h, sharding.ins)
    if not further:
        return _expand_pieces(slots, backend, rows, h, half)
    own = half.factor.shape[-1]
    start = lax.axis_index(further) * own
    part = lax.dynamic_slice_in_dim(rows, start, own, axis=1)
    part = _expand_pieces(slots, backend, part, h, half)
    if complete:
        return _gathered(part, further, 1)
    return lax.dynamic_update_slice_in_dim(rows, part, start, axis=1)


def _expand_pieces(slots: SlotSpec, backend: Any, rows: Array, h: Array, half: Half) -> Array:
    """`expand` over the columns that a shard has of the output slices."""
    pieces, (plan, b, ranks) = pieces_of(slots), half
    if pieces.sizes is not None:
        return expand(h, b, plan, slice_sizes=pieces.sizes, base=rows, ranks=ranks, backend=backend)
    table = jnp.asarray(pieces.table)
    ids = table[lax.axis_index(split_of(slots).b[2]) if len(table) > 1 else 0]
    sizes = (pieces.size,) * len(pieces.table[0])
    return expand(h[ids], b, plan, slice_sizes=sizes, base=rows, ranks=ranks[:, ids], backend=backend)


def _real(sharding: KernelSharding, axes: Names, blocks: Blocks) -> Bool[Array, "1 own"] | None:
    """Which features of a shard are no padding, where `axes` split all of those in `blocks`; None for all."""
    if all(first >= 0 for first, _ in blocks):
        return None
    real = np.concatenate([np.full(count, first >= 0) for first, count in blocks])
    return jnp.asarray(real.reshape(sharding.size(axes), 1, -1))[lax.axis_index(axes)]


# --- meshes -----------------------------------------------------------------------------------------------------------


def _of_held(slots: SlotSpec, lead: Lead, experts: Names = ()) -> Any:
    """The specs of a `Held` or `Half`: plans of the shards of rows, or of `experts`; arrays as one layer has them."""
    sharding = split_of(slots)
    own = ((),) if slots.experts is None else ((), sharding.experts)
    of_plan = partition((*(name for names in lead.axes for name in names), *experts))
    of_factors = [partition(*own, *(sharding.a, sharding.b)[j][1:]) for j in slots.factors]
    return (Held if slots.whole else Half)._make((of_plan, *of_factors, partition(*own)))


def _sum(array: Array, axes: Names) -> Array:
    return cast("Array", lax.psum(array, axes))


def _gathered(array: Array, axes: Names, axis: int) -> Array:
    return cast("Array", lax.all_gather(array, axes, axis=axis, tiled=True))
