"""Compiler options of a step with LoRA."""

from typing import Any

from jlora._compat import side_by_side
from jlora.pallas.gpus import platform


def compiler_options() -> dict[str, Any] | None:
    """Return options of `jax.jit` for a step with LoRA on the platform of the default device; None for no options.

    On an NVIDIA GPU, XLA then runs the kernels of LoRA at the same time as the base products (docs/performance.md).
    `LoRAManager.jit` sets them. JAX takes options only for a function that is not called inside another jitted one:

        step = jax.jit(step, compiler_options=jlora.compiler_options())

    `XLA_FLAGS=--xla_gpu_command_buffer_scheduling_mode=CONCURRENT` does the same for all functions of a process.
    """
    return side_by_side(platform())
