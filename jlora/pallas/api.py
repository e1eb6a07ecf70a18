"""Grouped LoRA as plain functions: check shapes and dtypes, then run one backend.

Each row of `x` belongs to a group, for example the slot of its adapter. Group g has its own pair of factors, a[g] and
b[g]. For a row m of group g:

    shrink   h[m] = a[g] @ x[m]               [K] -> [R]
    expand   out[m] = base[m] + b[g]ᵀ @ h[m]  [R] -> [N]

`make_plan` sorts the rows by group and cuts them into tiles once a step; every layer uses the same plan. A tile holds
rows of one group, so a kernel computes each product of a tile with one matrix.

A merged projection (qkv, or gate and up) is one matrix with n output slices side by side. Slice i has its own a[:, i]
and its own columns of b.

`ranks` has one meaning in all functions and their gradients. Let r = ranks[g, i]. The results do not depend on the
entries of a[g, i], or of slice i's columns of b[g], from rank r rounded up to a multiple of 16 (at most R) on. With r =
0 they depend on no entry at all. These entries may be NaN, because they are masked and never multiplied by zero. When
factors of rank r are written, only the ranks from r up to that multiple of 16 have to be zeroed.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeAlias

import jax
import jax.custom_batching
import jax.numpy as jnp
from jaxtyping import Float, Int

from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas import gradients, tables, xla
from jlora.pallas.gpus import platform
from jlora.pallas.plan import Plan, make_plan
from jlora.pallas.tiles import ProductTiles

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct

__all__ = ["Plan", "add_lora", "expand", "linear_lora", "make_plan", "shrink", "unsupported_reason"]


def shrink(
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    plan: Plan,
    *,
    ranks: Int[jax.Array, "G n"] | None = None,
    x_rows: Int[jax.Array, "M"] | None = None,
    backend: Backend = "auto",
) -> Float[jax.Array, "n M R"]:
    """Compute h[i, m] = a[group of m, i] @ x[m] in float32.

    Args:
      x: [M, K] rows in the order that the plan was made for, or [T, K] with `x_rows`.
      a: [G, n, R, K] first factors in bfloat16, float16 or float32.
      plan: Plan of M rows from `make_plan`, with num_groups = G.
      ranks: [G, n] integers from 0 to R. Entries of h at and past the rank are zero, and the kernels skip their work.
        Entries of a past the rank, rounded up to 16, are never used and may be NaN. None means R everywhere.
      x_rows: [M] integers. Row m of the plan is x[x_rows[m]]; the index must be in [0, T) where m has a group. With it,
        a token's row is stored once for all of its experts. A row of x may occur at most once in a group.
      backend: "auto" chooses by platform. A named backend is used, or raises with the reason why it cannot be.

    Returns:
      [n, M, R] float32 in the order of x. Rows without a group are zero.

    Raises:
      LoRAError: Shapes or dtypes do not fit, or the backend does not support them.
    """
    x_rows = _check_x("shrink", x, x_rows, plan)
    check_a("shrink", a, plan, x.shape[1])
    ranks = check_ranks("shrink", ranks, a.shape[:2])
    rows, (groups, n, rank, _) = plan.num_rows, a.shape
    base, b = _like((rows, n * rank)), _like((groups, rank, n * rank))
    kernels = choose("shrink", backend, base, x, a, b, (rank,) * n)
    if kernels is None or rows == 0:
        return xla.shrink(x, a, plan, ranks=ranks, x_rows=x_rows)
    return gradients.shrink(kernels.shrink, x, a, plan, ranks, x_rows)


def expand(
    h: Float[jax.Array, "n M R"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: Sequence[int],
    base: Float[jax.Array, "M N"] | None = None,
    ranks: Int[jax.Array, "G n"] | None = None,
    backend: Backend = "auto",
) -> Float[jax.Array, "M N"]:
    """Compute delta[m, columns of i] = h[i, m] @ b[group of m, :, columns of i], summed in float32.

    Args:
      h: [n, M, R] float32 from `shrink`. Entries at and past a row's rank are ignored.
      b: [G, R, N] second factors with the scaling folded in, all n slices side by side.
      plan: Plan that was given to `shrink`.
      slice_sizes: The n column counts, which sum to N.
      base: [M, N] to add the delta to. The sum is computed in float32 and rounded once to base.dtype.
      ranks: [G, n] as for `shrink`. Entries of b past the rank, rounded up to 16, are never used.
      backend: As for `shrink`.

    Returns:
      [M, N]. With `base`, base + delta in base.dtype; rows without a group and slices of rank 0 are bitwise the base.
      Without `base`, delta in b.dtype; these rows and slices are zero.

    Raises:
      LoRAError: As for `shrink`.
    """
    sizes = check_b("expand", b, plan, slice_sizes)
    if h.ndim != 3 or h.shape != (len(sizes), plan.num_rows, b.shape[1]):
        raise LoRAError(f"expand: h must be [n, M, R] = [{len(sizes)}, {plan.num_rows}, {b.shape[1]}], got {h.shape}")
    check_base("expand", base, plan, b.shape[2])
    ranks = check_ranks("expand", ranks, (b.shape[0], len(sizes)))
    (n, rows, rank), groups = h.shape, b.shape[0]
    out = _like((rows, b.shape[2]), b.dtype) if base is None else base
    kernels = choose("expand", backend, out, _like((rows, n * rank)), _like((groups, n, rank, n * rank)), b, sizes)
    if kernels is None or rows == 0:
        return xla.expand(h, b, plan, slice_sizes=sizes, base=base, ranks=ranks)
    return gradients.expand(kernels.expand, sizes, h, b, plan, base, ranks)


def add_lora(
    base: Float[jax.Array, "M N"],
    x: Float[jax.Array, "T K"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: Sequence[int] | None = None,
    ranks: Int[jax.Array, "G n"] | None = None,
    x_rows: Int[jax.Array, "M"] | None = None,
    backend: Backend = "auto",
) -> Float[jax.Array, "M N"]:
    """Compute base[m] + b[group of m]ᵀ (a[group of m] @ x[m]) for each slice.

    LoRA layers call this function. It is `expand` of `shrink`, fused where the backend can.

    Args:
      base: [M, N] output of the base layer. A backend may write the result in its place.
      x: [M, K] input of the base layer, or [T, K] with `x_rows`.
      a: [G, n, R, K] first factors.
      b: [G, R, N] second factors with the scaling folded in.
      plan: Plan of M rows from `make_plan`, with num_groups = G.
      slice_sizes: The n column counts, which sum to N. None means one slice.
      ranks: [G, n] true rank of each group and slice. A rank of 0 leaves the slice unchanged. Entries of a and b past
        the rank, rounded up to 16, are never used and may be NaN. None means R everywhere.
      x_rows: [M] as for `shrink`.
      backend: "auto" chooses by platform. A named backend is used, or raises with the reason why it cannot be.

    Returns:
      [M, N] in base.dtype. Products are summed in float32. If x, a and b are bfloat16, the kernels round a @ x to
      bfloat16 before the product with b; on a GPU they round each partial sum over K. base + delta is computed in
      float32 and rounded once. Rows without a group and slices of rank 0 are bitwise the base.

    Raises:
      LoRAError: Shapes or dtypes do not fit, or the backend does not support them.
    """
    x_rows = _check_x("add_lora", x, x_rows, plan)
    sizes = _check_pair("add_lora", a, b, plan, x.shape[1], slice_sizes)
    check_base("add_lora", base, plan, b.shape[2])
    ranks = check_ranks("add_lora", ranks, a.shape[:2])
    if plan.num_rows == 0:
        return base
    kernels = choose("add_lora", backend, base, x, a, b, sizes)
    if kernels is None:
        return xla.add_lora(base, x, a, b, plan, slice_sizes=sizes, ranks=ranks, x_rows=x_rows)
    return gradients.add_lora(kernels.add_lora, sizes, base, x, a, b, plan, ranks, x_rows)


def linear_lora(
    x: Float[jax.Array, "M K"],
    w: Float[jax.Array, "K N"],
    a: Float[jax.Array, "G n R K"],
    b: Float[jax.Array, "G R N"],
    plan: Plan,
    *,
    slice_sizes: Sequence[int] | None = None,
    ranks: Int[jax.Array, "G n"] | None = None,
    backend: Backend = "auto",
) -> Float[jax.Array, "M N"]:
    """Compute x[m] @ w + b[group of m]ᵀ (a[group of m] @ x[m]) for each slice: a base layer with its LoRA.

    Two fused launches compute both if `product_tiles` returns tiles for these operands. Otherwise `add_lora` adds the
    delta to x @ w.

    Args:
      x: [M, K] rows.
      w: [K, N] kernel of the base layer, in the dtype of x.
      a: [G, n, R, K] as for `add_lora`.
      b: [G, R, N] as for `add_lora`.
      plan: As for `add_lora`.
      slice_sizes: As for `add_lora`.
      ranks: As for `add_lora`.
      backend: As for `add_lora`.

    Returns:
      [M, N] in the dtype of x. The fused launches sum in float32 and round once if K is split, else twice. Their base
      product equals `x @ w` to rounding, not bitwise, in rows without a group too. The bits of a row depend on the
      number of rows M, but not on the other rows.

    Raises:
      LoRAError: As for `add_lora`, or w has another shape or dtype.
    """
    if w.ndim != 2 or x.ndim != 2 or w.shape[0] != x.shape[1] or w.dtype != x.dtype:
        raise LoRAError(
            f"linear_lora: x must be [M, K] and w [K, N] of one dtype, got {x.dtype}{list(x.shape)} and "
            f"{w.dtype}{list(w.shape)}"
        )
    _check_x("linear_lora", x, None, plan)
    sizes = _check_pair("linear_lora", a, b, plan, x.shape[1], slice_sizes)
    if w.shape[1] != b.shape[2]:
        raise LoRAError(f"linear_lora: w [K, N] = {w.shape} and b [G, R, N] = {b.shape}: N disagrees")

    def apart(x, w, a, b, plan, ranks):
        return add_lora(x @ w, x, a, b, plan, slice_sizes=sizes, ranks=ranks, backend=backend)

    tiles = product_tiles(x, w, a, b, slice_sizes=sizes, tile_m=plan.tile_m, backend=backend)
    if tiles is None or plan.experts > 1:
        return apart(x, w, a, b, plan, ranks)
    from jlora.pallas.triton import product  # slow import, needed on GPUs only

    ranks = check_ranks("linear_lora", ranks, a.shape[:2])
    ranks = jnp.full(a.shape[:2], a.shape[2], jnp.int32) if ranks is None else ranks
    run = functools.partial(product.linear_lora, slice_sizes=sizes, tiles=tiles)
    return gradients.linear_lora(_unless_mapped(run, apart), sizes, x, w, a, b, plan, ranks)


def product_tiles(
    x: Shaped, w: Shaped, a: Shaped, b: Shaped, *, slice_sizes: Sequence[int], tile_m: int = 64,
    backend: Backend = "auto",
) -> ProductTiles | None:  # fmt: skip
    """Return the tiles with which `linear_lora` fuses base product and LoRA, or None if it does not fuse them.

    It fuses them for few rows in bfloat16 or float16, on a GPU whose tuned table has an entry for these sizes
    (`tables.product_tiles`).

    Args:
      x: [M, K], an array or a `jax.ShapeDtypeStruct`, as are all operands.
      w: [K, N].
      a: [G, n, R, K].
      b: [G, R, N].
      slice_sizes: The n column counts, which sum to N.
      tile_m: Rows of the plan's tiles. The default is the most that `make_plan` chooses for so few rows.
      backend: As for `linear_lora`.

    Raises:
      LoRAError: A tuned table is malformed.
    """
    if (_own() if backend == "auto" else backend) != "triton":
        return None
    from jlora.pallas.triton import lora, product

    rows, sizes = x.shape[0], tuple(slice_sizes)
    if not 0 < rows <= product.MAX_ROWS or x.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    if not x.dtype == w.dtype == a.dtype == b.dtype:
        return None
    if lora.unsupported_reason(_like((rows, w.shape[1]), x.dtype), x, a, b, slice_sizes=sizes) is not None:
        return None
    return tables.product_tiles(lora.sizes_of(rows, x, a, b, len(sizes), tile_m))


def _unless_mapped(run: Callable[..., jax.Array], apart: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return `run` with a batching rule: `jax.vmap` calls `apart`, whose base product then has all mapped rows."""
    chosen = jax.custom_batching.custom_vmap(run)

    @chosen.def_vmap
    def mapped(axis_size, in_batched, *args):
        del axis_size
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        return jax.vmap(apart, in_axes=tuple(axes))(*args), True

    return chosen


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
    """
    if backend == "triton":
        from jlora.pallas.triton import lora

        return lora
    if backend == "mosaic_tpu":
        from jlora.pallas.mosaic_tpu import lora

        return lora
    if backend in ("auto", "xla"):
        return None
    raise LoRAError(f"backend must be 'auto', 'xla', 'mosaic_tpu' or 'triton', got {backend!r}")


def load(backend: Backend) -> None:
    """Import the kernels of a backend before a function that may use them is traced.

    From JAX 0.11 on, this import adds settings that belong to the key of each trace. A function that imports the
    kernels while it is traced is therefore traced and compiled again at its second call.
    """
    _kernels(_own() if backend == "auto" else backend)


def _own() -> Backend:
    """Return the backend that "auto" prefers on this platform."""
    where = platform()
    return "triton" if where in ("gpu", "cuda") else "mosaic_tpu" if where == "tpu" else "xla"


def choose(op: str, backend: Backend, base, x, a, b, sizes: tuple[int, ...]) -> ModuleType | None:
    """Return the kernels to run, or None for XLA."""
    if backend == "auto":
        name = _own()
        reason = unsupported_reason(name, base, x, a, b, slice_sizes=sizes)
        if reason is not None:
            shapes = ", ".join(f"{n} {v.dtype}{list(v.shape)}" for n, v in zip("xab", (x, a, b), strict=True))
            _tell_once(f"{op}: backend 'auto' takes 'xla' for {shapes}: '{name}' {reason}")
        return _kernels(name) if reason is None else None
    reason = unsupported_reason(backend, base, x, a, b, slice_sizes=sizes)
    if reason is not None:
        raise LoRAError(f"{op}: backend {backend!r} {reason}")
    return _kernels(backend)


@functools.cache
def _tell_once(message: str) -> None:
    """Log a warning about a slower path, once for each message (the reason and the shapes)."""
    logging.getLogger("jlora").warning(message)


def _like(shape: tuple[int, ...], dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _check_x(op: str, x, x_rows, plan: Plan) -> Int[jax.Array, "M"] | None:
    if x.ndim != 2 or (x_rows is None and x.shape[0] != plan.num_rows):
        raise LoRAError(
            f"{op}: x must be [M, features] with M = {plan.num_rows} (the plan's rows), got {x.shape}; "
            "flatten leading dimensions, make the plan over these rows, or say with x_rows which are its rows"
        )
    check_float(op, "x", x)
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
    check_float(op, "a", a)


def check_b(op: str, b, plan: Plan, slice_sizes: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in slice_sizes)
    if b.ndim != 3 or b.shape[0] != plan.num_groups:
        raise LoRAError(f"{op}: b must be [G, R, N] with G = {plan.num_groups} (the plan's groups), got {b.shape}")
    if not sizes or min(sizes) < 1 or sum(sizes) != b.shape[2]:
        raise LoRAError(f"{op}: slice_sizes must be positive and sum to N = {b.shape[2]} (b), got {sizes}")
    check_float(op, "b", b)
    return sizes


def _check_pair(op: str, a, b, plan: Plan, features: int, slice_sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Check both factors and return the slice sizes."""
    check_a(op, a, plan, features)
    sizes = check_b(op, b, plan, (b.shape[-1],) if slice_sizes is None else slice_sizes)
    if a.shape[1] != len(sizes) or a.shape[2] != b.shape[1]:
        raise LoRAError(
            f"{op}: a [G, n, R, K] = {a.shape} and b [G, R, N] = {b.shape}, {len(sizes)} slices: n or R disagree"
        )
    return sizes


def check_base(op: str, base, plan: Plan, columns: int) -> None:
    if base is None:
        return
    if base.shape != (plan.num_rows, columns):
        raise LoRAError(f"{op}: base must be [M, N] = [{plan.num_rows}, {columns}], got {base.shape}")
    check_float(op, "base", base)


def check_ranks(op: str, ranks, shape: tuple[int, ...]):
    if ranks is None:
        return None
    if ranks.shape != shape or not jnp.issubdtype(ranks.dtype, jnp.integer):
        raise LoRAError(f"{op}: ranks must be integers [G, n] = {list(shape)}, got {ranks.dtype}{list(ranks.shape)}")
    return ranks.astype(jnp.int32)


def check_float(op: str, name: str, array) -> None:
    if array.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise LoRAError(f"{op}: {name} must be bfloat16, float16 or float32, got {array.dtype}")
