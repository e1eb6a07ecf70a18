"""Check of a model and of adapters against a configuration, from shapes alone."""

import contextlib
import math
from collections.abc import Sequence

import numpy as np
from flax import nnx

from jlora.adapters import Adapter, AdapterShapes, BaseShape
from jlora.config import LoRAConfig, LoRARequest
from jlora.layers.wrap.apply import survey
from jlora.layers.wrap.wrapped import LayerInfo
from jlora.manager.base_weights import check_base_shapes
from jlora.manager.fit import describe, place, read_as
from jlora.manager.names import NameMap, SiteIndex, name_rules
from jlora.manager.stage import check_variant


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
        self, model: nnx.Module, config: LoRAConfig, *, name_map: NameMap | None = None, skip: Sequence[str] = ()
    ):
        self._config = config
        self._wrapped = survey(model, config, skip)
        self._index = SiteIndex(self._wrapped, name_rules(name_map))

    def layers(self) -> tuple[LayerInfo, ...]:
        """Return the same records as `LoRAManager.layers`."""
        return self._wrapped.layers()

    @property
    def device_slot_bytes(self) -> int:
        """Bytes of all slots on one device: A, B, ranks, scales and magnitudes."""
        total = 0
        for spec in (site.spec for site in self._wrapped.modules):
            for j in spec.held:
                shape, sharding = spec.shapes[j], spec.shardings[j]
                itemsize = np.dtype(spec.dtypes[j]).itemsize
                total += math.prod(shape if sharding is None else sharding.shard_shape(shape)) * itemsize
        return total

    def check(self, adapter: LoRARequest | Adapter) -> None:
        """Check names, kinds, shapes and ranks of an adapter, without reading tensors from files.

        Raises:
          AdapterMismatchError: The adapter does not fit the model or the configuration.
          LoRAError: The files of a request cannot be read (see `Adapter.from_pretrained`).
        """
        if isinstance(adapter, Adapter):
            where = describe(adapter.name, None)
            check_variant(where, self._config, adapter)
            index = read_as(where, adapter, self._index)
            place(where, adapter.modules, index, heads=adapter.heads, dora=adapter.use_dora)
            weights = {name: BaseShape(shape=w.shape, dtype=w.dtype) for name, w in adapter.base_weights.items()}
            check_base_shapes(where, weights, index)
            return
        where = describe(adapter.name, adapter.path)

        def check(shapes: AdapterShapes) -> None:
            check_variant(where, self._config, shapes)
            index = read_as(where, shapes, self._index)
            place(where, shapes.modules, index, heads=shapes.heads, dora=shapes.use_dora)
            check_base_shapes(where, shapes.base_weights, index)
            raise _Fits

        with contextlib.suppress(_Fits):
            Adapter.from_pretrained(
                adapter.path,
                name=adapter.name,
                revision=adapter.revision,
                local_only=adapter.local_only,
                check=check,
            )


class _Fits(Exception):
    """Internal signal that stops `Adapter.from_pretrained` before it reads tensors."""
