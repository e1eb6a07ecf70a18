"""The sharding of a decoder's parameters on a mesh, and the order of the columns of merged projections.

    "tensor"   heads of attention, inner features of MLPs, the vocabulary
    "expert"   experts
    "data"     sequences; no parameter has it

A product whose outputs are sharded over "tensor" needs no collective. One whose inputs are ends with a sum over all
shards. The columns of a merged projection are ordered shard by shard, so that a shard holds its part of each slice:

    checkpoint   q0 q1 q2 q3 k0 k1 v0 v1
    2 shards     q0 q1 k0 v0 | q2 q3 k1 v1
    4 shards     q0 k0 v0 | q1 k0 v0 | q2 k1 v1 | q3 k1 v1      fewer key heads than shards: copies
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jlora._typing import DType
from jlora.models.json_file import ModelError

AXES = ("data", "tensor", "expert")

# Columns from left to right: (first column in the checkpoint's order, count). The first is -1 for padding.
Blocks = tuple[tuple[int, int], ...]
Axes = tuple[str | None, ...]  # mesh axis of every axis of a parameter
Dispatch = Literal["all_gather", "all_to_all"]  # how tokens reach their experts; see `expert_parallel`


@dataclass(frozen=True)
class Partition:
    """The mesh of a decoder. Without a mesh, everything is one shard.

    Raises:
      ModelError: An axis is not one of `AXES`, or its type is not Auto.
    """

    mesh: Mesh | None = None

    def __post_init__(self):
        if self.mesh is None:
            return
        if not isinstance(self.mesh, Mesh):
            raise ModelError(f"mesh must be a jax.sharding.Mesh or None, got {type(self.mesh).__name__}")
        for name, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True):
            if name not in AXES:
                raise ModelError(f"mesh has an axis {name!r}; the decoder knows {AXES}")
            if kind != AxisType.Auto:
                raise ModelError(
                    f"mesh axis {name!r} is {kind.name}, and the decoder leaves shardings to the compiler: give "
                    "axis_types=(jax.sharding.AxisType.Auto,) * n"
                )

    def size(self, axis: str) -> int:
        """Return the number of shards along an axis; 1 if the mesh lacks it."""
        return 1 if self.mesh is None else self.mesh.shape.get(axis, 1)

    def sharding(self, *axes: str | None) -> NamedSharding | None:
        """Return the sharding of an array with these mesh axes, omitting those that the mesh lacks."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(*self._present(axes)))

    def metadata(self, *axes: str | None) -> dict[str, Any]:
        """Return Flax's sharding metadata of a variable with these axes."""
        return {} if self.mesh is None else {"out_sharding": self._present(axes), "mesh": self.mesh}

    def dividing(self, size: int, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the axes over which `size` can be sharded evenly, taken greedily from the first on."""
        found: tuple[str, ...] = ()
        for axis in axes:
            if self.size(axis) > 1 and size % math.prod(map(self.size, (*found, axis))) == 0:
                found = (*found, axis)
        return found

    def constrain(self, x: jax.Array, *axes: Sequence[str]) -> jax.Array:
        """Shard each axis of `x` over those of its mesh axes that divide it; axes that are not given are whole."""
        if self.mesh is None:
            return x
        spec = (self.dividing(size, names) or None for size, names in zip(x.shape, axes, strict=False))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def draw(self, axes: Axes, blocks: Blocks | None = None) -> Callable[..., jax.Array]:
        """Return an initializer of small random weights, with the same values on any mesh.

        `blocks` orders the columns of the axis that is sharded over "tensor".
        """

        def initialize(key: jax.Array, shape: Sequence[int], dtype: DType) -> jax.Array:
            if self.mesh is None:
                return _normal(key, tuple(shape), dtype)
            axis = axes.index("tensor") if "tensor" in axes else 0
            return _draw(key, tuple(shape), jnp.dtype(dtype), blocks, axis, self.sharding(*axes))

        return initialize

    def check(self, axis: str, **fields: int) -> None:
        """Raise `ModelError` if a field is not divisible by the number of shards of an axis."""
        shards = self.size(axis)
        for name, value in fields.items():
            if value % shards:
                raise ModelError(
                    f"{name} ({value}) must be a multiple of mesh axis {axis!r}, which has {shards} shards"
                )

    def _present(self, axes: Axes) -> Axes:
        assert self.mesh is not None
        return tuple(axis if axis in self.mesh.axis_names else None for axis in axes)


ONE_DEVICE = Partition()


def merged(slices: Sequence[tuple[int, int]], shards: int) -> Blocks | None:
    """Return the columns of a merged projection, shard by shard; None if that is the checkpoint's order.

    Args:
      slices: (units, columns of a unit) of each slice. Units are not divided. Either each shard has an equal number of
        units, or the number of shards is a multiple of the units and shards hold copies.
      shards: Number of shards.
    """
    found: list[tuple[int, int]] = []
    starts = [0, *accumulate(units * width for units, width in slices)]
    for shard in range(shards):
        for start, (units, width) in zip(starts, slices, strict=False):
            first, count = start + shard * units // shards * width, max(1, units // shards) * width
            if found and sum(found[-1]) == first:
                found[-1] = (found[-1][0], found[-1][1] + count)
            else:
                found.append((first, count))
    return None if found == [(0, starts[-1])] else tuple(found)


def padded(size: int, shards: int) -> Blocks | None:
    """Return the columns of a vocabulary padded to a multiple of the shards; None if it needs no padding."""
    return ((0, size), (-1, -size % shards)) if size % shards else None


def width(blocks: Blocks) -> int:
    """Return the total number of columns."""
    return sum(count for _, count in blocks)


def runs(blocks: Blocks, start: int, stop: int) -> Blocks:
    """Return the columns from `start` to `stop` of these blocks."""
    found: list[tuple[int, int]] = []
    at = 0
    for first, count in blocks:
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            found.append((first if first < 0 else first + low - at, high - low))
        at += count
    return tuple(found)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    # The barrier keeps the compiler from folding constants into one product, which rounds differently.
    return jax.lax.optimization_barrier(jax.random.normal(key, shape, dtype)) * jnp.array(0.02, dtype)


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _draw(
    key: jax.Array, shape: tuple[int, ...], dtype: Any, blocks: Blocks | None, axis: int, sharding: NamedSharding
) -> jax.Array:
    if blocks is not None:
        drawn = tuple(
            max(sum(block) for block in blocks if block[0] >= 0) if i == axis else size for i, size in enumerate(shape)
        )
        beyond = drawn[axis]
        columns = [np.full(n, beyond) if first < 0 else np.arange(first, first + n) for first, n in blocks]
        values = jnp.take(_normal(key, drawn, dtype), np.concatenate(columns), axis=axis, mode="fill", fill_value=0)
    else:
        values = _normal(key, shape, dtype)
    return jax.lax.with_sharding_constraint(values, sharding)
