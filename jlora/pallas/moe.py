"""LoRA for a mixture of experts.

The rows of an expert product are pairs of a token and one of its k experts, M = T * k of them. The group of a pair is
slot * E + expert. With a plan of the M pairs and S * E groups of factors, `add_lora` therefore serves experts as it
serves slots. The products w1 and w3 read the token's row by `x_rows`. The product w2 has a row of its own for each
pair.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas import api
from jlora.pallas.gpus import MIN_CAPABILITY, current_gpu, own_backend
from jlora.pallas.plan import INVARIANT_TILE_M, Plan, make_plan
from jlora.pallas.tiles import plan_tile_m


def plan_experts(
    slot_ids: Int[jax.Array, "T"],
    tokens: Int[jax.Array, "M"],
    experts: Int[jax.Array, "M"],
    *,
    num_slots: int,
    num_experts: int,
    tile_m: int | None = None,
    max_active: int | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Plan:
    """Make the plan of rows that are pairs of a token and an expert: group = slot * num_experts + expert.

    Its cost and size depend on the number of rows M and not on the number of groups. On an NVIDIA GPU it runs in a few
    launches of its own.

    Args:
      slot_ids: [T] slot of each token. An id outside [0, num_slots) means no adapter.
      tokens: [M] token of each row. An index outside [0, T) means no adapter.
      experts: [M] expert of each row. An id outside [0, num_experts) means no adapter.
      num_slots: Number of slots S.
      num_experts: Number of experts E. The plan's num_groups is S * E.
      tile_m: As for `make_plan`.
      max_active: As for `make_plan`: bound on the number of distinct pairs of slot and expert.
      batch_invariant: As for `make_plan`.
      backend: Backend whose preferred `tile_m` is used and that makes the plan. Any plan serves every backend.

    Returns:
      A `Plan` of M rows; rows without a group are dropped. For few rows the plan may be unsorted, with one tile a row.

    Raises:
      LoRAError: Arrays have other shapes or dtypes, or sizes are not positive.
    """
    _check_ids("plan_experts", "slot_ids", slot_ids, None)
    _check_ids("plan_experts", "tokens", tokens, None)
    _check_ids("plan_experts", "experts", experts, len(tokens))
    if min(num_slots, num_experts) < 1:
        raise LoRAError(f"plan_experts: num_slots and num_experts must be at least 1, got {num_slots}, {num_experts}")
    groups, rows = num_slots * num_experts, len(tokens)
    if not len(slot_ids):
        slot_ids = jnp.full(1, num_slots, jnp.int32)
    slot = slot_ids[jnp.clip(tokens, 0, len(slot_ids) - 1)]
    inside = (tokens >= 0) & (tokens < len(slot_ids)) & (slot >= 0) & (slot < num_slots)
    inside &= (experts >= 0) & (experts < num_experts)
    ids = jnp.where(inside, slot * num_experts + experts, groups).astype(jnp.int32)
    if batch_invariant and tile_m not in (None, INVARIANT_TILE_M):
        raise LoRAError(
            f"plan_experts: batch_invariant needs a tile_m of {INVARIANT_TILE_M}, got {tile_m}; leave it out"
        )
    tile_m = INVARIANT_TILE_M if batch_invariant else tile_m
    kernels = _plan_kernels(backend, rows)
    given = [1, *(size for size in (tile_m, max_active) if size is not None)]  # make_plan raises for sizes below 1
    if kernels is None or min(given) < 1:
        plan = make_plan(ids, num_groups=groups, tile_m=tile_m, max_active=max_active, backend=backend)
        return dataclasses.replace(plan, experts=num_experts)
    bound = min(rows, groups) if max_active is None else min(max_active, rows, groups)
    tile_m = plan_tile_m(rows, bound, backend) if tile_m is None else tile_m
    if rows <= min(kernels.ROW_TILES, num_experts):  # so few rows seldom share a group
        return kernels.row_tiles(ids, num_experts, groups, tile_m)
    return kernels.plan(ids, num_experts, groups, tile_m, bound)


def _plan_kernels(backend: Backend, rows: int):
    """Return the kernels that plan, or None for XLA; both give equal results."""
    if (own_backend() if backend == "auto" else backend) != "triton":
        return None
    api.import_backend("triton")
    from jlora.pallas.triton import plan as triton_plan  # slow import, needed on GPUs only

    capability = current_gpu().capability
    old = capability is not None and capability < MIN_CAPABILITY
    return None if old or not 0 < rows <= triton_plan.MOST_ROWS else triton_plan


def _check_ids(op: str, name: str, ids, size: int | None) -> None:
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer) or size not in (None, len(ids)):
        length = "" if size is None else f" of {size}"
        raise LoRAError(f"{op}: {name} must be a vector{length} of integers, got {ids.dtype}{list(ids.shape)}")
