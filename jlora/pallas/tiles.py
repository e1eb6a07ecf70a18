"""Tile choice: explicit > tuned table > heuristic, from static sizes only: no result depends on a batch's mix."""

import jax

from jlora._typing import Backend


def platform() -> str:
    """The platform that unplaced computations run on: "cpu", "gpu" or "tpu"."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def max_tiles(num_rows: int, tile_m: int, max_active: int) -> int:
    """The most tiles that `num_rows` rows in at most `max_active` groups can need.

    A group of c >= 1 rows takes ceil(c / t) <= (c + t - 1) / t tiles; the sum over groups is largest
    when all are present.
    """
    active = min(num_rows, max_active)
    return max(1, min(num_rows, (num_rows + active * (tile_m - 1)) // tile_m))


def plan_tile_m(num_rows: int, max_active: int, backend: Backend = "auto") -> int:
    """Rows a tile for `num_rows` rows that may hold up to `max_active` groups.

    A tile costs one fetch of its group's weights plus work in proportion to its rows, occupied or not. The XLA path
    fetches by copying, at about the cost of computing 16 rows, and may use tiles of one row. The kernels' matrix units
    work on at least 16 rows, so fewer would only mean more tiles.
    """
    kernels = backend in ("triton", "mosaic_tpu") or (backend == "auto" and platform() in ("gpu", "cuda", "tpu"))
    sizes = (16, 32, 64, 128) if kernels else (1, 2, 4, 8, 16, 32, 64, 128)
    return min(sizes, key=lambda t: (max_tiles(num_rows, t, max_active) * (t + 16), t))
