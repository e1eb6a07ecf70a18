"""Packed adapters with new weights, from host arrays, or from device arrays without a copy to the host.

An update from device arrays is compiled for their names and shapes.
"""

import collections
import difflib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jlora._compat import explicit_transfers, without_graphs
from jlora.adapters.checkpoint import sorted_keys
from jlora.adapters.int8 import steps_for
from jlora.adapters.peft_config import scaling_of
from jlora.adapters.tensor_data import all_finite
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAUsageError
from jlora.layers.site import SlotSpec
from jlora.slots.arrays import SlotArrays
from jlora.slots.blocks import Block, Chunk, Row, pack, rank_starts, rank_step, unpack
from jlora.slots.casting import check_scaling, in_slot_dtype
from jlora.slots.packed import PackedAdapter, Placement, largest_rank
from jlora.slots.packing import rank_table, with_scales
from jlora.slots.placement import auto_axes, with_auto_axes

_SHOWN = 4  # modules in a message
_shape_and_dtype = operator.attrgetter("shape", "dtype")
_sharding = operator.attrgetter("sharding")


@dataclass(frozen=True)
class _NewFactors:
    """New factors of one module, A [r, K] and B [N, r] as in PEFT. A factor that is kept is None."""

    placement: Placement
    a: Any
    b: Any
    keys: tuple[str, ...]  # tensor names of the factors that are given, A first


@dataclass(frozen=True)
class _Module:
    """Static description of one module in `_assemble`."""

    first: int
    count: int
    rank: int
    has_a: bool
    has_b: bool


@dataclass(frozen=True, eq=False)
class _Shape:
    """Static argument of `_assemble`. Compared by identity for speed, since `_shape` makes one object of each.

    Attributes:
      chunks: (spec, first ranks of the blocks, rows) for each chunk. Each row is (True if its old factors are not
        needed, its modules).
      order: Indices of the new arrays in the order in which the factors of these modules use them.
    """

    chunks: tuple[tuple[SlotSpec, tuple[int, ...], tuple[tuple[bool, tuple[_Module, ...]], ...]], ...]
    order: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _shape(chunks: Any, order: tuple[int, ...]) -> _Shape:
    return _Shape(chunks, order)


@dataclass(frozen=True, eq=False)
class _UpdatePlan:
    """Plan of an update from device arrays of given names and shapes.

    Attributes:
      names: Names of the arrays.
      shapes: Shapes and dtypes of the arrays.
      rows: The rows that are written.
      blocks: (chunk, row of it or None for all, first ranks) of the blocks of each chunk.
      old: Rows whose old factors are needed, in the order in which `_assemble` uses them.
      shape: The static argument of `_assemble`.
    """

    names: tuple[str, ...]
    shapes: list[Any]
    rows: set[Row]
    blocks: list[tuple[Chunk, int | None, tuple[int, ...]]]
    old: list[Row]
    shape: _Shape


def updated(
    packed: PackedAdapter, arrays: Mapping[str, Any], pool: SlotArrays[Any], *, allow_nonfinite: bool
) -> tuple[PackedAdapter, tuple[Block, ...]]:
    """Return (packed adapter with new weights, its blocks that changed). `packed` is not changed.

    Args:
      packed: The current packed adapter.
      arrays: PEFT tensor name -> A [r, K] or B [N, r]. A factor without a new array keeps its weights. The
        rank of a module can change if both of its factors are given. Its scaling is then computed from its alpha.
      pool: The slot arrays, whose chunks and sites are used.
      allow_nonfinite: True to accept NaN and infinity.

    Raises:
      LoRAUsageError: `arrays` is empty or not a mapping of names to arrays.
      AdapterMismatchError: The adapter lacks a named module, a shape or rank does not fit, the scaling of a new rank is
        not a finite float32, or slot dtype cannot hold a value of a host array.
      AdapterFormatError: An array is not a matrix of floats, or holds NaN or infinity. Device arrays with a value that
        slot dtype cannot hold raise it too.
    """
    where = f"adapter {packed.name!r}"
    if not isinstance(arrays, Mapping) or not arrays or not all(isinstance(name, str) for name in arrays):
        raise LoRAUsageError(f"{where}: expected a mapping of names to arrays, and at least one. {_taken(packed)}")
    names = tuple(arrays)
    on_device = any(isinstance(array, jax.Array) for array in arrays.values())
    try:
        shapes = list(map(_shape_and_dtype, arrays.values()))
    except AttributeError:  # `_check` raises the error with details
        shapes = []
    plan: _UpdatePlan | None = packed.update_plan
    if on_device and plan is not None and plan.names == names and plan.shapes == shapes:
        written = with_scales(_blocks_on_device(where, plan, arrays, {}, allow_nonfinite), packed.placements)
        return packed.with_blocks((*_untouched(packed.blocks, plan.rows), *written)), written
    had = {placement.module: placement for placement in packed.placements if placement.site.kind != "head"}
    try:
        keys_of = _sorted_keys(names, where)
    except AdapterMismatchError as error:
        raise AdapterMismatchError(f"{error}. {_taken(packed)}") from error
    news = [_check(where, had.get(module), packed, module, keys, arrays) for module, keys in keys_of.items()]
    changed = {new.placement.module: new for new in news}
    placements = tuple(changed[p.module].placement if p.module in changed else p for p in packed.placements)
    rows = {(new.placement.site, new.placement.row) for new in news}
    ranks: dict[Row, int] = {}
    for p in placements:
        ranks[p.site, p.row] = max(ranks.get((p.site, p.row), 0), p.rank)
    covered = collections.Counter[Row]()
    for new in news:
        p, spec = new.placement, new.placement.site.spec
        if (new.a is not None or not spec.in_features) and (new.b is not None or not spec.out_features):
            covered[p.site, p.row] += p.count
    old = unpack(packed.blocks, {row for row in rows if covered[row] < row[0].spec.slices})
    plan = None
    if on_device:
        plan = _plan_update(names, shapes, news, old, ranks, pool)
        written = _blocks_on_device(where, plan, arrays, old, allow_nonfinite)
        if old:  # the plan is not reusable, because the next update has other old factors
            plan = None
    else:
        written = _assemble_on_host(where, news, old, ranks, pool, allow_nonfinite)
    written = with_scales(written, placements)
    new = replace(
        packed,
        placements=placements,
        ranks=rank_table(pool.sites, placements),
        rank=largest_rank(placements),
        blocks=(*_untouched(packed.blocks, rows), *written),
        update_plan=plan,
    )
    return new, written


def to_host(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks with all arrays in host memory."""
    return tuple(block.with_arrays(iter(jax.device_get(block.arrays))) for block in blocks)


@functools.lru_cache(maxsize=8)  # a training loop updates the same names every time
def _sorted_keys(names: tuple[str, ...], where: str) -> Mapping[str, Mapping[str, str]]:
    return sorted_keys(names, where)


def _taken(packed: PackedAdapter, module: str = "") -> str:
    """Return a sentence with the tensor names that an update takes, for the modules whose names are most like one."""
    modules = [placement.module for placement in packed.placements if placement.site.kind != "head"]
    near = difflib.get_close_matches(module, modules, n=_SHOWN) or modules[:_SHOWN]
    more = f" and {len(modules) - len(near)} more" if len(modules) > len(near) else ""
    return (
        "update_adapter takes the tensor names of PEFT's files, MODULE.lora_A.weight and MODULE.lora_B.weight "
        "(MODULE.lora_embedding_A and _B for an embedding), with or without the prefix base_model.model., where MODULE "
        f"is one of {', '.join(near)}{more}; load_inplace=True replaces all weights"
    )


def _check(
    where: str,
    placement: Placement | None,
    packed: PackedAdapter,
    module: str,
    keys: Mapping[str, str],
    arrays: Mapping[str, Any],
) -> _NewFactors:
    """Check the new factors of one module against its placement.

    The result has the new rank and scaling. See `updated` for the errors.
    """
    at = f"{where}: {module}"
    if placement is None:
        raise AdapterMismatchError(f"{at}: the adapter has no such module. {_taken(packed, module)}")
    site = placement.site
    if site.spec.dtype == "int8" and not site.spec.whole:
        raise AdapterMismatchError(
            f"{at}: the experts share a factor, and in int8 their other factors have common scales, so that all change "
            "together; load_inplace=True replaces all weights"
        )
    names = ("lora_embedding_A", "lora_embedding_B") if site.kind == "embedding" else ("lora_A", "lora_B")
    halves = (site.spec.in_features, site.spec.out_features)
    allowed = [name for name, size in zip(names, halves, strict=True) if size]
    if unknown := keys.keys() - set(allowed):
        hint = "" if site.spec.whole else " (what all experts share has the name without the number of one)"
        raise AdapterMismatchError(f"{at}: expected {' and '.join(allowed)}, found {', '.join(sorted(unknown))}{hint}")
    a, b = (arrays[keys[name]] if name in keys else None for name in names)
    for label, array in (("A", a), ("B", b)):
        shaped = hasattr(array, "shape") and hasattr(array, "dtype")
        if array is not None and not (shaped and array.ndim == 2 and jnp.issubdtype(array.dtype, jnp.floating)):
            found = f"{array.dtype}{list(array.shape)}" if shaped else type(array).__name__
            raise AdapterFormatError(f"{at}: {label} must be a matrix of floats, found {found}")
    rank = placement.rank if a is None or b is None else a.shape[0]
    columns = site.spec.columns(placement.first, placement.count)
    outputs = columns.stop - columns.start
    for label, array, expected in (("A", a, (rank, site.spec.in_features)), ("B", b, (outputs, rank))):
        if array is not None and tuple(array.shape) != expected:
            raise AdapterMismatchError(f"{at}: {label} has shape {tuple(array.shape)}; expected {expected}")
    if not 1 <= rank <= site.spec.max_rank:
        raise AdapterMismatchError(f"{at}: rank {rank} is not from 1 to max_lora_rank={site.spec.max_rank}")
    if rank != placement.rank:
        scaling = scaling_of(placement.alpha, rank, packed.about.use_rslora)
        check_scaling(at, scaling)
        placement = replace(placement, rank=rank, scaling=scaling)
    return _NewFactors(placement, a, b, tuple(keys[name] for name in names if name in keys))


def _untouched(blocks: Sequence[Block], rows: set[Row]) -> list[Block]:
    """Return the blocks of all other rows. Blocks that also hold some of `rows` are divided into blocks of one row."""
    kept: list[Block] = []
    for block in blocks:
        own = block.rows
        if not rows.intersection(own):
            kept.append(block)
        elif block.row is None:
            with explicit_transfers():  # the blocks may be page-locked
                for i, row in enumerate(own):
                    if row not in rows:
                        own = slice(i, i + 1)
                        steps = None if block.steps is None else block.steps[:, own]
                        kept.append(
                            replace(block, row=i, steps=steps).with_arrays(array[own] for array in block.arrays)
                        )
    return kept


def _assemble_on_host(
    where: str,
    news: Sequence[_NewFactors],
    old: Mapping[Row, Any],
    ranks: Mapping[Row, int],
    pool: SlotArrays[Any],
    allow_nonfinite: bool,
) -> tuple[Block, ...]:
    """Return the blocks of the rows that an update writes, assembled from new and old factors."""
    factors: dict[Row, tuple[np.ndarray, np.ndarray]] = {}
    for new in news:
        p, spec = new.placement, new.placement.site.spec
        row = (p.site, p.row)
        if row not in factors:
            zeros = (
                np.zeros((spec.slices, 0, spec.in_features), spec.float_dtype),
                np.zeros((0, spec.out_features), spec.float_dtype),
            )
            factors[row] = _fitted(old.get(row, zeros), ranks[row])
        a, b = factors[row]
        for label, array in (("A", new.a), ("B", new.b)):
            if array is not None and not allow_nonfinite and not all_finite(np.asarray(array)):
                raise AdapterFormatError(f"{where}: {p.module}: {label} holds NaN or infinity; expected finite numbers")
        at, dtype = f"{where}: {p.module}", np.dtype(spec.dtype)
        if new.a is not None:
            covered = a[p.first : p.first + p.count]
            covered[:, : p.rank], covered[:, p.rank :] = in_slot_dtype(at, "A", np.asarray(new.a), dtype), 0
        if new.b is not None:
            columns = b[:, spec.columns(p.first, p.count)]
            columns[: p.rank], columns[p.rank :] = in_slot_dtype(at, "B", np.asarray(new.b).T, dtype), 0
    return pack(pool.chunks, factors)


def _plan_update(
    names: tuple[str, ...],
    shapes: list[Any],
    news: Sequence[_NewFactors],
    old: Mapping[Row, Any],
    ranks: Mapping[Row, int],
    pool: SlotArrays[Any],
) -> _UpdatePlan:
    """Return the plan of an update.

    Args:
      names: Names of the arrays.
      shapes: Shapes and dtypes of the arrays.
      news: The new factors of each module.
      old: The current factors of rows that keep some of their values.
      ranks: Ranks of the rows that are written.
      pool: The slot arrays, whose chunks are used.
    """
    by_row: dict[Row, list[_NewFactors]] = {}
    for new in news:
        by_row.setdefault((new.placement.site, new.placement.row), []).append(new)
    chosen: list[tuple[Chunk, int | None, list[Row]]] = []
    for chunk in pool.chunks:
        touched = [i for i, row in enumerate(chunk.rows) if row in by_row]
        if len(touched) == chunk.count:
            chosen.append((chunk, None, list(chunk.rows)))
        else:
            chosen.extend((chunk, i, [chunk.rows[i]]) for i in touched)
    blocks: list[tuple[Chunk, int | None, tuple[int, ...]]] = []
    kept: list[Row] = []
    keys: list[str] = []
    chunks: list[Any] = []
    for chunk, i, rows in chosen:
        starts = tuple(rank_starts(chunk.spec, max(ranks[row] for row in rows)))
        sources: list[tuple[bool, tuple[_Module, ...]]] = []
        for row in rows:
            if row in old:
                kept.append(row)
            keys.extend(key for new in by_row[row] for key in new.keys)
            sources.append((row not in old, tuple(_module(new) for new in by_row[row])))
        blocks.append((chunk, i, starts))
        chunks.append((chunk.spec, starts, tuple(sources)))
    position = {name: i for i, name in enumerate(names)}
    shape = _shape(tuple(chunks), tuple(position[key] for key in keys))
    return _UpdatePlan(names, shapes, set(by_row), blocks, kept, shape)


def _blocks_on_device(
    where: str, plan: _UpdatePlan, arrays: Mapping[str, Any], old: Mapping[Row, Any], allow_nonfinite: bool
) -> tuple[Block, ...]:
    """Return the blocks that an update writes, on the device. Messages start with `where`.

    Raises:
      AdapterFormatError: The blocks hold NaN or infinity, and `allow_nonfinite` is False.
    """
    kept: list[Any] = []
    if plan.old:
        tops = {row: starts[-1] + rank_step(chunk.spec) for chunk, _, starts in plan.blocks for row in chunk.rows}
        kept = [_fitted(old[row], tops[row]) for row in plan.old]
    given = _off_explicit(list(arrays.values()))
    with auto_axes(), explicit_transfers():
        assemble = _assembler(jax.default_backend())
        made, finite = assemble(plan.shape, given, kept)
        largest = jax.device_get([of_chunk for _, of_chunk in made])
    if not allow_nonfinite and not jax.device_get(finite):
        raise AdapterFormatError(
            f"{where}: the new weights hold NaN or infinity, or values that the slots' dtype cannot hold; expected "
            "finite numbers"
        )
    return tuple(
        Block(chunk, i, start, a, b, None if own is None else steps_for(own))
        for (chunk, i, starts), (factors, _), of_chunk in zip(plan.blocks, made, largest, strict=True)
        for start, (a, b), own in zip(starts, factors, of_chunk, strict=True)
    )


def _off_explicit(arrays: list[Any]) -> list[Any]:
    """Return the arrays with the axes of their meshes as Auto axes. No data moves."""
    try:
        kinds = set(map(type, map(_sharding, arrays)))
    except AttributeError:  # some arrays are on the host
        kinds = {NamedSharding}
    return list(map(with_auto_axes, arrays)) if any(issubclass(kind, NamedSharding) for kind in kinds) else arrays


def _module(new: _NewFactors) -> _Module:
    p = new.placement
    return _Module(p.first, p.count, p.rank, new.a is not None, new.b is not None)


def _fitted(factors: tuple[np.ndarray, np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A [n, r, K] and B [r, N], cut or zero-padded to `rank`."""
    a, b = factors
    more = max(0, rank - b.shape[0])
    return np.pad(a[:, :rank], ((0, 0), (0, more), (0, 0))), np.pad(b[:rank], ((0, more), (0, 0)))


@functools.cache
def _assembler(platform: str) -> Callable[..., tuple[Any, jax.Array]]:
    """Return `_assemble` under `jax.jit`.

    CUDA graphs are disabled, because the arrays have new addresses at every call, which the graph would have to update.
    """
    return jax.jit(_assemble, static_argnums=0, compiler_options=without_graphs(platform))


def _assemble(shape: _Shape, given: Sequence[jax.Array], old: Sequence[Any]) -> tuple[Any, jax.Array]:
    """Return ((A and B of the blocks, for int8 largest magnitudes) of each chunk, True if all values are finite)."""
    feed, kept = (given[i] for i in shape.order), iter(old)
    made: list[Any] = []
    finite = jnp.ones((), bool)
    for spec, starts, rows in shape.chunks:
        size = starts[-1] + rank_step(spec)
        all_a: list[jax.Array] = []
        all_b: list[jax.Array] = []
        for whole, modules in rows:
            if whole:
                a = jnp.zeros((spec.slices, size, spec.in_features), spec.float_dtype)
                b = jnp.zeros((size, spec.out_features), spec.float_dtype)
            else:
                a, b = (jnp.asarray(factor) for factor in next(kept))
            for module in modules:
                a, b = _fill(spec, module, a, b, feed)
            all_a.append(a)
            all_b.append(b)
        stacked_a, stacked_b = jnp.stack(all_a), jnp.stack(all_b)
        finite &= jnp.isfinite(stacked_a).all() & jnp.isfinite(stacked_b).all()
        step, largest = rank_step(spec), None
        if spec.dtype == "int8":
            stacked_a, stacked_b, largest = _in_int8(spec, stacked_a, stacked_b)
        stacked_a, stacked_b = stored(stacked_a, spec.in_blocks), stored(stacked_b, spec.out_blocks)
        factors = [(stacked_a[:, :, s : s + step], stacked_b[:, s : s + step]) for s in starts]
        made.append((factors, [None if largest is None else largest[..., s : s + step] for s in starts]))
    return made, finite


def _in_int8(spec: SlotSpec, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the codes of A [rows, n, R, K] and B [rows, R, N], and the largest magnitudes of rows [2, rows, n, R].

    It computes `jlora.adapters.int8` on the device.
    """

    def rounded(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest = jnp.abs(values).max(axis=-1, initial=0)
        inverse = 127 / jnp.where(largest > 0, largest, 1)
        return jnp.rint(values * inverse[..., None]).clip(-127, 127).astype(jnp.int8), largest

    a, of_a = rounded(a)
    of_slices = [rounded(b[..., spec.columns(i, 1)]) for i in range(spec.slices)]
    of_b = jnp.stack([own for _, own in of_slices], axis=1)
    return a, jnp.concatenate([codes for codes, _ in of_slices], axis=-1), jnp.stack([of_a, of_b])


def stored(factors: jax.Array, blocks: Sequence[tuple[int, int]]) -> jax.Array:
    """Return factors [..., features] in the stored order of features (see `SlotSpec.in_blocks`)."""
    if not blocks:
        return factors
    runs = [
        jnp.zeros((*factors.shape[:-1], count), factors.dtype) if first < 0 else factors[..., first : first + count]
        for first, count in blocks
    ]
    return jnp.concatenate(runs, axis=-1)


def _fill(
    spec: SlotSpec, module: _Module, a: jax.Array, b: jax.Array, feed: Iterator[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return A [n, R, K] and B [R, N] of a row with the new factors of one module written into them."""
    if module.has_a:
        new = next(feed).astype(spec.float_dtype)
        rows = jnp.zeros((a.shape[1], spec.in_features), spec.float_dtype).at[: module.rank].set(new)
        a = a.at[module.first : module.first + module.count].set(rows[None])
    if module.has_b:
        new = next(feed).T.astype(spec.float_dtype)
        columns = jnp.zeros((b.shape[0], new.shape[1]), spec.float_dtype).at[: module.rank].set(new)
        b = b.at[:, spec.columns(module.first, module.count)].set(columns)
    return a, b
