"""LoRA of a mixture of experts, after its rows were summed: see `add_lora` for products whose rows stand apart.

An expert product has rows for pairs of a token and one of its k experts. Their group is slot * E + expert, so that the
plan of M = T * k pairs and [S * E, ...] factors serve `add_lora` as any other groups do: w1 and w3 with `x_rows`, the
token of each row; w2 into the pairs' own rows. Where only the sum over a token's experts is wanted, `combine_lora`
adds to that, and saves the traffic of k times as many rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas import api, gradients, xla
from jlora.pallas.gpus import MIN_CAPABILITY, current_gpu, platform
from jlora.pallas.plan import Plan, make_plan
from jlora.pallas.tiles import plan_tile_m


def expert_order(experts: Int[jax.Array, "M"], *, num_experts: int, backend: Backend = "auto") -> Int[jax.Array, "M"]:
    """Stable argsort of expert ids in [0, num_experts): the order of rows that grouped products want.

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
    backend: Backend = "auto",
) -> Plan:
    """The plan of rows that are pairs of a token and an expert: group = slot * num_experts + expert.

    Its cost and size follow the M rows and not the groups, on an NVIDIA GPU in few launches of its own.

    Args:
      slot_ids: [T] slot of each token; outside [0, num_slots) is none.
      tokens: [M] which token a row is a copy of; outside [0, T) is none.
      experts: [M] which expert a row goes to; outside [0, num_experts) is none.
      num_slots, num_experts: S and E; the plan's num_groups is S * E.
      tile_m, max_active: as for `make_plan`; distinct pairs of slot and expert.
      backend: whose preferred `tile_m` to take, and who makes the plan; any plan serves every backend.

    Returns:
      A `Plan` of M rows; rows without a group are dropped. For few rows it may be one that is not sorted.

    Raises:
      LoRAError: arrays of other shapes or dtypes, sizes that are not positive.
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
    kernels = _plan_kernels(backend, rows)
    given = [1, *(size for size in (tile_m, max_active) if size is not None)]  # make_plan refuses the others
    if kernels is None or min(given) < 1:
        plan = make_plan(ids, num_groups=groups, tile_m=tile_m, max_active=max_active, backend=backend)
        return dataclasses.replace(plan, experts=num_experts)
    bound = min(rows, groups) if max_active is None else min(max_active, rows, groups)
    tile_m = plan_tile_m(rows, bound, backend) if tile_m is None else tile_m
    if rows <= min(kernels.ROW_TILES, num_experts):  # rows of one group are rare then
        return kernels.row_tiles(ids, num_experts, groups, tile_m)
    return kernels.plan(ids, num_experts, groups, tile_m, bound)


def _plan_kernels(backend: Backend, rows: int):
    """The kernels that sort and plan, or None for XLA. Both give the same, so that nobody need know which ran."""
    if (platform() if backend == "auto" else backend) not in ("gpu", "cuda", "triton"):
        return None
    from jlora.pallas.triton import plan as triton_plan  # slow, and needed on GPUs alone

    capability = current_gpu().capability
    old = capability is not None and capability < MIN_CAPABILITY
    return None if old or not 0 < rows <= triton_plan.MOST_ROWS else triton_plan


def _check_ids(op: str, name: str, ids, size: int | None) -> None:
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer) or size not in (None, len(ids)):
        length = "" if size is None else f" of {size}"
        raise LoRAError(f"{op}: {name} must be a vector{length} of integers, got {ids.dtype}{list(ids.shape)}")


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
    ranks: Int[jax.Array, "G 1"] | None = None,
    backend: Backend = "auto",
) -> Float[jax.Array, "T N"]:
    """base[t] + sum over j of weights[t, j] * b[group of m]ᵀ (a[group of m] @ x[m]), where m = rows[t, j].

    Args:
      base: [T, N] weighted sums of the experts' outputs; a backend may write the result in its place.
      x: [M, K] input of the second product, a row for every pair of a token and one of its experts.
      a: [G, 1, R, K]; b: [G, R, N], scaling folded in; G = S * E, group = slot * E + expert.
      plan: from `plan_experts` over the M pairs.
      token_plan: from `make_plan` over the T tokens with num_groups = S, of the same slots.
      rows: [T, k] integers, the k rows of x that are a token's; outside [0, M) is none.
      experts: [T, k] integers, what expert each of them goes to; a token's are different.
      weights: [T, k] routing weights; None: all 1.
      ranks: [G, 1], as for `add_lora`.
      backend: as for `add_lora`, which on a TPU makes the pairs' rows, that are then summed.

    Returns:
      [T, N] in base.dtype, summed in float32 and rounded once, in an order that neither other tokens nor their slots
      decide; weighted hidden values are rounded as `add_lora` rounds them. Tokens without a pair that has a rank above
      0 are bitwise the base.

    Raises:
      LoRAError: shapes or dtypes that do not fit, or a backend that cannot run them.
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
    if not plan.num_rows or not rows.size:
        return base
    rows, experts = rows.astype(jnp.int32), experts.astype(jnp.int32)
    where = platform() if backend == "auto" else backend
    if where in ("tpu", "mosaic_tpu"):
        zeros = jnp.zeros((plan.num_rows, b.shape[2]), jnp.float32)
        delta = api.add_lora(zeros, x, a, b, plan, ranks=ranks, backend=backend)
        return xla.add_pairs(base, delta, plan, rows=rows, weights=weights, ranks=ranks)
    pairs = jax.ShapeDtypeStruct((plan.num_rows, b.shape[2]), base.dtype)
    if where in ("gpu", "cuda", "triton") and api.choose(op, backend, pairs, x, a, b, sizes) is not None:
        return gradients.combine_lora(base, x, a, b, weights, plan, token_plan, rows, experts, ranks)
    return xla.combine_lora(base, x, a, b, plan, rows=rows, weights=weights, ranks=ranks)
