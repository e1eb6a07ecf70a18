"""The variants of LoRA whose modules bring a vector beside A and B, each described once.

Reading, checks, packing, slots, export, updates and saves go over these descriptions. `jlora.layers.variants` has the
functions that compute them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """A variant of LoRA with a vector [N] of the output features. All modules of an adapter bring it, or none does.

    Attributes:
      name: Name in `LoRAConfig.variants` and `ModuleLoRA.vectors`. The slots are the attribute `jlora_<name>` of a
        layer.
      title: Name of the method, for messages.
      field: Field of `adapter_config.json` that is True for adapters of the variant.
      tensor: Name of the vector in a checkpoint, after the name of the module.
      fill: Value of slots whose adapter is of another variant, and of features without a module.
      scaled: True if the scaling of the delta multiplies the vector too.
    """

    name: str
    title: str
    field: str
    tensor: str
    fill: float
    scaled: bool = False


DORA = Variant(name="dora", title="DoRA", field="use_dora", tensor="lora_magnitude_vector", fill=1.0)

# `jlora.layers.variants.register` adds others.
VARIANTS = {DORA.name: DORA}

ACTIVATED = "alora_invocation_tokens"  # the field of activated LoRA (aLoRA), which brings no vector

# The combinations of PEFT 0.21 (`LoraLayer.lora_variants`): sorted fields of `adapter_config.json` that are set
# together -> the kinds of modules. Adapters with another combination are refused.
COMBINATIONS: dict[tuple[str, ...], Sequence[str]] = {
    (): ("linear", "embedding", "experts"),
    (ACTIVATED,): ("linear",),
    (DORA.field,): ("linear", "embedding"),
}


def described(names: Iterable[str]) -> tuple[Variant, ...]:
    """Return the variants of these names, in the order of `VARIANTS`."""
    found = set(names)
    return tuple(variant for name, variant in VARIANTS.items() if name in found)
