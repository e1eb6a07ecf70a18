"""Multi-LoRA serving for JAX: one Flax model, many PEFT adapters, every sequence its own."""

from jlora import ops
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
from jlora.layers.linear import LinearLayer
from jlora.layers.scope import LoRABatch, use
from jlora.layers.slots import SlotParam, SlotRanks
from jlora.layers.wrap import register_layer
from jlora.manager.manager import LoRAManager
from jlora.manager.report import AdapterInfo, Stats

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterFormatError",
    "AdapterInUseError",
    "AdapterInfo",
    "AdapterMismatchError",
    "AdapterNotFoundError",
    "LinearLayer",
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
    "ops",
    "register_layer",
    "use",
]
