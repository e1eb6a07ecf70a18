"""The mesh that the calling code runs on: axes that are Explicit, axes of which it is one shard, and the one map.

And whether that makes it the code of a shard of a layer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jlora.errors import LoRAError
from jlora.layers.site import Site, SlotSpec
from jlora.sharding.rules import KernelSharding, Names, names_of, partition


def across_mesh(compute: Callable[..., Array], base: Array, *args: Any) -> Array:
    """`compute(base, *args)`, of base's shape and sharding.

    Where axes of the mesh are Explicit, JAX wants the sharding of each intermediate value written out; inside, the
    compiler is asked to find them, as it does everywhere else.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = tuple(name for name in mesh.axis_names if name in explicit_axes(mesh))
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


def manual_axes(mesh: Any) -> frozenset[str]:
    """Axes of a mesh along which the code that runs now is that of a shard."""
    return frozenset(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual)


def explicit_axes(mesh: Any) -> frozenset[str]:
    return frozenset(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def _without(spec: PartitionSpec, names: frozenset[str]) -> PartitionSpec:
    return partition(*(tuple(name for name in names_of(entry) if name not in names) for entry in spec))


def on_mesh(
    sharding: KernelSharding, local: Callable[..., Any], in_specs: Sequence[Any], out_specs: PartitionSpec
) -> Callable[..., Any]:
    """`jax.shard_map` of `local` over the axes of the mesh along which the calling code is not that of a shard.

    Without a mesh it is `local`, as `across_mesh` has it.
    """
    if not sharding.mesh.axis_names:
        return functools.partial(across_mesh, local)
    context = jax.sharding.get_abstract_mesh()
    manual = manual_axes(context)
    names = frozenset(sharding.mesh.axis_names) - manual
    if not names:
        return local
    in_specs = [jax.tree.map(functools.partial(_without, names=manual), spec, is_leaf=_is_spec) for spec in in_specs]
    out_specs = _without(out_specs, manual)
    mapped = jax.shard_map(
        local,
        mesh=sharding.mesh if context.empty else None,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names=set(names),
        check_vma=False,  # kernels do not say along which axes their results vary
    )
    explicit = explicit_axes(context)
    if not explicit:
        return mapped

    def moved(*args: Any) -> Any:
        """Where axes are Explicit, operands are asked to lie as they will be used."""
        of_explicit = [
            jax.tree.map(functools.partial(_without, names=names - explicit), spec, is_leaf=_is_spec)
            for spec in in_specs
        ]
        return mapped(*(_resharded(spec, arg) for spec, arg in zip(of_explicit, args, strict=True)))

    return moved


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def _resharded(specs: Any, operands: Any) -> Any:
    """Operands moved to where their specs say; a spec may stand for a whole tree."""

    def move(spec: PartitionSpec, operand: Any) -> Any:
        return jax.tree.map(functools.partial(jax.sharding.reshard, out_shardings=spec), operand)

    return jax.tree.map(move, specs, operands, is_leaf=_is_spec)


_NO_MESH = KernelSharding(AbstractMesh((), ()))


def split_of(slots: SlotSpec) -> KernelSharding:
    """How the kernel of a layer is split: over the axes of an empty mesh where it lies on none."""
    return slots.sharding or _NO_MESH


def check_mesh(site: Site) -> None:
    """Raises `LoRAError` where the mesh of the calling code is not that of the layer."""
    context, mesh = jax.sharding.get_abstract_mesh(), split_of(site.spec).mesh
    if not context.empty and any(context.shape.get(name) != size for name, size in mesh.shape.items()):
        raise LoRAError(
            f"{site.path}: the model lies on a mesh {dict(mesh.shape)}, and is called where jax.set_mesh or "
            f"jax.shard_map gives {dict(context.shape)}; give the model's own, or none"
        )


def reached(site: Site) -> bool:
    """Whether the code that runs now is that of a shard of K: then an output of the layer is a part of a sum.

    Raises:
      LoRAError: it is that of a shard along some of the axes that K is split over.
    """
    return _inside(site, split_of(site.spec).ins, "input features")


def experts_reached(site: Site) -> bool:
    """Whether the code that runs now is that of a shard of experts. Raises as `reached`."""
    return _inside(site, split_of(site.spec).experts, "experts")


def _inside(site: Site, axes: Names, what: str) -> bool:
    inside = [name for name in axes if name in manual_axes(jax.sharding.get_abstract_mesh())]
    if inside and len(inside) < len(axes):
        raise LoRAError(
            f"{site.path}: its {what} are split over {' and '.join(map(repr, axes))}, and it is called inside a "
            f"jax.shard_map over {' and '.join(map(repr, inside))} alone; map all of these axes or none"
        )
    return bool(inside)


def parts_of(site: Site) -> tuple[int, int]:
    """Of how many parts the code that runs now has one, of the layer's K and of its N."""
    sharding, manual = split_of(site.spec), manual_axes(jax.sharding.get_abstract_mesh())
    ins, outs = (tuple(name for name in names if name in manual) for names in (sharding.ins, sharding.outs))
    return sharding.size(ins), sharding.size(outs)
