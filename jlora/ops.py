"""The kernels as plain functions, for use without Flax. See `jlora.pallas.api` and `jlora.pallas.moe`."""

from jlora.pallas.api import Plan, add_lora, expand, make_plan, shrink, unsupported_reason
from jlora.pallas.moe import plan_experts

__all__ = ["Plan", "add_lora", "expand", "make_plan", "plan_experts", "shrink", "unsupported_reason"]
