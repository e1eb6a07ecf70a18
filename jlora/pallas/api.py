"""Grouped LoRA as plain functions: shapes and dtypes are checked here, then one backend runs.

Rows of `x` belong to groups (an adapter's slot, say); `make_plan` sorts them once a step. Group g applies its own pair
of factors, a[g] then b[g]. A merged projection (qkv, gate and up) is one matrix with n output slices side by side: each
slice i has its own a[:, i], and its own columns of b.

What `ranks` promises, in every function and its gradients: with r = ranks[g, i], nothing of a[g, i] or of slice i's
columns of b[g] at or past r, rounded up to a multiple of 16 (to R where that is less), ever reaches a result; with
r = 0 nothing at all does. What lies there may be NaN: it is masked, never multiplied by zero. Whoever writes the
factors only has to zero what is left of the last 16 ranks, from r on.
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
    """h[i, m] = a[group of m, i] @ x[m], in float32.

    Args:
      x: [M, K] rows, in the order the plan was made for; or, with `x_rows`, [T, K].
      a: [G, n, R, K] first factors, bfloat16, float16 or float32.
      plan: from `make_plan` with num_groups = G, over M rows.
      ranks: [G, n] integers from 0 to R: entries of h at or past the rank are zero, and the kernels skip their work.
        What lies in a past the rank, rounded up to 16, is never used, NaN or not. None: all R.
      x_rows: [M] integers: row m of the plan is x[x_rows[m]], from 0 to T - 1 wherever m has a group. A token's row
        is then read once for all experts that it goes to. Within a group no row of x may occur twice.
      backend: "auto" picks by platform; a named one is used, or raises with the reason it cannot be.

    Returns:
      [n, M, R] float32, rows in the order of x; zero for rows without a group.

    Raises:
      LoRAError: shapes or dtypes that do not fit, or a backend that cannot run them.
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
    """delta[m, columns of i] = h[i, m] @ b[group of m, :, columns of i], summed in float32.

    Args:
      h: [n, M, R] float32, from `shrink`. At and past a row's rank it may hold anything.
      b: [G, R, N] second factors with scaling folded in; all n slices side by side.
      plan: the plan of `shrink`.
      slice_sizes: the n column counts, summing to N.
      base: [M, N] to add to. The sum is made in float32 and rounded once to base.dtype.
      ranks: as for `shrink`; what lies in b past the rank, rounded up to 16, is never used either.
      backend: as for `shrink`.

    Returns:
      [M, N]: base + delta in base.dtype, where rows without a group, and slices of rank 0, are bitwise the base; or
      without base, delta in b.dtype, zero there.

    Raises:
      LoRAError: as for `shrink`.
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
    """base[m] + b[group of m]ᵀ (a[group of m] @ x[m]), slice by slice: what a layer calls.

    Args:
      base: [M, N] output of the base layer; a backend may write the result in its place.
      x: [M, K] input of the base layer; or, with `x_rows`, [T, K].
      a: [G, n, R, K]; b: [G, R, N], scaling folded in.
      plan: from `make_plan` with num_groups = G, over M rows.
      slice_sizes: the n column counts, summing to N; None for one slice.
      ranks: [G, n] true rank of each group and slice; 0 leaves the slice alone. What lies in a and b past the rank,
        rounded up to 16, is never used, NaN or not. None: all R.
      x_rows: [M], as for `shrink`.
      backend: "auto" picks by platform; a named one is used, or raises with the reason it cannot be.

    Returns:
      [M, N] in base.dtype. Products are summed in float32. Where x, a and b are bfloat16, the kernels round a @ x to
      bfloat16 before b, on a GPU in parts; base + delta is made in float32 and rounded once. Rows without a group, and
      slices of rank 0, are bitwise the base.

    Raises:
      LoRAError: shapes or dtypes that do not fit, or a backend that cannot run them.
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
    """x[m] @ w + b[group of m]ᵀ (a[group of m] @ x[m]), slice by slice: a base layer and its LoRA.

    They are made together where `product_tiles` has tiles for that, in two launches; else `add_lora` adds to x @ w.

    Args:
      x: [M, K] rows.
      w: [K, N], the base layer's kernel, of x's dtype.
      a, b, plan, slice_sizes, ranks, backend: as for `add_lora`.

    Returns:
      [M, N] in the dtype of x. Where they are made together, all is summed in float32 and the result is rounded once
      where K is split, twice where it is not; rows without a group are x @ w as summed there: to rounding, not
      bitwise, what `x @ w` gives. The same row has the same bits in any company of as many rows.

    Raises:
      LoRAError: as for `add_lora`; w of another shape or dtype.
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
    from jlora.pallas.triton import product  # slow, and needed on GPUs alone

    ranks = check_ranks("linear_lora", ranks, a.shape[:2])
    ranks = jnp.full(a.shape[:2], a.shape[2], jnp.int32) if ranks is None else ranks
    run = functools.partial(product.linear_lora, slice_sizes=sizes, tiles=tiles)
    return gradients.linear_lora(_unless_mapped(run, apart), sizes, x, w, a, b, plan, ranks)


def product_tiles(
    x: Shaped, w: Shaped, a: Shaped, b: Shaped, *, slice_sizes: Sequence[int], tile_m: int = 64,
    backend: Backend = "auto",
) -> ProductTiles | None:  # fmt: skip
    """How `linear_lora` makes both together for operands of these shapes and dtypes, or None where it does not.

    It does for few rows, on a GPU that a tuned table has found faster so (`tables.product_tiles`), in bfloat16 or
    float16 throughout.

    Args:
      x, w, a, b, slice_sizes, backend: as for `linear_lora`.
      tile_m: of the plan; the default is the most that `make_plan` chooses for so few rows.

    Raises:
      LoRAError: a table is malformed.
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
    """`run`; under `jax.vmap` `apart`, whose base product then has the rows of all that is mapped over."""
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
    """Why `backend` cannot run `add_lora` on operands of these shapes and dtypes (arrays or `jax.ShapeDtypeStruct`s).

    None if it can. It compiles nothing. For "triton" the answer is that of one kind of GPU: the one that the caller
    lowers for (`jax.sharding.use_abstract_mesh`), else the default device, else an H200. "auto" can always run: it
    takes the platform's kernels if they can, else "xla".
    """
    kernels = _kernels(backend)
    return None if kernels is None else kernels.unsupported_reason(base, x, a, b, slice_sizes=tuple(slice_sizes))


def _kernels(backend: Backend) -> ModuleType | None:
    """The kernels of a named backend; imported on use, for either import is slow and needs only its own platform."""
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
    """Import the kernels of a backend, before anything is traced that may use them.

    From JAX 0.11 on, this import adds settings that each trace depends on: a function that imported it while it was
    traced would be traced and compiled once more at its second call.
    """
    _kernels(_own() if backend == "auto" else backend)


def _own() -> Backend:
    """What "auto" takes on this platform, if its kernels can run."""
    where = platform()
    return "triton" if where in ("gpu", "cuda") else "mosaic_tpu" if where == "tpu" else "xla"


def choose(op: str, backend: Backend, base, x, a, b, sizes: tuple[int, ...]) -> ModuleType | None:
    """The kernels to run, or None for XLA."""
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
    """Logs what runs slower than it might. The message names the reason and the shapes, so each pair is told once."""
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
    """The slice sizes of both factors."""
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
