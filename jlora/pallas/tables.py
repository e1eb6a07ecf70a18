"""Choose tiles on a GPU: from a tuned table, else by a rule of thumb.

Tables are files `<device kind>.json`, looked up in the folder named by JLORA_TUNED_DIR, in the user's cache folder, and
then in the package.
"""

import fcntl
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

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
# None instead of the tiles of a "linear_lora": base product and LoRA were measured to be faster apart.
Table = dict[Key, Tiles | None]
_Otherwise = TypeVar("_Otherwise")
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
    chosen = _tuned("add_lora_experts" if p.experts else "add_lora", p, gpu, rule_of_thumb)
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
    found = _tuned("linear_lora", p, gpu, product_rule)
    if found is None:
        return None
    assert isinstance(found, ProductTiles)
    return found if product_shared_bytes(found, p) <= gpu.shared_memory else None


def _tuned(
    op: str, p: GPUProblem, gpu: GPU, otherwise: Callable[[GPUProblem, GPU], _Otherwise]
) -> Tiles | _Otherwise | None:
    """Return the tiles of the first table with an entry for these sizes, or `otherwise(p, gpu)` if there is none."""
    for table in tuned_tables(gpu.kind):
        key = _nearest(table, op, p)
        if key is not None:
            return table[key]
    return otherwise(p, gpu)


def _nearest(table: Table, op: str, p: GPUProblem) -> Key | None:
    """Return the key with the smallest rank that is at least p's; tiles tuned for a smaller rank may not fit."""
    shape = Key(op, p.dtype, rows_bucket(p.rows), p.k, p.n, 0)
    ranks = [key.rank for key in table if key._replace(rank=0) == shape and key.rank >= p.rank]
    return shape._replace(rank=min(ranks)) if ranks else None


def tuned_tables(kind: str) -> Iterator[Table]:
    """Yield the tables for a kind of device, in order of preference.

    Each folder gives at most one table, the first that exists of "nvidia_h200_nvl.json", "nvidia_h200.json", ... A
    malformed table of the cache folder is passed over with a warning.

    Raises:
      LoRAError: JLORA_TUNED_DIR is not a folder, or a table is malformed. The message names the file and the entry.
    """
    names = shorter_kinds(kind)
    names += [_SAME_CHIP[name] for name in names if name in _SAME_CHIP]
    given, cache = _given_folder(), cache_folder()
    for folder in (given, cache, Path(str(resources.files("jlora.pallas"))) / "tuned"):
        files = [] if folder is None else [folder / f"{name}.json" for name in names]
        path = next((path for path in files if os.path.isfile(path)), None)  # False for a folder without access
        if path is None:
            continue
        try:
            yield _read_once(path, path.stat().st_mtime_ns)
        except LoRAError as error:
            if folder is not cache:
                raise
            _warn_once(f"{error}; the tiles of this file are not used, tune again")  # from another version of jlora


def _given_folder() -> Path | None:
    given = os.environ.get(VARIABLE)
    if given and not Path(given).is_dir():
        raise LoRAError(f"{VARIABLE} must name a folder of <device kind>.json, not {given!r}; unset or create it")
    return Path(given) if given else None


def cache_folder() -> Path:
    """Return the folder of the user's own tables for this version of JAX: ~/.cache/jlora/tuned/jax-<version>.

    XDG_CACHE_HOME replaces ~/.cache.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores a relative path
        base = os.path.expanduser("~/.cache")
    return Path(base, "jlora", "tuned", f"jax-{jax.__version__}")


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("jlora").warning(message)


def own_table(kind: str) -> Path:
    """Return the file that tuning writes for a kind of device: in JLORA_TUNED_DIR, else in the cache folder.

    Raises:
      LoRAError: JLORA_TUNED_DIR is not a folder.
    """
    return (_given_folder() or cache_folder()) / f"{kind}.json"


def read_own_table(path: Path) -> Table:
    """Return the entries of a file of `own_table`: none if it is missing, or if it is malformed in the cache folder.

    Raises:
      LoRAError: The file is malformed, and not in the cache folder.
    """
    if not path.is_file():
        return {}
    try:
        return read_table(path)
    except LoRAError:
        if path.parent != cache_folder():
            raise
        return {}


def add_entries(path: Path, entries: Mapping[Key, Tiles | None]) -> None:
    """Add entries to a table, or replace them. Several processes may do so at the same time.

    Raises:
      LoRAError: The file cannot be written, or it is malformed and not in the cache folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released at the latest when the process ends
            part = path.with_suffix(".part")
            write_table(part, {**read_own_table(path), **entries})
            os.replace(part, path)  # readers see the old or the new file
    except OSError as error:
        raise LoRAError(f"{path}: the tuned tiles cannot be kept: {error.strerror or error}") from error


def write_table(path: Path, table: Mapping[Key, Tiles | None]) -> None:
    """Write a table, sorted, with each entry on its own line."""
    entries = (entry_of(key, table[key]) for key in sorted(table))
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n", encoding="utf-8")


@functools.lru_cache(maxsize=16)
def _read_once(path: Path, modified: int) -> Table:
    """Read a table, once for each modification time in nanoseconds."""
    del modified
    return read_table(path)


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
      LoRAError: The file is not a JSON list of entries as `entry_of` makes them.
    """
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


def entry_of(key: Key, tiles: Tiles | None) -> dict[str, str | int]:
    """Return an entry as JSON: {op, dtype, rows, k, n, rank, [fields of `ProductTiles`,] fields of `GPUTiles`}.

    An entry without tiles has the key alone.
    """
    values = {} if tiles is None else asdict(tiles)
    lora = values.pop("lora", {})
    return {**key._asdict(), **values, **lora}


def _parse(entry: Any) -> tuple[Key, Tiles | None]:
    op: Any = entry.get("op") if isinstance(entry, dict) else None
    of_product = [f.name for f in fields(ProductTiles) if f.name != "lora"] if op == "linear_lora" else []
    names = {*Key._fields, *of_product, *(f.name for f in fields(GPUTiles))}
    apart = op == "linear_lora" and set(entry) == {*Key._fields}
    if not isinstance(entry, dict) or (set(entry) != names and not apart):
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
    if apart:
        return key, None
    lora = GPUTiles(**{f.name: entry[f.name] for f in fields(GPUTiles)})
    return key, ProductTiles(**{name: entry[name] for name in of_product}, lora=lora) if of_product else lora
