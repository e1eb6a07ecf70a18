"""Update from device arrays, compiled for their names and shapes, without a copy to the host."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jlora._compat import explicit_transfers, without_graphs
from jlora.errors import AdapterFormatError
from jlora.layers.site import SlotSpec
from jlora.manager.array_placement import auto_axes, with_auto_axes
from jlora.manager.blocks import Block, Chunk, Row, rank_starts, rank_step
from jlora.manager.packed_adapter import Placement
from jlora.manager.slot_arrays import SlotArrays

_sharding = operator.attrgetter("sharding")


@dataclass(frozen=True)
class NewFactors:
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
      groups: (spec, first ranks of the blocks, rows) for each group of rows that share blocks. Each row is (True if its
        old factors are not needed, its modules).
      order: Indices of the new arrays in the order in which the factors of these modules use them.
    """

    groups: tuple[tuple[SlotSpec, tuple[int, ...], tuple[tuple[bool, tuple[_Module, ...]], ...]], ...]
    order: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _shape(groups: Any, order: tuple[int, ...]) -> _Shape:
    return _Shape(groups, order)


@dataclass(frozen=True, eq=False)
class UpdatePlan:
    """Plan of an update from device arrays of given names and shapes.

    Attributes:
      names: Names of the arrays.
      shapes: Shapes and dtypes of the arrays.
      rows: The rows that are written.
      blocks: (chunk, row of it or None for all, first ranks) of the blocks of each group of rows.
      old: Rows whose old factors are needed, in the order in which `_assemble` uses them.
      shape: The static argument of `_assemble`.
    """

    names: tuple[str, ...]
    shapes: list[Any]
    rows: set[Row]
    blocks: list[tuple[Chunk, int | None, tuple[int, ...]]]
    old: list[Row]
    shape: _Shape


def plan_update(
    names: tuple[str, ...],
    shapes: list[Any],
    news: Sequence[NewFactors],
    old: Mapping[Row, Any],
    ranks: Mapping[Row, int],
    pool: SlotArrays,
) -> UpdatePlan:
    """Return the plan of an update.

    Args:
      names: Names of the arrays.
      shapes: Shapes and dtypes of the arrays.
      news: The new factors of each module.
      old: The current factors of rows that keep some of their values.
      ranks: Ranks of the rows that are written.
      pool: The slot arrays, whose chunks are used.
    """
    by_row: dict[Row, list[NewFactors]] = {}
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
    groups: list[Any] = []
    for chunk, i, rows in chosen:
        starts = tuple(rank_starts(chunk.spec, max(ranks[row] for row in rows)))
        parts: list[tuple[bool, tuple[_Module, ...]]] = []
        for row in rows:
            if row in old:
                kept.append(row)
            keys.extend(key for new in by_row[row] for key in new.keys)
            parts.append((row not in old, tuple(_part(new) for new in by_row[row])))
        blocks.append((chunk, i, starts))
        groups.append((chunk.spec, starts, tuple(parts)))
    place = {name: i for i, name in enumerate(names)}
    shape = _shape(tuple(groups), tuple(place[key] for key in keys))
    return UpdatePlan(names, shapes, set(by_row), blocks, kept, shape)


def blocks_on_device(
    where: str, plan: UpdatePlan, arrays: Mapping[str, Any], old: Mapping[Row, Any], allow_nonfinite: bool
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
    if not allow_nonfinite and not jax.device_get(finite):
        raise AdapterFormatError(
            f"{where}: the new weights hold NaN or infinity, or values that the slots' dtype cannot hold; expected "
            "finite numbers"
        )
    return tuple(
        Block(chunk, i, start, a, b)
        for (chunk, i, starts), pairs in zip(plan.blocks, made, strict=True)
        for start, (a, b) in zip(starts, pairs, strict=True)
    )


def _off_explicit(arrays: list[Any]) -> list[Any]:
    """Return the arrays with the axes of their meshes as Auto axes. No data moves."""
    try:
        kinds = set(map(type, map(_sharding, arrays)))
    except AttributeError:  # some arrays are on the host
        kinds = {NamedSharding}
    return list(map(with_auto_axes, arrays)) if any(issubclass(kind, NamedSharding) for kind in kinds) else arrays


def _part(new: NewFactors) -> _Module:
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
    """Return (blocks of each group of rows, True if all of their values are finite)."""
    feed, kept = (given[i] for i in shape.order), iter(old)
    made: list[Any] = []
    finite = jnp.ones((), bool)
    for spec, starts, rows in shape.groups:
        size = starts[-1] + rank_step(spec)
        all_a: list[jax.Array] = []
        all_b: list[jax.Array] = []
        for whole, parts in rows:
            if whole:
                a = jnp.zeros((spec.slices, size, spec.in_features), spec.dtype)
                b = jnp.zeros((size, spec.out_features), spec.dtype)
            else:
                a, b = (jnp.asarray(factor) for factor in next(kept))
            for part in parts:
                a, b = _fill(spec, part, a, b, feed)
            all_a.append(a)
            all_b.append(b)
        stacked_a, stacked_b = jnp.stack(all_a), jnp.stack(all_b)
        finite &= jnp.isfinite(stacked_a).all() & jnp.isfinite(stacked_b).all()
        step = rank_step(spec)
        stacked_a, stacked_b = _stored(stacked_a, spec.in_blocks), _stored(stacked_b, spec.out_blocks)
        made.append([(stacked_a[:, :, s : s + step], stacked_b[:, s : s + step]) for s in starts])
    return made, finite


def _stored(factors: jax.Array, blocks: Sequence[tuple[int, int]]) -> jax.Array:
    """Return factors [..., features] in the stored order of features (see `SlotSpec.in_blocks`)."""
    if not blocks:
        return factors
    parts = [
        jnp.zeros((*factors.shape[:-1], count), factors.dtype) if first < 0 else factors[..., first : first + count]
        for first, count in blocks
    ]
    return jnp.concatenate(parts, axis=-1)


def _fill(
    spec: SlotSpec, part: _Module, a: jax.Array, b: jax.Array, feed: Iterator[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return A [n, R, K] and B [R, N] of a row with the new factors of one module written into them."""
    start = sum(spec.out_sizes[: part.first])
    stop = start + sum(spec.out_sizes[part.first : part.first + part.count])
    if part.has_a:
        new = next(feed).astype(spec.dtype)
        rows = jnp.zeros((a.shape[1], spec.in_features), spec.dtype).at[: part.rank].set(new)
        a = a.at[part.first : part.first + part.count].set(rows[None])
    if part.has_b:
        new = next(feed).T.astype(spec.dtype)
        columns = jnp.zeros((b.shape[0], stop - start), spec.dtype).at[: part.rank].set(new)
        b = b.at[:, start:stop].set(columns)
    return a, b
