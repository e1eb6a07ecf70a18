"""Values of slots for the arrays that adapters bring beside A and B (`jlora.adapters.variants`)."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from jlora.adapters.variants import EXTRAS, MAGNITUDE, Extra
from jlora.layers.site import Site
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.slots import magnitudes
from jlora.slots.blocks import Row
from jlora.slots.packed import PackedAdapter

# Modules that check and compute the values of a slot, for extras whose slots do not hold what adapters bring.
_COMPUTED = {MAGNITUDE.name: magnitudes}


def check_extras(packed: PackedAdapter, wrapped: WrappedModel) -> None:
    """Check the layers of an adapter with extras before any value is computed.

    Raises:
      AdapterMismatchError: a layer cannot serve them.
      LoRAError: a base weight was donated.
    """
    for computed in _COMPUTED.values():
        computed.check_base(packed, wrapped)


def refused_sites(wrapped: WrappedModel) -> frozenset[Site]:
    """Return the sites that `check_extras` refuses for any adapter that brings extras for them."""
    return frozenset[Site]().union(*(computed.refused_sites(wrapped) for computed in _COMPUTED.values()))


def empty_values(sites: Sequence[Site]) -> dict[str, Float[np.ndarray, "values"]]:
    """Return `Extra.name` -> values of an empty slot, of all sites that hold the extra, one site after the other."""
    found: dict[str, np.ndarray] = {}
    for extra in EXTRAS:
        if sizes := [_size(site) for site in sites if extra in site.spec.extras]:
            found[extra.name] = np.full(sum(sizes), extra.fill, np.float32)
    return found


def slot_values(
    packed: PackedAdapter, wrapped: WrappedModel, sites: Sequence[Site]
) -> dict[str, Float[np.ndarray, "values"]]:
    """Return the values of a slot as `empty_values` does, for the extras that an adapter brings.

    On meshes of several processes, all compute the same values together.

    Raises:
      AdapterMismatchError: a value cannot be computed.
      LoRAError: a base weight was donated.
    """
    found: dict[str, np.ndarray] = {}
    for extra in EXTRAS:
        if not any(extra.name in p.extras for p in packed.placements):
            continue
        holding = [site for site in sites if extra in site.spec.extras]
        found[extra.name] = empty_values(sites)[extra.name]
        views = np.split(found[extra.name], np.cumsum([_size(site) for site in holding])[:-1])
        of_site = {site: view.reshape(-1, site.spec.stored_out) for site, view in zip(holding, views, strict=True)}
        computed = _COMPUTED.get(extra.name)
        rows = _brought(packed, extra) if computed is None else computed.values_of_rows(packed, wrapped)
        for (site, row), own in rows:
            for features, stored in site.spec.out_runs:
                of_site[site][row, stored] = own[features]
    return found


def _size(site: Site) -> int:
    """Return the number of values of an extra in one slot of all layers of a site."""
    return math.prod((*site.spec.stack, site.spec.stored_out))


def _brought(packed: PackedAdapter, extra: Extra) -> Iterator[tuple[Row, Float[np.ndarray, "N"]]]:
    """Yield (row, values in the order of the adapter's features) of each row that an adapter has weights for."""
    rows: dict[Row, np.ndarray] = {}
    for p in packed.placements:
        empty = np.full(p.site.spec.out_features, extra.fill, np.float32)
        rows.setdefault((p.site, p.row), empty)[p.site.spec.columns(p.first, p.count)] = p.extras[extra.name]
    yield from rows.items()
