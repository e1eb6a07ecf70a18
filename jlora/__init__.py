"""Multi-LoRA serving for JAX: one Flax model, many PEFT adapters, every sequence its own."""

from jlora.adapters import Adapter, ModuleLoRA
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterMismatchError,
    AdapterNotFoundError,
    LoRAError,
    LoRAUsageError,
    NoFreeSlotError,
)
from jlora.layers.discover import register_layer
from jlora.layers.einsum import einsum_spec
from jlora.layers.linen import LinenModule
from jlora.layers.scope import LoRABatch, use
from jlora.layers.site import SlotParam, SlotRanks
from jlora.layers.specs import EmbedSpec, LinearSpec
from jlora.layers.wrap import LayerInfo
from jlora.manager.manager import LoRAManager
from jlora.manager.report import AdapterInfo, Stats
from jlora.manager.verify import VerifyReport
from jlora.pallas import api as ops

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterFormatError",
    "AdapterInUseError",
    "AdapterInfo",
    "AdapterMismatchError",
    "AdapterNotFoundError",
    "EmbedSpec",
    "LayerInfo",
    "LinearSpec",
    "LinenModule",
    "LoRABatch",
    "LoRAConfig",
    "LoRAError",
    "LoRAManager",
    "LoRARequest",
    "LoRAUsageError",
    "ModuleLoRA",
    "NoFreeSlotError",
    "SlotParam",
    "SlotRanks",
    "Stats",
    "VerifyReport",
    "einsum_spec",
    "ops",
    "register_layer",
    "use",
]
