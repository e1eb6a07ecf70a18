"""Wrap the eligible layers of an `nnx.Module` in place, all or none. Each layer gets a subclass of its class."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.core
from flax import nnx

from jlora import _qwix
from jlora._compat import Device, explicit_transfers, is_committed
from jlora._typing import is_mapping
from jlora.config import LoRAConfig
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.base_kernel import arrays_of
from jlora.layers.forward.embedding import embed_methods
from jlora.layers.forward.experts import experts_methods, product_of
from jlora.layers.forward.linear import linear_methods
from jlora.layers.site import (
    LAST,
    OF_SEQUENCES,
    PACKED,
    ModelSites,
    Site,
    SlotParam,
    allocate,
    attach,
    check_room,
    chosen_by_default,
    set_attribute,
)
from jlora.layers.specs import EmbedSpec, ExpertsSpec, LinearSpec
from jlora.layers.wrap.discover import ModuleInfo
from jlora.layers.wrap.make_sites import make_sites
from jlora.layers.wrap.select import PackedModules
from jlora.layers.wrap.wrapped import WrappedModel, set_class
from jlora.pallas.api import import_backend


def wrap_model(
    model: nnx.Module,
    config: LoRAConfig,
    packed_modules: PackedModules | None = None,
    skip: Sequence[str] = (),
    make: Callable[[Site], dict[str, SlotParam]] = allocate,
    row_groups: Mapping[str, str] | None = None,
) -> WrappedModel:
    """Wrap the eligible layers of `model` in place and give them zero slots.

    If an error is raised, the model is unchanged.

    Args:
      model: any `nnx.Module`. Layers reachable by several paths are wrapped once.
      config: sizes, dtype, target_modules, exclude_modules and backend.
      packed_modules: the checkpoint names that make up each merged projection. None reads the model's own
        `packed_modules` attribute if it has one.
      skip: regular expressions, searched in the names of checkpoint modules that this process lacks on purpose.
      make: function that returns the slot arrays of a site, or their shapes for a model of shapes alone.
      row_groups: name of a module -> the row group of its layers, "sequences", "last" or "packed".

    Returns:
      The wrapped model.

    Raises:
      LoRAUsageError: a target matches no layer or one that cannot be wrapped; a registered spec contradicts its layer;
        `skip` is no list of regular expressions; `row_groups` maps no names to names, or one of them matches no layer;
        or a variant is unknown.
      LoRAError: the model is wrapped already; the slots do not fit in memory.
    """
    wrapped = WrappedModel(model, config, skip_patterns(skip))
    row_groups = _checked_groups(row_groups)
    layers = make_sites(wrapped, packed_modules, row_groups)
    import_backend(config.backend)
    device = _device_of([info for info, _ in layers])
    every = [each for _, sites in layers for site in sites for each in site.with_all]
    arrays = {site: values for site, values in _allocate(every, make, device)}
    groups = frozenset(row_groups.values()) - OF_SEQUENCES
    wrapped.sites = _model_sites(wrapped, layers, device, groups)
    kept = [(f.module, type(f.module), dict(vars(f.module))) for f, _ in layers]
    try:
        for info, sites in layers:
            for site in (each for one in sites for each in one.with_all):
                attach(info.module, site, arrays[site])
                wrapped.modules[site] = info.module
            set_attribute(info.module, "jlora_spec", info.spec)
            set_attribute(info.module, "jlora_sites", wrapped.sites)
            cls = type(info.module)
            wrapped.classes[id(info.module)] = cls
            set_class(info.module, lora_class(cls, _methods(info, sites)))
        return wrapped
    except BaseException:
        # Restore the model after an interrupt as well, since no manager exists that could unwrap it.
        for layer, cls, attributes in kept:
            set_class(layer, cls)
            vars(layer).update(attributes)
            for name in set(vars(layer)) - set(attributes):
                del vars(layer)[name]
        raise


def survey(model: nnx.Module, config: LoRAConfig, skip: Sequence[str] = ()) -> WrappedModel:
    """Return the result of `wrap_model` without changing the model, whose parameters may be shapes alone."""
    wrapped = WrappedModel(model, config, skip_patterns(skip))
    layers = make_sites(wrapped, None, {})
    wrapped.modules = {site: info.module for info, sites in layers for one in sites for site in one.with_all}
    return wrapped


def skip_patterns(skip: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Return the compiled patterns of `skip`, to be searched in names. Raises `LoRAUsageError`."""
    if isinstance(skip, str) or not all(isinstance(pattern, str) and pattern for pattern in skip):
        raise LoRAUsageError(f"skip must be a list of regular expressions, got {skip!r}")
    try:
        return tuple(re.compile(pattern) for pattern in skip)
    except re.error as error:
        raise LoRAUsageError(f"skip: {error.pattern!r} is not a regular expression: {error}") from None


def _checked_groups(row_groups: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return `row_groups`, {} for None. Raises `LoRAUsageError`.

    Once the rows of some layers in packed batches are declared, those of layers that are not named are packed.
    """
    given: object = {} if row_groups is None else row_groups
    if not is_mapping(given) or not all(isinstance(each, str) and each for pair in given.items() for each in pair):
        raise LoRAUsageError(
            "row_groups maps names of modules to names of groups, such as {'visual': 'images'}, or to 'sequences', "
            f"'last' or 'packed' for rows that are the batch's own, got {row_groups!r:.100}"
        )
    groups = cast("Mapping[str, str]", given)
    return {"*": PACKED, **groups} if {LAST, PACKED} & {*groups.values()} else dict(groups)


def _model_sites(
    wrapped: WrappedModel,
    layers: Sequence[tuple[ModuleInfo, list[Site]]],
    device: Device | None,
    groups: frozenset[str],
) -> ModelSites:
    sites = [site for _, own in layers for site in own]
    names = {name for site in sites for name in (*site.aliases, *site.parts)}
    return ModelSites(
        wrapped.sites.config,
        tuple(sites),
        frozenset({*wrapped.unwrapped, *names}),
        sites[0].spec.sharding,
        device,
        groups=groups,
        intercepted=any(_qwix.is_intercepted(info.module) for info, _ in layers),
    )


def _device_of(layers: Iterable[ModuleInfo]) -> Device | None:
    """Return the single device, other than the default, to which parameters of the layers are committed, or None."""
    devices: set[Device] = set()
    for array in (array for info in layers for _, array in arrays_of(info.module)):
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and is_committed(array):
            devices |= cast("set[Device]", array.devices())
    return devices.pop() if len(devices - {chosen_by_default()}) == len(devices) == 1 else None


def _allocate(
    sites: Sequence[Site], make: Callable[[Site], dict[str, SlotParam]], device: Device | None
) -> Iterable[tuple[Site, dict[str, Any]]]:
    """Return the slot arrays of all sites, on the device before the model is changed.

    Raises:
      LoRAError: they do not fit in the memory of the device.
    """
    try:
        if make is allocate:  # other functions make shapes, possibly for devices that are absent
            check_room(sites, device)
            make = functools.partial(allocate, device=device)
        with explicit_transfers():
            arrays = [(site, make(site)) for site in sites]
        jax.block_until_ready([value.get_value() for _, values in arrays for value in values.values()])
    except (MemoryError, RuntimeError, ValueError, OverflowError) as error:
        if isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        kinds: dict[str, int] = {}
        for site in sites:
            limit = "expert_slots['per_expert']" if site.spec.experts else "max_loras"
            limit = limit if site.spec.whole else "expert_slots['shared']"
            kind = f"{limit}={site.spec.num_slots} slots"
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


def _methods(info: ModuleInfo, sites: Sequence[Site]) -> tuple[tuple[str, str], ...]:
    """Return (kind, name) of the methods that serve LoRA."""
    if isinstance(info.spec, LinearSpec):
        return (("linear", "__call__"),)
    if isinstance(info.spec, ExpertsSpec):
        names = [product_of(site) for site in sites]
        return tuple(("experts", name) for name in names if callable(getattr(type(info.module), name, None)))
    assert isinstance(info.spec, EmbedSpec)
    names = {"embedding": ("lookup", info.spec.lookup), "linear": ("attend", info.spec.attend)}
    return tuple((role, name) for role, name in (names[site.kind] for site in sites) if name is not None)


_MAKERS: dict[str, Callable[[type, str], Callable[..., Any]]] = {
    "linear": linear_methods,
    "experts": experts_methods,
    **embed_methods,
}


@functools.cache
def lora_class(cls: type, methods: tuple[tuple[str, str], ...]) -> type:
    """Return the subclass of a layer's class that serves LoRA. It is cached for each class, so that jit sees one type.

    The layer's class is its only base, because Python changes `__class__` only between classes of equal layout.
    """
    served = {name: _MAKERS[kind](cls, name) for kind, name in methods}
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": _copyable(cls), **served}
    # Flax's default would undo `class Dense(..., pytree=False)`.
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(f"{cls.__name__}WithLoRA", (cls,), body, pytree=is_pytree)


def _copyable(cls: type) -> Callable[[Any, Any], Any]:
    """Return a `__reduce_ex__` that supports `copy.copy` like that of the layer's own class, and rejects pickle."""

    def reduced(self: Any, protocol: Any) -> Any:
        found = cast("Any", cls).__reduce_ex__(self, protocol)
        return found if isinstance(found, str) else (_rebuild, (_Construction(*found[:2]),), *found[2:])

    return reduced


@dataclass(frozen=True, eq=False)
class _Construction:
    """The constructor call of a wrapped layer. It cannot be pickled, since the class exists only in this process."""

    make: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> Any:
        raise LoRAUsageError(
            "a wrapped model cannot be pickled: the classes of its wrapped layers are made when it is wrapped. Pickle "
            "the model that manager.unwrap() gives back, or save its parameters, "
            "nnx.state(model, nnx.Not(jlora.SlotParam)), and wrap the model anew where they are loaded"
        )


def _rebuild(call: _Construction) -> Any:
    return call.make(*call.args)
