"""Adapters on the host: PEFT folders read to NumPy and written back. No device code, no PyTorch."""

from jlora.adapters.adapter import Adapter
from jlora.adapters.expert_formats import decide_exchanged
from jlora.adapters.lora import ExpertsLoRA, ModuleLoRA
from jlora.adapters.shapes import AdapterShapes, BaseShape, ExpertsShapes, ModuleShapes

__all__ = [
    "Adapter",
    "AdapterShapes",
    "BaseShape",
    "ExpertsLoRA",
    "ExpertsShapes",
    "ModuleLoRA",
    "ModuleShapes",
    "decide_exchanged",
]
