"""Read PEFT adapter folders into NumPy arrays and write them back, without device code or PyTorch."""

from jlora.adapters.adapter import Adapter
from jlora.adapters.lora import ExpertsLoRA, ModuleLoRA, SavedHead, UnreadArray

__all__ = [
    "Adapter",
    "ExpertsLoRA",
    "ModuleLoRA",
    "SavedHead",
    "UnreadArray",
]
