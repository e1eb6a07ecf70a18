"""Grouped LoRA as plain functions: check shapes and dtypes, then run one backend.

Each row of `x` belongs to a group, for example the slot of its adapter. Group g has its own pair of factors, a[g] and
b[g]. For a row m of group g:

    shrink   h[m] = a[g] @ x[m]                         [K] -> [R]
    expand   out[m] = base[m] + b[g]ᵀ @ (scale * h[m])  [R] -> [N]

`make_plan` sorts the rows by group and cuts them into tiles once a step; every layer uses the same plan. A tile holds
rows of one group, so a kernel computes each product of a tile with one matrix.

A merged projection (qkv, or gate and up) is one matrix with n output slices side by side. Slice i has its own a[:, i]
and its own columns of b.

`ranks` has one meaning in all functions and their gradients. It is a float32 array [G, n, 2] of true ranks, which are
whole numbers, and scales. Let r, s = ranks[g, i].

Both factors may be int8. Then `ranks` is [G, n, 1 + R]: the true rank, and a scale for each of the R rows of a[g, i].
Such a scale is the product of three: the step between two values of that row of a, the step of the same row of slice i
of b, and s. Scales from the true rank on may be NaN. Products have the dtype of x, to which int8 converts exactly.

The results do not depend on the entries of a[g, i], or of slice i's columns of b[g], from rank r rounded up to a
multiple of 16 (at most R) on. With r = 0 they depend on no entry at all. These entries may be NaN, because they are
masked and never multiplied by zero. When factors of rank r are written, only the ranks from r up to that multiple of 16
have to be zeroed.

The scale s is LoRA's alpha / r, or alpha / sqrt(r) for rsLoRA. `expand` multiplies h[i, m] of group g by it in float32
before the product with b, so that b is stored as the adapter's file has it. `shrink` returns h unscaled.

Rows without a group and slices of rank 0 keep the base, bitwise. Without a base the result is the delta alone. It is
-0.0 in these rows and slices, so that adding it to a base changes no bit there.

Ranks, scales and int8 factors are constants of the gradients, which are those of reverse mode only. A group without
rows has zero gradients, and so have ranks from the true rank on. Under `jax.checkpoint`, h of `add_lora` has the name
"lora_h".

`batch_invariant` fixes all sizes that decide the order of a sum: the rows of a tile, the blocks and parts of K, and the
number of launches. They then follow K, N, R and dtypes alone. The kernels of a backend give a row's delta the same bits
in a call of 1 row or of 8,192, with any other rows and in any slot. Gradients are not covered. For backend "xla"
nothing but the rows of a tile is fixed: XLA chooses the order of its sums. On a CPU the bits were equal at all sizes
tried.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Real

from jlora import _qwix
from jlora._compat import triton_gap
from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas import gradients, xla
from jlora.pallas.gpus import own_backend, tell_once
from jlora.pallas.plan import INVARIANT_TILE_M, Plan, make_plan

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct

_FLOATS = "bfloat16", "float16", "float32"

__all__ = ["Plan", "add_lora", "expand", "make_plan", "shrink", "unsupported_reason"]


@_qwix.unintercepted
def shrink(
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Float[jax.Array, "G n s"] | None = None,
    x_rows: Int[jax.Array, "M"] | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Float[jax.Array, "n M R"]:
    """Compute h[i, m] = a[group of m, i] @ x[m] in float32.

    Args:
      x: [M, K] rows in the order that the plan was made for, or [T, K] with `x_rows`.
      a: [G, n, R, K] first factors in bfloat16, float16, float32 or int8.
      plan: Plan of M rows from `make_plan`, with num_groups = G.
      ranks: [G, n, 2] float32, or [G, n, 1 + R] with int8 factors: ranks from 0 to R, and scales, which are not used
        here. Entries of h at and past the rank are zero, and the kernels skip their work. Entries of a past the rank,
        rounded up to 16, are never used and may be NaN. None means R everywhere.
      x_rows: [M] integers. Row m of the plan is x[x_rows[m]]; the index must be in [0, T) where m has a group. With it,
        a token's row is stored once for all of its experts. A row of x may occur at most once in a group.
      batch_invariant: As for `add_lora`.
      backend: "auto" chooses by platform. A named backend is used, or raises with the reason why it cannot be.

    Returns:
      [n, M, R] float32 in the order of x. Rows without a group are zero.

    Raises:
      LoRAError: Shapes or dtypes do not fit, or the backend does not support them.
    """
    x_rows = _check_x("shrink", x, x_rows, plan)
    check_a("shrink", a, plan, x.shape[1])
    ranks = check_ranks("shrink", ranks, a.shape[:3], a.dtype)
    rows, (groups, n, rank, _) = plan.num_rows, a.shape
    base, b = _like((rows, n * rank)), _like((groups, rank, n * rank))
    check_invariant("shrink", batch_invariant, plan)
    kernels = choose("shrink", backend, base, x, a, b, (rank,) * n, batch_invariant)
    if rows == 0:
        return xla.shrink(x, a, plan, ranks=ranks, x_rows=x_rows)
    run, backward = _pass(kernels, "shrink", batch_invariant)
    return gradients.shrink(run, backward, x, a, plan, ranks, x_rows)


@_qwix.unintercepted
def expand(
    h: Float[jax.Array, "n M R"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: Sequence[int],
    base: Float[jax.Array, "M N"] | None = None,
    ranks: Float[jax.Array, "G n s"] | None = None,
    finite: bool = False,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Float[jax.Array, "M N"]:
    """Compute delta[m, columns of i] = scale * h[i, m] @ b[group of m, :, columns of i], summed in float32.

    Args:
      h: [n, M, R] float32 from `shrink`. Entries at and past a row's rank are ignored.
      b: [G, R, N] second factors, all n slices side by side, in a dtype of `shrink`'s a.
      plan: Plan that was given to `shrink`.
      slice_sizes: The n column counts, which sum to N.
      base: [M, N] to add the delta to. The sum is computed in float32 and rounded once to base.dtype. None returns the
        delta alone.
      ranks: [G, n, 2] or [G, n, 1 + R] as for `shrink`. Entries of b past the rank, rounded up to 16, are never used.
        The scale multiplies h in float32, with that of the row (`Plan.scaled`). None means rank R and scale 1
        everywhere.
      finite: As for `add_lora`.
      batch_invariant: As for `add_lora`.
      backend: As for `shrink`.

    Returns:
      [M, N]. With `base`, base + delta in base.dtype; rows without a group and slices of rank 0 are bitwise the base.
      Without `base`, delta in b.dtype, or float32 if b is int8; these rows and slices are -0.0.

    Raises:
      LoRAError: As for `shrink`.
    """
    sizes = check_b("expand", b, plan, slice_sizes)
    if h.ndim != 3 or h.shape != (len(sizes), plan.num_rows, b.shape[1]):
        raise LoRAError(f"expand: h must be [n, M, R] = [{len(sizes)}, {plan.num_rows}, {b.shape[1]}], got {h.shape}")
    check_base("expand", base, plan, b.shape[2])
    ranks = check_ranks("expand", ranks, (b.shape[0], len(sizes), b.shape[1]), b.dtype)
    (n, rows, rank), groups = h.shape, b.shape[0]
    out = _like((rows, b.shape[2]), xla.float_of(b)) if base is None else base
    check_invariant("expand", batch_invariant, plan)
    x, a = _like((rows, n * rank)), _like((groups, n, rank, n * rank))
    kernels = choose("expand", backend, out, x, a, b, sizes, batch_invariant)
    if rows == 0:
        return xla.expand(h, b, plan, slice_sizes=sizes, base=base, ranks=ranks)
    run, backward = _pass(kernels, "expand", batch_invariant, finite)
    return gradients.expand(run, backward, sizes, h, b, plan, base, ranks)


@_qwix.unintercepted
def add_lora(
    base: Float[jax.Array, "M N"] | None,
    x: Float[jax.Array, "T K"],
    a: Real[jax.Array, "G n R K"],
    b: Real[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: Sequence[int] | None = None,
    ranks: Float[jax.Array, "G n s"] | None = None,
    x_rows: Int[jax.Array, "M"] | None = None,
    finite: bool = False,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Float[jax.Array, "M N"]:
    """Compute base[m] + scale * b[group of m]ᵀ (a[group of m] @ x[m]) for each slice.

    LoRA layers call this function. It is `expand` of `shrink`, fused where the backend can.

    Args:
      base: [M, N] output of the base layer. A backend may write the result in its place. None returns the delta alone,
        in float32.
      x: [M, K] input of the base layer, or [T, K] with `x_rows`.
      a: [G, n, R, K] first factors in bfloat16, float16, float32 or int8.
      b: [G, R, N] second factors, int8 if and only if a is.
      plan: Plan of M rows from `make_plan`, with num_groups = G.
      slice_sizes: The n column counts, which sum to N. None means one slice.
      ranks: [G, n, 2] float32, the true rank and the scale of each group and slice, or [G, n, 1 + R] with int8
        factors, the true rank and the scale of each of the R rows. A rank of 0 leaves the slice unchanged. Entries of a
        and b past the rank, rounded up to 16, are never used and may be NaN. None means rank R and scale 1 everywhere.
      x_rows: [M] as for `shrink`.
      finite: True only if b holds no NaN or infinity up to each true rank, rounded up to 16. Kernels then need not
        search for them; if b holds one, it may reach rows of other groups. A differentiated call does not rely on it.
      batch_invariant: Compute a row's delta with the same bits for any number of rows, mix and slots (see above). The
        plan must be made for it, and the result may take longer.
      backend: "auto" chooses by platform. A named backend is used, or raises with the reason why it cannot be.

    Returns:
      [M, N] in base.dtype. Products are summed in float32. If x, a and b are bfloat16, the kernels round scale *
      (a @ x) to bfloat16 before the product with b; on a GPU they also round each partial sum over K. base + delta is
      computed in float32 and rounded once. Only for up to 256 rows of bfloat16 on a GPU, without `batch_invariant`, the
      delta is rounded to bfloat16 before, and on a GPU a delta alone of bfloat16 x, a and b. The same holds for
      bfloat16 x with int8 a and b. Rows without a group and slices of rank 0 are bitwise the base, or -0.0 without one.

    Raises:
      LoRAError: Shapes or dtypes do not fit, or the backend does not support them.
    """
    x_rows = _check_x("add_lora", x, x_rows, plan)
    sizes = _check_pair("add_lora", a, b, plan, x.shape[1], slice_sizes)
    check_base("add_lora", base, plan, b.shape[2])
    ranks = check_ranks("add_lora", ranks, a.shape[:3], a.dtype)
    check_invariant("add_lora", batch_invariant, plan)
    if plan.num_rows == 0:
        return jnp.zeros((0, b.shape[2])) if base is None else base
    out = _like((plan.num_rows, b.shape[2])) if base is None else base
    kernels = choose("add_lora", backend, out, x, a, b, sizes, batch_invariant)
    run, backward = _pass(kernels, "add_lora", batch_invariant, finite)
    return gradients.add_lora(run, backward, sizes, base, x, a, b, plan, ranks, x_rows)


def unsupported_reason(
    backend: Backend, base: Shaped, x: Shaped, a: Shaped, b: Shaped, *, slice_sizes: Sequence[int]
) -> str | None:
    """Return why `backend` cannot run `add_lora` on operands of these shapes and dtypes, or None if it can.

    The operands are arrays or `jax.ShapeDtypeStruct`s, and nothing is compiled. For "triton" the result holds for one
    kind of GPU: that of the abstract mesh set by the caller (`jax.sharding.use_abstract_mesh`), else the default
    device, else an H200. "auto" always returns None, because it uses "xla" where the platform's kernels cannot run.
    """
    kernels = _kernels(backend)
    return None if kernels is None else kernels.unsupported_reason(base, x, a, b, slice_sizes=tuple(slice_sizes))


def _kernels(backend: Backend) -> ModuleType | None:
    """Import and return the kernels of a named backend; None for "auto" and "xla".

    The imports are slow, and each is needed on its own platform only.

    Raises:
      LoRAError: There is no such backend, or "triton" is named and JAX has no Triton lowering.
    """
    if backend == "triton":
        if (gap := triton_gap()) is not None:
            raise LoRAError(f"backend 'triton' {gap}")
        from jlora.pallas.triton import lora

        return lora
    if backend == "mosaic_tpu":
        from jlora.pallas.mosaic_tpu import lora

        return lora
    if backend in ("auto", "xla"):
        return None
    raise LoRAError(f"backend must be 'auto', 'xla', 'mosaic_tpu' or 'triton', got {backend!r}")


def import_backend(backend: Backend) -> None:
    """Import the kernels of a backend before a function that may use them is traced.

    From JAX 0.11 on, this import adds settings that belong to the key of each trace. A function that imports the
    kernels while it is traced is therefore traced and compiled again at its second call.
    """
    _kernels(own_backend() if backend == "auto" else backend)


def choose(
    op: str, backend: Backend, base, x, a, b, sizes: tuple[int, ...], batch_invariant: bool
) -> ModuleType | None:
    """Return the kernels to run, or None for XLA. If `batch_invariant`, the number of rows does not decide."""
    if batch_invariant:
        base = _like((INVARIANT_TILE_M, base.shape[1]), base.dtype)
    if backend == "auto":
        name = own_backend()
        reason = unsupported_reason(name, base, x, a, b, slice_sizes=sizes)
        if reason is not None:
            shapes = ", ".join(f"{n} {v.dtype}{list(v.shape)}" for n, v in zip("xab", (x, a, b), strict=True))
            tell_once(f"{op}: backend 'auto' takes 'xla' for {shapes}: '{name}' {reason}")
        return _kernels(name) if reason is None else None
    reason = unsupported_reason(backend, base, x, a, b, slice_sizes=sizes)
    if reason is not None:
        raise LoRAError(f"{op}: backend {backend!r} {reason}")
    return _kernels(backend)


def _pass(
    kernels: ModuleType | None, op: str, batch_invariant: bool, finite: bool = False
) -> tuple[Callable[..., Any], ModuleType]:
    """Return the forward function of a backend and the module of its backward pass; None means XLA."""
    if kernels is None:
        return getattr(xla, op), xla
    options = {"batch_invariant": batch_invariant, "finite": finite and op in getattr(kernels, "SEARCHING", ())}
    on = {name: True for name, value in options.items() if value}
    run = getattr(kernels, op)
    return functools.partial(run, **on) if on else run, kernels.backward


def check_invariant(op: str, batch_invariant: bool, plan: Plan) -> None:
    if batch_invariant and plan.tile_m != INVARIANT_TILE_M:
        raise LoRAError(
            f"{op}: batch_invariant needs a plan with tile_m = {INVARIANT_TILE_M}, got {plan.tile_m}; "
            "make it with batch_invariant=True"
        )


def _like(shape: tuple[int, ...], dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _check_x(op: str, x, x_rows, plan: Plan) -> Int[jax.Array, "M"] | None:
    if x.ndim != 2 or (x_rows is None and x.shape[0] != plan.num_rows):
        raise LoRAError(
            f"{op}: x must be [M, features] with M = {plan.num_rows} (the plan's rows), got {x.shape}; "
            "flatten leading dimensions, make the plan over these rows, or say with x_rows which are its rows"
        )
    _check_dtype(op, "x", x, *_FLOATS)
    if x_rows is None:
        return None
    if x_rows.shape != (plan.num_rows,) or not jnp.issubdtype(x_rows.dtype, jnp.integer):
        raise LoRAError(
            f"{op}: x_rows must be integers [M] = [{plan.num_rows}] (the plan's rows), "
            f"got {x_rows.dtype}{list(x_rows.shape)}"
        )
    if not x.shape[0] and plan.num_rows:
        raise LoRAError(f"{op}: x has no rows, but x_rows refers to them")
    return x_rows.astype(jnp.int32)


def check_a(op: str, a, plan: Plan, features: int) -> None:
    if a.ndim != 4 or a.shape[0] != plan.num_groups or a.shape[3] != features:
        raise LoRAError(
            f"{op}: a must be [G, n, R, K] with G = {plan.num_groups} (the plan's groups) and K = {features} (x), "
            f"got {a.shape}"
        )
    _check_dtype(op, "a", a, *_FLOATS, "int8")


def check_b(op: str, b, plan: Plan, slice_sizes: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in slice_sizes)
    if b.ndim != 3 or b.shape[0] != plan.num_groups:
        raise LoRAError(f"{op}: b must be [G, R, N] with G = {plan.num_groups} (the plan's groups), got {b.shape}")
    if not sizes or min(sizes) < 1 or sum(sizes) != b.shape[2]:
        raise LoRAError(f"{op}: slice_sizes must be positive and sum to N = {b.shape[2]} (b), got {sizes}")
    _check_dtype(op, "b", b, *_FLOATS, "int8")
    return sizes


def _check_pair(op: str, a, b, plan: Plan, features: int, slice_sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Check both factors and return the slice sizes."""
    check_a(op, a, plan, features)
    sizes = check_b(op, b, plan, (b.shape[-1],) if slice_sizes is None else slice_sizes)
    if a.shape[1] != len(sizes) or a.shape[2] != b.shape[1]:
        raise LoRAError(
            f"{op}: a [G, n, R, K] = {a.shape} and b [G, R, N] = {b.shape}, {len(sizes)} slices: n or R disagree"
        )
    if (a.dtype == jnp.int8) != (b.dtype == jnp.int8):
        raise LoRAError(f"{op}: a and b must both be int8, or neither, got a {a.dtype} and b {b.dtype}")
    return sizes


def check_base(op: str, base, plan: Plan, columns: int) -> None:
    if base is None:
        return
    if base.shape != (plan.num_rows, columns):
        raise LoRAError(f"{op}: base must be [M, N] = [{plan.num_rows}, {columns}], got {base.shape}")
    _check_dtype(op, "base", base, *_FLOATS)


def check_ranks(op: str, ranks, shape: tuple[int, ...], factors) -> Float[jax.Array, "G n s"] | None:
    """Check `ranks` for factors of this dtype with (G, n, R) = shape."""
    if ranks is None:
        return None
    *groups, rank = shape
    width, name, of_rows = (1 + rank, "1 + R", " of the rows of int8 factors") if factors == jnp.int8 else (2, "2", "")
    if ranks.shape != (*groups, width) or ranks.dtype != jnp.float32:
        raise LoRAError(
            f"{op}: ranks must be float32 [G, n, {name}] = {[*groups, width]} of ranks and scales{of_rows}, "
            f"got {ranks.dtype}{list(ranks.shape)}"
        )
    return jax.lax.stop_gradient(jnp.asarray(ranks))


def _check_dtype(op: str, name: str, array, *dtypes: str) -> None:
    if array.dtype.name not in dtypes:
        raise LoRAError(f"{op}: {name} must be {', '.join(dtypes[:-1])} or {dtypes[-1]}, got {array.dtype}")
