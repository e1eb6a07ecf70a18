"""Values of slots for the arrays that adapters bring beside A and B (`jlora.adapters.extras`)."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from jlora.adapters.extras import EXTRAS, MAGNITUDE, Extra
from jlora.layers.site import Site, SlotSpec
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager import magnitudes
from jlora.manager.blocks import Row
from jlora.manager.packed_adapter import PackedAdapter

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


def empty_values(sites: Sequence[Site]) -> dict[str, Float[np.ndarray, "values"]]:
    """Return `Extra.name` -> values of an empty slot, of all sites that hold the extra, one site after the other."""
    extras = [extra for extra in EXTRAS if any(extra in site.spec.extras for site in sites)]
    sizes = {
        extra.name: sum(math.prod(_shape(site.spec, extra)) for site in sites if extra in site.spec.extras)
        for extra in extras
    }
    return {extra.name: np.full(sizes[extra.name], extra.fill, np.float32) for extra in extras}


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
    empty = empty_values(sites)
    for extra in EXTRAS:
        if not any(extra.name in p.extras for p in packed.placements):
            continue
        values, start = empty[extra.name], 0
        of_site: dict[Site, np.ndarray] = {}
        for site in sites:
            if extra in site.spec.extras:
                shape = _shape(site.spec, extra)
                of_site[site] = values[start : start + math.prod(shape)].reshape(shape)
                start += math.prod(shape)
        computed = _COMPUTED.get(extra.name)
        rows = _brought(packed, extra) if computed is None else computed.values_of_rows(packed, wrapped)
        for (site, row), own in rows:
            runs = {"N": site.spec.out_runs, "K": site.spec.in_runs}
            for pairs in itertools.product(*(runs[axis] for axis in extra.shape)):
                at, features = (tuple(pair[j] for pair in pairs) for j in (1, 0))
                of_site[site][row][at] = own[features]
        found[extra.name] = values
    return found


def _shape(spec: SlotSpec, extra: Extra) -> tuple[int, ...]:
    """Return the shape of an extra in one slot of all layers of a site, as stored."""
    return math.prod(spec.stack), *spec.extra_sizes[spec.extras.index(extra)]


def _brought(packed: PackedAdapter, extra: Extra) -> Iterator[tuple[Row, np.ndarray]]:
    """Yield (row, values in the order of the adapter's features) of each row that an adapter has weights for."""
    rows: dict[Row, np.ndarray] = {}
    for p in packed.placements:
        spec = p.site.spec
        shape = extra.sizes((p.rank, spec.in_features), (spec.out_features, p.rank))
        values = rows.setdefault((p.site, p.row), np.full(shape, extra.fill, np.float32))
        starts = np.cumsum((0, *spec.out_sizes))
        own = {"N": slice(starts[p.first], starts[p.first + p.count]), "K": slice(None)}
        values[tuple(own[axis] for axis in extra.shape)] = p.extras[extra.name]
    yield from rows.items()
