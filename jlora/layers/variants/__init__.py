"""The finishers, each in a file of its own: what follows the product of a layer and its LoRA.

To add one, write its file, and name it in `FINISHERS`.
"""

from jlora.config import LoRAConfig
from jlora.layers.variants.dora import SCALE_COLUMNS
from jlora.layers.variants.finisher import Finisher

FINISHERS = [SCALE_COLUMNS]  # in the order in which they run


def chosen(config: LoRAConfig) -> tuple[Finisher, ...]:
    """Return the finishers that the configuration switches on."""
    return tuple(each for each in FINISHERS if all(getattr(config, extra.option) for extra in each.extras))
