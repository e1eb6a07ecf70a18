"""How the rows of a layer lie on a mesh, and the plans of the shards that have them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Int

from jlora.layers.forward.mesh import experts_reached, explicit_axes, manual_axes, on_mesh, split_of
from jlora.layers.site import Site
from jlora.pallas.plan import Plan
from jlora.sharding.rules import KernelSharding, Names, names_of, partition


@dataclass(frozen=True)
class Lead:
    """How the axes before the features of a layer's rows are split: for each of them axes of the mesh."""

    axes: tuple[Names, ...]

    @property
    def split(self) -> bool:
        return any(self.axes)


def lead_of(sharding: KernelSharding, base: Array, axis: int | None, count: int) -> Lead:
    """How the rows of `base` lie: as its type says on axes of the mesh that are Explicit; else the `axis` of sequences
    (or packed rows), of which there are `count`, is split over the data axes if they divide it."""
    lead = base.ndim - 1
    mesh = jax.sharding.get_abstract_mesh()
    if explicit_axes(mesh):
        spec = (*jax.typeof(base).sharding.spec, *[None] * base.ndim)
        return Lead(tuple(names_of(entry) for entry in spec[:lead]))
    data = tuple(name for name in sharding.data if name not in manual_axes(mesh))
    axes: list[Names] = [()] * lead
    if axis is not None and data and count % sharding.size(data) == 0:
        axes[axis] = data
    return Lead(tuple(axes))


def plan_of_rows(
    sharding: KernelSharding,
    lead: Lead,
    shape: Sequence[int],
    ids: Int[Array, "..."],
    make: Callable[[Array, int], Plan],
) -> Plan:
    """The plans of the shards of rows, side by side: each leaf split as the rows are.

    Args:
      sharding: of the layer.
      lead: how its rows lie.
      shape: of the axes before the features.
      ids: slots, along the first of these axes; rows along the others are of the same sequence.
      make: `make_plan` of the slots of a shard, one for each run of so many rows.
    """
    rows = int(np.prod([size // sharding.size(names) for size, names in zip(shape, lead.axes, strict=True)]))

    def local(ids: Array) -> Plan:
        return make(ids.reshape(-1), rows // max(1, ids.size))

    every = tuple(name for names in lead.axes for name in names)
    return on_mesh(sharding, local, (partition(*lead.axes[: ids.ndim]),), partition(every))(ids)


def plan_of_experts(
    site: Site, make: Callable[[Array, Array, Array, int], Plan], ids: Array, index: Array, expert: Array
) -> Plan:
    """The plans of the shards of experts, side by side; the code of a shard counts its own experts from 0."""
    sharding = split_of(site.spec)
    assert site.spec.experts is not None
    own = site.spec.experts // site.spec.expert_shards
    if not sharding.experts or experts_reached(site):
        return make(ids, index, expert, own)

    def local(ids: Array, index: Array, expert: Array) -> Plan:
        return make(ids, index, expert - lax.axis_index(sharding.experts) * own, own)

    whole = PartitionSpec()
    return on_mesh(sharding, local, (whole, whole, whole), partition(sharding.experts))(ids, index, expert)
