"""The tuned table parses and fits, and the choice depends on static sizes only."""

import json
from importlib import resources

import pytest

from benchmarks.specs import PROJECTIONS
from jlora.errors import LoRAError
from jlora.pallas.tiles import GPUTiles, gpu_tiles, plan_tile_m, rows_bucket, tuned_table

SHARED_MEMORY = 227 * 1024  # bytes a program may use on an H200


def needs(tiles: GPUTiles, tile_m: int, slices: int, rank: int, size: int) -> int:
    """Bytes of shared memory of the hungrier kernel: the blocks in flight, and h on its way to the matrix unit."""
    block_r = min(tiles.block_r, -(-slices * rank // 16) * 16)
    shrink = tiles.shrink_stages * tiles.block_k * (tile_m + block_r) * size
    return max(shrink, tiles.stages * tiles.block_n * max(16, rank) * size + tile_m * min(64, max(16, rank)) * size)


def test_every_entry_parses_and_fits():
    path = resources.files("jlora.pallas").joinpath("tuned", "nvidia_h200.json")
    entries, table = json.loads(path.read_text()), tuned_table("nvidia_h200")
    assert len(table) == len(entries) > 0  # no key twice
    slices = {(p.k, p.n): len(p.slices) for p in PROJECTIONS.values()}
    for (op, dtype, rows, k, n, rank), tiles in table.items():
        assert op == "add_lora"
        assert dtype in ("bfloat16", "float16", "float32")
        assert rows == rows_bucket(rows)
        assert 1 <= rank <= 512
        assert tiles.split_k * tiles.block_k <= k  # no part is empty
        assert (k, n) in slices
        tile_m, size = 64, 4 if dtype == "float32" else 2  # few rows fill such tiles, too, if there are few slots
        assert needs(tiles, tile_m, slices[k, n], rank, size) <= SHARED_MEMORY


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_what_is_chosen_for_any_shape_fits(dtype, slots):
    for rank in (1, 8, 16, 17, 40, 64, 100, 128, 200, 256, 300, 512):
        for rows in (1, 8, 64, 256, 600, 2048, 8192):
            for k, n, slices in ((4096, 6144, 3), (300, 500, 2), (14336, 4096, 1)):
                tile_m = plan_tile_m(rows, min(rows, slots), "triton")
                tiles = gpu_tiles(dtype, rows, tile_m, k, n, rank)
                assert needs(tiles, tile_m, slices, rank, 4 if dtype == "float32" else 2) <= SHARED_MEMORY, (rank, rows)


def test_table_before_rule_and_the_next_tuned_rank_for_one_between():
    table = tuned_table("nvidia_h200")
    (op, dtype, rows, k, n, _), _ = next(iter(table.items()))
    assert op == "add_lora"
    tuned = sorted(key[5] for key in table if key[:5] == (op, dtype, rows, k, n))
    for rank in tuned:
        assert gpu_tiles(dtype, rows, 16, k, n, rank) == table[op, dtype, rows, k, n, rank]
    assert gpu_tiles(dtype, rows, 16, k, n, tuned[0] + 1) == table[op, dtype, rows, k, n, tuned[1]]
    beyond = gpu_tiles(dtype, rows, 16, k, n, tuned[-1] + 1)
    assert beyond == gpu_tiles(dtype, rows, 16, k, n + 1, tuned[-1] + 1)  # the rule


def test_plan_tiles_are_what_a_backend_takes():
    assert plan_tile_m(1, 1, "xla") == 1
    for rows in (1, 8, 64, 256, 2048, 8192):
        for active in (1, 8, 64):
            if active <= rows:
                assert plan_tile_m(rows, active, "triton") in (16, 32, 64)
    assert plan_tile_m(8192, 64, "triton") == 64
    assert plan_tile_m(64, 64, "triton") == 16


@pytest.mark.parametrize("change", [{"block_k": 48}, {"block_n": 8}, {"split_k": 0}, {"warps": 3}, {"stages": 2.0}])
def test_bad_tiles_raise(change):
    with pytest.raises(LoRAError, match=next(iter(change))):
        GPUTiles(**change)
