"""Adapters on the host: PEFT folders read to NumPy and written back. No device code, no PyTorch."""

from jlora.adapters.adapter import Adapter, ModuleLoRA
from jlora.adapters.shapes import AdapterShapes, BaseShape, ModuleShapes

__all__ = ["Adapter", "AdapterShapes", "BaseShape", "ModuleLoRA", "ModuleShapes"]
