"""What runs on NVIDIA GPUs through Pallas' Triton lowering: the kernels of a step, and the write of slots."""

from jlora.pallas.triton.kernels import MAX_RANK, add_lora, expand, shrink, unsupported_reason

__all__ = ["MAX_RANK", "add_lora", "expand", "shrink", "unsupported_reason"]
