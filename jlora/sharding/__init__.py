"""Derive the shardings of slot arrays from those of the base model, and place arrays on a mesh."""
