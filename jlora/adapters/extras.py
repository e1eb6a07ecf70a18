"""The arrays that modules of an adapter bring beside A and B, each described once.

Reading, checks, packing, slots, export, updates and saves go over these descriptions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Extra:
    """A vector [N] beside A and B, of the output features. All modules of an adapter bring it, or none does.

    Attributes:
      name: Field of `ModuleLoRA` that holds it. Its slots are the attribute `jlora_<name>` of the layer.
      key: Name of its tensor in a checkpoint, after the name of the module.
      fill: Value of slots whose adapter does not bring it, and of features without a module.
      field: Field of `adapter_config.json`, and of `Adapter`, that is True if the adapter brings it.
      kinds: Kinds of modules for which PEFT has it.
      option: Field of `LoRAConfig` that serves it.
      title: Name of the method, for messages.
    """

    name: str
    key: str
    fill: float
    field: str
    kinds: tuple[str, ...]
    option: str
    title: str


MAGNITUDE = Extra(
    name="magnitude",
    key="lora_magnitude_vector",
    fill=1.0,
    field="use_dora",
    kinds=("linear", "embedding"),
    option="dora",
    title="DoRA",
)
EXTRAS = (MAGNITUDE,)


def extras_of(module: Any) -> dict[str, np.ndarray]:
    """Return `Extra.name` -> array of the extras that a module brings."""
    found = {extra.name: getattr(module, extra.name, None) for extra in EXTRAS}
    return {name: array for name, array in found.items() if array is not None}


def brought(modules: Iterable[Any]) -> tuple[Extra, ...]:
    """Return the extras that some of the modules bring."""
    names = {name for module in modules for name in extras_of(module)}
    return tuple(extra for extra in EXTRAS if extra.name in names)
