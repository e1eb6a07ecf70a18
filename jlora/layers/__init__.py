"""Flax NNX layers that serve LoRA: wrapping, the trace-time scope and slot arrays."""
