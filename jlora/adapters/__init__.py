"""Read PEFT adapter folders into NumPy arrays and write them back, without device code or PyTorch."""

from jlora.adapters.adapter import Adapter
from jlora.adapters.expert_formats import decide_exchanged
from jlora.adapters.lora import ExpertsLoRA, ModuleLoRA, SavedHead
from jlora.adapters.shapes import AdapterShapes, BaseShape, ExpertsShapes, HeadShapes, ModuleShapes

__all__ = [
    "Adapter",
    "AdapterShapes",
    "BaseShape",
    "ExpertsLoRA",
    "ExpertsShapes",
    "HeadShapes",
    "ModuleLoRA",
    "ModuleShapes",
    "SavedHead",
    "decide_exchanged",
]
