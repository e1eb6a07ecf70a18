"""Tile sizes, derived from static sizes and the GPU only, so that no result depends on the mix of a batch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.pallas.gpus import GPU, H200, current_gpu, own_backend


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
    ahead: int = 1
    warps: int = 4
    stages: int = 4
    programs: int = 264


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
    where = own_backend() if backend == "auto" else backend
    if where == "triton":
        rows = max(1, num_rows // max_active)
        return max(16, min(64, 2 << (rows.bit_length() - 1)))
    sizes = (16, 32, 64, 128) if where == "mosaic_tpu" else (1, 2, 4, 8, 16, 32, 64, 128)
    return min(sizes, key=lambda t: (max_tiles(num_rows, t, max_active) * (t + 16), t))


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
      rows, k, slices, rank: M, K, the number of slices n, and R.
      tile_m: Rows of the plan's tiles.
      itemsizes: Bytes of an element of each operand.
      experts: True if the rows are pairs of tokens and experts, which means many groups with few rows each.
    """

    dtype: str
    rows: int
    tile_m: int
    k: int
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
    converted = p.itemsizes.h if p.itemsizes.b == 1 else 0
    b = tiles.block_n * p.padded_rank * (stages * p.itemsizes.b + converted)
    h = p.tile_rows * p.padded_rank * p.itemsizes.h
    return b + h + p.tile_rows * tiles.block_n * 4


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

    Few rows get short programs and many rows deep read-ahead.
    """
    few = p.tile_m <= 16 if p.experts else p.rows <= 512
    return GPUTiles(**_shrink_rule(p, few, gpu.multiprocessors), **_expand_rule(p, few, gpu.multiprocessors))


def _shrink_rule(p: GPUProblem, few: bool, cores: int) -> dict[str, int]:
    """Return the fields of the shrink for few or many rows.

    `least` is the fewest steps of a part of K, `most` the most parts, and `programs` those of a multiprocessor.
    """
    block_k = 128 if few or (p.experts and p.dtype != "float32") else 64
    steps = -(-p.k // block_k)
    if few:
        if p.experts:
            block_r, least, most, stages, programs = (32, 2, 28, 3, 12) if p.rank <= 32 else (64, 4, 28, 3, 8)
        elif p.rows <= 32:
            block_r, least, most, stages, programs = 32, 2, 28, 4, 6
        else:  # beside a base product of more rows, fewer and longer programs are faster, but K has eight parts or more
            block_r, least, most, stages, programs = 32, min(4, -(-steps // 8)), 14, 3, 4
            if p.itemsizes.a == 1 and p.rank > 16:
                programs = 6  # as many bytes in flight as in bfloat16
        parts, warps = min(most, -(-steps // least)), block_r // 16
    else:
        large = _is_large(p)
        block_r, warps = 64 if p.experts or large else 128, 8 if large else 4
        stages, programs = (3, 6) if p.experts else (4, 3)
        # Units for the two programs that a multiprocessor holds; a third waits, for the units of unequal groups. The
        # expand reads all parts, so long ones are few.
        units = p.rows * -(-p.slices * p.rank // block_r)
        parts = min(2 * cores * p.tile_m // units, 512 // p.rank, -(-steps // 8))
    steps_of_part = -(-steps // max(1, parts))
    return {
        "block_k": block_k, "split_k": -(-steps // steps_of_part), "block_r": block_r,  # no part is empty
        "shrink_warps": warps, "shrink_stages": stages, "shrink_programs": programs * cores,
    }  # fmt: skip


def _expand_rule(p: GPUProblem, few: bool, cores: int) -> dict[str, int]:
    """Return the fields of the expand for few or many rows.

    Two to four programs run on each multiprocessor at once, and up to sixteen for experts, whose tiles are many and
    small. With more, the last few wait for the end of others.
    """
    large = _is_large(p)
    block_n = 64 if large else 256 if few and p.rank <= 32 and not p.experts else 128
    while 2 * block_n * p.rank * (4 if p.dtype == "float32" else 2) > 128 * 1024:
        block_n //= 2  # two blocks of b would not fit into shared memory beside h
    if p.experts:
        warps, programs = 8 if large else 4, 16 if not few else 8 if p.rank <= 32 else 4
    elif p.rank <= 64 or large:
        warps, programs = 4 if few and not large else 8, 4 if few else 2
    else:  # of few rows, h has many parts and ranks to add up
        warps, programs = 8 if few else 4, 2
    stages = 3 if few and p.rank <= 16 and not p.experts else 2
    if few and p.itemsizes.b == 1:
        stages = 4  # about as many bytes in flight as in bfloat16
    return {"block_n": block_n, "warps": warps, "stages": stages, "programs": programs * cores}


def _is_large(p: GPUProblem) -> bool:
    """Return True if a tile's product takes so many registers that blocks are halved, and shared by eight warps."""
    return p.tile_m > 64 or p.dtype == "float32"


def gpu_tiles(p: GPUProblem, gpu: GPU | None = None) -> GPUTiles:
    """Return the tiles of `add_lora`: those of the rule, cut down if they need more shared memory than the GPU has.

    Args:
      p: Static sizes of the call.
      gpu: GPU to compile for. None means `current_gpu()`.

    Raises:
      LoRAError: No tiles of this plan's `tile_m` fit into shared memory.
    """
    gpu = current_gpu() if gpu is None else gpu
    chosen = rule_of_thumb(p, gpu)
    if _ample(p, gpu):
        return chosen
    tiles = fitted(chosen, p, gpu.shared_memory)
    if tiles is None:
        raise LoRAError(f"add_lora: backend 'triton' {_too_much(p, gpu)}")
    return tiles


def too_large(p: GPUProblem, gpu: GPU | None = None) -> str | None:
    """Return why no tiles fit on the GPU, or None if some do, for the largest `tile_m` that `make_plan` may choose."""
    gpu = current_gpu() if gpu is None else gpu
    p = replace(p, tile_m=plan_tile_m(p.rows, 1, "triton"))
    return None if _ample(p, gpu) or fitted(rule_of_thumb(p, gpu), p, gpu.shared_memory) else _too_much(p, gpu)


def _ample(p: GPUProblem, gpu: GPU) -> bool:
    """Return True if the rule's tiles need no check of shared memory.

    They were made on GPUs with this much, where all of them compile. `fitted` would cut those of float16 at ranks above
    256, because it overestimates the shared memory that the compiler takes for them.
    """
    return gpu.shared_memory >= H200.shared_memory and p.tile_m <= 64


def _too_much(p: GPUProblem, gpu: GPU) -> str:
    return (
        f"needs more than the {gpu.shared_memory} bytes of shared memory of {gpu.kind} for R = {p.rank} in tiles of "
        f"{p.tile_m} rows; lower R, make the plan with a smaller tile_m, or use backend='xla'"
    )
