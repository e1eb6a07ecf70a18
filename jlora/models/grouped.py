"""The product of an expert block: each row times the matrix of its own group, by what is fastest where it runs.

    NVIDIA Hopper and Blackwell    tokamax's Mosaic kernel, if the extra `moe` is installed: 16 bits, sizes that
                                   are multiples of 64, as every model's are
    TPU                            JAX's megablox, in bfloat16 and float32
    else                           `jax.lax.ragged_dot`

Which one is decided while a program is traced, by platform, dtype, sizes and what is installed: none is tried and
given up.
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
_GPU_TILE = 64  # of tokamax's kernel, in rows and columns


def grouped_matmul(x: Float[Array, "M K"], w: Float[Array, "E K N"], counts: Int[Array, "E"]) -> Float[Array, "M N"]:
    """Rows sorted by group, each times its group's matrix, accumulated in float32.

    Args:
      x: rows; the first `counts[0]` are of group 0, the next `counts[1]` of group 1, and so on.
      w: one matrix a group, of the dtype of `x`.
      counts: int32 rows of each group; a group may be empty. Where they sum to less than M, the rows after those are
        of no group.

    Returns:
      The dtype of `x`; of rows that are of no group any values.
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
    """Platform and, of a GPU, compute capability that a program traced now is for.

    In a `shard_map` that is said by the mesh, which has the device's kind, and a device of that kind the rest; there is
    none where a program is compiled for another machine.
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


@jax.jit  # traced and lowered once for all layers of a model, which takes a second each
def _tokamax(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    import tokamax  # pyright: ignore[reportMissingImports]  # an extra, for Python 3.12 and newer

    rows = x.shape[0]
    # It takes no fewer rows than a tile has, and above that multiples of 8.
    x = jnp.pad(x, ((0, max(_GPU_TILE - rows, -rows % 8)), (0, 0)))
    # Naming the kernel keeps it from falling back on another.
    return tokamax.ragged_dot(x, w, counts, preferred_element_type=x.dtype, implementation="mosaic")[:rows]


def _megablox(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows = x.shape[0]
    # Rows past the counts are of no group: their part of the result is never written, and cut off.
    x = jnp.pad(x, ((0, -rows % _TPU_ROWS), (0, 0)))
    tiles = _tpu_tiles(w.shape[1], w.shape[2], x.dtype.itemsize)
    return gmm(x, w, counts, preferred_element_type=x.dtype, tiling=tiles)[:rows]


def _tpu_tiles(k: int, n: int, width: int) -> tuple[int, int, int]:
    """Rows, K and N of a tile: as much of a matrix as leaves its two buffers in 8 MiB, since a small batch is bound by
    reading the matrices once."""
    tile_n = min(n, 512)
    return _TPU_ROWS, min(k, (4 << 20) // (width * tile_n) // 128 * 128), tile_n


@functools.cache
def _tell_once(message: str) -> None:
    logging.getLogger("jlora").warning(message)
