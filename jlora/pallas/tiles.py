"""Tile sizes, derived from static sizes only, so that no result depends on the mix of a batch.

`tables` chooses among them.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas.gpus import GPU, platform


@dataclass(frozen=True)
class GPUTiles:
    """Tile sizes of the GPU kernels for one projection: the shrink's launch, then the expand's.

    Only block_k and split_k change the order of additions. The other fields change the speed only.

    Attributes:
      block_k: Columns of x and a that one step of the shrink reads.
      split_k: Parts of K that are summed separately, then added in order.
      block_r: Ranks that one unit of the shrink computes; the ranks of all slices are numbered consecutively.
      shrink_warps, shrink_stages, shrink_programs: Warps of a program, blocks of a and x in flight, size of the grid.
      block_n: Columns of b and of the output in one step of the expand.
      chunks: Target number of the expand's units of work over all used tiles.
      ahead: Blocks of the base output that are read ahead.
      warps, stages, programs: As for the shrink; `stages` counts blocks of b.
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
        _check_tiles(self, blocks=("block_k", "block_r", "block_n"), warps=("shrink_warps", "warps"))


@dataclass(frozen=True)
class ProductTiles:
    """Tile sizes of the GPU kernels for a base product fused with its LoRA: the two launches of `linear_lora`.

    In the first launch some programs compute parts of the product and the others the shrink. The second launch adds
    both up. Only product_block_k and product_split_k, and block_k and split_k of `lora`, change the order of additions.

    Attributes:
      product_block_n, product_block_k: Columns of a program, and in-features that it reads in one step.
      product_split_k: Parts of K that are summed separately, then added in order. With 1 the product is complete after
        the first launch, and the second launch is the expand of `add_lora`.
      product_warps, product_stages: Warps and stages of the first launch, its shrink included.
      lora: Tiles of the shrink and of the second launch.
    """

    product_block_n: int
    product_block_k: int
    product_split_k: int
    product_warps: int
    product_stages: int
    lora: GPUTiles

    def __post_init__(self):
        _check_tiles(self, blocks=("product_block_n", "product_block_k"), warps=("product_warps",))


def _check_tiles(tiles: GPUTiles | ProductTiles, *, blocks: tuple[str, ...], warps: tuple[str, ...]) -> None:
    name = type(tiles).__name__
    values = {f.name: getattr(tiles, f.name) for f in fields(tiles) if f.name != "lora"}
    for field, value in values.items():
        if type(value) is not int or value < 1:
            raise LoRAError(f"{name}.{field} must be a positive int, got {value!r}")
    for field in (*blocks, *warps):
        if values[field] & (values[field] - 1):
            raise LoRAError(f"{name}.{field} must be a power of two, got {values[field]}")
    if min(values[field] for field in blocks) < 16:
        raise LoRAError(f"{name}: {', '.join(blocks)} must be at least 16, what a matrix unit takes")


def max_tiles(num_rows: int, tile_m: int, max_active: int) -> int:
    """Return the largest number of tiles that `num_rows` rows in at most `max_active` groups can need.

    A group of c >= 1 rows takes ceil(c / t) <= (c + t - 1) / t tiles. The sum over groups is largest when all of them
    are present.
    """
    active = min(num_rows, max_active)
    return max(1, min(num_rows, (num_rows + active * (tile_m - 1)) // tile_m))


def plan_tile_m(num_rows: int, max_active: int, backend: Backend = "auto") -> int:
    """Return the rows of a tile for `num_rows` rows of up to `max_active` groups.

    A tile costs one fetch of its group's weights, plus work in proportion to its rows, occupied or not. The XLA path
    fetches by copying, which costs about as much as computing 16 rows; its tiles may have a single row. The matrix
    units of the kernels work on at least 16 rows, so smaller tiles would only be more tiles. The GPU kernels skip empty
    tiles, and read ahead best with 64 rows if groups have half as many.
    """
    where = platform() if backend == "auto" else {"triton": "gpu", "mosaic_tpu": "tpu", "xla": "cpu"}[backend]
    if where in ("gpu", "cuda"):
        rows = max(1, num_rows // max_active)
        return max(16, min(64, 2 << (rows.bit_length() - 1)))
    sizes = (16, 32, 64, 128) if where == "tpu" else (1, 2, 4, 8, 16, 32, 64, 128)
    return min(sizes, key=lambda t: (max_tiles(num_rows, t, max_active) * (t + 16), t))


def rows_bucket(num_rows: int) -> int:
    """Return `num_rows` rounded up to a power of two, the granularity of the tuned tables."""
    return 1 << max(0, num_rows - 1).bit_length()


class ItemSizes(NamedTuple):
    """Bytes of an element of every operand; `h` as it enters the expand's product."""

    x: int
    a: int
    b: int
    h: int


@dataclass(frozen=True)
class GPUProblem:
    """Static sizes of a call of `add_lora`, from which its tiles on a GPU are chosen.

    Attributes:
      dtype: Name of x's dtype, or of b's for `expand` alone.
      rows, k, n, slices, rank: M, K, N, the number of slices n, and R.
      tile_m: Rows of the plan's tiles.
      itemsizes: Bytes of an element of each operand.
      experts: True if the rows are pairs of tokens and experts, which means many groups with few rows each.
    """

    dtype: str
    rows: int
    tile_m: int
    k: int
    n: int
    slices: int
    rank: int
    itemsizes: ItemSizes
    experts: bool = False

    @property
    def padded_rank(self) -> int:
        """Number of ranks, rounded up to whole blocks of the expand."""
        block = rank_block(self.rank)
        return -(-self.rank // block) * block

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile in the kernels."""
        return matrix_rows(self.tile_m)


def matrix_rows(rows: int) -> int:
    """Return the block size for `rows` rows: a power of two, at least 16 for the matrix units."""
    return max(16, 1 << (rows - 1).bit_length())


def rank_block(rank: int) -> int:
    """Return the number of ranks in one dot of the expand, at most 64."""
    return min(64, matrix_rows(rank))


def shrink_shared_bytes(tiles: GPUTiles, p: GPUProblem) -> int:
    """Return the bytes of shared memory of the shrink: blocks of x and a, `shrink_stages` of them in flight.

    The compiler takes this much for Hopper's matrix unit, and one stage less for others.
    """
    block_r = min(tiles.block_r, -(-p.slices * p.rank // 16) * 16)
    return tiles.shrink_stages * tiles.block_k * (p.tile_rows * p.itemsizes.x + block_r * p.itemsizes.a)


def expand_shared_bytes(tiles: GPUTiles, p: GPUProblem) -> int:
    """Return the bytes of shared memory of the expand: blocks of b in flight, h of all ranks, and one output block.

    This is the most that the compiler was observed to take. For Hopper's matrix unit it keeps all stages, but little
    more than half of the float32 h of a float16 model. For others, and with full float32 precision everywhere, it keeps
    one stage less.
    """
    stages = max(1, tiles.stages - 1) if p.itemsizes.b == 4 else tiles.stages
    b = stages * tiles.block_n * p.padded_rank * p.itemsizes.b
    h = p.tile_rows * p.padded_rank * p.itemsizes.h
    return b + h + p.tile_rows * tiles.block_n * 4


def product_shared_bytes(tiles: ProductTiles, p: GPUProblem) -> int:
    """Return the bytes of shared memory of the larger of `linear_lora`'s two launches.

    In the first, programs of the product hold blocks of x and w, and the others hold the shrink's blocks, with as many
    stages. The second holds as much as the expand.
    """
    held = matrix_rows(p.rows) + tiles.product_block_n
    product = tiles.product_stages * tiles.product_block_k * held * p.itemsizes.x
    shrink = shrink_shared_bytes(replace(tiles.lora, shrink_stages=tiles.product_stages), p)
    return max(product, shrink, expand_shared_bytes(tiles.lora, p))


def fitted(tiles: GPUTiles, p: GPUProblem, shared_memory: int) -> GPUTiles | None:
    """Return the tiles cut down until each kernel fits into `shared_memory` bytes, or None if that is impossible.

    Stages are reduced to two first, then the blocks shrink, and the second stage goes last.
    """
    while shrink_shared_bytes(tiles, p) > shared_memory:
        if tiles.shrink_stages > 2:
            tiles = replace(tiles, shrink_stages=tiles.shrink_stages - 1)
        elif tiles.block_k > 64:
            tiles = replace(tiles, block_k=tiles.block_k // 2)
        elif tiles.block_r > 16:
            tiles = replace(tiles, block_r=tiles.block_r // 2)
        elif tiles.block_k > 16:
            tiles = replace(tiles, block_k=tiles.block_k // 2)
        elif tiles.shrink_stages > 1:
            tiles = replace(tiles, shrink_stages=1)
        else:
            return None
    while expand_shared_bytes(tiles, p) > shared_memory:
        if tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.block_n > 16:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        elif tiles.stages > 1:
            tiles = replace(tiles, stages=1)
        else:
            return None
    return tiles


def rule_of_thumb(p: GPUProblem, gpu: GPU) -> GPUTiles:
    """Return tiles by the shape and the number of multiprocessors: those that searches chose most often.

    Few rows get short programs and many rows deep read-ahead. Of the expand, two to four programs run on each
    multiprocessor at once. With more, the last few wait for the end of others.
    """
    rows, k, rank = p.rows, p.k, p.rank
    wide = rank > 64 or p.tile_m > 64
    few = p.tile_m <= 16 if p.experts else rows <= 512
    size = 4 if p.dtype == "float32" else 2
    narrow = 2 * 64 * rank * size > 160 * 1024  # two blocks of b would not fit into shared memory
    long = few and rank <= 32 and not p.experts and p.tile_m <= 64
    programs = (4 if few else 2) * gpu.multiprocessors * (2 if p.experts and rank <= 64 else 1)
    expand = {
        "block_n": 32 if narrow else 64 if wide else 256 if long else 128, "warps": 8 if wide or not few else 4,
        "stages": 2, "chunks": programs, "programs": programs,
    }  # fmt: skip
    if few:
        return GPUTiles(
            block_k=128, split_k=max(1, min(28, k // 256)), block_r=32, shrink_warps=2,
            shrink_stages=2 if p.experts else 4, shrink_programs=(12 if p.experts else 6) * gpu.multiprocessors,
            **expand,
        )  # fmt: skip
    return GPUTiles(
        block_k=64 if size == 4 else 128, split_k=max(1, min(4, 16384 // rows, k // 256)), block_r=64,
        shrink_warps=8 if wide else 4, shrink_stages=3, shrink_programs=3 * gpu.multiprocessors, **expand,
    )  # fmt: skip


def product_rule(p: GPUProblem, gpu: GPU) -> ProductTiles | None:
    """Return the tiles of `linear_lora` by the shape and the device, or None if no gain is predicted.

    For 33 to 64 rows XLA reads a kernel at 36 to 65% of the bandwidth if it has few columns. Two programs on each
    multiprocessor, with as many stages as fit, read it faster. With so many columns that K needs no parts XLA reads it
    as fast, and with so few that more than four parts were needed the sum of the parts takes longer than the gain. With
    fewer rows Hopper's matrix unit is not used, and the parts are slower than XLA's product. All of this was measured
    on an H200. On other chips than Hopper's XLA's products differ, and only a table has entries.
    """
    block_n, block_k = 64, 128
    if gpu.capability != 90 or p.experts or not 32 < p.rows <= 64:
        return None
    blocks = -(-p.n // block_n)
    parts = min(4, 2 * gpu.multiprocessors // blocks, p.k // (3 * block_k))
    if parts < 2 or blocks * parts < gpu.multiprocessors:
        return None
    stages = gpu.shared_memory // 2 // (block_k * (matrix_rows(p.rows) + block_n) * p.itemsizes.x)
    programs = 4 * gpu.multiprocessors
    lora = GPUTiles(
        block_k=128, split_k=min(8, p.k // 128), block_r=16 if p.rank <= 16 else 32, shrink_warps=1, shrink_stages=1,
        shrink_programs=programs, block_n=128, chunks=programs, warps=4, stages=2, programs=programs,
    )  # fmt: skip
    return ProductTiles(block_n, block_k, parts, 4, min(8, stages), lora)
