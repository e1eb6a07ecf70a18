"""The choice of tiles on a GPU: explicit > tuned table > rule of thumb.

Tables are `<device kind>.json` in the folder that JLORA_TUNED_DIR names, then in the package.
"""

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jlora.errors import LoRAError
from jlora.pallas.gpus import GPU, H200, current_gpu, shorter_kinds
from jlora.pallas.tiles import (
    GPUProblem,
    GPUTiles,
    ProductTiles,
    fitted,
    plan_tile_m,
    product_shared_bytes,
    rows_bucket,
    rule_of_thumb,
)

VARIABLE = "JLORA_TUNED_DIR"
# Kinds with the chip of another and less memory: on them its tiles keep their share of the bandwidth.
_SAME_CHIP = {"nvidia_h100": "nvidia_h200", "nvidia_gh200": "nvidia_h200"}


class Key(NamedTuple):
    """What tiles are looked up by. op: "add_lora", "add_lora_experts" where the plan is of experts, or "linear_lora";
    rows: as `rows_bucket` rounds them; k, n, rank: of a and b."""

    op: str
    dtype: str
    rows: int
    k: int
    n: int
    rank: int


Tiles = GPUTiles | ProductTiles
Table = dict[Key, Tiles]
_OPS = ("add_lora", "add_lora_experts", "linear_lora")


def gpu_tiles(p: GPUProblem, gpu: GPU | None = None) -> GPUTiles:
    """Tiles of `add_lora`: a tuned table's for this rank or the next that was tuned, else the rule's.

    What needs more shared memory than the GPU has is cut down.

    Args:
      p: the sizes.
      gpu: what to compile for; None for `current_gpu()`.

    Raises:
      LoRAError: a table is malformed, or no tiles of this plan's rows fit into shared memory.
    """
    gpu = current_gpu() if gpu is None else gpu
    chosen = _tuned("add_lora_experts" if p.experts else "add_lora", p, gpu) or rule_of_thumb(p)
    assert isinstance(chosen, GPUTiles)
    if _ample(p, gpu):
        return chosen
    tiles = fitted(chosen, p, gpu.shared_memory)
    if tiles is None:
        raise LoRAError(f"add_lora: backend 'triton' {_too_much(p, gpu)}")
    return tiles


def too_large(p: GPUProblem, gpu: GPU | None = None) -> str | None:
    """Why no tiles fit on the GPU if `make_plan` chooses as many rows a tile as it may, or None if some do."""
    gpu = current_gpu() if gpu is None else gpu
    p = replace(p, tile_m=plan_tile_m(p.rows, 1, "triton"))
    return None if _ample(p, gpu) or fitted(rule_of_thumb(p), p, gpu.shared_memory) else _too_much(p, gpu)


def _ample(p: GPUProblem, gpu: GPU) -> bool:
    """Whether rule and tables fit as they are: they were made on such parts, where all that they choose compiles.

    `fitted` would cut float16's at ranks above 256, for the compiler takes less for them than it reckons with.
    """
    return gpu.shared_memory >= H200.shared_memory and p.tile_m <= 64


def _too_much(p: GPUProblem, gpu: GPU) -> str:
    return (
        f"needs more than the {gpu.shared_memory} bytes of shared memory of {gpu.kind} for R = {p.rank} in tiles of "
        f"{p.tile_m} rows; lower R, make the plan with a smaller tile_m, or use backend='xla'"
    )


def product_tiles(p: GPUProblem, gpu: GPU | None = None) -> ProductTiles | None:
    """Tiles of `linear_lora`, or None where base product and LoRA are better made apart.

    They come from a tuned table alone, and it holds a shape only where the two together were measured to be faster:
    whether they are depends on how well the compiler's own product runs, which no rule foretells. None too where its
    tiles need more shared memory than the GPU has with as many rows in the plan's.

    Args:
      p: the sizes.
      gpu: as for `gpu_tiles`.

    Raises:
      LoRAError: a table is malformed.
    """
    gpu = current_gpu() if gpu is None else gpu
    found = _tuned("linear_lora", p, gpu)
    if found is None:
        return None
    assert isinstance(found, ProductTiles)
    return found if product_shared_bytes(found, p) <= gpu.shared_memory else None


def _tuned(op: str, p: GPUProblem, gpu: GPU) -> Tiles | None:
    """The first table's that has them."""
    return next((tiles for table in tuned_tables(gpu.kind) if (tiles := _look_up(table, op, p))), None)


def _look_up(table: Table, op: str, p: GPUProblem) -> Tiles | None:
    """What was tuned for a larger rank fits with a smaller one too, but not the other way round."""
    shape = Key(op, p.dtype, rows_bucket(p.rows), p.k, p.n, 0)
    ranks = [key.rank for key in table if key._replace(rank=0) == shape and key.rank >= p.rank]
    return table[shape._replace(rank=min(ranks))] if ranks else None


def tuned_tables(kind: str) -> Iterator[Table]:
    """The tables for a kind of device, the one to be preferred first.

    In each folder it is the first of "nvidia_h200_nvl.json", "nvidia_h200.json", ... that is there.

    Raises:
      LoRAError: JLORA_TUNED_DIR is no folder, or a table is malformed: with the file and the entry.
    """
    given = os.environ.get(VARIABLE)
    folders = [Path(str(resources.files("jlora.pallas"))) / "tuned"]
    if given:
        if not Path(given).is_dir():
            raise LoRAError(f"{VARIABLE} must name a folder of <device kind>.json, not {given!r}; unset or create it")
        folders.insert(0, Path(given))
    names = shorter_kinds(kind)
    names += [_SAME_CHIP[name] for name in names if name in _SAME_CHIP]
    for folder in folders:
        path = next((path for name in names if (path := folder / f"{name}.json").is_file()), None)
        if path is not None:
            yield read_table(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def read_table(path: Path, modified: int = 0) -> Table:
    """Reads a table; once for every state of the file that `modified` tells apart.

    Raises:
      LoRAError: the file is no JSON list of entries as `entry_of` makes them.
    """
    del modified
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoRAError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(entries, list):
        raise LoRAError(f"{path}: must be a list of entries, got {type(entries).__name__}")
    table: Table = {}
    for number, entry in enumerate(entries):
        try:
            key, tiles = _parse(entry)
            if key in table:
                raise LoRAError(f"its shape occurs before: {key}")
        except LoRAError as error:
            raise LoRAError(f"{path}: entry {number} (counted from 0): {error}") from None
        table[key] = tiles
    return table


def entry_of(key: Key, tiles: Tiles) -> dict[str, str | int]:
    """{op, dtype, rows, k, n, rank, and the fields of `GPUTiles`; those of `ProductTiles` before them}."""
    values = asdict(tiles)
    lora = values.pop("lora", {})
    return {**key._asdict(), **values, **lora}


def _parse(entry: Any) -> tuple[Key, Tiles]:
    op: Any = entry.get("op") if isinstance(entry, dict) else None
    of_product = [f.name for f in fields(ProductTiles) if f.name != "lora"] if op == "linear_lora" else []
    names = {*Key._fields, *of_product, *(f.name for f in fields(GPUTiles))}
    if not isinstance(entry, dict) or set(entry) != names:
        found = sorted(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise LoRAError(f"must have exactly the fields {sorted(names)}, got {found}")
    key = Key(*(entry[name] for name in Key._fields))
    if key.op not in _OPS:
        raise LoRAError(f"op must be one of {_OPS}, got {key.op!r}")
    if key.dtype not in ("bfloat16", "float16", "float32"):
        raise LoRAError(f"dtype must be 'bfloat16', 'float16' or 'float32', got {key.dtype!r}")
    for name in ("rows", "k", "n", "rank"):
        value = getattr(key, name)
        if type(value) is not int or value < 1:
            raise LoRAError(f"{name} must be a positive int, got {value!r}")
    if key.rows != rows_bucket(key.rows):
        raise LoRAError(f"rows must be a power of two, got {key.rows}")
    lora = GPUTiles(**{f.name: entry[f.name] for f in fields(GPUTiles)})
    return key, ProductTiles(**{name: entry[name] for name in of_product}, lora=lora) if of_product else lora
