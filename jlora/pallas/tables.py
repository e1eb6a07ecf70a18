"""Choose tiles on a GPU: from a tuned table, else by a rule of thumb.

Tables are files `<device kind>.json`, looked up in the folder named by JLORA_TUNED_DIR and then in the package.
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
    product_rule,
    product_shared_bytes,
    rows_bucket,
    rule_of_thumb,
)

VARIABLE = "JLORA_TUNED_DIR"
# GPUs with the chip of another kind and less memory. The other's tiles reach the same share of their bandwidth.
_SAME_CHIP = {"nvidia_h100": "nvidia_h200", "nvidia_gh200": "nvidia_h200"}


class Key(NamedTuple):
    """The key of an entry of a table.

    Attributes:
      op: "add_lora", "add_lora_experts" for a plan of experts, or "linear_lora".
      dtype: Name of x's dtype.
      rows: Number of rows, rounded by `rows_bucket`.
      k, n, rank: K, N and R of the factors.
    """

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
    """Return the tiles of `add_lora`: from a tuned table, for this rank or the next larger one in it, else by the rule.

    Tiles that need more shared memory than the GPU has are cut down.

    Args:
      p: Static sizes of the call.
      gpu: GPU to compile for. None means `current_gpu()`.

    Raises:
      LoRAError: A table is malformed, or no tiles of this plan's `tile_m` fit into shared memory.
    """
    gpu = current_gpu() if gpu is None else gpu
    chosen = _tuned("add_lora_experts" if p.experts else "add_lora", p, gpu) or rule_of_thumb(p, gpu)
    assert isinstance(chosen, GPUTiles)
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
    """Return True if tiles of the rule and the tables need no check of shared memory.

    They were made on GPUs with this much, where all of them compile. `fitted` would cut those of float16 at ranks above
    256, because it overestimates the shared memory that the compiler takes for them.
    """
    return gpu.shared_memory >= H200.shared_memory and p.tile_m <= 64


def _too_much(p: GPUProblem, gpu: GPU) -> str:
    return (
        f"needs more than the {gpu.shared_memory} bytes of shared memory of {gpu.kind} for R = {p.rank} in tiles of "
        f"{p.tile_m} rows; lower R, make the plan with a smaller tile_m, or use backend='xla'"
    )


def product_tiles(p: GPUProblem, gpu: GPU | None = None) -> ProductTiles | None:
    """Return the tiles of `linear_lora`, or None if base product and LoRA are better computed apart.

    Tiles come from a tuned table, else from `product_rule`. None is also returned if the tiles need more shared memory
    than the GPU has for this plan's `tile_m`.

    Args:
      p: Static sizes of the call.
      gpu: As for `gpu_tiles`.

    Raises:
      LoRAError: A table is malformed.
    """
    gpu = current_gpu() if gpu is None else gpu
    found = _tuned("linear_lora", p, gpu) or product_rule(p, gpu)
    if found is None:
        return None
    assert isinstance(found, ProductTiles)
    return found if product_shared_bytes(found, p) <= gpu.shared_memory else None


def _tuned(op: str, p: GPUProblem, gpu: GPU) -> Tiles | None:
    """Return the tiles of the first table with an entry for these sizes."""
    return next((tiles for table in tuned_tables(gpu.kind) if (tiles := _look_up(table, op, p))), None)


def _look_up(table: Table, op: str, p: GPUProblem) -> Tiles | None:
    """Return the entry with the smallest rank that is at least p's; tiles tuned for a smaller rank may not fit."""
    shape = Key(op, p.dtype, rows_bucket(p.rows), p.k, p.n, 0)
    ranks = [key.rank for key in table if key._replace(rank=0) == shape and key.rank >= p.rank]
    return table[shape._replace(rank=min(ranks))] if ranks else None


def tuned_tables(kind: str) -> Iterator[Table]:
    """Yield the tables for a kind of device, in order of preference.

    Each folder gives at most one table, the first that exists of "nvidia_h200_nvl.json", "nvidia_h200.json", ...

    Raises:
      LoRAError: JLORA_TUNED_DIR is not a folder, or a table is malformed. The message names the file and the entry.
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
    """Read a table. Results are cached by path and `modified`, the file's modification time in nanoseconds.

    Raises:
      LoRAError: The file is not a JSON list of entries as `entry_of` makes them.
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
    """Return an entry as JSON: {op, dtype, rows, k, n, rank, [fields of `ProductTiles`,] fields of `GPUTiles`}."""
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
