"""Wrap the layers of a model that serve LoRA."""
