"""What a wrapped layer computes on a mesh whose axes are Explicit."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType


def across_mesh(compute: Callable[..., Array], base: Array, *args: Any) -> Array:
    """`compute(base, *args)`, of base's shape and sharding.

    Where axes of the mesh are Explicit, JAX wants the sharding of each intermediate value written out; inside, the
    compiler is asked to find them, as it does everywhere else.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if _is_explicit(kind))
    if not explicit:
        return compute(base, *args)
    auto = cast(
        "Callable[..., Array]",
        jax.sharding.auto_axes(compute, axes=explicit, out_sharding=jax.typeof(base).sharding),
    )
    return auto(base, *args)


def here(array: Array) -> Array:
    """An array that the code of a shard may have from outside of its map, as one of the map's own: for JAX it lies on
    another mesh, which few of its functions take."""
    return jnp.copy(array) if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types else array


def _is_explicit(kind: AxisType) -> bool:
    return kind == AxisType.Explicit
