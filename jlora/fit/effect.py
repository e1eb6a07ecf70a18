"""Find the layers that an adapter targets without bringing weights for them."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from jlora.adapters import Adapter
from jlora.adapters.peft_config import PeftConfig
from jlora.errors import listed
from jlora.layers.site import Site
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.slots.packed import SiteSlices

_Slice: TypeAlias = tuple[str, int, int]  # path of a layer, its index in a stack, output slice


def without_effect(
    adapter: Adapter, slices_of: Mapping[str, SiteSlices], wrapped: WrappedModel, unread: Collection[str] = ()
) -> list[str]:
    """Return one warning for each way in which an adapter has no effect, or only a part of the one it declares.

    Args:
      adapter: The adapter.
      slices_of: The slices that each module fills, from `find_slices`.
      wrapped: The wrapped model.
      unread: Modules whose values were not read in whole.
    """
    return _left_out(adapter, slices_of, wrapped) + adapter.warnings(unread)


def _left_out(adapter: Adapter, slices_of: Mapping[str, SiteSlices], wrapped: WrappedModel) -> list[str]:
    """Return warnings about targeted layers without weights, and about targeted layers that the model lacks."""
    config = adapter.config
    if config is None or config.unchecked:  # in the latter case every layer counts as targeted
        return []
    filled: set[_Slice] = set()
    brought: set[tuple[bool, str]] = set()
    for name, (site, entry, first, count) in slices_of.items():
        slices = range(first, first + count)
        filled |= {(site.path, entry // (site.spec.experts or 1), i) for i in slices}
        if name in adapter.modules:
            brought |= {_key(site, part) for part, covered in site.parts.items() if covered == (first, count)}
    targeted = dict(_targeted(config, brought, wrapped))
    missing = [name for name, slices in targeted.items() if not filled & slices]
    warnings: list[str] = []
    if missing:
        count = len(targeted)
        warnings.append(
            f"brings weights for {count - len(missing)} of {count} targeted layers; none for {listed(missing)}"
        )
    layers = max((site.spec.layers or 0 for site in wrapped.modules), default=0)  # of a stack, whose names lack them
    if absent := [str(i) for i in config.layers_without(adapter.modules.keys() | targeted.keys()) if i >= layers]:
        warnings.append(f"layers_to_transform: no layer has index {listed(absent)}")
    return warnings


def _targeted(
    config: PeftConfig, brought: Collection[tuple[bool, str]], wrapped: WrappedModel
) -> Iterator[tuple[str, set[_Slice]]]:
    """Yield the name of each wrapped layer that PEFT's rule matches, and its slices.

    The rule is applied to the names of the model. All experts of a layer are one. A layer counts if the adapter brings
    weights for a layer of the same last name, or if `target_modules` lists that name. Of other names it is not known
    whether PEFT found layers: those of routers and experts depend on the version of transformers.
    """
    # PEFT adds a tied output layer of its own accord, and writes no name of it.
    config = dataclasses.replace(config, ensure_weight_tying=False)
    entries = config.target_modules if isinstance(config.target_modules, frozenset) else frozenset[str]()
    known = {*brought, *((False, entry.rpartition(".")[2]) for entry in entries)}
    tables = {name for site in wrapped.modules if site.kind == "embedding" for name in site.parts}
    for site in wrapped.modules:
        if site.kind == "head" or site in wrapped.unserved.sites:
            continue
        parts = sorted(site.parts.items(), key=lambda part: part[1][1])  # parts before the whole
        if site.kind == "linear":  # of the names of a tied table's logits, PEFT knows that of the output layer
            parts = [part for part in parts if part[0].removesuffix(".attend") not in tables]
        found: set[int] = set()
        for name, (first, count) in parts:
            slices = set(range(first, first + count)) - found
            if not slices or not name.isascii() or _key(site, name) not in known:
                continue
            if config.targets(name, site.kind) or config.experts.targets(name):
                found |= slices
                for layer in range(site.spec.layers or 1):
                    at = name if site.spec.layers is None else f"{name}[{layer}]"
                    yield at, {(site.path, layer, i) for i in slices}


def _key(site: Site, part: str) -> tuple[bool, str]:
    """Return whether a part of a site is of experts, and its last name."""
    return bool(site.spec.experts), part.rpartition(".")[2]
