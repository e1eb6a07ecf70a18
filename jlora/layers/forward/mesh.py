"""The mesh of the calling code: its Explicit and Manual axes, and `jax.shard_map` over the remaining ones.

Code inside a `jax.shard_map` runs on one shard along the Manual axes. `reached` and `experts_reached` detect code that
runs on one shard of a layer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jlora.errors import LoRAError
from jlora.layers.site import Site, SlotSpec
from jlora.sharding.rules import AxisNames, KernelSharding, names_of, partition


def across_mesh(compute: Callable[..., Array], base: Array, *args: Any) -> Array:
    """Return `compute(base, *args)`, with the shape and sharding of `base`.

    See `off_explicit`.
    """
    return off_explicit(compute, jax.typeof(base).sharding)(base, *args)


def off_explicit(compute: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Return `compute` for arrays on a mesh with Explicit axes, with these shardings of its results.

    On Explicit mesh axes JAX requires the sharding of each intermediate value. Inside `compute` these axes are Auto, so
    the compiler infers the shardings. On other meshes, and on single devices, it is `compute`.
    """
    meshes = [leaf.mesh for leaf in jax.tree.leaves(shardings) if isinstance(leaf, NamedSharding)]
    explicit = tuple(name for mesh in meshes[:1] for name in mesh.axis_names if name in explicit_axes(mesh))
    if not explicit:
        return compute
    return cast("Callable[..., Any]", jax.sharding.auto_axes(compute, axes=explicit, out_sharding=shardings))


def here(array: Array) -> Array:
    """Return an array that can be used inside a `jax.shard_map` and may come from outside of it.

    JAX assigns an outside array to another mesh, and few of its functions accept that.
    """
    return jnp.copy(array) if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types else array


def manual_axes(mesh: Any) -> frozenset[str]:
    """Return the axes of a mesh that are Manual: the code runs on one shard along them."""
    return frozenset(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual)


def explicit_axes(mesh: Any) -> frozenset[str]:
    """Return the Explicit axes of a mesh."""
    return frozenset(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def _without(spec: PartitionSpec, names: frozenset[str]) -> PartitionSpec:
    return partition(*(tuple(name for name in names_of(entry) if name not in names) for entry in spec))


def on_mesh(
    sharding: KernelSharding, local: Callable[..., Any], in_specs: Sequence[Any], out_specs: PartitionSpec
) -> Callable[..., Any]:
    """Map `local` over the mesh with `jax.shard_map`, along the axes that are not Manual already.

    Without a mesh, return `local` wrapped in `across_mesh`.
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
        check_vma=False,  # kernels do not declare the axes along which their results vary
    )
    explicit = explicit_axes(context)
    if not explicit:
        return mapped

    def moved(*args: Any) -> Any:
        """Reshard the operands along Explicit axes, then call the mapped function."""
        of_explicit = [
            jax.tree.map(functools.partial(_without, names=names - explicit), spec, is_leaf=_is_spec)
            for spec in in_specs
        ]
        return mapped(*(_resharded(spec, arg) for spec, arg in zip(of_explicit, args, strict=True)))

    return moved


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def _resharded(specs: Any, operands: Any) -> Any:
    """Return the operands resharded to their specs; one spec may cover a whole tree."""

    def move(spec: PartitionSpec, operand: Any) -> Any:
        return jax.tree.map(functools.partial(jax.sharding.reshard, out_shardings=spec), operand)

    return jax.tree.map(move, specs, operands, is_leaf=_is_spec)


_NO_MESH = KernelSharding(AbstractMesh((), ()))


def split_of(spec: SlotSpec) -> KernelSharding:
    """Return the sharding of a layer's kernel; one of an empty mesh if the layer is not on a mesh."""
    return spec.sharding or _NO_MESH


def check_mesh(site: Site) -> None:
    """Check that the mesh of the calling code is the mesh of the layer.

    Raises:
      LoRAError: the sizes of their axes differ.
    """
    context, mesh = jax.sharding.get_abstract_mesh(), split_of(site.spec).mesh
    if not context.empty and any(context.shape.get(name) != size for name, size in mesh.shape.items()):
        raise LoRAError(
            f"{site.path}: the model lies on a mesh {dict(mesh.shape)}, and is called where jax.set_mesh or "
            f"jax.shard_map gives {dict(context.shape)}; give the model's own, or none"
        )


def reached(site: Site) -> bool:
    """Return True if the calling code runs on one shard of K, so that the layer's output is a partial sum.

    Raises:
      LoRAError: it is one shard along only some of the axes that split K.
    """
    return _inside(site, split_of(site.spec).ins, "input features")


def experts_reached(site: Site) -> bool:
    """Return True if the calling code runs on one shard of the experts.

    Raises:
      LoRAError: it is one shard along only some of the axes that split the experts.
    """
    return _inside(site, split_of(site.spec).experts, "experts")


def _inside(site: Site, axes: AxisNames, what: str) -> bool:
    inside = [name for name in axes if name in manual_axes(jax.sharding.get_abstract_mesh())]
    if inside and len(inside) < len(axes):
        raise LoRAError(
            f"{site.path}: its {what} are split over {' and '.join(map(repr, axes))}, and it is called inside a "
            f"jax.shard_map over {' and '.join(map(repr, inside))} alone; map all of these axes or none"
        )
    return bool(inside)


def shards_of(site: Site) -> tuple[int, int]:
    """Return the number of shards of K and of N along the Manual axes, (1, 1) outside of `jax.shard_map`."""
    sharding, manual = split_of(site.spec), manual_axes(jax.sharding.get_abstract_mesh())
    ins, outs = (tuple(name for name in names if name in manual) for names in (sharding.ins, sharding.outs))
    return sharding.size(ins), sharding.size(outs)
