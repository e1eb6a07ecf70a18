"""The plans of the rows of a call: which tile of rows takes which slot, or which slot and expert.

On a mesh the plans of all shards are side by side: each leaf is split as the rows are, or as the experts are.
"""

import math
from collections.abc import Hashable

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jlora.layers.forward.mesh import experts_reached, on_mesh, split_of
from jlora.layers.forward.row_layout import (
    BatchSlots,
    RowLayout,
    RowSharding,
    entries_of,
    slots_by_axes,
    slots_of,
)
from jlora.layers.forward.rows import RowMap
from jlora.layers.site import Site, SlotSpec
from jlora.pallas.moe import plan_experts
from jlora.pallas.plan import Plan, make_plan
from jlora.sharding.rules import partition


def plan_key(site: Site, spec: SlotSpec, layout: RowLayout, sharding: RowSharding) -> Hashable:
    """Return the key of a plan: calls of equal keys, in one scope, have the same one.

    The arrays of a row map are compared by identity; keep them alive as long as the key.
    """
    kind: Hashable = layout.kind
    if isinstance(layout.kind, RowMap):
        kind = id(layout.kind.source), id(layout.kind.expert), layout.kind.of, layout.kind.length
    rows = (sharding, layout.shape) if sharding.split else None
    experts = site.spec.experts, spec.experts, split_of(spec).experts
    return kind, layout.repeats, spec.slots, experts, site.backend, rows


def plan_of(
    site: Site, spec: SlotSpec, layout: RowLayout, sharding: RowSharding, slots: BatchSlots, num_sequences: int
) -> Plan:
    """Return the plan of the rows of a call.

    Args:
      site: of the layer.
      spec: of the slots: its own, or of one of `site.shared`.
      layout: of the rows.
      sharding: of the rows.
      slots: of the batch, or of the shard of it that the calling code has.
      num_sequences: of the whole batch; no more slots are active.
    """
    if site.spec.experts is not None:
        return _plan_of_experts(site, spec, site.spec.experts, layout, slots, num_sequences)

    def make(slots: Array, repeats: int) -> Plan:
        return make_plan(
            slots, num_groups=spec.num_slots, max_active=num_sequences, repeats=repeats, backend=site.backend
        )

    if not sharding.split:
        return make(slots_of(layout, slots, spec.num_slots), layout.repeats)
    kernel = split_of(spec)
    rows = math.prod(size // kernel.size(names) for size, names in zip(layout.shape, sharding.axes, strict=True))

    def local(slots: Array) -> Plan:
        return make(slots.reshape(-1), rows // max(1, slots.size))

    ids = slots_by_axes(layout, slots, spec.num_slots)
    return on_mesh(kernel, local, (partition(*sharding.axes[: ids.ndim]),), partition(sharding.names))(ids)


def _plan_of_experts(
    site: Site, spec: SlotSpec, num_experts: int, layout: RowLayout, slots: BatchSlots, num_sequences: int
) -> Plan:
    """Return the plan by slot and expert; by slot alone, for a factor that experts share."""
    row_map, sharding = layout.kind, split_of(site.spec)
    assert isinstance(row_map, RowMap)  # `layout_of` has checked that it has `expert`
    own = num_experts // site.spec.expert_shards
    table, index = entries_of(row_map, slots)
    table = table if spec.first_slot == 0 else table - spec.first_slot

    def make(table: Array, index: Array, expert: Array) -> Plan:
        groups = own
        if spec.experts is None:  # one group a slot; rows of experts elsewhere still take none
            expert, groups = jnp.where((expert >= 0) & (expert < own), 0, -1), 1
        return plan_experts(
            table,
            index,
            expert,
            num_slots=spec.num_slots,
            num_experts=groups,
            max_active=num_sequences * groups,
            backend=site.backend,
        )

    def local(table: Array, index: Array, expert: Array) -> Plan:
        return make(table, index, expert - lax.axis_index(sharding.experts) * own)

    operands = table, index, jnp.asarray(row_map.expert)
    if not sharding.experts or experts_reached(site):  # the code of a shard counts its own experts from 0
        return make(*operands)
    whole = PartitionSpec()
    return on_mesh(sharding, local, (whole, whole, whole), partition(sharding.experts))(*operands)
