"""How the rows of one call of a layer are split over the mesh."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from jlora.layers.forward.mesh import explicit_axes, manual_axes
from jlora.layers.forward.row_layout import RowLayout
from jlora.layers.site import Site
from jlora.sharding.rules import Names, names_of


@dataclass(frozen=True)
class RowSharding:
    """How the rows of a call are split over the mesh.

    Attributes:
      axes: the mesh axes that split each axis before the features; () off meshes.
    """

    axes: tuple[Names, ...] = ()

    @property
    def split(self) -> bool:
        """True if any axis of the rows is split."""
        return any(self.axes)

    @property
    def names(self) -> Names:
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
