"""Modules that join jlora with other libraries.

`linen` is for Flax Linen models, `qwix` for LoRA training, `tunix` for models and rollouts, and `vllm_jax` a plugin for
vLLM on TPUs. Import the one that is needed. None imports another library than Flax before a function of it runs.
"""
