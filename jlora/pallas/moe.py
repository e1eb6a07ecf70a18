"""LoRA of a mixture of experts, after its rows were summed: see `add_lora` for products whose rows stand apart.

An expert product has rows for pairs of a token and one of its k experts. Their group is slot * E + expert, so that the
plan of M = T * k pairs and [S * E, ...] factors serve `add_lora` as any other groups do: w1 and w3 with `x_rows`, the
token of each row; w2 into the pairs' own rows. Where only the sum over a token's experts is wanted, `combine_lora`
adds to that, and saves the traffic of k times as many rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas import api, xla
from jlora.pallas.plan import Plan


def combine_lora(
    base: Float[jax.Array, "T N"],
    x: Float[jax.Array, "M K"],
    a: Float[jax.Array, "G 1 R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    token_plan: Plan,
    *,
    rows: Int[jax.Array, "T k"],
    weights: Float[jax.Array, "T k"] | None = None,
    ranks: Int[jax.Array, "G 1"] | None = None,
    backend: Backend = "auto",
) -> Float[jax.Array, "T N"]:
    """base[t] + sum over j of weights[t, j] * b[group of m]ᵀ (a[group of m] @ x[m]), where m = rows[t, j].

    Args:
      base: [T, N] weighted sums of the experts' outputs; a backend may write the result in its place.
      x: [M, K] input of the second product, a row for every pair of a token and one of its experts.
      a: [G, 1, R, K]; b: [G, R, N], scaling folded in; G = S * E, group = slot * E + expert.
      plan: from `make_plan` over the M pairs with num_groups = G.
      token_plan: from `make_plan` over the T tokens with num_groups = S. A pair's group must be of its token's slot, or
        none.
      rows: [T, k] integers, the k rows of x that are a token's; outside [0, M) is none. Each row is at most one
        token's, and a token's rows are of different experts.
      weights: [T, k] routing weights; None: all 1.
      ranks: [G, 1], as for `add_lora`.
      backend: as for `add_lora`.

    Returns:
      [T, N] in base.dtype, summed in float32 in an order that the experts' numbers decide, and rounded once. Tokens
      without a pair that has a group of a rank above 0 are bitwise the base.

    Raises:
      LoRAError: shapes or dtypes that do not fit, or a backend that cannot run them.
    """
    if plan.num_groups % token_plan.num_groups:
        raise LoRAError(
            f"combine_lora: the plan's {plan.num_groups} groups must be S * E, a multiple of the token_plan's "
            f"{token_plan.num_groups}"
        )
    if x.ndim != 2 or x.shape[0] != plan.num_rows:
        raise LoRAError(f"combine_lora: x must be [M, K] with M = {plan.num_rows} (the plan's rows), got {x.shape}")
    api.check_a("combine_lora", a, plan, x.shape[1])
    api.check_b("combine_lora", b, plan, b.shape[-1:])
    if a.shape[1] != 1 or a.shape[2] != b.shape[1]:
        raise LoRAError(
            f"combine_lora: a [G, 1, R, K] = {a.shape} and b [G, R, N] = {b.shape}: n is not 1, or R differs"
        )
    api.check_base("combine_lora", base, token_plan, b.shape[2])
    if rows.ndim != 2 or rows.shape[0] != token_plan.num_rows or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise LoRAError(
            f"combine_lora: rows must be integers [T, k] with T = {token_plan.num_rows} (the token_plan's rows), "
            f"got {rows.dtype}{list(rows.shape)}"
        )
    if weights is not None:
        if weights.shape != rows.shape:
            raise LoRAError(f"combine_lora: weights must be [T, k] = {list(rows.shape)}, got {list(weights.shape)}")
        api.check_float("combine_lora", "weights", weights)
    ranks = api.check_ranks("combine_lora", ranks, a.shape[:2])
    if not plan.num_rows or not rows.size:
        return base
    api.check_float("combine_lora", "x", x)
    del backend  # the kernels are to come
    return xla.combine_lora(base, x, a, b, plan, rows=rows.astype(jnp.int32), weights=weights, ranks=ranks)
