"""The finishers of the variants of LoRA, each in a file of its own."""

from collections.abc import Mapping, Sequence

from jlora.adapters.variants import COMBINATIONS, VARIANTS
from jlora.config import LoRAConfig
from jlora.errors import LoRAUsageError
from jlora.layers.variants.dora import SCALE_COLUMNS
from jlora.layers.variants.finisher import Finisher

FINISHERS = [SCALE_COLUMNS]  # in the order in which they run


def register(finisher: Finisher, combinations: Mapping[tuple[str, ...], Sequence[str]]) -> None:
    """Add a variant of LoRA, which adapters that are read and managers that are made afterwards can have.

    Args:
      finisher: the function, with the description of its variant.
      combinations: entries for `jlora.adapters.variants.COMBINATIONS`: the field of the variant, alone and with those
        of others, sorted -> the kinds of modules that PEFT has them for.

    Raises:
      LoRAUsageError: the name, the field or the tensor of the variant is that of another.
    """
    new = finisher.variant
    for other in VARIANTS.values():
        if shared := {new.name, new.field, new.tensor} & {other.name, other.field, other.tensor}:
            raise LoRAUsageError(f"variant {new.name!r}: {min(shared)!r} is of the variant {other.name!r} already")
    VARIANTS[new.name] = new
    FINISHERS.append(finisher)
    COMBINATIONS.update(combinations)


def finishers_of(config: LoRAConfig) -> tuple[Finisher, ...]:
    """Return the finishers of `config.variants`.

    Raises:
      LoRAUsageError: a name is no variant.
    """
    if unknown := [name for name in config.variants if name not in VARIANTS]:
        raise LoRAUsageError(
            f"LoRAConfig.variants: {unknown[0]!r} is no variant; expected names of {', '.join(map(repr, VARIANTS))}"
        )
    return tuple(each for each in FINISHERS if each.variant.name in config.variants)
