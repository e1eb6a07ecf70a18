"""Multi-LoRA serving for JAX: one Flax model, many PEFT adapters, every sequence its own."""

from jlora.adapters import Adapter, ModuleLoRA
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterMismatchError,
    AdapterNotFoundError,
    LoadTimeoutError,
    LoRAError,
    LoRAUsageError,
    NoFreeSlotError,
)
from jlora.layers.batch import LoRABatch
from jlora.layers.linear import LinearLayer
from jlora.layers.rows import RowMap, rows
from jlora.layers.scope import use
from jlora.layers.site import SlotParam, SlotRanks
from jlora.layers.wrap import register_layer
from jlora.manager.leases import AdapterHandle, LeaseInfo
from jlora.manager.manager import LoRAManager
from jlora.manager.report import AdapterInfo, Stats
from jlora.pallas import api as ops

__version__ = "0.2.0"

__all__ = [
    "Adapter",
    "AdapterFormatError",
    "AdapterHandle",
    "AdapterInUseError",
    "AdapterInfo",
    "AdapterMismatchError",
    "AdapterNotFoundError",
    "LeaseInfo",
    "LinearLayer",
    "LoRABatch",
    "LoRAConfig",
    "LoRAError",
    "LoRAManager",
    "LoRARequest",
    "LoRAUsageError",
    "LoadTimeoutError",
    "ModuleLoRA",
    "NoFreeSlotError",
    "RowMap",
    "SlotParam",
    "SlotRanks",
    "Stats",
    "ops",
    "register_layer",
    "rows",
    "use",
]
