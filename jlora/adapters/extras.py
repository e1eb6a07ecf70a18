"""The arrays that modules of an adapter bring beside A and B, each described once.

Reading, checks, packing, slots, export, updates and saves go over these descriptions.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Extra:
    """An array beside A and B. All modules of an adapter bring it, or none does.

    Attributes:
      name: Field of `ModuleLoRA` that holds it. Its slots are the attribute `jlora_<name>` of the layer.
      key: Name of its tensor in a checkpoint, after the name of the module.
      shape: Axes of the array, and of one slot: "N" for the output features, in the order of B, and "K" for the input
        features, in the order of A. On a mesh, an axis is split as the output or the input of the layer is.
      fill: Value of slots whose adapter does not bring it, and of features without a module.
      field: Field of `adapter_config.json`, and of `Adapter`, that is True if the adapter brings it.
      kinds: Kinds of modules for which PEFT has it.
      option: Field of `LoRAConfig` that serves it.
      flag: Flag of `jlora serve` that sets the option.
      title: Name of the method, for messages.
    """

    name: str
    key: str
    shape: tuple[Literal["N", "K"], ...]
    fill: float
    field: str
    kinds: tuple[str, ...]
    option: str
    flag: str
    title: str


MAGNITUDE = Extra(
    name="magnitude",
    key="lora_magnitude_vector",
    shape=("N",),
    fill=1.0,
    field="use_dora",
    kinds=("linear", "embedding"),
    option="dora",
    flag="--dora-loras",
    title="DoRA",
)
EXTRAS = (MAGNITUDE,)
