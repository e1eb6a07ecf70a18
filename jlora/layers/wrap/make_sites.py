"""Choose the layers of a model to wrap and make their sites, or the reasons why they take no adapter."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jlora.config import CONFIG_DTYPES, LoRAConfig, count_expert_slots, slot_dtype
from jlora.errors import LoRAError, LoRAUsageError, nearest
from jlora.layers.base_kernel import Kernel, arrays_of, kernel_of
from jlora.layers.forward.experts import prefix_of, shared_sites
from jlora.layers.forward.merged_columns import too_many_pieces
from jlora.layers.site import HEAD, SEQUENCES, Site, SlotSpec
from jlora.layers.specs import Doubt, EmbedSpec, ExpertsSpec, LinearSpec, Spec, own_attribute
from jlora.layers.variants import finishers_of
from jlora.layers.variants.finisher import Finisher
from jlora.layers.wrap.discover import ModuleInfo, discover
from jlora.layers.wrap.select import (
    Heads,
    PackedModules,
    check_names,
    exclusion,
    is_position_table,
    largest_rank,
    longest,
    matching,
    not_selected,
    packed_modules_of,
    part_names,
    slices,
    tied_heads,
)
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.sharding.rules import KernelSharding, kernel_sharding

_ATTEND = "jlora_attend"
_WIDTHS = ("bfloat16", "float16", "float32", "float64")  # parameter dtypes that slots can have
_POSITIONS = Doubt(
    "by its name it is a table of positions, whose rows are not those of sequences",
    "leave it out with LoRAConfig.exclude_modules",
)
_HEAD = Doubt(
    "it is not known whether the model computes its logits with this table",
    "say so: tie_word_embeddings = True on the model, its config or the table",
)
_SHOWN = 8  # kinds of layers in a message


@dataclass(frozen=True)
class _Use:
    """One use of a layer where LoRA may be served: a projection, a lookup, the logits of a table, or a product.

    Attributes:
      path: path of the site.
      names: names by which a configuration or a checkpoint can refer to it.
      make: function that returns its site, or raises `LoRAError`.
    """

    path: str
    names: tuple[str, ...]
    make: Callable[[], Site]


@dataclass(frozen=True)
class _Context:
    """State shared by all layers of a model while their sites are made."""

    config: LoRAConfig
    row_groups: Mapping[str, str]
    packed: PackedModules
    heads: Heads
    mesh: Mesh | AbstractMesh | None
    finishers: tuple[Finisher, ...]  # of linear layers
    headless: dict[str, str] = field(default_factory=dict[str, str])  # name of a wrapped layer -> why it takes no head


def make_sites(
    wrapped: WrappedModel, packed_modules: PackedModules | None, row_groups: Mapping[str, str]
) -> list[tuple[ModuleInfo, list[Site]]]:
    """Return the layers to wrap with the sites of each. The model is not changed.

    A layer that cannot be served is left out, with its reason in `wrapped.unwrapped`. Wrapped layers with a `doubt`
    start in `wrapped.unserved`.

    Raises:
      LoRAError: the model is wrapped already, no layer of it can serve LoRA, or as in `_mesh_of`.
      LoRAUsageError: a configured name matches no layer, or only layers that cannot be wrapped; a variant is unknown;
        or as in `_mesh_of`.
    """
    model, config = wrapped.model, wrapped.sites.config
    packed = packed_modules_of(model, packed_modules)
    everything = discover(model, lambda aliases: exclusion(config, (*aliases, *part_names(aliases, packed))))
    for info in everything:
        if "jlora_sites" in vars(info.module):
            raise LoRAError(f"{info.aliases[0]}: this model is wrapped already; call unwrap() on its manager first")
    heads = tied_heads(model, everything, config.target_modules or ())
    context = _Context(config, row_groups, packed, heads, _mesh_of(everything, config), finishers_of(config))
    layers: list[tuple[ModuleInfo, list[Site]]] = []
    others: dict[str, str] = {}  # path -> class
    selected: list[str] = []  # names of wrapped and of excluded layers
    refused: list[tuple[Sequence[str], str]] = []  # names of a layer that cannot be wrapped, the layer with the reason
    known: list[str] = []
    for info in everything:
        path, name = info.aliases[0], type(info.module).__name__
        uses = [] if isinstance(info.spec, str) else _uses(info, info.spec, context)
        if not uses:
            reason = info.spec if isinstance(info.spec, str) else heads.reasons.get(id(info.module), _NO_METHOD)
            if info.excluded:
                # Configured names of its uses are valid, although its actual uses are unknown.
                selected += (*info.aliases, *part_names(info.aliases, packed), "lm_head")
                selected += [f"{alias}.{use}" for alias in info.aliases for use in ("attend", *vars(info.module))]
            else:
                refused.append((info.aliases, f"{path!r} ({name}), but {reason}"))
            wrapped.unwrapped.update(dict.fromkeys(_names_of_unwrapped(info, packed), reason))
            if info.candidate:
                others[path] = name
            continue
        if isinstance(info.spec, EmbedSpec):
            for role, reason in info.reasons.items():
                names = info.aliases if role == "lookup" else [f"{alias}.attend" for alias in info.aliases]
                wrapped.unwrapped.update((alias, reason) for alias in names)
            if (reason := heads.reasons.get(id(info.module))) is not None:
                wrapped.unwrapped.update((f"{alias}.attend", reason) for alias in info.aliases)
        chosen: list[Site] = []
        for use in uses:
            reason = not_selected(config, use.names)
            made = reason or _site_or_reason(use, context)
            known += use.names
            if reason is not None or isinstance(made, Site):
                selected += use.names
            else:
                refused.append((use.names, f"{use.path!r} ({name}), but {made}"))
            if isinstance(made, Site):
                chosen.append(made)
            else:
                wrapped.unwrapped.update(dict.fromkeys(use.names, made))
                others[use.path] = name
        if chosen:
            layers.append((info, chosen))
    check_names(config, row_groups, type(model).__name__, selected, refused, known)
    if not layers:
        raise LoRAError(f"{type(model).__name__} has no layer that can serve LoRA{_listed(others, wrapped.unwrapped)}")
    _stamp(layers)
    every = [site for _, sites in layers for site in sites]
    wrapped.headless = context.headless
    _check_saved_heads(wrapped, every)
    attends = [name for name in wrapped.unwrapped if name.endswith(".attend") and name not in others]
    wrapped_names = {alias for site in every for alias in site.aliases}
    wrapped.others = tuple(name for name in (*others, *attends) if name not in wrapped_names)
    wrapped.set_unserved({site: site.doubt.reason for site in every if site.doubt is not None})
    return layers


def _check_saved_heads(wrapped: WrappedModel, sites: Sequence[Site]) -> None:
    """Raise `LoRAUsageError` if a name in `saved_heads` matches no layer that an adapter can replace."""
    able = [alias for site in sites if site.head is not None for alias in site.aliases]
    for name in wrapped.sites.config.saved_heads or ():
        if not matching([name], able):
            reasons = {**wrapped.unwrapped, **wrapped.headless}
            why = next((f"; {path!r}: {reasons[path]}" for path in reasons if matching([name], [path])), None)
            known = [alias for site in sites if site.kind == "linear" for alias in site.aliases]
            raise LoRAUsageError(
                f"LoRAConfig.saved_heads names {name!r}, and no wrapped layer of that name can be replaced by a saved "
                f"head{nearest(name, known) if why is None else why}"
            )


_NO_METHOD = "its spec leaves it no method that serves LoRA"


def _names_of_unwrapped(info: ModuleInfo, packed: PackedModules) -> Iterable[str]:
    """Yield the checkpoint names of a module without any known use."""
    yield from info.aliases
    yield from part_names(info.aliases, packed)
    if isinstance(info.module, nnx.Embed):
        yield from (f"{alias}.attend" for alias in info.aliases)


def _site_or_reason(use: _Use, context: _Context) -> Site | str:
    """Return the site of a use, or the reason why it has none."""
    try:
        config, group = context.config, longest(context.row_groups, use.names)
        group = None if group is None else context.row_groups[group]
        options = {"bitwise_base": config.bitwise_base, "batch_invariant": config.batch_invariant}
        own = options | {"finite": not config.allow_nonfinite, "row_group": group}
        site = replace(use.make(), **own)
        return site if site.head is None else replace(site, head=replace(site.head, **own))
    except LoRAError as error:
        return str(error)


def _listed(others: Mapping[str, str], reasons: Mapping[str, str]) -> str:
    """Return a message that lists the unserved layers, the first of each kind, with the reason."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for path, name in others.items():
        kinds.setdefault((name, reasons[path]), []).append(path)
    lines = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({name}): {reason}"
        for (name, reason), paths in kinds.items()
    ]
    if len(lines) > _SHOWN:
        lines = [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more kinds"]
    return ":\n  " + "\n  ".join(lines) if lines else ": no module of it holds a matrix"


def _stamp(layers: list[tuple[ModuleInfo, list[Site]]]) -> None:
    """Mark one site of the model as stamped.

    Prefer a site that is certain to serve, is called in every step (no tower of images), has all slots, and is not
    stacked, since a stack of layers is written in parts.
    """
    every = [(sites, i) for _, sites in layers for i in range(len(sites))]
    every = [(sites, i) for sites, i in every if sites[i].row_group in (None, SEQUENCES)] or every
    sure = [(sites, i) for sites, i in every if sites[i].doubt is None] or every
    whole = [(sites, i) for sites, i in sure if not sites[i].spec.entries] or [
        (sites, i) for sites, i in sure if sites[i].spec.experts is None
    ]
    sites, i = (whole or sure)[0]
    sites[i] = replace(sites[i], stamped=True)


def _uses(info: ModuleInfo, spec: Spec, context: _Context) -> list[_Use]:
    """Return the uses of one layer where LoRA may be served."""
    aliases, backend = info.aliases, context.config.backend
    if isinstance(spec, ExpertsSpec):
        return [_product_use(info, spec, name, context) for name in spec.products]
    if isinstance(spec, LinearSpec):

        def projection() -> Site:
            sizes, parts = slices(info.module, aliases, spec.real_out, context.packed)
            slot_spec = _slot_spec(info, spec, spec, sizes, (*aliases, *parts), context)
            site = Site(aliases[0], aliases, "linear", slot_spec, parts, backend, doubt=info.guess)
            return replace(site, head=_head(info.module, site, spec, context))

        return [_Use(aliases[0], (*aliases, *part_names(aliases, context.packed)), projection)]
    uses: list[_Use] = []
    key = id(info.module)
    if spec.lookup is not None:

        def lookup() -> Site:
            slot_spec = _slot_spec(info, spec, spec.table, (spec.features,), aliases, context)
            doubt = _POSITIONS if is_position_table(aliases) else None
            context.headless.update(dict.fromkeys(aliases, "it is an embedding, and only linear layers are replaced"))
            return Site(
                aliases[0], aliases, "embedding", slot_spec, dict.fromkeys(aliases, (0, 1)), backend, doubt=doubt
            )

        uses.append(_Use(aliases[0], aliases, lookup))
    if spec.attend is not None and key not in context.heads.reasons:
        # PEFT names the weights of tied logits "lm_head" if no layer has that name.
        names = (*(f"{alias}.attend" for alias in aliases), *(("lm_head",) if key in context.heads.lm_head else ()))

        def attend() -> Site:
            parts = dict.fromkeys((*aliases, *names), (0, 1))
            slot_spec = _slot_spec(info, spec, spec.head, (spec.head.real_out,), parts, context)
            doubt = None if key in context.heads.known else _HEAD
            for name in names:
                context.headless.setdefault(name, "its weight is that of an embedding (tied), which is not replaced")
            return Site(names[0], names, "linear", slot_spec, parts, backend, prefix=_ATTEND, doubt=doubt)

        uses.append(_Use(names[0], (*names, *aliases), attend))
    return uses


def _head(layer: nnx.Module, site: Site, spec: LinearSpec, context: _Context) -> Site | None:
    """Return the site of the saved heads of a linear layer, or None if it takes none.

    If no adapter can replace it, its names are added to `context.headless` with the reason.
    """
    slot_spec, saved = site.spec, context.config.saved_heads or {}
    sharding, reason = slot_spec.sharding, None
    plain = spec.rows is None and len(spec.out_axes) == len(spec.in_axes) == 1
    if not plain or spec.columns_in or spec.columns_out or slot_spec.stack or slot_spec.slices > 1:
        reason = "it is not a plain projection [..., K] to [..., N]"
    elif sharding is not None and sharding.outs:
        reason = f"its outputs are split over {' and '.join(sharding.outs)}; leave them whole"
    if reason is not None:
        context.headless.update(dict.fromkeys((*site.aliases, *site.parts), reason))
        return None
    if (name := matching(saved, site.aliases)) is None:
        return None
    sharding = None if sharding is None else replace(sharding, fully=False)
    dtype = _slot_dtype(layer, spec, spec, kernel_of(layer, spec), context.config)
    slot_spec = replace(slot_spec, out_sizes=(1,), max_rank=saved[name], dtype=dtype, sharding=sharding, finishers=())
    return Site(
        site.path,
        site.aliases,
        "head",
        slot_spec,
        dict.fromkeys(site.aliases, (0, 1)),
        site.backend,
        prefix=HEAD,
        biased=spec.bias is not None and vars(layer).get(spec.bias) is not None,
    )


def _product_use(info: ModuleInfo, spec: ExpertsSpec, name: str, context: _Context) -> _Use:
    """Return the use of one grouped product of experts."""
    linear, names = spec.products[name], spec.names[name]
    aliases = tuple(f"{alias}.{linear.param}" for alias in info.aliases)
    fused = [f"{alias}.gate_up_proj" for alias in info.aliases if len(names) == 2]  # name of both together in adapters
    parts: dict[str, tuple[int, int]] = dict.fromkeys((*aliases, *fused), (0, len(names)))
    for i, called in enumerate(names):
        parts.update((f"{alias}.{one}", (i, 1)) for alias in info.aliases for one in called if one != linear.param)

    def product() -> Site:
        sizes = (linear.real_out // len(names),) * len(names)
        slot_spec = _slot_spec(info, spec, linear, sizes, parts, context)
        site = Site(aliases[0], aliases, "linear", slot_spec, parts, context.config.backend, prefix=prefix_of(name))
        context.headless.update(dict.fromkeys(parts, "it is a product of experts, and only linear layers are replaced"))
        _, shared = count_expert_slots(context.config)
        return replace(site, shared=shared_sites(site, names, shared)) if shared else site

    return _Use(aliases[0], tuple(parts), product)


def _slot_spec(
    info: ModuleInfo, spec: Spec, linear: LinearSpec, sizes: tuple[int, ...], names: Iterable[str], context: _Context
) -> SlotSpec:
    """Return the spec of the slot arrays of one use of a layer. Raises LoRAError if none is possible."""
    config, experts = context.config, spec.experts if isinstance(spec, ExpertsSpec) else None
    kernel = kernel_of(info.module, linear)
    shape: tuple[int, ...] = () if kernel is None else tuple(kernel.array.shape)
    stack = 0 if kernel is None else len(shape) - len(linear.in_axes + linear.out_axes) - (experts is not None)
    if stack > 1:
        raise LoRAError(f"its parameter has shape {shape}: {stack} axes more than one stack of layers")
    table = isinstance(spec, EmbedSpec) and linear is spec.table
    in_int8 = slot_dtype(config.dtype, CONFIG_DTYPES) == "int8"
    slot_spec = SlotSpec(
        layers=next(iter(shape)) if stack else None,
        num_slots=config.max_loras if experts is None else count_expert_slots(config)[0],
        in_features=linear.real_in,
        out_sizes=sizes,
        max_rank=largest_rank(config, names),
        dtype="int8" if in_int8 and not table else _slot_dtype(info.module, spec, linear, kernel, config),
        experts=experts,
        finishers=() if table or experts is not None else context.finishers,
    )
    if context.mesh is None:
        return slot_spec
    return _on_mesh(slot_spec, context.mesh, info.aliases[0], kernel, linear, config)


def _slot_dtype(layer: nnx.Module, spec: Spec, linear: LinearSpec, kernel: Kernel | None, config: LoRAConfig) -> str:
    """Return the configured dtype of floats, else that of the spec, of the layer, or of the values of its kernel.

    Raises:
      LoRAError: the dtype of the kernel is needed, and slots cannot have it or there is no kernel.
    """
    configured = slot_dtype(config.dtype)  # None for int8
    declared = next((dtype for dtype in (configured, linear.dtype, spec.dtype) if dtype is not None), None)
    dtype = slot_dtype(own_attribute(layer, "dtype") if declared is None else declared)
    if dtype is not None:
        return dtype
    if kernel is not None and jnp.dtype(kernel.dtype).name in _WIDTHS:
        return jnp.dtype(kernel.dtype).name
    problem = "it has no parameter whose dtype slots could take"
    if kernel is not None:
        problem = f"its parameter {linear.param!r} is {jnp.dtype(kernel.dtype).name}, which slots cannot be"
    raise LoRAError(
        f"{problem}; give them a dtype: LoRAConfig(dtype=...) for all layers, or jlora.{type(spec).__name__}(..., "
        "dtype=...) for its class"
    )


def _sharding_of(param: Any) -> Any:
    """Return the sharding of an array or of its ShapeDtypeStruct, or None."""
    return getattr(param, "sharding", None)


def _named(everything: Iterable[ModuleInfo]) -> Iterable[tuple[str, NamedSharding]]:
    """Yield (name, sharding) of the parameters on a mesh, including a mesh of one device."""
    for info in everything:
        for name, array in arrays_of(info.module):
            sharding = _sharding_of(array)
            if isinstance(sharding, NamedSharding):
                yield f"{info.aliases[0]}.{name}", sharding


def _mesh_of(everything: Sequence[ModuleInfo], config: LoRAConfig) -> Mesh | AbstractMesh | None:
    """Return the mesh of the model's parameters, or None if no mesh has several devices.

    Excluded layers are considered only if no other layer is on such a mesh.

    Raises:
      LoRAError: there are several meshes.
      LoRAUsageError: mesh options are set without a mesh, or name axes that it lacks.
    """
    kept = list(_named(info for info in everything if not info.excluded))
    named = kept if any(sharding.mesh.size > 1 for _, sharding in kept) else list(_named(everything))
    if (config.fully_sharded or config.data_axes) and not named:
        raise LoRAUsageError(
            "LoRAConfig.fully_sharded and data_axes are for models on a mesh, and no parameter of this one lies on one"
        )
    meshes: dict[Mesh | AbstractMesh, str] = {}
    for name, sharding in named:
        if sharding.mesh.size > 1:
            meshes.setdefault(sharding.mesh, name)
    if len(meshes) > 1:
        (one, first), (other, second), *_ = meshes.items()
        raise LoRAError(
            f"the parameters of the model lie on different meshes, {first} on {dict(one.shape)} and {second} on "
            f"{dict(other.shape)}: move them to one"
        )
    for mesh, name in meshes.items():
        if missing := [axis for axis in config.data_axes if axis not in mesh.axis_names]:
            raise LoRAUsageError(
                f"LoRAConfig.data_axes names {missing[0]!r}, which is no axis of the mesh of {name}: it has "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
    return next(iter(meshes), None)


def _on_mesh(
    slot_spec: SlotSpec,
    mesh: Mesh | AbstractMesh,
    path: str,
    kernel: Kernel | None,
    linear: LinearSpec,
    config: LoRAConfig,
) -> SlotSpec:
    """Return the spec of a layer's slot arrays with their sharding. They are replicated for a layer without a kernel.

    Raises:
      LoRAError: the sharding of the kernel is not supported.
    """
    where = f"{path}.{linear.param}"
    stack = len(slot_spec.stack)
    first = stack + (slot_spec.experts is not None)
    axes = [[first + axis for axis in own] for own in (linear.in_axes, linear.out_axes)]
    axes += [[stack]] if slot_spec.experts is not None else []
    data = tuple(config.data_axes)
    sharding = None
    if kernel is not None:
        array = kernel.array
        sharding = kernel_sharding(where, _sharding_of(array), axes, array.shape, data, config.fully_sharded)
    sharding = KernelSharding(mesh, data=data, fully=config.fully_sharded) if sharding is None else sharding
    slot_spec = replace(
        slot_spec,
        sharding=sharding,
        in_blocks=linear.columns_in.blocks if sharding.ins and linear.columns_in is not None else (),
        out_blocks=linear.columns_out.blocks if sharding.outs and linear.columns_out is not None else (),
    )
    shards = sharding.size(sharding.b[2])
    if slot_spec.stored_out % shards:
        raise LoRAError(
            f"{where}: LoRAConfig.fully_sharded splits its {slot_spec.stored_out} outputs over the axes "
            f"{' and '.join(map(repr, sharding.b[2]))} of the mesh, {shards} shards, which do not divide them; set "
            "fully_sharded=False"
        )
    if problem := too_many_pieces(slot_spec):
        raise LoRAError(f"{where}: {problem}")
    return slot_spec
