"""Modules that join jlora with other libraries: `qwix` (LoRA training) and `tunix` (models and rollouts).

Import the one that is needed. None imports its library before a function of it runs.
"""
