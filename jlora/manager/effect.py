"""Find the layers that an adapter targets without bringing weights for them."""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

from jlora.adapters import Adapter
from jlora.adapters.escaping import listed
from jlora.adapters.expert_fields import ROUTER_MODULES
from jlora.adapters.lora import LoRA
from jlora.adapters.peft_config import PeftConfig
from jlora.layers.site import Site, SlotSpec
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager.fit import rows_of
from jlora.manager.names import SiteSlices

# Names of the list of layers, after which the names of a checkpoint have the index of a stacked layer.
_STACKS = frozenset(("layers", "layer", "blocks", "block", "h"))


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
    warnings = adapter.warnings(unread)
    if adapter.config is None:
        return warnings
    return _left_out(adapter.modules, slices_of, wrapped, adapter.config) + warnings


def _left_out(
    modules: Mapping[str, LoRA], slices_of: Mapping[str, SiteSlices], wrapped: WrappedModel, config: PeftConfig
) -> list[str]:
    """Return warnings about targeted layers without weights, and about targeted layers that the model lacks."""
    if config.unchecked:  # then every layer counts as targeted
        return []
    filled = {
        (site, r, i)
        for name, (site, row, first, count) in slices_of.items()
        if name in modules
        for r in rows_of(modules[name], site, row)
        for i in range(first, first + count)
    }
    targeted = dict(_targeted(modules, slices_of, wrapped, config))
    missing = [name for name, slices in targeted.items() if not filled & slices]
    warnings: list[str] = []
    if missing:
        count = len(targeted)
        warnings.append(
            f"brings weights for {count - len(missing)} of {count} targeted layers; none for {listed(missing)}"
        )
    if absent := config.layers_without(modules.keys() | targeted.keys()):
        warnings.append(f"layers_to_transform: no layer has index {listed([str(layer) for layer in absent])}")
    return warnings


def _targeted(
    modules: Mapping[str, LoRA], slices_of: Mapping[str, SiteSlices], wrapped: WrappedModel, config: PeftConfig
) -> Iterator[tuple[str, set[tuple[Site, int, int]]]]:
    """Yield the checkpoint name of each wrapped layer that PEFT's rule matches, with its (site, row, slice).

    Experts and routers count if the adapter brings weights for some, since PEFT finds no linear layers there in newer
    versions of transformers.
    """
    # PEFT adds a tied output layer of its own accord, and writes no name of it.
    config = dataclasses.replace(config, ensure_weight_tying=False)
    in_one = any(modules[name].kind == "experts" for name in slices_of if name in modules)
    experts = any(site.spec.experts for site, *_ in slices_of.values())
    routers = any(name.endswith(ROUTER_MODULES) for name in slices_of)
    tables = {name for site in wrapped.modules if site.kind == "embedding" for name in site.parts}
    for site in wrapped.modules:
        spec = site.spec
        if site.kind == "head" or site in wrapped.unserved.sites or (spec.experts and not experts):
            continue
        parts = sorted(site.parts.items(), key=lambda part: part[1][1])  # parts before the whole
        if site.kind == "linear":  # of the names of a tied table's logits, PEFT knows that of the output layer
            parts = [part for part in parts if part[0].removesuffix(".attend") not in tables]
        together = spec.experts if spec.experts and in_one else 1  # rows that one module fills
        for row in range(0, math.prod(spec.rows), together):
            found: set[int] = set()
            for name, (first, count) in parts:
                slices = set(range(first, first + count)) - found
                full = _full_name(name, spec, row, with_expert=together == 1)
                if not slices or not full.isascii() or (name.endswith(ROUTER_MODULES) and not routers):
                    continue
                if config.experts.targets(full) if together > 1 else config.targets(full, site.kind):
                    found |= slices
                    yield full, {(site, r, i) for r in range(row, row + together) for i in slices}


def _full_name(name: str, spec: SlotSpec, row: int, *, with_expert: bool) -> str:
    """Return the name that checkpoints give to one row of a site, with the indices of its layer and expert."""
    keys = name.split(".")
    layer, expert = divmod(row, spec.experts or 1)
    if spec.experts and with_expert:
        keys.insert(-1, str(expert))
    if spec.layers is not None:
        keys.insert(next((i + 1 for i, key in enumerate(keys) if key in _STACKS), 1), str(layer))
    return ".".join(keys)
