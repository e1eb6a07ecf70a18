"""Read PEFT adapter folders into NumPy arrays and write them back, without device code or PyTorch."""

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
