"""Modules that join jlora with other libraries.

`qwix` is for LoRA training, `tunix` for models and rollouts, and `vllm_jax` a plugin for vLLM on TPUs. Import the one
that is needed. None imports its library before a function of it runs.
"""
