"""Wrapping: which layers of a model serve LoRA, and their new classes."""
