"""Check of a model and of adapters against a configuration, from shapes alone."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from flax import nnx

from jlora.adapters import Adapter
from jlora.adapters.adapter import open_adapter
from jlora.adapters.resolve import resolve
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import Problems
from jlora.fit.base_weights import check_base_shapes, difference
from jlora.fit.effect import without_effect
from jlora.fit.names import SiteIndex, name_rules
from jlora.fit.read import check_variant
from jlora.fit.shapes import describe, find_slices, read_as, refuse
from jlora.layers.wrap.apply import survey
from jlora.layers.wrap.wrapped import LayerInfo
from jlora.slots.packed import SiteSlices


class Survey:
    """Survey of the layers that `LoRAManager(model, config, ...)` wraps, and of the adapters that fit them.

    The model is not changed, and no array is allocated.

    Args:
      model: Any `nnx.Module`. Its parameters can be shapes only, as from `nnx.eval_shape`.
      config: Configuration of the slots.
      name_map: As for `LoRAManager`.
      skip: As for `LoRAManager`.

    Raises:
      LoRAError: No layer can be wrapped, or `name_map` or `skip` is invalid, as in `LoRAManager`.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: LoRAConfig,
        *,
        name_map: Mapping[str, str] | None = None,
        skip: Sequence[str] = (),
    ):
        self._config = config
        self._wrapped = survey(model, config, skip)
        self._index = SiteIndex(self._wrapped, name_rules(name_map))

    def layers(self) -> tuple[LayerInfo, ...]:
        """Return the same records as `LoRAManager.layers`."""
        return self._wrapped.layers()

    @property
    def device_slot_bytes(self) -> int:
        """Bytes of all slots on one device: A, B, ranks, scales and extras."""
        return sum(site.spec.device_nbytes for site in self._wrapped.modules)

    def check(
        self, adapter: LoRARequest | Adapter, *, base_weight: Callable[[str], np.ndarray | None] | None = None
    ) -> tuple[str, ...]:
        """Check names, kinds, shapes and ranks of an adapter, without reading tensors from files.

        Args:
          adapter: The adapter. The base weights that one in memory brings are compared with those of `base_weight`.
          base_weight: Function from a module's name to the model's weight, [N, K] or [V, D]; None compares none.

        Returns:
          The sentences that a load of an `Adapter` would add to `AdapterInfo.warnings`. Those of a request, whose
          tensors are not read, are not known.

        Raises:
          AdapterMismatchError: The adapter does not fit the model or the configuration. `LoRAError.problems` has all
            problems.
          LoRAError: The files of a request cannot be read (see `Adapter.from_pretrained`).
        """
        if isinstance(adapter, Adapter):
            where, problems = describe(adapter.name, None), Problems()
            slices_of = problems.attempt(dict[str, SiteSlices](), self._check, where, adapter)
            if base_weight is not None:
                problems.attempt(None, _check_values, where, adapter.base_weights, base_weight)
            problems.raise_first()
            return tuple(without_effect(adapter, slices_of, self._wrapped))
        where = describe(adapter.name, adapter.path)
        found = resolve(adapter.path, adapter.name, adapter.revision, local_only=adapter.local_only)
        problems = Problems()
        with open_adapter(found, problems=problems) as opened:
            problems.attempt(None, self._check, where, opened.adapter)
            problems.raise_first()
        return ()

    def _check(self, where: str, adapter: Adapter) -> Mapping[str, SiteSlices]:
        problems = Problems()
        problems.attempt(None, check_variant, where, self._config, adapter)
        index = problems.attempt(self._index, read_as, where, adapter, self._index)
        slices_of = problems.attempt(dict[str, SiteSlices](), find_slices, where, adapter, index)
        problems.attempt(None, check_base_shapes, where, adapter.base_weights, index)
        problems.raise_first()
        return slices_of


def _check_values(
    where: str, weights: Mapping[str, np.ndarray], base_weight: Callable[[str], np.ndarray | None]
) -> None:
    found = {name: base_weight(name) for name in weights}
    differ = {name: difference(weights[name], own) for name, own in found.items() if own is not None}
    refuse(where, [f"{name}.base_layer.weight: {problem}" for name, problem in differ.items() if problem is not None])
