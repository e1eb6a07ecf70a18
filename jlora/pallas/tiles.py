"""Tile choice: explicit > tuned table > heuristic, from static sizes only: no result depends on a batch's mix."""

import functools
import json
from dataclasses import dataclass, fields
from importlib import resources

import jax

from jlora._typing import Backend
from jlora.errors import LoRAError


@dataclass(frozen=True)
class GPUTiles:
    """How the GPU kernels cut one projection: the shrink's launch, then the expand's.

    Only block_k and split_k change the order of additions; the others change nothing but speed.

    Attributes:
      block_k: columns of x and A that a step of the shrink reads.
      split_k: parts of K that are summed apart, then together in order.
      block_r: ranks that a unit of the shrink computes, those of all slices counted one after the other.
      shrink_warps, shrink_stages, shrink_programs: warps a program, blocks of A and x in flight, size of the grid.
      block_n: columns of B and the output that a step of the expand handles.
      chunks: units of work that the expand aims at, over all tiles in use.
      ahead: blocks of the base output that are read ahead.
      warps, stages, programs: as for the shrink; stages counts blocks of B.
    """

    block_k: int = 128
    split_k: int = 1
    block_r: int = 64
    shrink_warps: int = 4
    shrink_stages: int = 4
    shrink_programs: int = 264
    block_n: int = 128
    chunks: int = 264
    ahead: int = 1
    warps: int = 4
    stages: int = 4
    programs: int = 264

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not int or value < 1:
                raise LoRAError(f"GPUTiles.{f.name} must be a positive int, got {value!r}")
        for name in ("block_k", "block_r", "block_n", "shrink_warps", "warps"):
            if (value := getattr(self, name)) & (value - 1):
                raise LoRAError(f"GPUTiles.{name} must be a power of two, got {value}")
        if min(self.block_k, self.block_r, self.block_n) < 16:
            raise LoRAError("GPUTiles: block_k, block_r and block_n must be at least 16, what a matrix unit takes")


def platform() -> str:
    """The platform that unplaced computations run on: "cpu", "gpu" or "tpu"."""
    device = getattr(jax.config, "jax_default_device", None)  # set by `jax.default_device(...)`
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
    work on at least 16 rows, so fewer would only mean more tiles. The GPU kernels skip empty tiles, and read ahead best
    with 64 rows if groups have half as many.
    """
    where = platform() if backend == "auto" else {"triton": "gpu", "mosaic_tpu": "tpu", "xla": "cpu"}[backend]
    if where in ("gpu", "cuda"):
        rows = max(1, num_rows // max_active)
        return max(16, min(64, 2 << (rows.bit_length() - 1)))
    sizes = (16, 32, 64, 128) if where == "tpu" else (1, 2, 4, 8, 16, 32, 64, 128)
    return min(sizes, key=lambda t: (max_tiles(num_rows, t, max_active) * (t + 16), t))


def rows_bucket(num_rows: int) -> int:
    """Rows rounded up to a power of two: the granularity of the tuned table."""
    return 1 << max(0, num_rows - 1).bit_length()


def gpu_tiles(dtype: str, rows: int, tile_m: int, k: int, n: int, rank: int) -> GPUTiles:
    """Tiles of `add_lora` on a GPU: the tuned table's for this or the next tuned rank, else a rule of thumb.

    What was tuned for a larger rank fits into shared memory with a smaller one, but not the other way round.
    """
    shape = ("add_lora", dtype, rows_bucket(rows), k, n)
    table = tuned_table("nvidia_h200")
    tuned = min((key[5] for key in table if key[:5] == shape and key[5] >= rank), default=None)
    return _gpu_rule(dtype, rows, tile_m, k, rank) if tuned is None else table[(*shape, tuned)]


@functools.cache
def tuned_table(device: str) -> dict[tuple[str, str, int, int, int, int], GPUTiles]:
    """The tuned tiles of a device, by (op, dtype, rows bucket, K, N, rank)."""
    path = resources.files("jlora.pallas").joinpath("tuned", f"{device}.json")
    table = {}
    for entry in json.loads(path.read_text()):
        key = tuple(entry.pop(name) for name in ("op", "dtype", "rows", "k", "n", "rank"))
        table[key] = GPUTiles(**entry)
    return table


def _gpu_rule(dtype: str, rows: int, tile_m: int, k: int, rank: int) -> GPUTiles:
    """What the search chose most often: many short programs for few rows, deep read-ahead for many."""
    wide = rank > 64 or tile_m > 64
    few = rows <= 512
    size = 4 if dtype == "float32" else 2
    narrow = 2 * 64 * rank * size > 160 * 1024  # two blocks of b would not fit into shared memory
    programs = 528 if few else 264
    expand = {
        "block_n": 32 if narrow else 64 if wide else 128, "warps": 8 if wide or not few else 4, "stages": 2,
        "chunks": programs, "programs": programs,
    }  # fmt: skip
    if few:
        return GPUTiles(
            block_k=128, split_k=max(1, min(28, k // 256)), block_r=32, shrink_warps=2, shrink_stages=4,
            shrink_programs=792, **expand,
        )  # fmt: skip
    return GPUTiles(
        block_k=64 if size == 4 else 128, split_k=max(1, min(4, 16384 // rows, k // 256)), block_r=64,
        shrink_warps=8 if wide else 4, shrink_stages=3, shrink_programs=396, **expand,
    )  # fmt: skip
