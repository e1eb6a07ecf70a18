"""Adapters on the host: PEFT folders read to NumPy and written back. No device code, no PyTorch."""

from jlora.adapters.adapter import Adapter, ModuleLoRA

__all__ = ["Adapter", "ModuleLoRA"]
