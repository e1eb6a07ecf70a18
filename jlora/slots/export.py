"""Export of an adapter from its slot, for example after training it there, or from its blocks, for a save."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Float

from jlora._compat import explicit_transfers
from jlora.adapters import Adapter, ExpertsLoRA, ModuleLoRA, SavedHead
from jlora.adapters.lora import Layer
from jlora.errors import LoRAError
from jlora.layers.site import Site
from jlora.slots.blocks import unpack
from jlora.slots.codec import A, B, from_stored, place, taken
from jlora.slots.packed import PackedAdapter, Placement


def export(packed: PackedAdapter, slot: int, modules: Mapping[Site, nnx.Module]) -> Adapter:
    """Return the adapter that `slot` holds, in slot dtype.

    Module names, ranks, alphas and scalings are those of the packed adapter `packed`.

    Raises:
      LoRAError: A module has one factor A for several slices, and training made them different.
    """

    def factors_of(site: Site) -> Callable[[int], list[np.ndarray]]:
        factors = _slot(site, slot, modules[site])
        return lambda entry: [factor[entry] for factor in factors]

    return export_factors(packed, modules, factors_of)


def export_blocks(packed: PackedAdapter, sites: Iterable[Site]) -> Adapter:
    """Return the adapter that the blocks of `packed` hold, as `export` returns that of a slot."""
    found = unpack(packed.blocks, {(p.site, p.entry) for p in packed.placements})
    return export_factors(packed, sites, lambda site: lambda entry: [found[site, entry][j] for j in site.spec.factors])


def export_factors(
    packed: PackedAdapter, sites: Iterable[Site], factors_of: Callable[[Site], Callable[[int], list[np.ndarray]]]
) -> Adapter:
    """Return an adapter of these factors.

    `factors_of(site)(entry)` are A [n, R, K] and B [R, N], or the only one that the site holds.
    """
    by_site: dict[Site, list[Placement]] = {}
    for p in packed.placements:
        by_site.setdefault(p.site, []).append(p)
    product = {half: site for site in sites for half in site.shared}
    read: dict[str, Layer] = {}
    halves: dict[tuple[Site, int, int], list[_Half]] = {}  # (product site, layer, first slice) -> factors
    for site, placements in by_site.items():
        of_entry = factors_of(site)
        for p in placements:
            found = of_entry(p.entry)
            if site.spec.whole:
                read[p.module] = _module(packed.name, p, *found)
            else:
                key = product[site], p.entry // (site.spec.experts or 1), p.first
                halves.setdefault(key, []).append(_Half(p, *found))
    read |= dict(_experts(of_one) for of_one in halves.values())
    names = dict.fromkeys(p.module for p in packed.placements)
    ordered = {name: read[name] for name in names if name in read}
    return packed.about.with_layers(ordered)


class _Half(NamedTuple):
    """A [n, R, K] or B [R, N], the only factor that the site of the placement holds."""

    placement: Placement
    factor: np.ndarray


def _slot(site: Site, slot: int, layer: nnx.Module) -> list[np.ndarray]:
    """Return A [entries, n, R, K] and B [entries, R, N] of one slot, or the only one that the site holds.

    Each is transferred in one piece, because many small transfers take long.
    """
    spec = site.spec
    where = (*(slice(None) for _ in spec.stack), slot - spec.first_slot)
    found: list[np.ndarray] = []
    for attribute, j in zip(site.attributes, spec.factors, strict=False):
        with explicit_transfers():
            array = np.asarray(getattr(layer, attribute)[...][where])
        array = array.reshape(math.prod(spec.entries), *array.shape[len(spec.entries) :])
        found.append(from_stored(array[..., : spec.max_rank, :], spec, j))
    return found


def _module(name: str, p: Placement, a: Float[np.ndarray, "n R K"], b: Float[np.ndarray, "R N"]) -> Layer:
    if p.site.kind == "head":
        return SavedHead(_taken(p, A, a), _taken(p, B, b)[0] if p.site.biased else None)
    covered = a[place(p.site.spec, A, p.first, p.count, p.rank)]
    if not all(np.array_equal(covered[0], other) for other in covered[1:]):
        raise LoRAError(
            f"adapter {name!r}: {p.module} is one factor A for {p.count} slices of {p.site.path!r}, and training made "
            "them differ; train with one module for each slice"
        )
    return ModuleLoRA(
        a=_taken(p, A, a), b=_taken(p, B, b), kind=p.site.kind, alpha=p.alpha, scaling=p.scaling, vectors=p.extras
    )


def _experts(halves: Sequence[_Half]) -> tuple[str, ExpertsLoRA]:
    """Return (name, module) of all experts, which share one of its factors."""
    once = next(p for p, _ in halves if p.site.spec.experts is None)
    a = np.stack([_taken(p, A, a) for p, a in halves if p.site.spec.in_features])
    b = np.stack([_taken(p, B, b) for p, b in halves if p.site.spec.out_features])
    return once.module, ExpertsLoRA(a=a, b=b, alpha=once.alpha, scaling=once.scaling)


def _taken(p: Placement, half: int, factor: np.ndarray) -> np.ndarray:
    """Return A [r, K] or B [N', r] of a module, in the memory order of the factor: slots have B as [r, N']."""
    return taken(p.site.spec, half, factor, p.first, p.count, p.rank).copy("K")
