"""How the rows of one call of a layer map to the row space of the layer, and how they are split over the mesh."""

from collections.abc import Hashable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from jlora.layers.forward.mesh import explicit_axes, here, manual_axes
from jlora.layers.forward.row_space import RowSlots, RowSpace
from jlora.layers.forward.rows import RowMap
from jlora.layers.site import Site
from jlora.sharding.rules import AxisNames, names_of


@dataclass(frozen=True, eq=False)
class RowLayout:
    """How the rows of a call map to a row space.

    Attributes:
      space: the row space.
      shape: shape of the axes before the features.
      positions: 0 if the rows are packed rows, or if a map indexes those. Else the rows of each entry among the rows,
        or among those that a map indexes, that may take different adapters: 1 if all take the same, or if only the last
        row of each entry is among them.
      repeats: consecutive rows of each entry; 1 for packed rows and with a map.
      row_map: the map of the rows; None if they are in the order of the space.
      length: L if the rows are [B, L, features]; else None.
    """

    space: RowSpace
    shape: tuple[int, ...]
    positions: int
    repeats: int = 1
    row_map: RowMap | None = None
    length: int | None = None

    @property
    def key(self) -> Hashable:
        """The part of a cache key that describes how flattened rows map to the space.

        The arrays of a row map are compared by identity. Keep the layout alive as long as the key.
        """
        arrays = None if self.row_map is None else (id(self.row_map.source), id(self.row_map.expert))
        return arrays, self.repeats, self.positions

    @property
    def num_indexed(self) -> int:
        """The number of rows of the space that a map indexes."""
        return self._row_slots.size * max(1, self.positions)

    @property
    def _row_slots(self) -> RowSlots:
        packed = None if self.positions else self.space.packed
        return self.space.entries if packed is None else packed

    def entries(self, adapter: int, none: int) -> tuple[Int[Array, "entries"], Integer[Array, "M"] | None]:
        """Return the slots of one adapter that the rows read, and the index of each row among them; None: in order."""
        slots = _vector(self._row_slots.slots[adapter])
        index = None if self.row_map is None else jnp.asarray(self.row_map.source)
        if not self.positions:
            return slots, index
        if self.space.first is None:
            return slots, None if index is None else index // self.positions  # a negative index stays negative
        length = self.space.length or 1
        positions = jnp.arange(length - self.positions, length, dtype=jnp.int32)
        active = positions[None] >= _vector(self.space.first)[:, None]
        return jnp.where(active, slots[:, None], none).astype(jnp.int32).reshape(-1), index

    def runs(self, adapter: int, none: int) -> tuple[Int[Array, "runs"], int]:
        """Return the slot of one adapter in each run of rows, and the number of rows of a run.

        The slot is `none` for inactive rows and for rows of a map outside of the space.
        """
        slots, index = self.entries(adapter, none)
        if index is not None:
            return _taken(slots, index, none).astype(jnp.int32), 1
        if not self.positions or self.space.first is None:
            return slots, self.repeats
        return jnp.repeat(slots, self.repeats // self.positions), 1

    def slots(self, adapter: int, none: int) -> Int[Array, "..."]:
        """Return `runs` in the shape of the first axes of the rows. The slot is constant along the other axes."""
        slots, rows = self.runs(adapter, none)
        return slots if rows > 1 else slots.reshape(self.shape)

    def scales(self, adapter: int) -> Float[Array, "..."] | None:
        """Return the factor of one adapter in each row, in the shape of the rows; None if all are 1."""
        if self._row_slots.scales is None:
            return None
        scales = _vector(self._row_slots.scales[adapter])
        if self.row_map is not None:
            scales = _taken(scales, jnp.asarray(self.row_map.source) // max(1, self.positions), 1)
        elif self.positions:
            scales = jnp.repeat(scales, self.repeats)
        return scales.reshape(self.shape)


@dataclass(frozen=True)
class RowSharding:
    """How the rows of a call are split over the mesh.

    Attributes:
      axes: the mesh axes that split each axis before the features; () off meshes.
    """

    axes: tuple[AxisNames, ...] = ()

    @property
    def split(self) -> bool:
        """True if any axis of the rows is split."""
        return any(self.axes)

    @property
    def names(self) -> AxisNames:
        """All mesh axes that split rows, in order."""
        return tuple(name for names in self.axes for name in names)


def row_sharding(site: Site, layout: RowLayout, rows: Float[Array, "*lead N"]) -> RowSharding:
    """Return how `rows` are split over the mesh of the layer.

    On Explicit mesh axes the type of `rows` determines it. Otherwise the axis of sequences (or of packed rows) is split
    over the data axes if its size is divisible by theirs.
    """
    sharding = site.spec.sharding
    if sharding is None:
        return RowSharding()
    count = len(layout.shape)
    mesh = jax.sharding.get_abstract_mesh()
    if explicit_axes(mesh):
        spec = (*jax.typeof(rows).sharding.spec, *[None] * rows.ndim)
        return RowSharding(tuple(names_of(entry) for entry in spec[:count]))
    if layout.row_map is not None or (layout.positions and layout.space.is_mapped):
        axis, size = None, 0
    elif layout.positions:
        axis, size = 0, layout.space.entries.size
    else:
        axis, size = count - 1, layout.shape[-1]
    data = tuple(name for name in sharding.data if name not in manual_axes(mesh))
    divided = axis is not None and size % sharding.size(data) == 0
    return RowSharding(tuple(data if divided and i == axis else () for i in range(count)))


def _vector(array: Array) -> Array:
    """Return an array of a space as a vector, also under `vmap`, that can be used inside a `jax.shard_map`."""
    return here(array.reshape(-1))


def _taken(array: Array, index: Array, other: int) -> Array:
    """Return `array[index]`, and `other` where the index is outside of the array."""
    inside = (index >= 0) & (index < array.shape[0])
    found = array.at[jnp.clip(index, 0, array.shape[0] - 1)].get(mode="promise_in_bounds")
    return jnp.where(inside, found, other)
