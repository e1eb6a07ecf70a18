"""The state of a wrapped model: the sites of its layers, the modules left out, and how to unwrap it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import jax
import numpy as np
from flax import nnx

from jlora.config import LoRAConfig
from jlora.errors import LoRAError
from jlora.layers.base_kernel import arrays_of, can_dequantize, dequantized, kernel_of
from jlora.layers.forward.experts import product_of
from jlora.layers.site import HEAD, ModelSites, Site, delete_attribute, detach
from jlora.layers.specs import EmbedSpec, ExpertsSpec, LinearSpec, Spec
from jlora.sharding.put import own_values

_SHARED = ("jlora_spec", "jlora_sites")


@dataclass(frozen=True)
class LayerInfo:
    """Description of one layer, as returned by `LoRAManager.layers()`.

    Attributes:
      path: canonical dotted path; the checkpoint's name if `skip` matched it.
      aliases: the other paths that reach the layer.
      kind: "linear", "embedding", "experts" (one grouped product), "other" (any other module with parameters), or
        "skipped".
      in_features, out_features: the sizes that an adapter must have; None if the layer is not wrapped.
      slot_bytes: bytes of one slot of the layer, on a mesh over all devices, with replicas counted once; 0 if the layer
        is not wrapped.
      wrapped: True if the layer is wrapped.
      reason: why the layer is not wrapped or takes no adapter; None if it serves adapters.
      shared_slot_bytes: bytes of one slot for shared factors of experts in the layer.
      row_group: the group in `LoRAManager(row_groups=)` that the layer is of, or "sequences", "last" or "packed"; None
        if it is undeclared.
      saved_outputs: most outputs of a saved head that can replace the layer; 0 if none can.
      dtype: dtype of A and B in the slots; None if the layer is not wrapped.
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
    row_group: str | None = None
    saved_outputs: int = 0
    dtype: str | None = None


@dataclass(frozen=True)
class Unserved:
    """The layers that serve no adapter.

    Attributes:
      reasons: path -> reason.
      sites: the wrapped sites among them.
    """

    reasons: Mapping[str, str]
    sites: frozenset[Site]


class WrappedModel:
    """A wrapped model: its sites, the layer of each, and the modules that are not wrapped.

    Attributes:
      model: the model.
      modules: Site -> layer.
      sites: shared by all layers and batches; without any site until the model is wrapped.
      unwrapped: path -> the reason why that module takes no adapter.
      others: the paths in `unwrapped` that `layers` returns: modules with variables, and uses of a table.
      unserved: the layers that serve no adapter. Replaced as a whole, only by `set_unserved`.
      headless: name of a wrapped layer -> the reason why no saved head can replace it.
      classes: id of a layer -> its class before wrapping.
      skip: patterns of checkpoint modules that this process lacks on purpose.
      skipped: checkpoint name -> the `skip` pattern that matched it, collected from loaded adapters.
    """

    def __init__(self, model: nnx.Module, config: LoRAConfig, skip: tuple[re.Pattern[str], ...] = ()):
        self.model = model
        self.modules: dict[Site, nnx.Module] = {}
        self.sites = ModelSites(config)
        self.unwrapped: dict[str, str] = {}
        self.headless: Mapping[str, str] = {}
        self.skip = skip
        self.skipped: dict[str, str] = {}
        self.classes: dict[int, type] = {}
        self.others: tuple[str, ...] = ()
        self.unserved = Unserved({}, frozenset())

    def set_unserved(self, reasons: Mapping[Site, str]) -> None:
        """Mark these wrapped sites as unserved, and all others as served."""
        paths = {path: self.unwrapped[path] for path in self.others}
        paths |= {site.path: reason for site, reason in reasons.items()}
        sites = frozenset(each for site in reasons for each in site.with_all)
        self.unserved = Unserved(MappingProxyType(paths), sites)

    def skips(self, name: str) -> bool:
        """Return True if a `skip` pattern matches a checkpoint module, and record the match."""
        pattern = next((pattern for pattern in self.skip if pattern.search(name)), None)
        if pattern is not None:
            self.skipped[name] = pattern.pattern
        return pattern is not None

    def layers(self) -> tuple[LayerInfo, ...]:
        """Return the wrapped layers, the other modules with their reasons, and the names skipped so far."""
        wrapped = [
            LayerInfo(
                site.path,
                site.aliases[1:],
                "experts" if site.spec.experts else site.kind,
                site.spec.in_features,
                site.spec.out_features,
                site.slot_nbytes + (0 if site.head is None else site.head.slot_nbytes),
                True,
                self.unserved.reasons.get(site.path),
                site.shared_slot_nbytes,
                site.row_group,
                0 if site.head is None else site.head.spec.max_rank,
                site.spec.dtype,
            )
            for site in self.modules
            if site.spec.whole and site.kind != "head"
        ]
        other = [LayerInfo(path, (), "other", None, None, 0, False, self.unwrapped[path]) for path in self.others]
        skipped = [
            LayerInfo(name, (), "skipped", None, None, 0, False, f"passed over by skip={pattern!r}")
            for name, pattern in sorted(self.skipped.items())
        ]
        return (*wrapped, *other, *skipped)

    def check(self) -> None:
        """Raise `LoRAError` if the model is no longer wrapped."""
        if not self.modules:
            raise LoRAError("this manager gave its model back (unwrap); make a new LoRAManager")

    def unwrap(self) -> None:
        """Restore the model: its layers regain their classes and lose their slot arrays."""
        for site, layer in self.modules.items():
            take_off(layer, site, self.classes[id(layer)])
        self.modules = {}

    @property
    def paths(self) -> dict[Site, str]:
        """Site -> path of its layer."""
        own = "jlora", HEAD
        return {s: s.path if s.prefix in own else s.path.rpartition(".")[0] for s in self.modules}


def take_off(layer: nnx.Module, site: Site, cls: type) -> None:
    """Remove a site from a layer and restore the layer's class. Steps that are already done are skipped."""
    set_class(layer, cls)
    detach(layer, site)
    for name in _SHARED:
        delete_attribute(layer, name)


def spec_of(layer: nnx.Module, site: Site) -> LinearSpec | EmbedSpec:
    """Return the spec of a wrapped layer at one of its sites."""
    spec: Spec = vars(layer)["jlora_spec"]
    return spec.products[product_of(site)] if isinstance(spec, ExpertsSpec) else spec


def own_order_of(layer: nnx.Module, site: Site) -> np.ndarray | None:
    """Return `ExpertsSpec.own_order` of the product of a site."""
    spec: ExpertsSpec = vars(layer)["jlora_spec"]
    return spec.own_order(product_of(site))


def checkpoint_weight(wrapped: WrappedModel, site: Site, entry: int = 0) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the base weight of one entry in the layout of a checkpoint, and a mask of the values of this process.

    Returns:
      The weight without padding, [N, K] of a linear layer or [V, F] of a table, and a bool array of its shape;
        None if the layer stores its weight in another form, such as a quantized one.
    """
    module = wrapped.modules[site]
    spec = spec_of(module, site)
    kernel = kernel_of(module, spec)
    if kernel is None or not kernel.exact:
        return None
    weight, known = own_values(cast("jax.Array", kernel.array))
    own = np.broadcast_to(True, weight.shape) if known is None else known
    return _as_stored(spec, site, entry, weight), _as_stored(spec, site, entry, own)


def dequantized_weight(wrapped: WrappedModel, site: Site) -> tuple[np.ndarray, np.dtype] | None:
    """Return the dequantized weight of a linear layer in the layout of a checkpoint, and the dtype of its codes.

    Returns:
      float32 [N, K] without padding, and an integer or float8 dtype; None if the layer is a stack, cannot be
        dequantized, packs its codes, or holds them on devices of other processes.
    """
    layer = wrapped.modules[site]
    spec = spec_of(layer, site)
    if site.spec.entries or not isinstance(spec, LinearSpec) or not can_dequantize(layer, spec):
        return None
    arrays = [array for _, array in arrays_of(layer)]
    size = spec.in_features * spec.out_features
    codes = [np.dtype(array.dtype) for array in arrays if array.size == size and array.dtype.itemsize == 1]
    if not codes or not all(array.is_fully_addressable for array in arrays):
        return None
    return _of_columns(spec, np.asarray(jax.device_get(dequantized(layer, spec))).T), codes[0]


def _as_stored(spec: LinearSpec | EmbedSpec, site: Site, entry: int, weight: np.ndarray) -> np.ndarray:
    if site.spec.entries:
        weight = weight[np.unravel_index(entry, site.spec.entries)]
    if isinstance(spec, EmbedSpec):
        return weight[: spec.head.real_out]
    flat = weight.transpose(*spec.out_axes, *spec.in_axes).reshape(spec.out_features, spec.in_features)
    return _of_columns(spec, flat)


def _of_columns(spec: LinearSpec, flat: np.ndarray) -> np.ndarray:
    """Return the rows and columns of a weight [N, K] that a checkpoint has, in its order."""
    if spec.columns_out is not None:
        flat = flat[spec.columns_out.positions]
    return flat if spec.columns_in is None else flat[:, spec.columns_in.positions]


def set_class(layer: nnx.Module, cls: type) -> None:
    """Change the class of a layer without adding an attribute to it."""
    # `layer.__class__ = cls` would make flax list the class among the layer's attributes, which jit compares.
    object.__setattr__(layer, "__class__", cls)
