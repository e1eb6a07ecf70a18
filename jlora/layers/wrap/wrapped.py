"""What a wrapped model is: the sites of its layers, what could not be wrapped, and how it is given back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from flax import nnx

from jlora.errors import LoRAError
from jlora.layers.forward.experts import product_of
from jlora.layers.site import ModelSites, Site, delete_attribute, detach
from jlora.layers.specs import EmbedSpec, ExpertsSpec, LinearSpec, Spec
from jlora.sharding.put import own_values

_SHARED = ("jlora_spec", "jlora_sites")


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
      reason: why it is not wrapped, or takes no adapter; None where it serves.
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


@dataclass(frozen=True)
class Unserved:
    """The layers that serve no adapter.

    Attributes:
      reasons: path -> why.
      sites: those of them that are wrapped.
    """

    reasons: Mapping[str, str]
    sites: frozenset[Site]


class WrappedModel:
    """A wrapped model: its sites, the layer of each, and what could not be wrapped.

    Attributes:
      modules: Site -> layer.
      sites: shared by all layers and batches; set when the model is wrapped.
      unwrapped: path -> why that module takes no adapter.
      others: those of them that `layers` shows: what holds variables, and uses of a table.
      unserved: replaced whole, by `set_unserved` alone.
      classes: id of a layer -> the class it had.
      skip: patterns of checkpoint modules that this process lacks on purpose.
      skipped: checkpoint name -> the pattern that passed it over, as adapters brought them.
    """

    def __init__(self, model: nnx.Module, skip: tuple[re.Pattern[str], ...] = ()):
        self.model = model
        self.modules: dict[Site, nnx.Module] = {}
        self.sites = ModelSites((), frozenset(), None, None)
        self.unwrapped: dict[str, str] = {}
        self.skip = skip
        self.skipped: dict[str, str] = {}
        self.classes: dict[int, type] = {}
        self.others: tuple[str, ...] = ()
        self.unserved = Unserved({}, frozenset())

    def set_unserved(self, reasons: Mapping[Site, str]) -> None:
        """Let these of the wrapped sites serve no adapter, and all others serve."""
        paths = {path: self.unwrapped[path] for path in self.others}
        paths |= {site.path: reason for site, reason in reasons.items()}
        sites = frozenset(each for site in reasons for each in site.with_shared)
        self.unserved = Unserved(MappingProxyType(paths), sites)

    def skips(self, name: str) -> bool:
        """Whether a checkpoint module is passed over by one of the `skip` patterns; it is counted then."""
        pattern = next((pattern for pattern in self.skip if pattern.search(name)), None)
        if pattern is not None:
            self.skipped[name] = pattern.pattern
        return pattern is not None

    def layers(self) -> tuple[LayerInfo, ...]:
        """What is wrapped, what is not and why, and what `skip` passed over so far."""
        wrapped = [
            LayerInfo(
                site.path,
                site.aliases[1:],
                "experts" if site.spec.experts else site.kind,
                site.spec.in_features,
                site.spec.out_features,
                site.slot_nbytes,
                True,
                self.unserved.reasons.get(site.path),
                site.shared_slot_nbytes,
            )
            for site in self.modules
            if site.spec.whole
        ]
        other = [LayerInfo(path, (), "other", None, None, 0, False, self.unwrapped[path]) for path in self.others]
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
        """Give the model back as it was: classes restored, slot arrays gone."""
        for site, layer in self.modules.items():
            take_off(layer, site, self.classes[id(layer)])
        self.modules = {}

    @property
    def paths(self) -> dict[Site, str]:
        """Site -> the path of its layer."""
        return {s: s.path if s.prefix == "jlora" else s.path.rpartition(".")[0] for s in self.modules}


def take_off(layer: nnx.Module, site: Site, cls: type) -> None:
    """Undo what wrapping did to a layer for one of its sites; what is undone already is left alone."""
    set_class(layer, cls)
    detach(layer, site)
    for name in _SHARED:
        delete_attribute(layer, name)


def spec_of(layer: nnx.Module, site: Site) -> LinearSpec | EmbedSpec:
    """What a wrapped layer computes at one of its sites."""
    spec: Spec = vars(layer)["jlora_spec"]
    return spec.products[product_of(site)] if isinstance(spec, ExpertsSpec) else spec


def own_order_of(layer: nnx.Module, site: Site) -> np.ndarray | None:
    """`ExpertsSpec.own_order` of the product that a site is."""
    spec: ExpertsSpec = vars(layer)["jlora_spec"]
    return spec.own_order(product_of(site))


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


def set_class(layer: nnx.Module, cls: type) -> None:
    """Change the class of a layer."""
    # Not `layer.__class__ = cls`: flax would list the class among the layer's attributes, for jit to compare.
    object.__setattr__(layer, "__class__", cls)
