"""The rows of one call of a layer: their layout, and the plans that all layers with equal rows share."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax.extend.core
from jaxtyping import Array, Float, Int

from jlora.layers.forward.match_rows import layout_of, only_rows_mapped
from jlora.layers.forward.mesh import check_mesh
from jlora.layers.forward.plans import plan_key, plan_of
from jlora.layers.forward.row_layout import RowLayout, RowSharding, row_sharding
from jlora.layers.forward.row_space import RowSpace
from jlora.layers.forward.rows import RowMap
from jlora.layers.site import Site, SlotSpec
from jlora.pallas.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class CallRows:
    """The rows of one call of a layer.

    Attributes:
      layout: how the rows map to the row space of the layer.
      sharding: how the rows are split over the mesh.
      adapters: for the first adapter of each entry, then for the second of each, and so on, its plans: one for each
        site in `Site.with_shared`.
    """

    layout: RowLayout
    sharding: RowSharding
    adapters: tuple[tuple[Plan, ...], ...]

    def slots(self, none: int) -> list[Int[Array, "..."]]:
        """Return the slot of each row for each adapter, `none` without one, as `RowLayout.slots`."""
        return [self.layout.slots(adapter, none) for adapter in range(len(self.adapters))]


class Rows:
    """The rows of one row space in the calls of a scope, and the plans made for them.

    Args:
      space: the row space.
      num_sequences: sequences of the whole batch, an upper bound on the number of active slots.
    """

    def __init__(self, space: RowSpace, num_sequences: int):
        self._space = space
        self._num_sequences = num_sequences
        self._lengths: set[tuple[bool, int]] = set()  # (only rows under vmap, L) of each [B, L, features] so far
        self._trace: object = jax.extend.core.get_opaque_trace_state()
        self._made: dict[Hashable, tuple[RowLayout, Any]] = {}

    def layout(self, site: Site, base: Float[Array, "*lead N"], row_map: RowMap | None) -> RowLayout | str:
        """Return the layout of the rows of one call of a layer, or the reason why they fit none."""
        mapped = only_rows_mapped(self._space, base)
        lengths = frozenset(length for under_vmap, length in self._lengths if under_vmap == mapped)
        layout = layout_of(self._space, site, base.shape[:-1], lengths, mapped=mapped, row_map=row_map)
        if isinstance(layout, RowLayout) and layout.length is not None:
            self._lengths.add((mapped, layout.length))
        return layout

    def of_call(self, site: Site, base: Float[Array, "*lead N"], layout: RowLayout) -> CallRows:
        """Return the rows of one call of a layer. Raise `LoRAError` in code on another mesh than that of the layer."""
        check_mesh(site)
        sharding = row_sharding(site, layout, base)
        adapters = range(len(self._space.entries.slots))

        def plan(spec: SlotSpec, adapter: int) -> Plan:
            make = partial(plan_of, site, spec, layout, sharding, adapter, self._num_sequences)
            return self._kept((adapter, plan_key(site, spec, layout, sharding)), layout, make)

        return CallRows(
            layout, sharding, tuple([tuple([plan(each.spec, i) for each in site.with_shared]) for i in adapters])
        )

    def _kept(self, key: Hashable, layout: RowLayout, make: Callable[[], T]) -> T:
        """Return what `make` returns, computed once and shared by all layers with the same key."""
        # A value traced inside scan, remat or grad must not outlive that trace, so it is not cached. XLA merges the
        # identical plans of the layers.
        keep = self._trace == jax.extend.core.get_opaque_trace_state()
        if keep and key in self._made:
            return self._made[key][1]
        made = make()
        if keep:
            self._made[key] = layout, made  # the layout keeps the arrays alive that the key identifies
        return made
