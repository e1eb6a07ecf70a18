"""Training of adapters in one step."""
