"""Which layers of a model are wrapped, the sites of each, and why the others take no adapter."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jlora.config import LoRAConfig
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.discover import Found, discover
from jlora.layers.experts import prefix_of, shared_sites
from jlora.layers.pieces import too_many_pieces
from jlora.layers.select import PackedModules, Selection, packed_modules_of, slices, tied_heads
from jlora.layers.site import Site, SlotSpec
from jlora.layers.specs import EmbedSpec, ExpertsSpec, LinearSpec
from jlora.layers.wrapped import WrappedModel
from jlora.sharding.rules import KernelSharding, kernel_sharding

_MaxRank: TypeAlias = Callable[[Iterable[str]], int]

_ATTEND = "jlora_attend"


def choose(
    wrapped: WrappedModel, config: LoRAConfig, packed_modules: PackedModules | None
) -> list[tuple[Found, list[Site]]]:
    """The layers to wrap and the sites of each. Nothing is changed yet."""
    model = wrapped.model
    packed = packed_modules_of(model, packed_modules)
    everything = discover(model)
    for found in everything:
        if "jlora_tracking" in vars(found.module):
            raise LoRAError(f"{found.aliases[0]}: this model is wrapped already; call unwrap() on its manager first")
    no_head, heads = tied_heads(everything)
    selection = Selection(config)
    mesh = _mesh_of(everything)
    if mesh is None and (config.fully_sharded or config.data_axes) and not any(_named(everything)):
        raise LoRAUsageError(
            "LoRAConfig.fully_sharded and data_axes are for models on a mesh, and no parameter of this one lies on one"
        )
    plans: list[tuple[Found, list[Site]]] = []
    others: list[str] = []
    for found in everything:
        path, key = found.aliases[0], id(found.module)
        sites = _sites(found, config, selection.max_rank, packed, no_head, heads, mesh)
        holds = any(isinstance(value, nnx.Variable) for value in vars(found.module).values())
        if isinstance(sites, str):
            excluded = selection.exclusions(found.aliases)
            if not excluded and (hits := selection.hits(found.aliases)):
                name = type(found.module).__name__
                raise LoRAUsageError(f"target_modules {hits} match {path!r} ({name}), but {sites}")
            wrapped.unwrapped.update((alias, sites) for alias in found.aliases)
            others += [path] if holds else []
            continue
        if isinstance(found.spec, EmbedSpec):
            for role, reason in found.reasons.items():
                names = found.aliases if role == "lookup" else [f"{alias}.attend" for alias in found.aliases]
                wrapped.unwrapped.update((alias, reason) for alias in names)
            if key in no_head:
                wrapped.unwrapped.update((f"{alias}.attend", no_head[key]) for alias in found.aliases)
        chosen: list[Site] = []
        for site in sites:
            reason = selection.why_not((*site.aliases, *site.parts))
            if reason is None:
                chosen.append(site)
            else:
                names = (*site.aliases, *site.parts) if site.spec.experts else site.aliases
                wrapped.unwrapped.update(dict.fromkeys(names, reason))
                others.append(site.path)
        if chosen:
            plans.append((found, chosen))
    selection.finish(type(model).__name__)
    if not plans:
        raise LoRAError(f"{type(model).__name__} has no layer that can serve LoRA")
    _stamp(plans)
    wrapped.others = (*others, *(name for name in wrapped.unwrapped if name.endswith(".attend")))
    return plans


def _stamp(plans: list[tuple[Found, list[Site]]]) -> None:
    """Let one site have the stamps: the first that has all slots and is no stack of layers, for those come in parts."""
    every = [(sites, i) for _, sites in plans for i in range(len(sites))]
    whole = [(sites, i) for sites, i in every if not sites[i].spec.rows] or [
        (sites, i) for sites, i in every if sites[i].spec.experts is None
    ]
    sites, i = (whole or every)[0]
    sites[i] = replace(sites[i], stamped=True)


def _sites(
    found: Found,
    config: LoRAConfig,
    max_rank: _MaxRank,
    packed: PackedModules,
    no_head: dict[int, str],
    heads: set[int],
    mesh: Mesh | AbstractMesh | None,
) -> list[Site] | str:
    """The sites of one layer, or why it has none."""
    spec, aliases = found.spec, found.aliases
    if isinstance(spec, str):
        return spec
    if isinstance(spec, ExpertsSpec):
        products = [_product_site(found, spec, name, config, max_rank, mesh) for name in spec.products]
        sites = [site for site in products if isinstance(site, Site)]
        return sites or next(reason for reason in products if isinstance(reason, str))
    param: jax.Array | jax.ShapeDtypeStruct = vars(found.module)[spec.param].get_value()
    axes = 2 if isinstance(spec, EmbedSpec) else len(spec.in_axes) + len(spec.out_axes)
    stored = _stored(param, axes, config)
    if isinstance(stored, str):
        return stored
    layers, dtype = stored

    def slot_spec(linear: LinearSpec, sizes: tuple[int, ...], names: Iterable[str]) -> SlotSpec:
        k = linear.real_in
        slots = SlotSpec(layers, config.max_loras, k, sizes, max_rank(names), dtype)
        return slots if mesh is None else _on_mesh(slots, mesh, found.aliases[0], spec.param, param, linear, config)

    if isinstance(spec, LinearSpec):
        sizes, parts = slices(found.module, aliases, spec.real_out, packed)
        slots = slot_spec(spec, sizes, (*aliases, *parts))
        guess, exact = found.inferred, config.bitwise_base
        return [Site(aliases[0], aliases, "linear", slots, parts, config.backend, inferred=guess, bitwise_base=exact)]
    sites: list[Site] = []
    key = id(found.module)
    if spec.lookup is not None:
        parts = dict.fromkeys(aliases, (0, 1))
        slots = slot_spec(spec.table, (spec.features,), aliases)
        sites.append(Site(aliases[0], aliases, "embedding", slots, parts, config.backend))
    if spec.attend is not None and key not in no_head:
        # PEFT calls the weights of tied logits "lm_head", where no layer has that name.
        names = tuple(f"{alias}.attend" for alias in aliases)
        also = ("lm_head",) if key in heads else ()
        parts = dict.fromkeys((*aliases, *names, *also), (0, 1))
        slots = slot_spec(spec.head, (spec.rows,), parts)
        sites.append(Site(names[0], (*names, *also), "linear", slots, parts, config.backend, prefix=_ATTEND))
    return sites or no_head.get(key, "its spec leaves it no method that serves LoRA")


def _sharding_of(param: Any) -> Any:
    """Of an array, or of the shape that stands for one."""
    return getattr(param, "sharding", None)


def _named(everything: Sequence[Found]) -> Iterable[tuple[str, NamedSharding]]:
    """(name, sharding) of the parameters that lie on a mesh, be it of one device."""
    for found in everything:
        for name, value in vars(found.module).items():
            sharding = _sharding_of(value.get_value()) if isinstance(value, nnx.Variable) else None
            if isinstance(sharding, NamedSharding):
                yield f"{found.aliases[0]}.{name}", sharding


def _mesh_of(everything: Sequence[Found]) -> Mesh | AbstractMesh | None:
    """The mesh that the model's parameters lie on; None if none lies on several devices."""
    meshes: dict[Mesh | AbstractMesh, str] = {}
    for name, sharding in _named(everything):
        if sharding.mesh.size > 1:
            meshes.setdefault(sharding.mesh, name)
    if len(meshes) > 1:
        (one, first), (other, second), *_ = meshes.items()
        raise LoRAError(
            f"the parameters of the model lie on different meshes, {first} on {dict(one.shape)} and {second} on "
            f"{dict(other.shape)}: move them to one"
        )
    return next(iter(meshes), None)


def _on_mesh(
    slots: SlotSpec, mesh: Mesh | AbstractMesh, path: str, name: str, param: Any, linear: LinearSpec, config: LoRAConfig
) -> SlotSpec:
    """The spec of a layer's slot arrays as they are split. Raises LoRAError where the kernel's split is not served."""
    where = f"{path}.{name}"
    stack = len(slots.stack)
    first = stack + (slots.experts is not None)
    axes = [[first + axis for axis in group] for group in (linear.in_axes, linear.out_axes)]
    axes += [[stack]] if slots.experts is not None else []
    data = tuple(config.data_axes)
    found = kernel_sharding(where, _sharding_of(param), axes, param.shape, data, config.fully_sharded)
    found = KernelSharding(mesh, data=data, fully=config.fully_sharded) if found is None else found
    slots = replace(
        slots,
        sharding=found,
        in_blocks=linear.columns_in.blocks if found.ins and linear.columns_in is not None else (),
        out_blocks=linear.columns_out.blocks if found.outs and linear.columns_out is not None else (),
    )
    shards = found.size(found.b[2])
    if slots.stored_out % shards:
        raise LoRAError(
            f"{where}: LoRAConfig.fully_sharded splits its {slots.stored_out} outputs over the axes "
            f"{' and '.join(map(repr, found.b[2]))} of the mesh, {shards} shards, which do not divide them; leave it "
            "out with LoRAConfig.exclude_modules, or set fully_sharded=False"
        )
    if problem := too_many_pieces(slots):
        raise LoRAError(f"{where}: {problem}")
    return slots


def _stored(param: Any, axes: int, config: LoRAConfig) -> tuple[int | None, str] | str:
    """Layers of the stack that a parameter is, and the dtype of its slots; or why it has none."""
    stack = param.ndim - axes
    if stack > 1:
        return f"its parameter has shape {tuple(param.shape)}: {stack} axes more than one stack of layers"
    dtype = str(jnp.dtype(param.dtype if config.dtype is None else cast("Any", config.dtype)))
    if not jnp.issubdtype(dtype, jnp.floating):
        return f"its parameter is {dtype}; set LoRAConfig.dtype to a floating dtype for the slots"
    return param.shape[0] if stack else None, dtype


def _product_site(
    found: Found, spec: ExpertsSpec, name: str, config: LoRAConfig, max_rank: _MaxRank, mesh: Mesh | AbstractMesh | None
) -> Site | str:
    """The site of one grouped product of experts, or why it has none."""
    linear, names = spec.products[name], spec.names[name]
    param: Any = vars(found.module)[linear.param].get_value()
    stored = _stored(param, 1 + len(linear.in_axes + linear.out_axes), config)
    if isinstance(stored, str):
        return stored
    layers, dtype = stored
    sizes = (linear.real_out // len(names),) * len(names)
    aliases = tuple(f"{alias}.{linear.param}" for alias in found.aliases)
    fused = [f"{alias}.gate_up_proj" for alias in found.aliases if len(names) == 2]  # what adapters of both call it
    parts: dict[str, tuple[int, int]] = dict.fromkeys((*aliases, *fused), (0, len(names)))
    for i, called in enumerate(names):
        parts.update((f"{alias}.{one}", (i, 1)) for alias in found.aliases for one in called if one != linear.param)
    rank = max_rank((*aliases, *parts))
    shared = config.max_shared_expert_loras
    num_slots = config.max_expert_loras or config.max_loras - shared
    slots = SlotSpec(layers, num_slots, linear.real_in, sizes, rank, dtype, spec.experts)
    if mesh is not None:
        slots = _on_mesh(slots, mesh, found.aliases[0], linear.param, param, linear, config)
    site = Site(aliases[0], aliases, "linear", slots, parts, config.backend, prefix=prefix_of(name))
    return replace(site, shared=shared_sites(site, names, shared)) if shared else site
