"""The LoRA of a layer's rows: where slot arrays, plans and kernels meet, on one device and on a mesh.

    column-parallel   x whole, A whole, B and y split by N: a shard does what one device does, for its columns
    row-parallel      x and A split by K: a shard has a part of x A^T. Where the base product is made here too
                      (`fused_base`), each expands its part into its part of the base output, and the one reduction that
                      the base model makes anyway sums both. Else the parts of x A^T, of rank size, are
                      summed first
    fully sharded     besides, A is split by rank, and x A^T gathered; B of row-parallel by N: each shard expands the
                      sum of x A^T into its own columns

Without a mesh nothing is split, and the one shard is called directly. Rows that are split (over data) have plans of
their own shard (`jlora.layers.forward.rows_on_mesh`). Inside a `jax.shard_map` of the user, arrays are those of a shard
already, and what is computed is the same without another one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Integer

from jlora.errors import LoRAError
from jlora.layers.forward.merged_columns import pieces_of
from jlora.layers.forward.mesh import experts_reached, on_mesh, reached, split_of
from jlora.layers.forward.rows import RowMap
from jlora.layers.forward.rows_on_mesh import Lead
from jlora.layers.forward.scope import Scope, check_slots_fresh
from jlora.layers.site import Blocks, Site, SlotSpec
from jlora.layers.specs import EmbedSpec, LinearSpec
from jlora.pallas.api import add_lora, expand, shrink
from jlora.pallas.plan import Plan
from jlora.sharding.rules import KernelSharding, Names, partition


class SlotFactors(NamedTuple):
    """The slot arrays of a site, and the plan of the rows that they are for.

    Attributes:
      plan: of groups: slots, or slots and experts.
      a: [S, (E,) n, R, K], or None where the site holds B alone.
      b: [S, (E,) R, N], or None where it holds A alone.
      ranks: [S, (E,) n].
    """

    plan: Plan
    a: Any
    b: Any
    ranks: Array


def lead_of_rows(scope: Scope, site: Site, rows: Array, row_map: RowMap | None = None) -> Lead:
    """How `rows` [*lead, features] lie on the mesh of the layer."""
    return Lead(()) if site.spec.sharding is None else scope.lead(site, rows, row_map)


def factors_of(layer: nnx.Module, site: Site, plan: Plan) -> SlotFactors:
    """The slot arrays of a layer inside the forward.

    Raises:
      LoRAError: they would be baked into a compiled function; a stack of layers that is not mapped.
    """
    *factors, ranks = (vars(layer)[name][...] for name in site.attributes)
    check_slots_fresh(site.path, ranks)
    if ranks.ndim != (2 if site.spec.experts is None else 3):
        raise LoRAError(
            f"{site.path}: this layer is one of a stack of {site.spec.layers}, but its slot arrays still have the "
            "stack axis; map jlora.SlotParam over axis 0 in the StateAxes of your nnx.scan, as the kernel is"
        )
    held = dict(zip(site.spec.factors, factors, strict=True))
    return SlotFactors(plan, held.get(0), held.get(1), ranks)


def add_delta(
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    base: Float[Array, "*lead N"],
    x: Float[Array, "*rows K"],
    spec: LinearSpec,
    row_map: RowMap | None = None,
    x_rows: Integer[Array, "M"] | None = None,
) -> Float[Array, "*lead N"]:
    """`base`, which is complete, plus the LoRA of every row in an open scope; padding features stay the base's bits.

    `row_map` is what the layer itself says of its rows, where they are not the batch's: those of experts. With `x_rows`
    row m of it has x[x_rows[m]] for input. Where experts are split and no shard of them calls, each adds what its own
    give, and a row is then taken from the shard that has its expert.

    Raises:
      LoRAError: slots that would be baked into a compiled function, or a stack of layers that is not mapped.
    """
    if not base.size:
        return base
    plan = scope.plan(site, base, row_map)
    if plan is None:
        return base
    plans = [(half, scope.plan(site, base, row_map, half)) for half in site.shared]  # of the same rows
    shared = [factors_of(layer, half, plan) for half, plan in plans if plan is not None]
    held, lead = factors_of(layer, site, plan), lead_of_rows(scope, site, base, row_map)
    sharding = split_of(site.spec)
    sums = () if experts_reached(site) else sharding.experts
    complete = not reached(site)  # of the calling code: inside `local` it always is

    def local(
        base: Array,
        x: Array,
        held: SlotFactors,
        expert: Array | None,
        x_rows: Array | None,
        shared: Sequence[SlotFactors],
    ) -> Array:
        out = add_rows(site, spec, base, x, held, complete=complete, x_rows=x_rows, shared=shared)
        if expert is None:
            return out
        mine = expert.reshape(base.shape[:-1]) // (site.spec.rows[-1] // sharding.size(sums)) == lax.axis_index(sums)
        return summed(jnp.where(mine[..., None], out, jnp.zeros_like(out)), sums)

    with jax.named_scope("lora"):
        base = scope.checked(layer, site, base)
        expert = None
        if sums:
            assert row_map is not None
            expert = jnp.asarray(row_map.expert)
            expert = jnp.where((expert >= 0) & (expert < site.spec.rows[-1]), expert, 0)  # one shard must add the base
        whole = PartitionSpec()
        of_base, of_x = partition(*lead.axes, sharding.outs), partition(*lead.axes, sharding.ins)
        of_x = of_x if x_rows is None else partition(*[()] * (x.ndim - 1), sharding.ins)
        of_held, *of_shared = (factor_specs(each.spec, lead, sums) for each in (site, *site.shared))
        mapped = on_mesh(sharding, local, (of_base, of_x, of_held, whole, whole, of_shared), of_base)
        return mapped(base, x, held, expert, x_rows, shared)


def add_lookup(
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    base: Float[Array, "*lead N"],
    tokens: Int[Array, "*lead"],
    spec: EmbedSpec,
) -> Float[Array, "*lead N"]:
    """base + scale * A[slot, :, token] @ B[slot]: PEFT's `lora_embedding_B @ lora_embedding_A[:, token]`.

    Raises:
      LoRAError: as `add_delta`; called by a shard of a table whose rows are split.
    """
    if not base.size:
        return base
    plan = scope.plan(site, base)
    if plan is None:
        return base
    sharding = split_of(site.spec)
    if reached(site):
        raise LoRAError(
            f"{site.path}: a lookup in a table whose rows are split is not served inside a jax.shard_map over "
            f"{' and '.join(map(repr, sharding.ins))}: only you know which tokens a shard looks up there. Call it "
            "outside, or leave it out with LoRAConfig.exclude_modules"
        )

    def local(base: Array, tokens: Array, ids: Array, held: SlotFactors) -> Array:
        rows = base.reshape(-1, base.shape[-1])
        found = tokens.reshape(-1)
        found = jnp.where(found < 0, found + spec.vocab, found)  # as the table itself is indexed
        size = held.a.shape[-1]
        own = found - lax.axis_index(sharding.ins) * size if sharding.ins else found
        # Rows without an adapter read some slot's column here, and `expand` gives them no tile.
        slots = jnp.repeat(ids.reshape(-1), len(own) // max(1, ids.size)).clip(0, site.spec.num_slots - 1)
        h = held.a.at[slots, 0, :, own].get(mode="clip").astype(jnp.float32)  # [M, R]
        if sharding.ins:
            h = jnp.where(((own >= 0) & (own < size))[:, None], h, 0)
        h = (h if spec.scale == 1 else h * spec.scale)[None]
        out = _expand_whole(site.spec, site.backend, rows, h, held, complete=True)
        if spec.rows < spec.vocab:
            out = jnp.where((found < spec.rows)[:, None], out, rows)
        return out.reshape(base.shape)

    with jax.named_scope("lora"):
        ids, lead = scope.runs(site, base), lead_of_rows(scope, site, base)
        base = scope.checked(layer, site, base)
        of_base, of_rows = partition(*lead.axes, sharding.outs), partition(*lead.axes)
        specs = of_base, of_rows, partition(*lead.axes[: ids.ndim]), factor_specs(site.spec, lead)
        return on_mesh(sharding, local, specs, of_base)(base, tokens, ids, factors_of(layer, site, plan))


# --- what a shard computes --------------------------------------------------------------------------------------------


def add_rows(
    site: Site,
    spec: LinearSpec,
    base: Array,
    x: Array,
    held: SlotFactors,
    *,
    complete: bool,
    x_rows: Array | None = None,
    shared: Sequence[SlotFactors] = (),
) -> Array:
    """`base` [*lead, own N] plus the LoRA of x [*lead, own K]; where K is split, base is a part of a sum unless
    `complete`. `shared` are the factors in the slots of `site.shared`."""
    sharding, backend = split_of(site.spec), site.backend
    held, shared = _by_group(held), [_by_group(half) for half in shared]
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
        h = _shrink_own(site.spec, backend, x, held, x_rows)
        out = _expand_whole(site.spec, backend, rows, h, held, complete=complete)
    if shared:  # a row has its adapter in slots of one kind, and those of the other leave it as it is
        (of_a, of_b), (a, b) = site.shared, shared
        h = _shrink_own(of_a.spec, backend, x, a, x_rows)
        out = _expand_whole(of_b.spec, backend, out, h, b, complete=complete)
    real = _real(sharding, sharding.outs, site.spec.out_blocks)
    out = out if real is None else jnp.where(real, out, rows)
    return (out if columns is None else columns.put(all_rows, out)).reshape(base.shape)


def _by_group(held: SlotFactors) -> SlotFactors:
    """Arrays of slots and experts with one axis for both."""
    if held.ranks.ndim == 2:
        return held

    def flat(array: Array) -> Array:
        return array.reshape(-1, *array.shape[2:])

    return SlotFactors(held.plan, *jax.tree.map(flat, held[1:]))


def _shrink_own(slots: SlotSpec, backend: Any, x: Array, held: SlotFactors, x_rows: Array | None) -> Array:
    """[n, M, own R] of x [M or tokens, own K]: of the ranks that a shard has, and of sums its part."""
    ranks, size = held.ranks, held.a.shape[2]
    if (axes := split_of(slots).a[2]) and size:
        ranks = jnp.clip(ranks - lax.axis_index(axes) * size, 0, size)
    return shrink(x, held.a, held.plan, ranks=ranks, x_rows=x_rows, backend=backend)


def _expand_whole(slots: SlotSpec, backend: Any, rows: Array, h: Array, held: SlotFactors, *, complete: bool) -> Array:
    """`rows` [M, own N] plus the expanded `h` [n, M, own R], of which shards may have parts, of sums or of ranks."""
    sharding = split_of(slots)
    if sharding.a[2]:
        h = _gathered(h, sharding.a[2], 2)[:, :, : slots.max_rank]
    further = sharding.b[2][len(sharding.outs) :]  # axes that split the columns of B and not those of the layer
    if complete or further:
        h = summed(h, sharding.ins)
    if not further:
        return _expand_pieces(slots, backend, rows, h, held)
    own = held.b.shape[-1]
    start = lax.axis_index(further) * own
    part = lax.dynamic_slice_in_dim(rows, start, own, axis=1)
    part = _expand_pieces(slots, backend, part, h, held)
    if complete:
        return _gathered(part, further, 1)
    return lax.dynamic_update_slice_in_dim(rows, part, start, axis=1)


def _expand_pieces(slots: SlotSpec, backend: Any, rows: Array, h: Array, held: SlotFactors) -> Array:
    """`expand` over the columns that a shard has of the output slices."""
    pieces, (plan, _, b, ranks) = pieces_of(slots), held
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


def factor_specs(slots: SlotSpec, lead: Lead, experts: Names = ()) -> SlotFactors:
    """The specs of `SlotFactors`: plans of the shards of rows, or of `experts`; arrays as one layer has them."""
    sharding = split_of(slots)
    own = ((),) if slots.experts is None else ((), sharding.experts)
    of_plan = partition((*(name for names in lead.axes for name in names), *experts))
    specs = of_plan, partition(*own, *sharding.a[1:]), partition(*own, *sharding.b[1:]), partition(*own)
    return SlotFactors(*cast("Any", specs))


def summed(array: Array, axes: Names) -> Array:
    """The sum of what shards along these axes have."""
    return cast("Array", lax.psum(array, axes)) if axes else array


def _gathered(array: Array, axes: Names, axis: int) -> Array:
    return cast("Array", lax.all_gather(array, axes, axis=axis, tiled=True))
