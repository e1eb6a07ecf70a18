"""The arrays that modules of an adapter bring beside A and B, each described once.

Reading, checks, packing, slots, export, updates and saves go over these descriptions.
"""

from collections.abc import Iterable, Sequence
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
      option: Field of `LoRAConfig` that serves it.
      title: Name of the method, for messages.
    """

    name: str
    key: str
    fill: float
    field: str
    option: str
    title: str


MAGNITUDE = Extra(
    name="magnitude",
    key="lora_magnitude_vector",
    fill=1.0,
    field="use_dora",
    option="dora",
    title="DoRA",
)
EXTRAS = [MAGNITUDE]

ACTIVATED = "alora_invocation_tokens"  # the field of activated LoRA (aLoRA), which brings no array

# The variants of PEFT 0.21 (`LoraLayer.lora_variants`): sorted fields of `adapter_config.json` that are set together ->
# the kinds of modules. Adapters with another combination are refused.
VARIANTS: dict[tuple[str, ...], Sequence[str]] = {
    (): ("linear", "embedding", "experts"),
    (ACTIVATED,): ("linear",),
    (MAGNITUDE.field,): ("linear", "embedding"),
}


def extras_of(module: Any) -> dict[str, np.ndarray]:
    """Return `Extra.name` -> array of the extras that a module brings."""
    found = {extra.name: getattr(module, extra.name, None) for extra in EXTRAS}
    return {name: array for name, array in found.items() if array is not None}


def brought(modules: Iterable[Any]) -> tuple[Extra, ...]:
    """Return the extras that some of the modules bring."""
    names = {name for module in modules for name in extras_of(module)}
    return tuple(extra for extra in EXTRAS if extra.name in names)
