"""Search tiles of the GPU kernels for the products of a model, and keep them in a table (`tables`).

The candidates of a shape are the present choice, the tiles of similar shapes in all tables, and changes of one size of
the best of these. All are timed, in chains of layers. The fastest are timed again in alternation, and their values are
checked (`trial`). A "linear_lora" gets tiles only if base product and LoRA are faster together than apart by `GAIN`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jlora.pallas.gpus import GPU, H200, current_gpu
from jlora.pallas.tables import (
    Key,
    Table,
    Tiles,
    add_entries,
    gpu_tiles,
    own_table,
    product_tiles,
    read_own_table,
    tuned_tables,
)
from jlora.pallas.tiles import (
    GPUProblem,
    GPUTiles,
    ProductTiles,
    fitted,
    plan_tile_m,
    product_shared_bytes,
    rows_bucket,
)

# Least gain of base product and LoRA together. The compiler can fuse its own product with later operations, for example
# the sum of a residual. The chains of a search have none, but a step does. With entries for any gain, 8 rows without
# adapters took 3% longer (Llama-3-8B, H200).
GAIN = 1.03
DECODE = 256  # most tokens of a decode step, each of another sequence; more tokens are a prefill of a few sequences
FEW = 512  # most rows for which tiles of few rows are best
_SIMILAR = 8  # tiles of similar shapes that are tried
_TRIED = 3  # the same, once the shape has been searched for another number of rows
_MOST_PARTS = 32  # parts of K, whose sums the second launch reads
_EXPAND = ("block_n", "chunks", "ahead", "warps", "stages", "programs")
# Part of a field's name -> the least and the most that are tried.
_LIMITS = {"block": (16, 512), "split": (1, 56), "warps": (1, 8), "stages": (1, 8), "programs": (66, 8448)}
_T = TypeVar("_T", GPUTiles, ProductTiles)


@dataclass(frozen=True)
class Shape:
    """Static sizes of a projection and its slots, apart from the number of rows.

    Attributes:
      k, slices, rank: K, the sizes of the n output slices, and R.
      dtype, slot_dtype: Names of the dtypes of x and of the factors.
      slots: Number of slots.
      experts: Number of experts, each with own factors; 1 for other projections.
      fusible: True if `linear_lora` may compute the base product.
    """

    k: int
    slices: tuple[int, ...]
    rank: int
    dtype: str
    slot_dtype: str
    slots: int
    experts: int = 1
    fusible: bool = False

    @property
    def n(self) -> int:
        """N, the sum of the slices."""
        return sum(self.slices)


@dataclass(frozen=True)
class Task:
    """A shape with a number of rows, for which one entry of a table is searched.

    Attributes:
      op: As in `tables.Key`.
      shape: The sizes of the projection.
      tokens: Number of tokens on one device.
      per_token: Number of rows of a token: its experts.
    """

    op: str
    shape: Shape
    tokens: int
    per_token: int = 1

    @property
    def rows(self) -> int:
        """M, the number of rows."""
        return self.tokens * self.per_token

    @property
    def max_active(self) -> int:
        """Bound on the number of adapters of a step: a sequence has one token in decode and many in prefill."""
        return min(self.shape.slots, self.tokens if self.tokens <= DECODE else 8)

    @property
    def key(self) -> Key:
        """Key of the entry."""
        s = self.shape
        return Key(self.op, s.dtype, rows_bucket(self.rows), s.k, s.n, s.rank)

    @property
    def problem(self) -> GPUProblem:
        """Sizes from which the kernels choose their tiles."""
        from jlora.pallas.triton.lora import sizes_of  # slow import, needed on GPUs only

        s = self.shape
        groups = s.slots * s.experts
        x = jax.ShapeDtypeStruct((self.rows, s.k), jnp.dtype(s.dtype))
        a = jax.ShapeDtypeStruct((groups, len(s.slices), s.rank, s.k), jnp.dtype(s.slot_dtype))
        b = jax.ShapeDtypeStruct((groups, s.rank, s.n), jnp.dtype(s.slot_dtype))
        tile_m = plan_tile_m(self.rows, min(self.rows, self.max_active * s.experts), "triton")
        return sizes_of(self.rows, x, a, b, len(s.slices), tile_m, s.experts > 1)


# Return the microseconds of a layer with each of the tiles, inf for tiles that do not run. None stands for base product
# and LoRA apart. The last argument is True for finalists: times are then taken in alternation, and tiles with wrong
# values get inf.
Measure = Callable[[Task, Sequence[Tiles | None], bool], Sequence[float]]


@dataclass(frozen=True)
class TuneProgress:
    """Progress of `LoRAManager.tune`, after each entry of the table.

    Attributes:
      done, total: Number of entries that are complete, and in total.
      op: "add_lora", "add_lora_experts" for experts, or "linear_lora" for a base product with its LoRA.
      rows, k, n, rank: Number of rows, in-features, out-features and largest rank.
      us: Microseconds of a layer with the chosen tiles, the geometric mean over mixes of adapters. inf if no candidate
        ran.
      before_us: The same with the tiles that were used before; for "linear_lora" with product and LoRA apart.
      together: True if one kernel computes base product and LoRA.
    """

    done: int
    total: int
    op: str
    rows: int
    k: int
    n: int
    rank: int
    us: float
    before_us: float
    together: bool


def tasks_of(shapes: Sequence[Shape], tokens: Sequence[int], per_token: int) -> list[Task]:
    """Return the tasks of all shapes and numbers of tokens, each key once, in the order of `tokens`."""
    from jlora.pallas.triton.product import MAX_ROWS  # slow import, needed on GPUs only

    found: dict[Key, Task] = {}
    for count in tokens:
        for shape in shapes:
            op = "add_lora" if shape.experts == 1 else "add_lora_experts"
            tasks = [Task(op, shape, count, 1 if shape.experts == 1 else per_token)]
            if shape.fusible and count <= MAX_ROWS:
                tasks.append(Task("linear_lora", shape, count))
            for task in tasks:
                found.setdefault(task.key, task)
    return list(found.values())


def search(
    tasks: Sequence[Task],
    measure: Measure,
    *,
    seconds: float,
    again: bool = False,
    progress: Callable[[TuneProgress], Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Path:
    """Search the tiles of all tasks, and add each to the device's own table as soon as it is found.

    Args:
      tasks: The entries to search.
      measure: Timing of tiles, `trial.OnDevice()` except in tests.
      seconds: Time after which no other entry is begun.
      again: True to search entries that the table already has.
      progress: Called after each entry.
      clock: Seconds that have passed, of any origin.

    Returns:
      The file of the table. Entries that were not begun in time are missing in it.

    Raises:
      LoRAError: A table is malformed, or cannot be written.
    """
    gpu, started, longest = current_gpu(), clock(), 0.0
    path = own_table(gpu.kind)
    done = {} if again else read_own_table(path)
    todo = [task for task in tasks if task.key not in done]
    found: Table = {}
    for task in todo:
        begun = clock()
        if begun - started + longest > seconds:
            break
        tiles, us, before = best(task, measure, gpu, found)
        if us < math.inf:
            found[task.key] = tiles
            add_entries(path, {task.key: tiles})
        else:
            logging.getLogger("jlora").warning(
                "tune: no tiles run for %s; the log of level DEBUG has reasons", task.key
            )
        longest = max(longest, clock() - begun)
        if progress is not None:
            k = task.key
            complete = len(tasks) - len(todo) + todo.index(task) + 1
            together = isinstance(tiles, ProductTiles)
            progress(TuneProgress(complete, len(tasks), k.op, task.rows, k.k, k.n, k.rank, us, before, together))
    return path


def best(task: Task, measure: Measure, gpu: GPU, found: Table) -> tuple[Tiles | None, float, float]:
    """Return the fastest tiles, their microseconds, and those of the tiles that are used without this search.

    Args:
      task: The entry to search.
      measure: As for `search`.
      gpu: The GPU.
      found: Entries found before, for other tasks.
    """
    p, fused = task.problem, task.op == "linear_lora"
    present = product_tiles(p, gpu) if fused else gpu_tiles(p, gpu)
    apart: list[Tiles | None] = [None] if fused else []
    times: dict[Tiles, float] = {}

    def run(candidates: Sequence[Tiles]) -> list[Tiles]:
        """Time candidates that are new and fit, and return all, the fastest first."""
        fit = (_fit(tiles, p, gpu) for tiles in candidates)
        new = [tiles for tiles in dict.fromkeys(fit) if tiles is not None and tiles not in times]
        also = [] if times else apart  # compiled along with the others
        us = measure(task, [*new, *also], False)
        times.update(zip(new, us[: len(new)], strict=True))
        return sorted(times, key=times.__getitem__)

    searched = any(_alike(key, task) for key in found)
    tables = [found, *tuned_tables(gpu.kind), *tuned_tables(H200.kind)]
    similar = [tiles for tiles in similar_tiles(task, tables) if _fit(tiles, p, gpu) is not None]
    order = run([*([present] if present is not None else []), *similar[: _TRIED if searched else _SIMILAR]])
    if order and not searched:
        top = order[0]
        order = run([*_crossed(order[:2]), *neighbours(top)])
        gains = [tiles for tiles in order if times[tiles] < times[top]]
        order = run(_combined(top, gains))
    finals: list[Tiles | None] = [*apart]
    for tiles in ([] if present is None else [present], order[:3]):
        finals += [each for each in tiles if each not in finals]
    us = dict(zip(finals, measure(task, finals, True), strict=True))
    chosen = min((tiles for tiles in finals if tiles is not None), key=us.__getitem__, default=None)
    if fused:
        if chosen is None or us[None] < us[chosen] * GAIN:
            return None, us[None], us[None]
        return chosen, us[chosen], us[None]
    assert chosen is not None
    assert present is not None
    return chosen, us[chosen], us[present]


def similar_tiles(task: Task, tables: Sequence[Table]) -> list[Tiles]:
    """Return the tiles of the tables' entries for the same operation, those of the most similar shape first."""
    entries = [(key, tiles) for table in tables for key, tiles in table.items() if key.op == task.op]
    entries.sort(key=lambda entry: (not _alike(entry[0], task), _distance(entry[0], task)))
    return list(dict.fromkeys(_moved(tiles, key, task) for key, tiles in entries if tiles is not None))


def neighbours(tiles: Tiles) -> list[Tiles]:
    """Return the tiles with one size halved or doubled."""
    lora = [
        ("block_k",), ("split_k",), ("block_r",), ("shrink_warps",), ("shrink_programs",),
        ("block_n",), ("warps",), ("stages",), ("programs", "chunks"),
    ]  # fmt: skip
    if isinstance(tiles, GPUTiles):
        return list(_changed(tiles, lora))
    product = [
        ("product_block_n",),
        ("product_block_k",),
        ("product_split_k",),
        ("product_warps",),
        ("product_stages",),
    ]
    few = [names for names in lora if names[0] not in ("shrink_warps", "stages")]  # the first are those of the product
    own: list[Tiles] = list(_changed(tiles, product))
    return [*own, *(replace(tiles, lora=each) for each in _changed(tiles.lora, few))]


def _changed(tiles: _T, names: Sequence[tuple[str, ...]]) -> Iterator[_T]:
    for together in names:
        values = {name: getattr(tiles, name) for name in together}
        least, most = next(limits for part, limits in _LIMITS.items() if part in together[0])
        for changed in ({n: v * 2 for n, v in values.items()}, {n: v // 2 for n, v in values.items()}):
            if all(least <= value <= most for value in changed.values()):
                yield replace(tiles, **changed)


def _crossed(order: Sequence[Tiles]) -> list[Tiles]:
    """Return the second launch of each with the first launch of every other."""
    found: list[Tiles] = []
    for one in order:
        for other in (other for other in order if other is not one):
            values = _values(other)
            found.append(_with(one, {name: values[name] for name in _EXPAND}))
    return found


def _combined(top: Tiles, gains: Sequence[Tiles]) -> list[Tiles]:
    """Return the tiles of `top` with the changes of the best two, three, ... of `gains` that change other sizes."""
    own, changes = _values(top), dict[str, int]()
    found: list[Tiles] = []
    for tiles in gains:
        change = {name: value for name, value in _values(tiles).items() if value != own[name]}
        if not change.keys() & changes.keys():
            changes |= change
            found.append(_with(top, changes))
    return found[1:5]


def _values(tiles: Tiles) -> dict[str, int]:
    values = dict(vars(tiles))
    lora = values.pop("lora", None)
    return values if lora is None else {**values, **vars(lora)}


def _with(tiles: Tiles, changes: Mapping[str, int]) -> Tiles:
    if isinstance(tiles, GPUTiles):
        return replace(tiles, **changes)
    of_lora = {name: value for name, value in changes.items() if not name.startswith("product")}
    own = {name: value for name, value in changes.items() if name.startswith("product")}
    return replace(tiles, **own, lora=replace(tiles.lora, **of_lora))


def _alike(key: Key, task: Task) -> bool:
    """Return True if an entry is for the same shape and for decode, or prefill, as the task's."""
    own = task.key
    return key._replace(rows=own.rows) == own and (key.rows <= FEW) == (own.rows <= FEW)


def _distance(key: Key, task: Task) -> float:
    own = task.key
    parts = [(key.rows, own.rows, 1.0), (key.rank, own.rank, 1.0), (key.k, own.k, 0.5), (key.n, own.n, 0.5)]
    between = sum(weight * abs(math.log2(one / other)) for one, other, weight in parts)
    return between + 8 * ((key.rows <= FEW) != (own.rows <= FEW)) + (key.dtype != own.dtype)


def _moved(tiles: Tiles, key: Key, task: Task) -> Tiles:
    """Return tiles of another shape with as many steps of K in a part, and as many programs of the product."""
    own = task.key
    if isinstance(tiles, GPUTiles):
        steps = -(-key.k // (tiles.block_k * tiles.split_k))
        parts = 1 if tiles.split_k == 1 else -(-own.k // (tiles.block_k * steps))
        return replace(tiles, split_k=max(1, min(parts, _MOST_PARTS)))
    programs = key.n / tiles.product_block_n * tiles.product_split_k
    parts = programs / max(1, own.n / tiles.product_block_n)
    parts = min(max(1, 2 ** round(math.log2(parts))), max(1, own.k // (4 * tiles.product_block_k)))
    lora = _moved(tiles.lora, key, task)
    assert isinstance(lora, GPUTiles)
    return replace(tiles, product_split_k=parts, lora=lora)


def _fit(tiles: Tiles, p: GPUProblem, gpu: GPU) -> Tiles | None:
    """Return the tiles with as many stages as fit into shared memory, or None if they do not fit."""
    if isinstance(tiles, GPUTiles):
        return fitted(tiles, p, gpu.shared_memory)
    while product_shared_bytes(tiles, p) > gpu.shared_memory and tiles.product_stages > 2:
        tiles = replace(tiles, product_stages=tiles.product_stages - 1)
    return tiles if product_shared_bytes(tiles, p) <= gpu.shared_memory else None
