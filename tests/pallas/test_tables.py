"""Tuned tables: the table of a kind of GPU, and the errors of malformed ones."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import resources

import jax
import pytest

from jlora.errors import LoRAError
from jlora.pallas.gpus import GPU, H200
from jlora.pallas.tables import (
    Key,
    add_entries,
    entry_of,
    gpu_tiles,
    own_table,
    product_tiles,
    read_table,
    tuned_tables,
    write_table,
)
from jlora.pallas.tiles import GPUTiles, ProductTiles, rule_of_thumb
from tests.pallas.test_tiles import problem

SHAPE = {"op": "add_lora", "dtype": "bfloat16", "rows": 64, "k": 320, "n": 640, "rank": 16}
MINE = GPUTiles(block_k=32, block_n=16)
TOGETHER = ProductTiles(32, 64, 4, 4, 3, lora=MINE)
PROBLEM = problem("bfloat16", 64, 16, 320, 640, 1, 16)


def entry(**change):
    return {**SHAPE, **asdict(MINE), **change}


def product(**change):
    """An entry of `linear_lora`."""
    return {**entry_of(Key("linear_lora", *list(SHAPE.values())[1:]), TOGETHER), **change}


def write(path, *entries):
    path.write_text(json.dumps(list(entries)))


def test_a_user_table_precedes_the_packaged_one_and_the_rule(tuned_folder):
    assert gpu_tiles(PROBLEM, H200) == rule_of_thumb(PROBLEM, H200)
    write(tuned_folder / "nvidia_h200.json", entry())
    assert gpu_tiles(PROBLEM, H200) == MINE
    assert gpu_tiles(PROBLEM, GPU("nvidia_l4", 99 << 10, 89)) == rule_of_thumb(PROBLEM, H200)
    packaged = json.loads(resources.files("jlora.pallas").joinpath("tuned", "nvidia_h200.json").read_text())[0]
    sizes = {name: packaged[name] for name in SHAPE}
    shape = problem(sizes["dtype"], sizes["rows"], 16, sizes["k"], sizes["n"], 1, sizes["rank"])
    assert gpu_tiles(shape, H200) == GPUTiles(**{n: v for n, v in packaged.items() if n not in SHAPE})
    write(tuned_folder / "nvidia_h200.json", entry(**sizes))
    assert gpu_tiles(shape, H200) == MINE


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, 1), ({"rank": 1}, 1), ({"rank": 17}, 2), ({"rank": 64}, 2), ({"rank": 65}, 0), ({"rows": 33}, 1),
        ({"rows": 32}, 0), ({"rows": 65}, 0), ({"k": 321}, 0), ({"n": 320}, 0), ({"dtype": "float16"}, 0),
    ],
)  # fmt: skip
def test_linear_lora_uses_the_tiles_of_the_table(tuned_folder, change, found):
    """The entry of this rank, or of the next larger one; rows are rounded up; no rule stands in for a table."""
    wide = replace(TOGETHER, product_split_k=2, lora=replace(MINE, block_r=16))
    write(tuned_folder / "nvidia_h200.json", product(rank=64, product_split_k=2, block_r=16), entry(), product())
    asked = replace(PROBLEM, **change)
    assert product_tiles(asked, H200) == (None, TOGETHER, wide)[found]
    assert product_tiles(asked, GPU("nvidia_l4", 99 << 10, 89)) is None
    assert gpu_tiles(PROBLEM, H200) == MINE


@pytest.mark.parametrize(
    ("tile_m", "change", "fits"),
    [
        (16, {}, True),
        (16, {"product_block_n": 256, "product_stages": 4}, False),  # (64 + 256) * 64 * 2 * 4
        (16, {"product_block_n": 256, "product_stages": 3}, True),
        (16, {"product_stages": 8, "block_k": 512}, False),  # of the shrink: (16 + 16) * 512 * 2 * 8
        (16, {"product_stages": 8, "block_k": 128}, True),
        (64, {"product_stages": 8, "block_k": 128}, False),  # (64 + 16) * 128 * 2 * 8
        (16, {"block_n": 2048}, False),  # of the sum
    ],
)
def test_products_fit_the_shared_memory_or_are_made_apart(tuned_folder, tile_m, change, fits):
    small = GPU("nvidia_h200", 128 << 10, 90)
    write(tuned_folder / "nvidia_h200.json", product(**{"product_block_n": 16, "product_stages": 2, **change}))
    assert (product_tiles(replace(PROBLEM, tile_m=tile_m), small) is not None) == fits


def test_entries_of_products_are_written_as_they_are_read(tuned_folder):
    wide = replace(TOGETHER, product_stages=7, lora=replace(MINE, chunks=99))
    table = {Key(*SHAPE.values()): MINE, Key("linear_lora", "float16", 8, 320, 640, 16): wide}
    table[Key("linear_lora", *list(SHAPE.values())[1:])] = TOGETHER
    write_table(tuned_folder / "nvidia_h200.json", table)
    assert read_table(tuned_folder / "nvidia_h200.json") == table
    assert product_tiles(PROBLEM, H200) == TOGETHER
    assert product_tiles(replace(PROBLEM, dtype="float16", rows=5, rank=2), H200) == wide
    assert len(json.loads((tuned_folder / "nvidia_h200.json").read_text())) == 3


def test_a_file_that_changed_is_read_again(tuned_folder):
    write(tuned_folder / "nvidia_l4.json", entry())
    part = GPU("nvidia_l4", 99 << 10, 89)
    assert gpu_tiles(PROBLEM, part) == MINE
    (tuned_folder / "nvidia_l4.json").unlink()
    assert gpu_tiles(PROBLEM, part) == rule_of_thumb(PROBLEM, H200)


def test_a_table_does_not_ask_for_more_than_the_device_has(tuned_folder):
    write(tuned_folder / "nvidia_l4.json", entry(block_n=512, stages=8))
    assert gpu_tiles(PROBLEM, GPU("nvidia_l4", 99 << 10, 89)).block_n == 512
    assert gpu_tiles(PROBLEM, GPU("nvidia_l4", 99 << 10, 89)).stages < 8


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("nvidia_h200", True), ("nvidia_h200_nvl", True), ("nvidia_h100_80gb_hbm3", True), ("nvidia_gh200_480gb", True),
        ("nvidia_l4", False), ("nvidia_h2000", False), ("nvidia_a100_sxm4_40gb", False),
    ],
)  # fmt: skip
def test_forms_of_a_chip_share_its_table(kind, found):
    assert len(list(tuned_tables(kind))) == found


def test_the_nearest_kind_is_taken(tuned_folder):
    write(tuned_folder / "nvidia_a100.json", entry())
    part = GPU("nvidia_a100_sxm4_40gb", 163 << 10, 80)
    assert gpu_tiles(PROBLEM, part) == MINE
    write(tuned_folder / "nvidia_a100_sxm4_40gb.json", entry(block_k=64))
    assert gpu_tiles(PROBLEM, part).block_k == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("\udce9", "cannot be read as JSON"),
        ("{}", "must be a list of entries, got dict"),
        ("[7]", "entry 0.*got int"),
        ([entry(), entry(rows=128, spare=1)], "entry 1.*'spare'"),
        ([{k: v for k, v in entry().items() if k != "warps"}], "entry 0.*exactly the fields"),
        ([entry(), entry()], "entry 1.*occurs before"),
        ([entry(op="add")], r"op must be one of \('add_lora', 'add_lora_experts', 'linear_lora'\), got 'add'"),
        ([entry(dtype="int8")], "dtype must be"),
        ([entry(rows=48)], "rows must be a power of two, got 48"),
        ([entry(rank="16")], "rank must be a positive int, got '16'"),
        ([entry(k=True)], "k must be a positive int, got True"),
        ([entry(block_k=48)], r"GPUTiles.block_k must be a power of two, got 48"),
        ([entry(stages=0)], r"GPUTiles.stages must be a positive int, got 0"),
        ([entry(op="linear_lora")], r"entry 0.*exactly the fields .*'product_block_k', .* got \['ahead'"),
        ([{k: v for k, v in product().items() if k != "product_warps"}], "entry 0.*exactly the fields"),
        ([{k: v for k, v in product().items() if k != "block_r"}], "entry 0.*exactly the fields"),
        ([product(op="add_lora")], "entry 0.*exactly the fields .* got .*'product_block_k'"),
        ([entry(), product(op="add_lora_experts")], "entry 1.*exactly the fields .* got .*'product_block_k'"),
        ([product(lora={})], "entry 0.*exactly the fields .* got .*'lora'"),
        ([product(), product()], "entry 1.*occurs before: Key.op='linear_lora'"),
        ([product(rows=48)], "rows must be a power of two, got 48"),
        ([product(dtype="int8")], "dtype must be"),
        ([product(product_block_n=48)], r"ProductTiles.product_block_n must be a power of two, got 48"),
        ([product(product_block_k=8)], r"ProductTiles: product_block_n, product_block_k must be at least 16"),
        ([product(product_split_k=0)], r"ProductTiles.product_split_k must be a positive int, got 0"),
        ([product(product_stages=-2)], r"ProductTiles.product_stages must be a positive int, got -2"),
        ([product(product_warps=3)], r"ProductTiles.product_warps must be a power of two, got 3"),
        ([product(block_k=48)], r"GPUTiles.block_k must be a power of two, got 48"),
    ],
)
def test_a_malformed_table_names_its_file_and_entry(tuned_folder, text, message):
    path = tuned_folder / "nvidia_l4.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text), errors="surrogateescape")
    for look_up in (gpu_tiles, product_tiles):
        with pytest.raises(LoRAError, match=rf"nvidia_l4\.json: .*{message}"):
            look_up(PROBLEM, GPU("nvidia_l4", 99 << 10, 89))


def test_a_missing_folder_is_refused(tuned_folder):
    tuned_folder.rmdir()
    with pytest.raises(LoRAError, match=r"JLORA_TUNED_DIR must name a folder.*tuned"):
        gpu_tiles(PROBLEM, H200)


def test_the_packaged_table_is_written_as_the_search_writes_it(tmp_path):
    packaged = resources.files("jlora.pallas").joinpath("tuned", "nvidia_h200.json").read_text()
    (table,) = tuned_tables("nvidia_h200")
    write_table(tmp_path / "again.json", table)
    assert (tmp_path / "again.json").read_text() == packaged


APART = {**SHAPE, "op": "linear_lora"}


@pytest.mark.parametrize("rank", [1, 16, 17])
def test_an_entry_without_tiles_keeps_product_and_lora_apart(tuned_folder, cache, rank):
    """It takes precedence over the tiles of a later folder, for the ranks that it covers."""
    write(tuned_folder / "nvidia_h200.json", APART)
    cache.mkdir(parents=True)
    write(cache / "nvidia_h200.json", product(rank=64))
    tiles = product_tiles(replace(PROBLEM, rank=rank), H200)
    assert (tiles is None) == (rank <= 16)
    assert read_table(tuned_folder / "nvidia_h200.json") == {Key(*APART.values()): None}
    write_table(tuned_folder / "again.json", read_table(tuned_folder / "nvidia_h200.json"))
    assert json.loads((tuned_folder / "again.json").read_text()) == [APART]


def test_the_cache_folder_comes_after_the_given_and_before_the_packaged(tuned_folder, cache):
    cache.mkdir(parents=True)
    write(cache / "nvidia_h200.json", entry(block_k=64))
    assert gpu_tiles(PROBLEM, H200).block_k == 64
    write(tuned_folder / "nvidia_h200.json", entry())
    assert gpu_tiles(PROBLEM, H200) == MINE
    assert len(list(tuned_tables("nvidia_h200"))) == 3


def test_a_malformed_table_of_the_cache_folder_is_passed_over(cache, caplog):
    """It may be of another version of jlora. Tuning writes it anew."""
    cache.mkdir(parents=True)
    path = cache / "nvidia_h200.json"
    write(path, entry(spare=1))
    for _ in range(2):
        assert gpu_tiles(PROBLEM, H200) == rule_of_thumb(PROBLEM, H200)
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "tune again" in record.getMessage()
    add_entries(path, {Key(*SHAPE.values()): MINE})
    assert gpu_tiles(PROBLEM, H200) == MINE


def test_own_tables_go_to_the_given_folder_else_to_the_cache_folder(monkeypatch, tmp_path, cache):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    assert own_table("nvidia_l4") == cache / "nvidia_l4.json"
    for where in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", where)
        assert (
            own_table("nvidia_l4") == home / ".cache" / "jlora" / "tuned" / f"jax-{jax.__version__}" / "nvidia_l4.json"
        )
    monkeypatch.setenv("JLORA_TUNED_DIR", str(tmp_path))
    assert own_table("nvidia_l4") == tmp_path / "nvidia_l4.json"
    monkeypatch.setenv("JLORA_TUNED_DIR", str(home))
    with pytest.raises(LoRAError, match="JLORA_TUNED_DIR must name a folder"):
        own_table("nvidia_l4")


def test_a_malformed_given_table_is_not_replaced(tuned_folder):
    path = own_table("nvidia_l4")
    write(path, entry(spare=1))
    before = path.read_text()
    with pytest.raises(LoRAError, match=r"nvidia_l4\.json: entry 0"):
        add_entries(path, {Key(*SHAPE.values()): MINE})
    assert path.read_text() == before


def test_a_table_that_cannot_be_written_names_its_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LoRAError, match=r"file/nvidia_l4\.json: the tuned tiles cannot be kept: "):
        add_entries(tmp_path / "file" / "nvidia_l4.json", {Key(*SHAPE.values()): MINE})


def test_concurrent_writers_keep_the_entries_of_all(cache):
    """Each reads the file, adds to it and replaces it. Readers never see a part of it."""
    path = own_table("nvidia_l4")
    keys = [Key("add_lora", "bfloat16", 1 << rows, 320, 640, rank) for rows in range(6) for rank in (8, 16, 32)]
    add_entries(path, {keys[0]: MINE})
    sizes = []

    def add(key):
        add_entries(path, {key: MINE})
        sizes.append(len(read_table(path)))

    with ThreadPoolExecutor(len(keys)) as pool:
        list(pool.map(add, keys))
    assert read_table(path) == dict.fromkeys(keys, MINE)
    assert min(sizes) >= 1
    assert [file.name for file in sorted(cache.iterdir())] == ["nvidia_l4.json", "nvidia_l4.lock"]
