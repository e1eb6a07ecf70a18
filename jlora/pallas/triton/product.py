"""A base product of few rows on NVIDIA GPUs.

The products of a decode step are bound by reading the kernel w. XLA's own products read it at 36 to 65% of the
bandwidth if it has few columns. Here K is cut into parts, so that all multiprocessors have programs that read:

    x @ w, columns 0.., part 0 | columns 0.., part 1 | ... | columns 64.., part 0 | ...

XLA adds up the parts, together with what follows, for example the delta of the LoRA.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float

from jlora.pallas.tiles import ProductTiles, matrix_rows
from jlora.pallas.triton.parts import add_in_order, both, compiler_params, dot, load, store


# Jitted so that layers with equal shapes share one trace and lowering, as in `lora`.
@partial(jax.jit, static_argnames=("tiles", "interpret"))
def product(
    x: Float[jax.Array, "M K"], w: Float[jax.Array, "K N"], *, tiles: ProductTiles, interpret: bool = False
) -> Float[jax.Array, "M N"]:
    """Compute x @ w for operands of one 16-bit dtype, summed in float32. All rows are in one block of a matrix unit."""
    blocks = pl.cdiv(w.shape[1], tiles.block_n)
    parts = pl.pallas_call(
        partial(_kernel, tiles=tiles),
        grid=(blocks * tiles.split_k,),
        out_shape=jax.ShapeDtypeStruct((tiles.split_k, x.shape[0], w.shape[1]), jnp.float32),
        compiler_params=compiler_params(tiles.warps, tiles.stages),
        interpret=interpret,
        name="lora_base_product",
    )(x, w)
    return add_in_order(parts).astype(x.dtype)


def _kernel(x_ref, w_ref, parts_ref, *, tiles: ProductTiles):
    """Compute parts[part, all rows, block of columns] = x[:, part of K] @ w[part of K, block of columns].

    The programs of a part are consecutive.
    """
    (rows, k_size), n = x_ref.shape, w_ref.shape[1]
    blocks = pl.cdiv(n, tiles.block_n)
    part, block = pl.program_id(0) // blocks, pl.program_id(0) % blocks
    steps = pl.cdiv(pl.cdiv(k_size, tiles.block_k), tiles.split_k)
    row = jnp.arange(matrix_rows(rows), dtype=jnp.int32)[:, None]
    col = (block * tiles.block_n + jnp.arange(tiles.block_n, dtype=jnp.int32))[None, :]
    live, inside = row < rows, col < n

    def step(j, total):
        k = (part * steps + j) * tiles.block_k + jnp.arange(tiles.block_k, dtype=jnp.int32)
        within = None if tiles.split_k * steps * tiles.block_k == k_size else k < k_size
        x = load(x_ref, (row, k[None, :]), both(live, None if within is None else within[None, :]))
        w = load(w_ref, (k[:, None], col), both(inside, None if within is None else within[:, None]))
        return total + dot(x, w, x.dtype, 0)

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((row.shape[0], tiles.block_n), jnp.float32))
    store(parts_ref, (part, row, col), total, live & inside)
