"""Match an adapter's checkpoint names to the sites of a wrapped model, and check every tensor against its site."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jlora.adapters import Adapter, ModuleLoRA
from jlora.errors import AdapterMismatchError
from jlora.layers.site import Site
from jlora.layers.wrap import WrappedModel, checkpoint_weight
from jlora.manager.names import SiteIndex

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Placement:
    """The factors that fill some slices of one site (of one layer of a stack), in slot dtype.

    Attributes:
      module: the checkpoint's name of the module.
      layer: index in the stack, or 0.
      first, count: the output slices covered.
      a: [r, K]; b: [r, N of those slices], scaling folded in.
    """

    module: str
    site: Site
    layer: int
    first: int
    count: int
    a: np.ndarray
    b: np.ndarray
    alpha: float
    scaling: float


@dataclass(frozen=True)
class HostAdapter:
    """An adapter in the host cache: checked against the model and ready to be packed."""

    name: str
    placements: tuple[Placement, ...]
    rank: int
    base_model_name: str | None
    use_rslora: bool
    path: str | None

    @property
    def nbytes(self) -> int:
        return sum(p.a.nbytes + p.b.nbytes for p in self.placements)

    def serves(self, site: Site) -> bool:
        return any(p.site is site for p in self.placements)


def fit(adapter: Adapter, wrapped: WrappedModel, index: SiteIndex, path: str | None = None) -> HostAdapter:
    """Check every tensor of `adapter` against the model and bring it into slot dtype.

    Raises:
      AdapterMismatchError: a tensor that no module takes, a rank above max_lora_rank, a shape that disagrees, base
        weights that differ from the model's, weights for a layer that the forward never calls.
    """
    where = f"adapter {adapter.name!r}" + (f" ({path})" if path else "")
    if not adapter.modules:
        raise AdapterMismatchError(f"{where} brings no LoRA weights: expected at least one module, found none")
    problems: list[str] = []
    placements: list[Placement] = []
    taken: dict[tuple[Site, int, int], str] = {}
    for name, module in adapter.modules.items():
        if index.skips(name):
            continue
        found = index.find(module.kind, name)
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
            continue
        site, layer, first, count = found
        if problem := _misfit(site, module, first, count):
            problems.append(f"{name}: {problem}")
            continue
        for i in range(first, first + count):
            other = taken.setdefault((site, layer, i), name)
            if other != name:
                problems.append(f"{name}: fills slice {i} of {site.path!r}, which {other} fills too")
                break
        else:
            placements.append(_place(where, name, site, layer, first, count, module))
    for name, weight in adapter.base_weights.items():
        if index.skips(name):
            continue
        if problem := _base_differs(name, weight, wrapped, index):
            problems.append(f"{name}.base_layer.weight: {problem}")
    for placement in placements:
        if placement.site in wrapped.tracking.uncalled:
            raise AdapterMismatchError(f"{where}: {wrapped.tracking.reason(placement.site)}")
    if problems:
        shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise AdapterMismatchError(f"{where} does not fit this model:\n  " + "\n  ".join(shown))
    if not placements:
        raise AdapterMismatchError(f"{where} brings weights only for modules that `skip` passes over")
    return HostAdapter(adapter.name, tuple(placements), adapter.rank, adapter.base_model_name, adapter.use_rslora, path)


def _misfit(site: Site, module: ModuleLoRA, first: int, count: int) -> str | None:
    if module.rank > site.spec.max_rank:
        return f"rank {module.rank} is above max_lora_rank={site.spec.max_rank}"
    if not abs(module.scaling) <= _LARGEST:  # NaN is not
        return f"scaling must be a finite float32, found {module.scaling}"
    outputs = sum(site.spec.out_sizes[first : first + count])
    expected = ((module.rank, site.spec.in_features), (outputs, module.rank))
    found = (tuple(module.a.shape), tuple(module.b.shape))
    if found != expected:
        return f"A and B have shapes {found[0]} and {found[1]}, and {site.path!r} takes {expected[0]} and {expected[1]}"
    return None


def _place(where: str, name: str, site: Site, layer: int, first: int, count: int, module: ModuleLoRA) -> Placement:
    # The scaling is folded into B in float32, before the one rounding to slot dtype.
    with np.errstate(over="ignore", invalid="ignore"):
        b = np.multiply(module.b.T, np.float32(module.scaling), dtype=np.float32)
        a, cast = module.a.astype(site.spec.dtype), b.astype(site.spec.dtype)
    for factor, original, label in ((a, module.a, "A"), (cast, module.b.T, "scaling * B")):
        if (overflow := np.isinf(factor) & np.isfinite(original)).any():
            largest = float(np.abs(original[overflow]).max()) * (1 if factor is a else abs(module.scaling))
            raise AdapterMismatchError(
                f"{where}: {name}: {label} must be finite in the slots' dtype {site.spec.dtype}, and reaches "
                f"{largest:.3g}; set LoRAConfig.dtype to a wider one"
            )
    return Placement(
        name,
        site,
        layer,
        first,
        count,
        np.ascontiguousarray(a),
        np.ascontiguousarray(cast),
        module.alpha,
        module.scaling,
    )


def _base_differs(name: str, weight: np.ndarray, wrapped: WrappedModel, index: SiteIndex) -> str | None:
    """PEFT may save the full embedding beside its LoRA: it must be the one that the model has."""
    found: Sequence | str = ""
    for kind in ("embedding", "linear"):
        found = index.find(kind, name)
        if not isinstance(found, str):
            break
    if isinstance(found, str):
        return f"no wrapped module can be compared with it ({found})"
    site, layer, first, count = found
    own = checkpoint_weight(wrapped, site, layer)
    if site.kind == "linear":
        start = sum(site.spec.out_sizes[:first])
        own = own[start : start + sum(site.spec.out_sizes[first : first + count])]
    if own.shape != weight.shape:
        return f"shape {weight.shape}, and the model's own weight has {own.shape}"
    with np.errstate(over="ignore", invalid="ignore"):
        stored = weight.astype(own.dtype)
    if not np.array_equal(own, stored):
        return "its values differ from the model's own weight: it was trained on another base model"
    return None
