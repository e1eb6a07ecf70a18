"""The kernels as plain functions, for people who do not use Flax: see `jlora.pallas.api`."""

from jlora.pallas.api import Plan, add_lora, expand, make_plan, shrink, unsupported_reason

__all__ = ["Plan", "add_lora", "expand", "make_plan", "shrink", "unsupported_reason"]
