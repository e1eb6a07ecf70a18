"""Make the eligible layers of any `nnx.Module` serve LoRA, in place, all or none: each gets a subclass of its class."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jlora.config import LoRAConfig
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.coverage import Coverage
from jlora.layers.discover import Found, discover
from jlora.layers.embedding import embed_methods
from jlora.layers.experts import experts_methods, prefix_of, product_of, shared_sites
from jlora.layers.linear import linear_methods
from jlora.layers.pieces import too_many_pieces
from jlora.layers.select import PackedModules, Selection, packed_modules_of, slices, tied_heads
from jlora.layers.site import (
    Site,
    SlotParam,
    SlotSpec,
    allocate,
    attach,
    check_room,
    delete_attribute,
    detach,
    set_attribute,
)
from jlora.layers.specs import EmbedSpec, ExpertsSpec, LinearSpec, Spec
from jlora.sharding.put import own_values
from jlora.sharding.rules import KernelSharding, kernel_sharding

_SHARED = ("jlora_spec", "jlora_tracking")
MaxRank: TypeAlias = Callable[[Iterable[str]], int]

_OWN, _ATTEND = "jlora", "jlora_attend"


@dataclass(frozen=True)
class LayerInfo:
    """One layer, as `LoRAManager.layers()` shows it.

    Attributes:
      path: canonical dotted path; for what `skip` passed over, the checkpoint's name.
      aliases: the other paths that reach it.
      kind: "linear", "embedding", "experts" (one grouped product of them), "other" (a module that holds parameters and
        is none of these), "skipped".
      in_features, out_features: sizes an adapter must have; None where the layer is not wrapped.
      slot_bytes: bytes that one slot takes there, on a mesh of all devices together (what several hold counts once); 0
        where the layer is not wrapped.
      wrapped: whether it serves LoRA.
      reason: why it is not wrapped, or takes no adapter yet; None where it serves.
      shared_slot_bytes: bytes that one slot of `max_shared_expert_loras` takes there.
    """

    path: str
    aliases: tuple[str, ...]
    kind: str
    in_features: int | None
    out_features: int | None
    slot_bytes: int
    wrapped: bool
    reason: str | None
    shared_slot_bytes: int = 0


class WrappedModel:
    """A wrapped model: its sites, the layer of each, and what could not be wrapped.

    Attributes:
      modules: Site -> layer.
      tracking: shared by all layers; knows which of them the traced forward calls.
      unwrapped: path -> why that module takes no adapter.
      others: those of them that `layers` shows: what holds variables, and uses of a table.
      classes: id of a layer -> the class it had.
      skip: patterns of checkpoint modules that this process lacks on purpose.
      skipped: checkpoint name -> the pattern that passed it over, as adapters brought them.
    """

    def __init__(self, model: nnx.Module, skip: tuple[re.Pattern[str], ...] = ()):
        self.model = model
        self.modules: dict[Site, nnx.Module] = {}
        self.tracking = Coverage()
        self.unwrapped: dict[str, str] = {}
        self.skip = skip
        self.skipped: dict[str, str] = {}
        self.classes: dict[int, type] = {}
        self.others: tuple[str, ...] = ()

    @property
    def provisional(self) -> dict[Site, str]:
        """Sites that take no adapter until `verify` has confirmed their spec -> the reason."""
        return {site: site.inferred.reason for site in self.modules if site.inferred and site.provisional}

    def skips(self, name: str) -> bool:
        """Whether a checkpoint module is passed over by one of the `skip` patterns; it is counted then."""
        pattern = next((pattern for pattern in self.skip if pattern.search(name)), None)
        if pattern is not None:
            self.skipped[name] = pattern.pattern
        return pattern is not None

    def layers(self) -> tuple[LayerInfo, ...]:
        """What is wrapped, what is not and why, and what `skip` passed over so far."""
        provisional = self.provisional
        wrapped = [
            LayerInfo(
                site.path,
                site.aliases[1:],
                "experts" if site.spec.experts else site.kind,
                site.spec.in_features,
                site.spec.out_features,
                site.slot_nbytes,
                True,
                provisional.get(site),
                site.shared_slot_nbytes,
            )
            for site in self.modules
            if site.spec.whole
        ]
        shown = {alias for site in self.modules for alias in site.aliases}
        other = [
            LayerInfo(path, (), "other", None, None, 0, False, self.unwrapped[path])
            for path in self.others
            if path not in shown
        ]
        skipped = [
            LayerInfo(name, (), "skipped", None, None, 0, False, f"passed over by skip={pattern!r}")
            for name, pattern in sorted(self.skipped.items())
        ]
        return (*wrapped, *other, *skipped)

    def check(self) -> None:
        """Raises `LoRAError` once the model was given back."""
        if not self.modules:
            raise LoRAError("this manager gave its model back (unwrap); make a new LoRAManager")

    def unwrap(self) -> None:
        """Give the model back as it was: classes restored, slot arrays gone. An interrupt is raised when it is done."""
        try:
            self._restore()
        except BaseException:
            self._restore()  # a model that is wrapped in part is of no use to anybody
            raise

    def _restore(self) -> None:
        """Can be called again where it was cut short."""
        for site, layer in self.modules.items():
            take_off(layer, site, self.classes[id(layer)])
        self.modules = {}

    @property
    def paths(self) -> dict[Site, str]:
        """Site -> the path of its layer."""
        return {s: s.path if s.prefix == _OWN else s.path.rpartition(".")[0] for s in self.modules}


def wrap_model(
    model: nnx.Module,
    config: LoRAConfig,
    packed_modules: PackedModules | None = None,
    skip: Sequence[str] = (),
    make: Callable[[Site], dict[str, SlotParam]] = allocate,
) -> WrappedModel:
    """Wrap the eligible layers of `model` in place and give them zero slots.

    Args:
      model: any `nnx.Module`; layers reachable by several paths are wrapped once.
      config: sizes, dtype, target_modules, exclude_modules and backend.
      packed_modules: which checkpoint names make up a merged projection; None reads the model's own
        `packed_modules` attribute if it has one.
      skip: regular expressions, searched in the names of checkpoint modules that this process lacks on purpose.
      make: makes the slot arrays of a site; for a model of shapes alone, shapes.

    Raises:
      LoRAUsageError: a target that matches nothing or a layer that cannot be wrapped; a registered spec that its layer
        contradicts; a `skip` that is no list of regular expressions.
      LoRAError: the model is wrapped already; the slots do not fit in memory.
        Whatever is raised, the model is as it was.
    """
    wrapped = WrappedModel(model, skip_patterns(skip))
    plans = _choose(wrapped, config, packed_modules)
    arrays = {site: values for site, values in _allocate([site for _, sites in plans for site in _every(sites)], make)}
    kept = [(f.module, type(f.module), dict(vars(f.module))) for f, _ in plans]
    try:
        for found, sites in plans:
            for site in _every(sites):
                attach(found.module, site, arrays[site])
                wrapped.modules[site] = found.module
            set_attribute(found.module, "jlora_spec", found.spec)
            set_attribute(found.module, "jlora_tracking", wrapped.tracking)
            cls = type(found.module)
            wrapped.classes[id(found.module)] = cls
            _set_class(found.module, _lora_class(cls, _methods(found, sites)))
        wrapped.tracking.sites = tuple(wrapped.modules)
        wrapped.tracking.sharding = next(iter(wrapped.modules)).spec.sharding
        return wrapped
    except BaseException:
        # An interrupt too: no manager would be left to unwrap the model.
        for layer, cls, attributes in kept:
            _set_class(layer, cls)
            vars(layer).update(attributes)
            for name in set(vars(layer)) - set(attributes):
                del vars(layer)[name]
        raise


def survey(model: nnx.Module, config: LoRAConfig, packed_modules: PackedModules | None = None) -> WrappedModel:
    """What `wrap_model` would wrap. The model is left as it is, and its parameters may be shapes alone."""
    wrapped = WrappedModel(model)
    plans = _choose(wrapped, config, packed_modules)
    wrapped.modules = {site: found.module for found, sites in plans for site in _every(sites)}
    return wrapped


def take_off(layer: nnx.Module, site: Site, cls: type) -> None:
    """Undo what wrapping did to a layer for one of its sites; what is undone already is left alone."""
    _set_class(layer, cls)
    detach(layer, site)
    for name in _SHARED:
        delete_attribute(layer, name)


def spec_of(layer: nnx.Module, site: Site) -> LinearSpec | EmbedSpec:
    """What a wrapped layer computes at one of its sites."""
    spec: Spec = vars(layer)["jlora_spec"]
    return spec.products[product_of(site)] if isinstance(spec, ExpertsSpec) else spec


def checkpoint_weight(wrapped: WrappedModel, site: Site, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The base weight of a row as a checkpoint holds it: [N, K] of a linear layer, [V, F] of a table; no padding. And
    which of its values this process has."""
    module = wrapped.modules[site]
    spec = spec_of(module, site)
    weight, known = own_values(vars(module)[spec.param][...])
    own = np.broadcast_to(True, weight.shape) if known is None else known
    return _as_stored(spec, site, row, weight), _as_stored(spec, site, row, own)


def _as_stored(spec: LinearSpec | EmbedSpec, site: Site, row: int, weight: np.ndarray) -> np.ndarray:
    if site.spec.rows:
        weight = weight[np.unravel_index(row, site.spec.rows)]
    if isinstance(spec, EmbedSpec):
        return weight[: spec.rows]
    flat = weight.transpose(*spec.out_axes, *spec.in_axes).reshape(spec.out_features, spec.in_features)
    if spec.columns_out is not None:
        flat = flat[spec.columns_out.positions]
    return flat if spec.columns_in is None else flat[:, spec.columns_in.positions]


def skip_patterns(skip: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """The patterns of `skip`, compiled; they are searched in names. Raises LoRAUsageError."""
    if isinstance(skip, str) or not all(isinstance(pattern, str) and pattern for pattern in skip):
        raise LoRAUsageError(f"skip must be a list of regular expressions, got {skip!r}")
    try:
        return tuple(re.compile(pattern) for pattern in skip)
    except re.error as error:
        raise LoRAUsageError(f"skip: {error.pattern!r} is not a regular expression: {error}") from None


def _choose(
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


def _every(sites: Iterable[Site]) -> Iterable[Site]:
    """Sites, each with those of its shared slots."""
    return (held for site in sites for held in (site, *site.shared))


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
    max_rank: MaxRank,
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
        return [Site(aliases[0], aliases, "linear", slots, parts, config.backend, inferred=found.inferred)]
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
    found: Found, spec: ExpertsSpec, name: str, config: LoRAConfig, max_rank: MaxRank, mesh: Mesh | AbstractMesh | None
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


def _allocate(
    sites: Sequence[Site], make: Callable[[Site], dict[str, SlotParam]]
) -> Iterable[tuple[Site, dict[str, Any]]]:
    """The slot arrays of all sites, on the device before the model is touched."""
    try:
        if make is allocate:  # others have shapes alone, maybe for devices that are not there
            check_room(sites)
        arrays = [(site, make(site)) for site in sites]
        jax.block_until_ready([value.get_value() for _, values in arrays for value in values.values()])
    except (MemoryError, RuntimeError, ValueError, OverflowError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        kinds: dict[str, int] = {}
        for site in sites:
            own = "max_expert_loras" if site.spec.experts else "max_loras"
            kind = f"{own if site.spec.whole else 'max_shared_expert_loras'}={site.spec.num_slots} slots"
            kinds[kind] = kinds.get(kind, 0) + site.spec.slot_nbytes
        ranks = " and ".join(map(str, sorted({site.spec.max_rank for site in sites})))
        raise LoRAError(
            "the slot arrays do not fit on the device: "
            f"{sum(site.spec.num_slots * site.spec.slot_nbytes for site in sites):,} bytes are needed, "
            f"{', '.join(f'{one:,} for each of {kind}' for kind, one in kinds.items())}, of max_lora_rank={ranks} over "
            f"{sum(site.spec.whole for site in sites)} layers. Lower those, or leave layers out with target_modules or "
            f"exclude_modules ({repr(error)[:200]})"
        ) from error
    return arrays


def _set_class(layer: nnx.Module, cls: type) -> None:
    # Not `layer.__class__ = cls`: flax would list the class among the layer's attributes, for jit to compare.
    object.__setattr__(layer, "__class__", cls)


def _methods(found: Found, sites: Sequence[Site]) -> tuple[tuple[str, str], ...]:
    """(kind, name) of the methods that serve LoRA."""
    if isinstance(found.spec, LinearSpec):
        return (("linear", "__call__"),)
    if isinstance(found.spec, ExpertsSpec):
        names = [product_of(site) for site in sites]
        return tuple(("experts", name) for name in names if callable(getattr(type(found.module), name, None)))
    assert isinstance(found.spec, EmbedSpec)
    names = {"embedding": ("lookup", found.spec.lookup), "linear": ("attend", found.spec.attend)}
    return tuple((role, name) for role, name in (names[site.kind] for site in sites) if name is not None)


_MAKERS: dict[str, Callable[[type, str], Callable[..., Any]]] = {
    "linear": linear_methods,
    "experts": experts_methods,
    **embed_methods,
}


@functools.cache
def _lora_class(cls: type, methods: tuple[tuple[str, str], ...]) -> type:
    """The subclass of a layer's own class that serves LoRA; one a class, so that jit sees one type.

    It has the layer's class as its only base: Python lets an object change to a class of the same layout alone.
    """
    served = {name: _MAKERS[kind](cls, name) for kind, name in methods}
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__, **served}
    # flax's own default would undo `class Dense(..., pytree=False)`
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(f"{cls.__name__}WithLoRA", (cls,), body, pytree=is_pytree)
