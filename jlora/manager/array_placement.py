"""Where slot arrays lie, and the blocks that are written into them: on a device, or split over a mesh."""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jlora._compat import Device, is_committed
from jlora.layers.site import SlotSpec
from jlora.sharding.put import put

# Where an array lies: as its sharding says, or, where nobody chose, on a device that a computation may take it from.
ArrayPlacement: TypeAlias = Sharding | Device


def a_device(where: ArrayPlacement) -> Device:
    """The device, or one of them."""
    return where if isinstance(where, Device) else next(iter(cast("set[Device]", where.device_set)))


def own_device(where: ArrayPlacement) -> Device:
    """One of the devices that this process has of them: another process's tell nothing of themselves here."""
    if isinstance(where, Device):
        return where
    own = cast("set[Device]", where.addressable_devices)
    return next(iter(own)) if own else cast("Device", jax.local_devices()[0])


def place_of(array: jax.Array) -> ArrayPlacement:
    return array.sharding if is_committed(array) else a_device(array.sharding)  # also of deleted ones


def as_said(before: ArrayPlacement, array: jax.Array) -> ArrayPlacement:
    """Where an array lies, as it was said before if that is the same in other words."""
    where = place_of(array)
    if isinstance(before, Sharding) and isinstance(where, Sharding) and before.is_equivalent_to(where, array.ndim):
        return before
    return where


def as_sharded(spec: SlotSpec, lie: Sequence[ArrayPlacement]) -> bool:
    """Whether all A and then all B of such sites lie as their spec says; whoever moved the model may have changed
    that."""
    if spec.sharding is None:
        return False
    return list(lie) == [spec.shardings[j] for j in spec.factors for _ in range(len(lie) // len(spec.factors))]


def of_blocks(spec: SlotSpec, *, whole: bool) -> tuple[ArrayPlacement, ArrayPlacement]:
    """Where blocks of split slots lie; those of one row only are whole on all shards of experts."""
    a, b = cast("tuple[NamedSharding, NamedSharding]", spec.block_shardings)
    if not whole:
        a, b = (NamedSharding(of.mesh, PartitionSpec(None, *of.spec[1:])) for of in (a, b))
    return a, b


def everywhere(where: ArrayPlacement) -> ArrayPlacement:
    """Where an operand lies that every device needs whole."""
    return NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where


def lies(array: Any, where: ArrayPlacement) -> bool:
    """Whether an array of a block lies where the programs take it from."""
    if not isinstance(array, jax.Array) or array.sharding.memory_kind == "pinned_host":
        return False
    return array.devices() == {where} if isinstance(where, Device) else array.sharding == where


def pinned(where: ArrayPlacement) -> Sharding:
    """The same place in page-locked host memory."""
    if isinstance(where, Device):
        return SingleDeviceSharding(where, memory_kind="pinned_host")
    return where.with_memory_kind("pinned_host")


def put_operands(arrays: Sequence[Any], where: Sequence[ArrayPlacement]) -> list[jax.Array]:
    """Move operands of the programs, in one call."""
    return put(arrays, [SingleDeviceSharding(w) if isinstance(w, Device) else w for w in where])
