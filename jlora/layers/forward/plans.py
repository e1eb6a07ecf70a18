"""Plans of the rows of a call: the slot, or the slot and expert, of each tile of rows.

On a mesh the plans of all shards are concatenated, and each leaf is split like the rows or the experts.
"""

import math
from collections.abc import Hashable

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jlora.layers.forward.mesh import experts_reached, on_mesh, split_of
from jlora.layers.forward.row_layout import RowLayout, RowSharding
from jlora.layers.site import Site, SlotSpec
from jlora.pallas.moe import plan_experts
from jlora.pallas.plan import Plan, make_plan
from jlora.sharding.rules import partition


def plan_key(site: Site, spec: SlotSpec, layout: RowLayout, sharding: RowSharding) -> Hashable:
    """Return the cache key of a plan. Calls with equal keys in one scope share the plan of one adapter of a sequence.

    Keep the layout alive as long as the key, as for `RowLayout.key`.
    """
    rows = (sharding, layout.shape) if sharding.split else None
    experts = site.spec.experts, spec.experts, split_of(spec).experts
    return layout.key, spec.slots, experts, site.backend, rows


def plan_of(
    site: Site,
    spec: SlotSpec,
    layout: RowLayout,
    sharding: RowSharding,
    adapter: int,
    num_sequences: int,
) -> Plan:
    """Return the plan of the rows of a call.

    Args:
      site: the site of the layer.
      spec: the spec of the slots: the site's own, or of one in `site.shared`.
      layout: the layout of the rows.
      sharding: the sharding of the rows.
      adapter: index of the adapter among those of an entry.
      num_sequences: sequences of the whole batch, an upper bound on the number of active slots.
    """
    if site.spec.experts is not None:
        return _plan_of_experts(site, spec, site.spec.experts, layout, adapter, num_sequences)

    def make(slots: Array, repeats: int) -> Plan:
        return make_plan(
            slots,
            num_groups=spec.num_slots,
            max_active=num_sequences,
            repeats=repeats,
            batch_invariant=site.batch_invariant,
            backend=site.backend,
        )

    scales = layout.scales(adapter)
    if not sharding.split:
        return make(*layout.runs(adapter, spec.num_slots)).scaled(_flat(scales))
    kernel = split_of(spec)
    rows = math.prod(size // kernel.size(names) for size, names in zip(layout.shape, sharding.axes, strict=True))

    def local(slots: Array, scales: Array | None) -> Plan:
        return make(slots.reshape(-1), rows // max(1, slots.size)).scaled(_flat(scales))

    ids = layout.slots(adapter, spec.num_slots)
    specs = partition(*sharding.axes[: ids.ndim]), partition(*sharding.axes)
    return on_mesh(kernel, local, specs, partition(sharding.names))(ids, scales)


def _flat(scales: Array | None) -> Array | None:
    return None if scales is None else scales.reshape(-1)


def _plan_of_experts(
    site: Site,
    spec: SlotSpec,
    num_experts: int,
    layout: RowLayout,
    adapter: int,
    num_sequences: int,
) -> Plan:
    """Return the plan by slot and expert, or by slot alone for a factor that experts share."""
    row_map, sharding = layout.row_map, split_of(site.spec)
    own = num_experts // site.spec.expert_shards
    slots, index = layout.entries(adapter, spec.slots.stop)
    assert row_map is not None  # `layout_of` has checked `expert`
    assert index is not None
    slots = slots if spec.first_slot == 0 else slots - spec.first_slot

    def make(slots: Array, index: Array, expert: Array, scales: Array | None) -> Plan:
        groups = own
        if spec.experts is None:  # one group for each slot; rows of experts on other shards still get none
            expert, groups = jnp.where((expert >= 0) & (expert < own), 0, -1), 1
        return plan_experts(
            slots,
            index,
            expert,
            num_slots=spec.num_slots,
            num_experts=groups,
            max_active=num_sequences * groups,
            batch_invariant=site.batch_invariant,
            backend=site.backend,
        ).scaled(scales)

    def local(slots: Array, index: Array, expert: Array, scales: Array | None) -> Plan:
        return make(slots, index, expert - lax.axis_index(sharding.experts) * own, scales)

    operands = slots, index, jnp.asarray(row_map.expert), _flat(layout.scales(adapter))
    if not sharding.experts or experts_reached(site):  # inside a shard, its own experts are numbered from 0
        return make(*operands)
    return on_mesh(sharding, local, (PartitionSpec(),) * 4, partition(sharding.experts))(*operands)
