"""Placement of slot arrays and of the blocks written into them, on one device or sharded over a mesh."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, cast

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jlora._compat import Device, is_committed
from jlora.layers.site import SlotSpec
from jlora.sharding.put import put

# The sharding of a committed array, or the device of an uncommitted one.
ArrayPlacement: TypeAlias = Sharding | Device


def a_device(where: ArrayPlacement) -> Device:
    """Return the device, or any device of the sharding."""
    return where if isinstance(where, Device) else next(iter(cast("set[Device]", where.device_set)))


def own_device(where: ArrayPlacement) -> Device:
    """Return a device of this process, since properties of other processes' devices cannot be queried.

    If the sharding has none, return the first local device.
    """
    if isinstance(where, Device):
        return where
    own = cast("set[Device]", where.addressable_devices)
    return next(iter(own)) if own else cast("Device", jax.local_devices()[0])


def placement_of(array: jax.Array) -> ArrayPlacement:
    """Return the sharding of a committed array, or the device of an uncommitted one."""
    return array.sharding if is_committed(array) else a_device(array.sharding)  # works for deleted arrays too


def refreshed(before: ArrayPlacement, array: jax.Array) -> ArrayPlacement:
    """Return the placement of `array`, or the object `before` if both are equivalent shardings."""
    where = placement_of(array)
    if isinstance(before, Sharding) and isinstance(where, Sharding) and before.is_equivalent_to(where, array.ndim):
        return before
    return where


def as_sharded(spec: SlotSpec, placements: Sequence[ArrayPlacement]) -> bool:
    """Return whether slot arrays still have the shardings of their spec.

    They differ if the model was moved after it was wrapped. The placements are those of `SlotSpec.of_blocks`, each for
    all sites.
    """
    if spec.sharding is None:
        return False
    count = len(placements) // len(spec.of_blocks)
    return list(placements) == [array.sharding for array in spec.of_blocks for _ in range(count)]


def of_blocks(spec: SlotSpec, *, whole: bool) -> dict[str, ArrayPlacement]:
    """Return the placements of A, B and the scales of a block of sharded slots, by the names of the slot arrays.

    If `whole` is False, the block has one entry and is replicated over the shards of experts.
    """
    sharding = spec.sharding
    assert sharding is not None
    entries = sharding.experts if whole and spec.experts is not None else ()
    return {
        "a": sharding.named(entries, (), (), sharding.ins),
        "b": sharding.named(entries, (), sharding.b[2]),
        "ranks": sharding.named(entries),
    }


def everywhere(where: ArrayPlacement) -> ArrayPlacement:
    """Return the placement of an operand that is replicated on every device."""
    return NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where


def is_there(array: Any, where: ArrayPlacement) -> bool:
    """Return whether an array of a block is already where the write programs expect it."""
    if not isinstance(array, jax.Array) or array.sharding.memory_kind == "pinned_host":
        return False
    return array.devices() == {where} if isinstance(where, Device) else array.sharding == where


def page_locked(where: ArrayPlacement) -> Sharding:
    """Return the same placement in page-locked host memory."""
    if isinstance(where, Device):
        return SingleDeviceSharding(where, memory_kind="pinned_host")
    return where.with_memory_kind("pinned_host")


def put_operands(arrays: Sequence[Any], where: Sequence[ArrayPlacement]) -> list[jax.Array]:
    """Transfer operands of the write programs in one call."""
    return put(arrays, [SingleDeviceSharding(w) if isinstance(w, Device) else w for w in where])


@contextlib.contextmanager
def auto_axes() -> Generator[None, None, None]:
    """Make all axes of the current mesh Auto axes, so that the compiler chooses the sharding of each value."""
    mesh = jax.sharding.get_mesh()
    with contextlib.nullcontext() if mesh.empty else jax.set_mesh(_auto(mesh)):
        yield


def with_auto_axes(array: Any) -> Any:
    """Return an array with the axes of its mesh as Auto axes. No data moves."""
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return array
    mesh = array.sharding.mesh
    assert isinstance(mesh, Mesh)
    return jax.device_put(array, NamedSharding(_auto(mesh), array.sharding.spec))


def _auto(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
