"""Match an adapter's checkpoint names to the sites of a wrapped model, and check every tensor against its site."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jlora.adapters import Adapter, ModuleLoRA
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.site import Site
from jlora.layers.wrap import WrappedModel, kernel_of

NameMap = Mapping[str, str]
NameRules = tuple[tuple[re.Pattern[str], str], ...]

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


def name_rules(name_map: NameMap | None) -> NameRules:
    """The rules of a name map, compiled. Raises `LoRAError` for one that is no regular expression and replacement."""
    rules = []
    for pattern, replacement in (name_map or {}).items():
        try:
            rule = re.compile(pattern)
            rule.sub(replacement, "")  # reads the replacement too
        except (re.error, IndexError, TypeError) as error:
            raise LoRAError(
                f"name_map: {pattern!r} -> {replacement!r} is not a regular expression and its replacement: {error}"
            ) from None
        rules.append((rule, replacement))
    return tuple(rules)


class SiteIndex:
    """Checkpoint name -> site, for one wrapped model."""

    def __init__(self, wrapped: WrappedModel, rules: NameRules):
        self._wrapped = wrapped
        self._rules = rules
        self._sites: dict[tuple[str, str], list[Site]] = {}
        for site in wrapped.modules:
            for name in site.parts:
                self._sites.setdefault((site.kind, name), []).append(site)

    def model_name(self, name: str) -> str:
        """The checkpoint name with the first rule of the name map that matches applied."""
        for pattern, replacement in self._rules:
            if pattern.search(name):
                return pattern.sub(replacement, name)
        return name

    def find(self, kind: str, name: str) -> tuple[Site, int, int, int] | str:
        """(site, layer, first slice, slices) that a checkpoint name fills, or why there is none."""
        mapped = self.model_name(name)
        hits = [(site, 0, mapped) for site in self._sites.get((kind, mapped), ()) if site.spec.layers is None]
        # A stack of layers is one module, so its checkpoint names have one integer component more than its path.
        parts = mapped.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                short = ".".join(parts[:i] + parts[i + 1 :])
                for site in self._sites.get((kind, short), ()):
                    if site.spec.layers is not None and int(part) < site.spec.layers:
                        hits.append((site, int(part), short))
        if len(hits) == 1:
            site, layer, key = hits[0]
            return site, layer, *site.parts[key]
        if hits:
            places = ", ".join(repr(site.path) for site, _, _ in hits)
            return f"it could belong to any of {places}; name one of them with name_map"
        return self._reason(kind, mapped)

    def _reason(self, kind: str, name: str) -> str:
        for alias in (name, f"{name}.attend"):
            if alias in self._wrapped.unwrapped:
                return f"{name!r} is not wrapped: {self._wrapped.unwrapped[alias]}"
        other = "embedding" if kind == "linear" else "linear"
        if (other, name) in self._sites:
            return f"{name!r} takes {other} weights, and these are {kind} weights"
        if stacked := self._sites.get((kind, name)):
            return f"{name!r} is a stack of {stacked[0].spec.layers} layers, and the name has no layer index below that"
        return f"the model has no module {name!r} (name_map can map the checkpoint's names to the model's paths)"


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
        if problem := _base_differs(name, weight, wrapped, index):
            problems.append(f"{name}.base_layer.weight: {problem}")
    for placement in placements:
        if placement.site in wrapped.tracking.uncalled:
            raise AdapterMismatchError(f"{where}: {wrapped.tracking.reason(placement.site)}")
    if problems:
        shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise AdapterMismatchError(f"{where} does not fit this model:\n  " + "\n  ".join(shown))
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
    param, spec = kernel_of(wrapped.modules[site])
    own = np.asarray(param[...])
    if site.spec.layers is not None:
        own = own[layer]
    if spec is not None:
        own = own.transpose(*spec.in_axes, *spec.out_axes).reshape(spec.in_features, spec.out_features).T
        start = sum(site.spec.out_sizes[:first])
        own = own[start : start + sum(site.spec.out_sizes[first : first + count])]
    if own.shape != weight.shape:
        return f"shape {weight.shape}, and the model's own weight has {own.shape}"
    with np.errstate(over="ignore", invalid="ignore"):
        stored = weight.astype(own.dtype)
    if not np.array_equal(own, stored):
        return "its values differ from the model's own weight: it was trained on another base model"
    return None
