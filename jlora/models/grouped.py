"""Grouped product of an expert layer: multiply each row by its group's matrix, with the platform's fastest kernel.

    NVIDIA Hopper and Blackwell    tokamax's Mosaic kernel, if the extra `moe` is installed; 16-bit dtypes and sizes
                                   that are multiples of 64, as in all models
    TPU                            JAX's megablox, in bfloat16 and float32
    else                           `jax.lax.ragged_dot`

The choice is made when a program is traced, from platform, dtype, sizes and installed packages. No kernel falls back to
another at run time.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jlora._compat import abstract_device, default_device, gpu_compute_capability

_TPU_ROWS = 128  # megablox takes whole tiles of rows only
_GPU_TILE = 64  # rows and columns of a tile of tokamax's kernel


def grouped_matmul(x: Float[Array, "M K"], w: Float[Array, "E K N"], counts: Int[Array, "E"]) -> Float[Array, "M N"]:
    """Multiply rows sorted by group by their group's matrix, accumulated in float32.

    Args:
      x: [M, K] rows. The first `counts[0]` belong to group 0, the next `counts[1]` to group 1, and so on.
      w: [E, K, N] one matrix per group, in the dtype of `x`.
      counts: [E] int32 number of rows of each group, which may be 0. If the sum is less than M, the remaining rows
        belong to no group.

    Returns:
      [M, N] in the dtype of `x`. Rows that belong to no group have undefined values.
    """
    return _choose(x, w)(x, w, counts)


def _choose(x: jax.Array, w: jax.Array) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    where, capability = _target()
    if where == "tpu" and x.dtype != jnp.float16:
        return _megablox
    if where not in ("gpu", "cuda") or capability not in (90, 100, 103):
        return _ragged_dot
    if x.dtype == jnp.float32 or any(size % _GPU_TILE for size in w.shape[1:]):
        return _ragged_dot
    if importlib.util.find_spec("tokamax") is None:
        _tell_once(
            "experts are multiplied by jax.lax.ragged_dot, which on this GPU is up to 40 times slower than tokamax's "
            "kernel: pip install 'jlora[moe]', on Python 3.12 or newer"
        )
        return _ragged_dot
    return _tokamax


def _target() -> tuple[str, int | None]:
    """Return the platform, and a GPU's compute capability, that a program traced now is compiled for.

    In a `shard_map` the mesh gives the platform and the kind of device, and a local device of that kind gives the
    capability. It is None if there is no such device, as when compiling for another machine.
    """
    target = abstract_device()
    if target is not None:
        same = (device for device in jax.local_devices() if device.device_kind == target[1])
        return target[0], next(map(gpu_compute_capability, same), None)
    device = default_device()
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return device.platform, gpu_compute_capability(device)


def _ragged_dot(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, counts, preferred_element_type=jnp.float32).astype(x.dtype)


@jax.jit  # layers share one trace and lowering, which takes a second
def _tokamax(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    import tokamax  # pyright: ignore[reportMissingImports]  # an extra, for Python 3.12 and newer

    rows = x.shape[0]
    # The kernel takes at least the rows of one tile, and above that multiples of 8.
    x = jnp.pad(x, ((0, max(_GPU_TILE - rows, -rows % 8)), (0, 0)))
    # A named implementation does not fall back to another.
    return tokamax.ragged_dot(x, w, counts, preferred_element_type=x.dtype, implementation="mosaic")[:rows]


def _megablox(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows = x.shape[0]
    # Rows past the counts belong to no group. Their part of the result is not written, and is cut off.
    x = jnp.pad(x, ((0, -rows % _TPU_ROWS), (0, 0)))
    tiles = _tpu_tiles(w.shape[1], w.shape[2], x.dtype.itemsize)
    return gmm(x, w, counts, preferred_element_type=x.dtype, tiling=tiles)[:rows]


def _tpu_tiles(k: int, n: int, width: int) -> tuple[int, int, int]:
    """Return the rows, K and N of a tile.

    The two buffers of a matrix block take up to 8 MiB, because a small batch is bound by reading the matrices once.
    """
    tile_n = min(n, 512)
    return _TPU_ROWS, min(k, (4 << 20) // (width * tile_n) // 128 * 128), tile_n


@functools.cache
def _tell_once(message: str) -> None:
    logging.getLogger("jlora").warning(message)
