"""Move arrays between the host and a mesh that may have devices of other processes."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding


def put(arrays: Sequence[Any], where: Sequence[Sharding]) -> list[jax.Array]:
    """Move arrays to devices. Each process moves only its own shards.

    Processes exchange no data, so the caller must pass the same arrays in all of them. `jax.device_put` would compare
    the arrays of all processes in a collective.

    Args:
      arrays: Arrays on the host, or on the target devices in another kind of memory.
      where: Target sharding of each array.

    Returns:
      One `jax.Array` for each input, with the sharding of `where`.
    """
    if all(sharding.is_fully_addressable for sharding in where):
        return jax.device_put(list(arrays), list(where))
    shards = [_shards(array, sharding) for array, sharding in zip(arrays, where, strict=True)]
    targets = [
        SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        for own, sharding in zip(shards, where, strict=True)
        for device in own
    ]
    moved = iter(jax.device_put([shard for own in shards for shard in own.values()], targets))
    return [
        jax.make_array_from_single_device_arrays(array.shape, sharding, list(itertools.islice(moved, len(own))))
        for array, sharding, own in zip(arrays, where, shards, strict=True)
    ]


def _shards(array: Any, sharding: Sharding) -> dict[Any, Any]:
    """Return device -> shard, for the devices of this process."""
    if isinstance(array, jax.Array):
        return {shard.device: shard.data for shard in array.addressable_shards}
    indices = cast("Mapping[Any, Any]", sharding.addressable_devices_indices_map(array.shape))
    return {device: np.asarray(array)[index] for device, index in indices.items()}


def own_values(array: jax.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Return an array's values and a boolean mask of those that this process holds; the mask is None for all."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return jax.device_get(array), None
    values, known = np.zeros(array.shape, array.dtype), np.zeros(array.shape, bool)
    for shard in array.addressable_shards:
        values[shard.index], known[shard.index] = jax.device_get(shard.data), True
    return values, known


def whole(array: Any) -> np.ndarray:
    """Return all values of an array, gathered from all processes if this one does not hold them."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(jax.device_get(array))
