"""The tuned table parses and fits, and the choice depends on static sizes only."""

import json
from importlib import resources

import pytest

from benchmarks.specs import PROJECTIONS
from jlora.errors import LoRAError
from jlora.pallas.tiles import GPUTiles, gpu_tiles, plan_tile_m, rows_bucket, tuned_table

SHARED_MEMORY = 227 * 1024  # bytes a program may use on an H200


def test_every_entry_parses_and_fits():
    path = resources.files("jlora.pallas").joinpath("tuned", "nvidia_h200.json")
    entries, table = json.loads(path.read_text()), tuned_table("nvidia_h200")
    assert len(table) == len(entries) > 0  # no key twice
    shapes = {(p.k, p.n) for p in PROJECTIONS.values()}
    for (op, dtype, rows, k, n, rank), tiles in table.items():
        assert op == "add_lora"
        assert dtype in ("bfloat16", "float16", "float32")
        assert rows == rows_bucket(rows)
        assert (k, n) in shapes
        assert 1 <= rank <= 512
        assert tiles.split_k * tiles.block_k <= k  # no part is empty
        tile_m, size = 64, 4 if dtype == "float32" else 2
        block_r = min(tiles.block_r, max(16, rank))
        assert tiles.shrink_stages * tiles.block_k * (tile_m + block_r) * size <= SHARED_MEMORY
        assert tiles.stages * tiles.block_n * min(64, max(16, rank)) * size <= SHARED_MEMORY


def test_table_before_rule():
    (op, dtype, rows, k, n, rank), tiles = next(iter(tuned_table("nvidia_h200").items()))
    assert op == "add_lora"
    assert gpu_tiles(dtype, rows, 16, k, n, rank) == tiles
    assert gpu_tiles(dtype, rows, 16, k + 16, n, rank) == gpu_tiles(dtype, rows, 16, k + 16, n + 1, rank)


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
