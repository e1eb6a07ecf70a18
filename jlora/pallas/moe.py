"""LoRA for a mixture of experts.

The rows of an expert product are pairs of a token and one of its k experts, M = T * k of them. The group of a pair is
slot * E + expert. With a plan of the M pairs and S * E groups of factors, `add_lora` therefore serves experts as it
serves slots. The products w1 and w3 read the token's row by `x_rows`. The product w2 has a row of its own for each
pair.

`combine_lora` adds the delta of w2 to the weighted sum over each token's experts. It is for layers that have only this
sum, and writes k times fewer rows than `add_lora` on the pairs.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jlora import _qwix
from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas import api, gradients, xla
from jlora.pallas.gpus import MIN_CAPABILITY, current_gpu, own_backend
from jlora.pallas.plan import INVARIANT_TILE_M, Plan, make_plan
from jlora.pallas.tiles import plan_tile_m


def expert_order(experts: Int[jax.Array, "M"], *, num_experts: int, backend: Backend = "auto") -> Int[jax.Array, "M"]:
    """Return the stable argsort of expert ids, the row order that grouped products take.

    Args:
      experts: [M] integers in [0, num_experts).
      num_experts: Number of experts.
      backend: Backend whose sort is used; all backends return the same order.

    Returns:
      [M] int32: sorted position -> row.

    Raises:
      LoRAError: experts is not a vector of integers.
    """
    _check_ids("expert_order", "experts", experts, None)
    kernels = _plan_kernels(backend, len(experts))
    if kernels is None:
        return jnp.argsort(experts, stable=True).astype(jnp.int32)
    return kernels.order(experts.astype(jnp.int32), num_experts)


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
    """Return the kernels that sort and plan, or None for XLA; both give equal results."""
    if (own_backend() if backend == "auto" else backend) != "triton":
        return None
    api.load("triton")
    from jlora.pallas.triton import plan as triton_plan  # slow import, needed on GPUs only

    capability = current_gpu().capability
    old = capability is not None and capability < MIN_CAPABILITY
    return None if old or not 0 < rows <= triton_plan.MOST_ROWS else triton_plan


def _check_ids(op: str, name: str, ids, size: int | None) -> None:
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer) or size not in (None, len(ids)):
        length = "" if size is None else f" of {size}"
        raise LoRAError(f"{op}: {name} must be a vector{length} of integers, got {ids.dtype}{list(ids.shape)}")


@_qwix.unintercepted
def combine_lora(
    base: Float[jax.Array, "T N"],
    x: Float[jax.Array, "M K"],
    a: Float[jax.Array, "G 1 R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    token_plan: Plan,
    *,
    rows: Int[jax.Array, "T k"],
    experts: Int[jax.Array, "T k"],
    weights: Float[jax.Array, "T k"] | None = None,
    ranks: Int[jax.Array, "G 1"] | Float[jax.Array, "G 1 2"] | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Float[jax.Array, "T N"]:
    """Compute base[t] + sum over j of weights[t, j] * scale * b[group of m]ᵀ (a[group of m] @ x[m]), m = rows[t, j].

    Args:
      base: [T, N] weighted sums of the experts' outputs. A backend may write the result in its place.
      x: [M, K] input of the second product, one row for each pair of a token and one of its experts.
      a: [G, 1, R, K] first factors, G = S * E, group = slot * E + expert.
      b: [G, R, N] second factors.
      plan: Plan of the M pairs from `plan_experts`.
      token_plan: Plan of the T tokens from `make_plan`, with num_groups = S and the same slots.
      rows: [T, k] integers, the k rows of x of each token. An index outside [0, M) means none.
      experts: [T, k] integers, the expert of each of these rows. The experts of a token are distinct.
      weights: [T, k] routing weights. None means 1 everywhere.
      ranks: [G, 1] or [G, 1, 2] as for `add_lora`.
      batch_invariant: As for `add_lora`, with a `plan` made for it. The token_plan need not be.
      backend: As for `add_lora`. On a TPU, `add_lora` computes the rows of the pairs, which are then summed.

    Returns:
      [T, N] in base.dtype, summed in float32 and rounded once. The order of the sum does not depend on other tokens or
      on the slots. Weighted hidden values are rounded as `add_lora` rounds them. A token whose pairs all have rank 0,
      or that has no pair, is bitwise the base.

    Raises:
      LoRAError: Shapes or dtypes do not fit, or the backend does not support them.
    """
    op = "combine_lora"
    if plan.num_groups != token_plan.num_groups * plan.experts:
        raise LoRAError(
            f"{op}: the plan has {plan.num_groups} groups for {plan.experts} experts, and the token_plan "
            f"{token_plan.num_groups} slots; make them by plan_experts and make_plan of the same slots"
        )
    if x.ndim != 2 or x.shape[0] != plan.num_rows:
        raise LoRAError(f"{op}: x must be [M, K] with M = {plan.num_rows} (the plan's rows), got {x.shape}")
    api.check_float(op, "x", x)
    api.check_a(op, a, plan, x.shape[1])
    sizes = api.check_b(op, b, plan, b.shape[-1:])
    if a.shape[1] != 1 or a.shape[2] != b.shape[1]:
        raise LoRAError(f"{op}: a [G, 1, R, K] = {a.shape} and b [G, R, N] = {b.shape}: n is not 1, or R differs")
    api.check_base(op, base, token_plan, b.shape[2])
    for name, array in (("rows", rows), ("experts", experts)):
        if array.shape != (token_plan.num_rows, rows.shape[-1]) or not jnp.issubdtype(array.dtype, jnp.integer):
            raise LoRAError(
                f"{op}: {name} must be integers [T, k] with T = {token_plan.num_rows} (the token_plan's rows), "
                f"got {array.dtype}{list(array.shape)}"
            )
    if weights is not None:
        if weights.shape != rows.shape:
            raise LoRAError(f"{op}: weights must be [T, k] = {list(rows.shape)}, got {list(weights.shape)}")
        api.check_float(op, "weights", weights)
    ranks = api.check_ranks(op, ranks, a.shape[:2])
    api.check_invariant(op, batch_invariant, plan)
    if not plan.num_rows or not rows.size:
        return base
    rows, experts = rows.astype(jnp.int32), experts.astype(jnp.int32)
    where = own_backend() if backend == "auto" else backend
    if where == "mosaic_tpu":
        zeros = jnp.zeros((plan.num_rows, b.shape[2]), jnp.float32)
        delta = api.add_lora(zeros, x, a, b, plan, ranks=ranks, batch_invariant=batch_invariant, backend=backend)
        return xla.add_pairs(base, delta, plan, rows=rows, weights=weights, ranks=ranks)
    pairs = jax.ShapeDtypeStruct((plan.num_rows, b.shape[2]), base.dtype)
    if where == "triton" and api.choose(op, backend, pairs, x, a, b, sizes, batch_invariant):
        from jlora.pallas.triton import moe  # slow import, needed on GPUs only

        run = partial(moe.combine_lora, batch_invariant=batch_invariant)
        return gradients.combine_lora(run, base, x, a, b, weights, plan, token_plan, rows, experts, ranks)
    return xla.combine_lora(base, x, a, b, plan, rows=rows, weights=weights, ranks=ranks)
