"""Add the LoRA delta of a layer's rows from slot arrays and plans, on one device or on a mesh.

The kernel's sharding determines the computation of each shard:

    column-parallel   x and A are replicated, B and y split by N. Each shard computes its columns as one device does.
    row-parallel      x and A are split by K, so a shard has a partial sum of x A^T. If the base product is computed
                      here too (`row_parallel`), each shard expands its partial sum into its part of the base output,
                      and the base model's own reduction sums both. Otherwise the partial sums of x A^T, of size
                      rank, are reduced first.
    fully sharded     in addition, A is split by rank and x A^T is gathered. B of a row-parallel layer is split by N,
                      and each shard expands the sum of x A^T into its own columns.

Without a mesh the same code runs directly as the only shard. Rows split over the data axes have one plan for each shard
(`jlora.layers.forward.plans`). Inside a user's `jax.shard_map` the arrays are already those of a shard, and the same
code runs without another map.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Integer, Real

from jlora.errors import LoRAError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.call_rows import CallRows
from jlora.layers.forward.context import tracing
from jlora.layers.forward.merged_columns import merged_columns
from jlora.layers.forward.mesh import experts_reached, on_mesh, reached, split_of
from jlora.layers.forward.rows import RowMap
from jlora.layers.forward.scope import Scope
from jlora.layers.forward.stamps import check_stamps
from jlora.layers.site import Site, SlotSpec
from jlora.layers.specs import Blocks, EmbedSpec, LinearSpec
from jlora.pallas.api import add_lora, expand, shrink
from jlora.pallas.plan import Plan
from jlora.sharding.rules import AxisNames, KernelSharding, partition

_STALE_SLOTS = (
    "{path}: the model is read inside `jax.jit` without being an argument of it: its slots would be baked into the "
    "compiled function as constants, and later adapters would not be seen. Pass the model (or the state that you split "
    "from it) as an argument: `forward(model, tokens, batch)`."
)


class Factor(NamedTuple):
    """A or B of all slots.

    Attributes:
      array: A [S, (E,) n, R, K] or B [S, (E,) R, N].
      ranks: float32 [S, (E,) n, 2], or [S, (E,) n, 1 + R] in int8: true ranks and scales.
    """

    array: Array
    ranks: Array


class SlotFactors(NamedTuple):
    """A and B of all slots of a site.

    Attributes:
      a: [S, (E,) n, R, K].
      b: [S, (E,) R, N].
      ranks: float32 [S, (E,) n, 2], or [S, (E,) n, 1 + R] in int8: true ranks and scales.
      extras: the arrays of the finishers, float32 [S, N].
    """

    a: Array
    b: Array
    ranks: Array
    extras: Sequence[Array] = ()

    @property
    def first(self) -> Factor:
        """A as a `Factor`."""
        return Factor(self.a, self.ranks)

    @property
    def second(self) -> Factor:
        """B as a `Factor`."""
        return Factor(self.b, self.ranks)


def slot_factors(layer: nnx.Module, site: Site, batch: LoRABatch) -> SlotFactors:
    """Return the slot arrays of a layer inside the forward, for `batch` (`check_stamps`).

    Raises:
      LoRAError: they would be constants of a compiled function, the layer is a stack that is not mapped, or, in an
        eager call, the copy of the model missed a write.
    """
    a, b, ranks, *extras = _slot_arrays(layer, site)
    return SlotFactors(a, b, check_stamps(layer, site, batch, ranks, site.spec.max_rank), extras)


def shared_factors(layer: nnx.Module, site: Site, batch: LoRABatch) -> list[Factor]:
    """Return the single factor of each site in `site.shared`. Raises as `slot_factors`."""
    arrays = [_slot_arrays(layer, each) for each in site.shared]
    return [Factor(a, check_stamps(layer, site, batch, r, site.spec.max_rank)) for a, r in arrays]


def _slot_arrays(layer: nnx.Module, site: Site) -> Sequence[Array]:
    """Return the slot arrays named in `site.attributes`."""
    arrays: list[Array] = [vars(layer)[name][...] for name in site.attributes]
    ranks = arrays[len(site.spec.factors)]
    if not isinstance(ranks, jax.core.Tracer) and tracing():
        raise LoRAError(_STALE_SLOTS.format(path=site.path))
    if ranks.ndim != (3 if site.spec.experts is None else 4):
        raise LoRAError(
            f"{site.path}: this layer is one of a stack of {site.spec.layers}, but its slot arrays still have the "
            "stack axis; map jlora.SlotParam over axis 0 in the StateAxes of your nnx.scan"
        )
    return arrays


def add_delta(
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    base: Float[Array, "*lead N"],
    x: Float[Array, "*rows K"],
    spec: LinearSpec,
    row_map: RowMap | None = None,
    x_rows: Integer[Array, "M"] | None = None,
    bias: Float[Array, "N"] | None = None,
) -> Float[Array, "*lead N"]:
    """Add the LoRA of every row to the complete output `base`. Padding features keep the bits of `base`.

    If the experts are split and the calling code is not one of their shards, each shard adds the LoRA of its own
    experts, and each row is taken from the shard that holds its expert.

    Args:
      layer: the wrapped layer.
      site: its site.
      scope: the open scope.
      base: the output without LoRA.
      x: the input.
      spec: the spec of the layer, or of the product.
      row_map: the rows of a product of experts; None if the rows are those of the batch.
      x_rows: integers [M]: row m of `base` has the input x[x_rows[m]]. None: it has x[m].
      bias: the values that `base` holds beside the product, for the finishers; None for zeros.

    Raises:
      LoRAError: slots would be constants of a compiled function, the layer is a stack that is not mapped, or a finisher
        that does not commute with the sum meets a partial sum.
    """
    if not base.size:
        return base
    rows = scope.rows(site, base, row_map)
    if rows is None:
        return base
    factors, shared = slot_factors(layer, site, scope.batch), shared_factors(layer, site, scope.batch)
    sharding = split_of(site.spec)
    sums = () if experts_reached(site) else sharding.experts
    complete = not reached(site)  # in the calling code; inside `local` it always is
    if not complete and (unfit := [each for each in site.spec.finishers if "sum" not in each.commutes]):
        raise LoRAError(
            f"{site.path}: {unfit[0].variant.title} is not served inside a jax.shard_map over "
            f"{' and '.join(map(repr, sharding.ins))}, where the output of the layer is a partial sum; call the layer "
            "outside"
        )

    def local(
        base: Array,
        x: Array,
        factors: SlotFactors,
        adapters: Sequence[tuple[Plan, ...]],
        expert: Array | None,
        x_rows: Array | None,
        shared: Sequence[Factor],
        bias: Array | None,
    ) -> Array:
        out = add_rows(
            site, spec, base, x, factors, adapters, complete=complete, x_rows=x_rows, shared=shared, bias=bias
        )
        if expert is None:
            return out
        mine = expert.reshape(base.shape[:-1]) // (site.spec.entries[-1] // sharding.size(sums)) == lax.axis_index(sums)
        return summed(jnp.where(mine[..., None], out, jnp.zeros_like(out)), sums)

    with jax.named_scope("lora"):
        expert = None
        if sums:
            assert row_map is not None
            expert = jnp.asarray(row_map.expert)
            # A row without an expert counts for expert 0, since one shard must add its base.
            expert = jnp.where((expert >= 0) & (expert < site.spec.entries[-1]), expert, 0)
        whole = PartitionSpec()
        lead = rows.sharding.axes
        of_base, of_x = partition(*lead, sharding.outs), partition(*lead, sharding.ins)
        of_x = of_x if x_rows is None else partition(*[()] * (x.ndim - 1), sharding.ins)
        of_own, of_rows = factor_specs(site.spec), plan_specs(rows, sums)
        of_shared = [_shared_specs(each.spec) for each in site.shared]
        of_bias = partition(sharding.outs)
        specs = (of_base, of_x, of_own, of_rows, whole, whole, of_shared, of_bias)
        mapped = on_mesh(sharding, local, specs, of_base)
        return mapped(base, x, factors, rows.adapters, expert, x_rows, shared, bias)


def add_lookup(
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    base: Float[Array, "*lead N"],
    tokens: Int[Array, "*lead"],
    spec: EmbedSpec,
) -> Float[Array, "*lead N"]:
    """Return base + scale * A[slot, :, token] @ B[slot], PEFT's `lora_embedding_B @ lora_embedding_A[:, token]`.

    Raises:
      LoRAError: as in `add_delta`, or the calling code is one shard of a table with split rows.
    """
    if not base.size:
        return base
    rows = scope.rows(site, base)
    if rows is None:
        return base
    sharding = split_of(site.spec)
    if reached(site):
        raise LoRAError(
            f"{site.path}: a lookup in a table whose rows are split is not served inside a jax.shard_map over "
            f"{' and '.join(map(repr, sharding.ins))}: only you know which tokens a shard looks up there. Call it "
            "outside, or leave it out with LoRAConfig.exclude_modules"
        )

    def local(
        base: Array, tokens: Array, ids: Sequence[Array], factors: SlotFactors, adapters: Sequence[tuple[Plan, ...]]
    ) -> Array:
        flat = base.reshape(-1, base.shape[-1])
        index = tokens.reshape(-1)
        index = jnp.where(index < 0, index + spec.vocab, index)  # negative ids count from the end, as in the table
        size = factors.a.shape[-1]
        column = index - lax.axis_index(sharding.ins) * size if sharding.ins else index

        def add(total: Array, plans: tuple[Plan, ...], slots: Array) -> Array:
            # Rows without an adapter read a column of an arbitrary slot here; `expand` has no tile for them.
            slots = jnp.repeat(slots.reshape(-1), len(column) // max(1, slots.size)).clip(0, site.spec.num_slots - 1)
            h = cast("Array", _columns(factors.a, slots, column.clip(0, size - 1)))
            if sharding.ins:
                h = jnp.where(((column >= 0) & (column < size))[:, None], h, 0)
            h = (h if spec.scale == 1 else h * spec.scale)[None]
            return _expand_whole(site, site.spec, total, h, factors.second, plans[0], complete=True)

        out = _summed_adapters(flat, [partial(add, plans=a, slots=s) for a, s in zip(adapters, ids, strict=True)])
        if spec.table.real_in < spec.vocab:
            out = jnp.where((index < spec.table.real_in)[:, None], out, flat)
        return out.reshape(base.shape)

    with jax.named_scope("lora"):
        ids = rows.slots(site.spec.num_slots)
        lead = rows.sharding.axes
        of_base, of_rows = partition(*lead, sharding.outs), partition(*lead)
        of_ids = partition(*lead[: ids[0].ndim])
        specs = of_base, of_rows, of_ids, factor_specs(site.spec), plan_specs(rows)
        mapped = on_mesh(sharding, local, specs, of_base)
        return mapped(base, tokens, ids, slot_factors(layer, site, scope.batch), rows.adapters)


@jax.custom_vjp
def _columns(a: Real[Array, "G 1 R V"], slots: Int[Array, "M"], column: Int[Array, "M"]) -> Float[Array, "M R"]:
    """Return A[slot, :, column] of each row, in float32."""
    return a[slots, 0, :, column].astype(jnp.float32)


def _columns_forward(a: Array, slots: Array, column: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return cast("Array", _columns(a, slots, column)), (a, slots, column)


def _columns_backward(kept: tuple[Array, Array, Array], dh: Float[Array, "M R"]) -> tuple[Array, None, None]:
    """Return the gradient of A: of each column the sum of its rows, in float32 and in a fixed order.

    The scatter of XLA would add in the dtype of A, and on a GPU in any order.
    """
    a, slots, column = kept
    order = jnp.lexsort((column, slots))
    slots, column = slots[order], column[order]
    new = jnp.append(True, (slots[1:] != slots[:-1]) | (column[1:] != column[:-1]))

    def add(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        return one[0] | two[0], jnp.where(two[0], two[1], one[1] + two[1])

    _, sums = lax.associative_scan(add, (new[:, None], dh[order]))
    place = jnp.where(jnp.append(new[1:], True), slots, len(a))  # the last row of a column has its sum
    return jnp.zeros_like(a).at[place, 0, :, column].set(sums.astype(a.dtype), mode="drop"), None, None


_columns.defvjp(_columns_forward, _columns_backward)


# --- the code of a shard ----------------------------------------------------------------------------------------------


def add_rows(
    site: Site,
    spec: LinearSpec,
    base: Array,
    x: Array,
    factors: SlotFactors,
    adapters: Sequence[tuple[Plan, ...]],
    *,
    complete: bool,
    x_rows: Array | None = None,
    shared: Sequence[Factor] = (),
    bias: Array | None = None,
) -> Array:
    """Return `base` [*lead, own N] plus the LoRA of x [*lead, own K], in the code of one shard.

    If K is split, `base` is a partial sum unless `complete` is True. `shared` holds A and B of the slots of
    `site.shared`. `bias` [own N] is the part of `base` that is no product, for the finishers.
    """
    sharding = split_of(site.spec)
    a, b, ranks = _by_group(site.spec, factors.a, factors.b, factors.ranks)
    factors = factors._replace(a=a, b=b, ranks=ranks)
    shared = [Factor(*_by_group(each.spec, *factor)) for each, factor in zip(site.shared, shared, strict=False)]
    all_rows = rows = base.reshape(-1, base.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    if factors.a.dtype != jnp.int8:  # PEFT casts the input to the adapter's dtype too (_cast_input_dtype)
        x = x.astype(factors.a.dtype)
    elif x.dtype not in (jnp.bfloat16, jnp.float16):
        x = x.astype(jnp.float32)
    if sharding.ins:  # padding features may hold any value
        real = _real(sharding, sharding.ins, site.spec.in_blocks)
        x = x if real is None else jnp.where(real, x, 0)
    elif spec.columns_in is not None:
        x = spec.columns_in.take(x)
    columns = None if sharding.outs else spec.columns_out
    rows = rows if columns is None else columns.take(rows)
    bias = bias if columns is None or bias is None else columns.take(bias)
    add = partial(_add_adapter, site, x=x, factors=factors, shared=shared, complete=complete, x_rows=x_rows)
    adds = [partial(add, plans=plans) for plans in adapters]
    if site.spec.finishers:  # XLA computes them and the sums in one pass
        y = rows.astype(jnp.float32)
        for add in adds:
            y = y + add(None)
        slots = adapters[0][0].row_groups  # an adapter with vectors is the only one of its rows
        for finisher, vectors in zip(site.spec.finishers, factors.extras, strict=True):
            y = finisher.apply(y, x, rows, bias, vectors, slots)
        out = y.astype(rows.dtype)
    else:
        out = _summed_adapters(rows, adds)
    real = _real(sharding, sharding.outs, site.spec.out_blocks)
    out = out if real is None else jnp.where(real, out, rows)
    return (out if columns is None else columns.put(all_rows, out)).reshape(base.shape)


def _summed_adapters(rows: Array, adds: Sequence[Callable[[Array], Array]]) -> Array:
    """Return `rows` after each of `adds`. With several, the sum is in float32 and rounded once."""
    total = rows if len(adds) == 1 else rows.astype(jnp.float32)
    for add in adds:
        total = add(total)
    return total.astype(rows.dtype)


def _add_adapter(
    site: Site,
    rows: Array | None,
    *,
    x: Array,
    factors: SlotFactors,
    shared: Sequence[Factor],
    plans: tuple[Plan, ...],
    complete: bool,
    x_rows: Array | None,
) -> Array:
    """Return `rows` [M, own N] plus the LoRA of one adapter of each sequence. See `add_rows`.

    Without `rows` return the delta alone, in float32.
    """
    sharding, merged = split_of(site.spec), merged_columns(site.spec)
    by_itself = not sharding.ins or not complete
    if by_itself and merged.sizes is not None and not sharding.a[2] and sharding.b[2] == sharding.outs:
        rows = add_lora(
            rows, x, factors.a, factors.b, plans[0],
            slice_sizes=merged.sizes, ranks=factors.ranks, x_rows=x_rows, finite=site.finite, **options(site),
        )  # fmt: skip
    else:
        h = _shrink_own(site, site.spec, x, factors.first, plans[0], x_rows)
        rows = _expand_whole(site, site.spec, rows, h, factors.second, plans[0], complete=complete)
    if shared:  # a row's adapter is in slots of one kind, and the other kind leaves the row unchanged
        of_a, of_b = (each.spec for each in site.shared)
        h = _shrink_own(site, of_a, x, shared[0], plans[1], x_rows)
        rows = _expand_whole(site, of_b, rows, h, shared[1], plans[2], complete=complete)
    return rows


def options(site: Site) -> dict[str, Any]:
    """Return the options of the ops that are the same for all calls of a layer."""
    return {"backend": site.backend, "batch_invariant": site.batch_invariant}


def _by_group(spec: SlotSpec, *arrays: Array) -> Sequence[Array]:
    """Return slot arrays with the axes of slots and experts merged into one."""
    if spec.experts is None:
        return arrays
    return [array.reshape(-1, *array.shape[2:]) for array in arrays]


def _shrink_own(site: Site, spec: SlotSpec, x: Array, first: Factor, plan: Plan, x_rows: Array | None) -> Array:
    """Return h [n, M, own R] of x [M or tokens, own K]: the ranks of this shard, as a partial sum if K is split."""
    a, ranks = first
    size = a.shape[2]
    if (axes := split_of(spec).a[2]) and size:
        # The scales beside the ranks do not matter here, because only `expand` uses them.
        first_rank = (lax.axis_index(axes) * size).astype(ranks.dtype)
        ranks = ranks.at[..., 0].set(jnp.clip(ranks[..., 0] - first_rank, 0, size))
        ranks = ranks[..., : 1 + size] if a.dtype == jnp.int8 else ranks
    return shrink(x, a, plan, ranks=ranks, x_rows=x_rows, **options(site))


def _expand_whole(
    site: Site,
    spec: SlotSpec,
    rows: Array | None,
    h: Array,
    second: Factor,
    plan: Plan,
    *,
    complete: bool,
) -> Array:
    """Return `rows` [M, own N] plus the expansion of `h` [n, M, own R], a partial sum or a part of the ranks."""
    sharding = split_of(spec)
    if rows is None:
        rows = jnp.full((h.shape[1], spec.stored_out // sharding.size(sharding.outs)), -0.0)
    if sharding.a[2]:
        h = _gathered(h, sharding.a[2], 2)[:, :, : spec.max_rank]
    further = sharding.b[2][len(sharding.outs) :]  # axes that split the columns of B but not those of the layer
    if complete or further:
        h = summed(h, sharding.ins)
    if not further:
        return _expand_merged(site, spec, rows, h, second, plan)
    count = second.array.shape[-1]
    start = lax.axis_index(further) * count
    part = lax.dynamic_slice_in_dim(rows, start, count, axis=1)
    part = _expand_merged(site, spec, part, h, second, plan)
    if complete:
        return _gathered(part, further, 1)
    return lax.dynamic_update_slice_in_dim(rows, part, start, axis=1)


def _expand_merged(
    site: Site,
    spec: SlotSpec,
    rows: Array,
    h: Array,
    second: Factor,
    plan: Plan,
) -> Array:
    """Call `expand` on the columns of the output slices that this shard holds."""
    merged, (b, ranks) = merged_columns(spec), second
    sizes = merged.sizes
    if sizes is None:
        pieces = jnp.asarray(merged.pieces)
        ids = pieces[lax.axis_index(split_of(spec).b[2]) if len(pieces) > 1 else 0]
        h, ranks, sizes = h[ids], ranks[:, ids], (merged.size,) * len(merged.pieces[0])
    return expand(h, b, plan, slice_sizes=sizes, base=rows, ranks=ranks, finite=site.finite, **options(site))


def _real(sharding: KernelSharding, axes: AxisNames, blocks: Blocks) -> Bool[Array, "1 own"] | None:
    """Return a mask of a shard's features that are not padding; None if there is no padding.

    `axes` split all features in `blocks`.
    """
    if all(first >= 0 for first, _ in blocks):
        return None
    real = np.concatenate([np.full(count, first >= 0) for first, count in blocks])
    return jnp.asarray(real.reshape(sharding.size(axes), 1, -1))[lax.axis_index(axes)]


# --- meshes -----------------------------------------------------------------------------------------------------------


def factor_specs(spec: SlotSpec) -> SlotFactors:
    """Return the PartitionSpecs of `SlotFactors`, split as for a single layer of a stack."""
    sharding = split_of(spec)
    lead = ((),) if spec.experts is None else ((), sharding.experts)
    specs = partition(*lead, *sharding.a[1:]), partition(*lead, *sharding.b[1:]), partition(*lead)
    of_extras = [partition((), sharding.outs)] * len(spec.extras)
    return SlotFactors(*cast("Any", (*specs, of_extras)))


def _shared_specs(spec: SlotSpec) -> Factor:
    """Return the PartitionSpecs of the single `Factor` that these slots hold."""
    specs = factor_specs(spec)
    return specs.second if 1 in spec.factors else specs.first


def plan_specs(rows: CallRows, experts: AxisNames = ()) -> PartitionSpec:
    """Return the PartitionSpec of `rows.adapters`, whose plans are split over the shards of rows or over `experts`."""
    return partition((*rows.sharding.names, *experts))


def summed(array: Array, axes: AxisNames) -> Array:
    """Return the sum over the shards along `axes`."""
    return cast("Array", lax.psum(array, axes)) if axes else array


def _gathered(array: Array, axes: AxisNames, axis: int) -> Array:
    return cast("Array", lax.all_gather(array, axes, axis=axis, tiled=True))
