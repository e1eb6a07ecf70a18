"""The product of an `nnx.Linear` on 33 to 64 rows, by a kernel on Hopper GPUs.

The products of a decode step are bound by reading the kernel w. XLA's own products of so few rows read it at 36 to 65%
of the bandwidth if it has few columns. Here K is cut into parts, so that all multiprocessors have programs that read:

    x @ w, columns 0.., part 0 | columns 64.., part 0 | ... | columns 0.., part 1 | ...

XLA adds up the parts, together with what follows, for example the delta of the LoRA.
"""

# Kernels are written over references and tracers, for which Pallas has no types.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jlora import _qwix
from jlora._compat import promote_dtype
from jlora.layers.site import Site
from jlora.pallas.gpus import current_gpu, own_backend
from jlora.pallas.tiles import matrix_rows

BLOCK_N, BLOCK_K, WARPS = 64, 128, 4  # columns and warps of a program, in-features that it reads in one step


def few_rows_output(
    own: Callable[..., Any], layer: Any, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Array | None:
    """Return the output of a layer without LoRA, or None if its own call `own` is as fast or computes another product.

    The output equals that of `own` to rounding, not bitwise.
    """
    backend = own_backend() if site.backend == "auto" else site.backend
    if backend != "triton" or own is not nnx.Linear.__call__ or _qwix.is_intercepted(layer):
        return None
    if site.bitwise_base or site.batch_invariant or site.spec.sharding is not None or site.spec.stack:
        return None  # a stack's kernel is a slice, which only XLA's own products read in place
    if layer.promote_dtype is not promote_dtype or layer.dot_general is not lax.dot_general:
        return None
    if layer.precision is not None or layer.preferred_element_type is not None:
        return None
    if kwargs or len(args) != 1 or not isinstance(args[0], Array) or not jax.sharding.get_abstract_mesh().empty:
        return None
    x, kernel, bias = args[0], layer.kernel[...], None if layer.bias is None else layer.bias[...]
    if x.dtype not in (jnp.bfloat16, jnp.float16) or layer.dtype not in (None, x.dtype):
        return None
    if kernel.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return None  # Flax promotes all to one dtype
    if x.shape[-1:] != kernel.shape[:1]:
        return None  # the layer's own call raises
    cut = parts_and_stages(x.size // kernel.shape[0], *kernel.shape)
    if cut is None:
        return None
    y = _product(x.reshape(-1, x.shape[-1]), kernel, *cut).reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


def parts_and_stages(rows: int, k: int, n: int) -> tuple[int, int] | None:
    """Return the parts of K and the blocks in flight of x [rows, k] @ w [k, n], or None if XLA's product is as fast.

    Two programs on each multiprocessor, with as many stages as fit, read w faster than XLA's product. With so many
    columns that K needs no parts XLA reads it as fast, and with so few that more than four parts were needed the sum of
    the parts takes longer than the gain. With fewer rows Hopper's matrix unit is not used, and the parts are slower
    than XLA's product. All of this was measured on an H200. On other chips than Hopper's XLA's products differ.
    """
    gpu = current_gpu()
    if gpu.capability != 90 or not 32 < rows <= 64:
        return None
    blocks = -(-n // BLOCK_N)
    parts = min(4, 2 * gpu.multiprocessors // blocks, k // (3 * BLOCK_K))
    if parts < 2 or blocks * parts < gpu.multiprocessors:
        return None
    return parts, min(8, gpu.shared_memory // 2 // (BLOCK_K * (matrix_rows(rows) + BLOCK_N) * 2))


def _product(x: Array, w: Array, parts: int, stages: int) -> Array:
    """Compute `product_in_parts`. Its gradients, and the product of all rows under `jax.vmap`, are XLA's."""
    run = jax.custom_batching.custom_vmap(functools.partial(product_in_parts, parts=parts, stages=stages))

    @run.def_vmap
    def mapped(axis_size: int, in_batched: list[bool], x: Array, w: Array) -> tuple[Array, bool]:
        del axis_size
        return jax.vmap(lax.dot, in_axes=[0 if batched else None for batched in in_batched])(x, w), True

    product = jax.custom_vjp(run)
    product.defvjp(lambda x, w: (run(x, w), (x, w)), lambda operands, dy: jax.vjp(lax.dot, *operands)[1](dy))
    return product(x, w)


# Jitted so that layers with equal shapes share one trace and lowering, as in `add_lora`.
@functools.partial(jax.jit, static_argnames=("parts", "stages", "interpret"))
def product_in_parts(x: Array, w: Array, *, parts: int, stages: int, interpret: bool = False) -> Array:
    """Compute x [M, K] @ w [K, N], both of one 16-bit dtype, in float32. A block of a matrix unit holds all rows."""
    from jax.experimental import pallas as pl  # slow imports, needed on GPUs only

    from jlora.pallas.triton.parts import add_in_order, both, compiler_params, dot, load, store

    (rows, k_size), n = x.shape, w.shape[1]
    blocks, steps = pl.cdiv(n, BLOCK_N), pl.cdiv(pl.cdiv(k_size, BLOCK_K), parts)

    def kernel(x_ref: Any, w_ref: Any, parts_ref: Any) -> None:
        """Compute parts[part, all rows, block of columns] = x[:, part of K] @ w[part of K, block of columns]."""
        part, block = pl.program_id(0) // blocks, pl.program_id(0) % blocks
        row = jnp.arange(matrix_rows(rows), dtype=jnp.int32)[:, None]
        col = (block * BLOCK_N + jnp.arange(BLOCK_N, dtype=jnp.int32))[None, :]
        live, inside = row < rows, col < n

        def step(j: Array, total: Array) -> Array:
            k = (part * steps + j) * BLOCK_K + jnp.arange(BLOCK_K, dtype=jnp.int32)
            within = None if parts * steps * BLOCK_K == k_size else k < k_size
            x = load(x_ref, (row, k[None, :]), both(live, None if within is None else within[None, :]))
            w = load(w_ref, (k[:, None], col), both(inside, None if within is None else within[:, None]))
            return total + dot(x, w, x.dtype, 0)

        total = lax.fori_loop(0, steps, step, jnp.zeros((row.shape[0], BLOCK_N), jnp.float32))
        store(parts_ref, (part, row, col), total, live & inside)

    sums = pl.pallas_call(
        kernel,
        grid=(blocks * parts,),
        out_shape=jax.ShapeDtypeStruct((parts, rows, n), jnp.float32),
        compiler_params=compiler_params(WARPS, stages),
        interpret=interpret,
        name="lora_base_product",
    )(x, w)
    return add_in_order(sums).astype(x.dtype)
