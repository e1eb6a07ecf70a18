"""LoRA for the JAX models of vLLM (`tpu-inference`), as a plugin: `vllm serve MODEL --enable-lora` is all.

vLLM calls `register` in each of its processes. docs/vllm.md says what is served.
"""

import functools
import importlib.util


@functools.cache
def register() -> None:
    """Add LoRA to the JAX models of `tpu-inference`. vLLM calls this through its entry point `vllm.general_plugins`.

    It does nothing where `tpu_inference` is not installed, and does its work once in each process.

    Raises:
      LoRAError: a function of vLLM or of tpu-inference has other parameters than the releases that jlora knows.
    """
    if importlib.util.find_spec("tpu_inference") is not None:
        from jlora.integrations.vllm_jax import hooks

        hooks.install()
