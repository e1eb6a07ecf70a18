"""Compiled programs that write the blocks of an adapter, already on the device, into one slot of many layers."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jlora._compat import Device, Launch, launch_of, without_graphs
from jlora.layers.site import SlotSpec
from jlora.slots.blocks import block_shapes
from jlora.slots.placement import ArrayPlacement, a_device, as_sharded, everywhere, of_blocks
from jlora.slots.slot_write import takes_kernels, write_block, write_whole

# (spec, entries of the block, number of sites) of each block that a program writes.
WriteKey: TypeAlias = tuple[tuple[SlotSpec, int, int], ...]
Arrays: TypeAlias = tuple[jax.Array, ...]


@lru_cache(maxsize=256)
def compiled_write(key: WriteKey, stamps: tuple[int, ...], placements: tuple[ArrayPlacement, ...]) -> Launch:
    """Compile the program that writes blocks into one slot and increments the stamp of the slot.

    Its signature is `write(*arrays, *operands)`, and it returns the updated arrays. The arrays are donated. For each
    block, the operands are its factors, in int8 its scales, and the int32 vector [slot, entry, rank, shard].

    Args:
      key: Specs and sizes of the blocks, in the order of the operands.
      stamps: Shape of the stamps, which is the axes of `SlotSpec.stack` and then the slots.
      placements: Placements of the arrays: for each block all A, all B and in int8 all ranks; the stamps at the end.
    """
    whole = everywhere(placements[0])
    writers: list[Callable[..., Arrays]] = []
    arrays: list[jax.ShapeDtypeStruct] = []
    operands: list[tuple[jax.ShapeDtypeStruct, ...]] = []
    meshes: set[Any] = set()
    for spec, entries, count in key:
        own = placements[len(arrays) : len(arrays) + len(spec.of_blocks) * count]
        sharding = spec.sharding if as_sharded(spec, own) else None
        over, alone, of = (), (), {array.name: whole for array in spec.of_blocks}
        if sharding is not None:
            over = sharding.a[2]
            alone = sharding.experts if entries == 1 and spec.expert_shards > 1 else ()
            of = of_blocks(spec, whole=not alone)
        meshes.add(None if sharding is None else sharding.mesh)
        writers.append(partial(_write_sites, spec, count, over, alone, takes_kernels(a_device(placements[0]))))
        held = [array for array in spec.of_blocks for _ in range(count)]
        arrays += [_struct(array.shape, array.dtype, where) for array, where in zip(held, own, strict=True)]
        shapes = block_shapes(spec, entries)
        structs = [_struct(shapes[array.name], array.dtype, of[array.name]) for array in spec.of_blocks]
        operands.append((*structs, _struct((4,), "int32", whole)))

    def write(arrays: Arrays, operands: Sequence[Arrays]) -> Arrays:
        written: list[jax.Array] = []
        for (spec, _, count), writer, (*blocks, where) in zip(key, writers, operands, strict=True):
            written += writer(arrays[len(written) : len(written) + len(spec.of_blocks) * count], blocks, where)
        return *written, _stamped(arrays[-1], operands[0][-1][0])

    arrays.append(_struct(stamps, "int32", placements[-1]))
    mesh = meshes.pop() if len(meshes) == 1 else None
    return _compile(write, mesh, placements, arrays, (tuple(operands),))


def _write_sites(
    spec: SlotSpec,
    count: int,
    over: tuple[str, ...],
    alone: tuple[str, ...],
    one_launch: bool,
    arrays: Arrays,
    blocks: Sequence[jax.Array],
    where: jax.Array,
) -> Arrays:
    held = [arrays[i * count : (i + 1) * count] for i in range(len(spec.of_blocks))]
    return write_block(spec, held, blocks, where, over, alone, one_launch=one_launch)


@lru_cache(maxsize=32)
def compiled_whole(
    name: str, specs: tuple[SlotSpec, ...], stamps: tuple[int, ...], placements: tuple[ArrayPlacement, ...]
) -> Launch:
    """Compile the program that writes the ranks and scales, or an extra, of one slot, and increments its stamp.

    Its signature is `write(*arrays, values, [slot, 0, 0, 0])`. The arrays are those of all sites that hold the array,
    and the stamps. They are donated. `values` are those of one slot, one site after the other: `rank_values`, flat, or
    `slot_values`.

    Args:
      name: "ranks" or `Extra.name`.
      specs: Specs of the sites.
      stamps: As in `compiled_write`.
      placements: Placements of the arrays.
    """

    def write(arrays: Arrays, values: jax.Array, where: jax.Array) -> Arrays:
        return *write_whole(name, specs, arrays[:-1], values, where[0], stamps[-1]), _stamped(arrays[-1], where[0])

    meshes = {spec.sharding.mesh for spec in specs if spec.sharding is not None}
    held = [(spec.arrays[name], where) for spec, where in zip(specs, placements[:-1], strict=True)]
    split = all(array.sharding == where for array, where in held)
    mesh = meshes.pop() if meshes and split else None
    arrays = [_struct(array.shape, array.dtype, where) for array, where in held]
    arrays.append(_struct(stamps, "int32", placements[-1]))
    total = sum(math.prod(array.slot_shape) for array, _ in held)
    whole = everywhere(placements[0])
    operands = [_struct((total,), "float32", whole), _struct((4,), "int32", whole)]
    return _compile(write, mesh, placements, arrays, operands)


def _stamped(stamps: jax.Array, slot: jax.Array) -> jax.Array:
    return stamps.at[..., slot].add(1)


def _struct(shape: tuple[int, ...], dtype: str, where: ArrayPlacement) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if isinstance(where, Device) else where)


def _spec_of(struct: jax.ShapeDtypeStruct) -> PartitionSpec:
    return cast("NamedSharding", struct.sharding).spec


def _compile(
    write: Callable[..., Arrays],
    mesh: Any,
    placements: Sequence[ArrayPlacement],
    arrays: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[Any],
) -> Launch:
    """Compile a write program ahead of time.

    `jax.jit` would compile again under another precision or debugging option. On a mesh, each device writes its shard
    of the operands, without communication.
    """
    donated = tuple(arrays)
    if mesh is not None:
        kept, *given = jax.tree.map(_spec_of, (donated, *operands))
        write = jax.shard_map(write, mesh=mesh, in_specs=(kept, *given), out_specs=kept, check_vma=False)
    devices = {where for where in placements if isinstance(where, Device)}
    lying = tuple(array.sharding for array in donated)
    jitted = jax.jit(write, donate_argnums=0, keep_unused=True, out_shardings=lying)
    with jax.default_device(next(iter(devices), None)), jax.disable_jit(False):
        return launch_of(jitted.lower(donated, *operands).compile(without_graphs(a_device(placements[0]).platform)))
