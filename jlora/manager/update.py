"""New weights for an adapter that is served: from host arrays, or from device arrays without a trip to the host."""

import collections
import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jlora._compat import without_graphs
from jlora.adapters.checkpoint import all_finite, sorted_keys
from jlora.adapters.peft_config import scaling_of
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAUsageError
from jlora.layers.site import SlotSpec
from jlora.manager.blocks import Block, Chunk, Row, pack, rank_starts, rank_step, unpack
from jlora.manager.casting import in_slot_dtype
from jlora.manager.content import Content, Placement
from jlora.manager.fit import rank_vector
from jlora.manager.pool import Pool

_shape_and_dtype = operator.attrgetter("shape", "dtype")


@dataclass(frozen=True)
class _New:
    """New factors of one module: A [r, K] and B [N, r] as PEFT has them, or None for one that stays."""

    placement: Placement
    a: Any
    b: Any
    keys: tuple[str, ...]  # the names of the halves that there are, A first


def updated(
    content: Content, arrays: Mapping[str, Any], pool: Pool, *, allow_nonfinite: bool
) -> tuple[Content, tuple[Block, ...]]:
    """`content` with new weights, as a content of its own, and those of its blocks that changed.

    Args:
      content: the adapter as it is.
      arrays: PEFT tensor name -> A [r, K] or B [N, r], unscaled. Names left out keep their weights. Where both halves
        of a module are given its rank may change; the scaling follows its alpha then.
      pool: for its chunks.
      allow_nonfinite: let NaN and infinity through.

    Raises:
      AdapterMismatchError: a name that the adapter does not have, a shape or rank that does not fit, a value that slot
        dtype cannot hold.
      AdapterFormatError: not matrices of floats; NaN or infinity.
    """
    where = f"adapter {content.name!r}"
    if not isinstance(arrays, Mapping) or not arrays or not all(isinstance(name, str) for name in arrays):
        raise LoRAUsageError(
            f"{where}: update_adapter takes a mapping of PEFT tensor names to arrays, and at least one"
        )
    names = tuple(arrays)
    on_device = any(isinstance(array, jax.Array) for array in arrays.values())
    try:
        shapes = list(map(_shape_and_dtype, arrays.values()))
    except AttributeError:  # which, and what it should be, is found out below
        shapes = []
    plan: _Plan | None = content.update_plan
    if on_device and plan is not None and plan.names == names and plan.shapes == shapes:
        written = _assemble_on_device(where, plan, arrays, {}, allow_nonfinite)
        same = copy.copy(content)  # of the same modules in the same slots
        same.blocks = (*_untouched(content.blocks, plan.rows), *written)
        same.request = same.key = same.ahead = None
        same.sample, same.digest = b"", ""
        same.on_host = same.copying = False
        return same, written
    had = {placement.module: placement for placement in content.placements}
    parts = _parts(names, where)
    news = [_check(where, had.get(module), content, module, keys, arrays) for module, keys in parts.items()]
    changed = {new.placement.module: new for new in news}
    placements = tuple(changed[p.module].placement if p.module in changed else p for p in content.placements)
    rows = {(new.placement.site, new.placement.row) for new in news}
    ranks: dict[Row, int] = {}
    for p in placements:
        ranks[p.site, p.row] = max(ranks.get((p.site, p.row), 0), p.rank)
    covered = collections.Counter[Row]()
    for new in news:
        p, spec = new.placement, new.placement.site.spec
        if (new.a is not None or not spec.in_features) and (new.b is not None or not spec.out_features):
            covered[p.site, p.row] += p.count
    old = unpack(content.blocks, {row for row in rows if covered[row] < row[0].spec.slices})
    plan = None
    if on_device:
        plan = _plan(names, shapes, news, old, ranks, pool)
        written = _assemble_on_device(where, plan, arrays, old, allow_nonfinite)
        if old:  # what the next update finds there is not what this one found
            plan = None
    else:
        written = _assemble_on_host(where, news, old, ranks, pool, allow_nonfinite)
    on_host = content.on_host  # asked before the blocks, which are there first
    kept: Sequence[Block] = _untouched(content.blocks, rows)
    if not (on_device or on_host):
        kept = to_host(kept)
    new = replace(
        content,
        placements=placements,
        blocks=(*kept, *written),
        ranks=rank_vector(pool.sites, placements),
        rank=max(p.rank for p in placements),
        request=None,
        key=None,
        sample=b"",
        digest="",
        on_host=not on_device,
        copying=False,
        ahead=None,
        update_plan=plan,
    )
    return new, written


def to_host(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks with every array in host memory."""
    return tuple(replace(block, a=np.asarray(block.a), b=np.asarray(block.b)) for block in blocks)


@functools.lru_cache(maxsize=8)  # a training loop comes with the same names every time
def _parts(names: tuple[str, ...], where: str) -> Mapping[str, Mapping[str, str]]:
    return sorted_keys(names, where)


def _check(
    where: str,
    placement: Placement | None,
    content: Content,
    module: str,
    parts: Mapping[str, str],
    arrays: Mapping[str, Any],
) -> _New:
    """One module's new halves, checked against the placement that it has."""
    at = f"{where}: {module}"
    if placement is None:
        raise AdapterMismatchError(f"{at}: the adapter has no such module; update_adapter changes those that it has")
    site = placement.site
    names = ("lora_embedding_A", "lora_embedding_B") if site.kind == "embedding" else ("lora_A", "lora_B")
    halves = (site.spec.in_features, site.spec.out_features)
    held = [name for name, size in zip(names, halves, strict=True) if size]
    if unknown := parts.keys() - set(held):
        hint = "" if site.spec.whole else " (what all experts share has the name without the number of one)"
        raise AdapterMismatchError(f"{at}: expected {' and '.join(held)}, found {', '.join(sorted(unknown))}{hint}")
    a, b = (arrays[parts[name]] if name in parts else None for name in names)
    for label, array in (("A", a), ("B", b)):
        shaped = hasattr(array, "shape") and hasattr(array, "dtype")
        if array is not None and not (shaped and array.ndim == 2 and jnp.issubdtype(array.dtype, jnp.floating)):
            found = f"{array.dtype}{list(array.shape)}" if shaped else type(array).__name__
            raise AdapterFormatError(f"{at}: {label} must be a matrix of floats, found {found}")
    rank = placement.rank if a is None or b is None else a.shape[0]
    outputs = sum(site.spec.out_sizes[placement.first : placement.first + placement.count])
    for label, array, expected in (("A", a, (rank, site.spec.in_features)), ("B", b, (outputs, rank))):
        if array is not None and tuple(array.shape) != expected:
            raise AdapterMismatchError(f"{at}: {label} has shape {tuple(array.shape)}; expected {expected}")
    if not 1 <= rank <= site.spec.max_rank:
        raise AdapterMismatchError(f"{at}: rank {rank} is not from 1 to max_lora_rank={site.spec.max_rank}")
    if rank != placement.rank:
        scaling = scaling_of(placement.alpha, rank, content.about is not None and content.about.use_rslora)
        placement = replace(placement, rank=rank, scaling=scaling)
    return _New(placement, a, b, tuple(parts[name] for name in names if name in parts))


def _untouched(blocks: Sequence[Block], rows: set[Row]) -> list[Block]:
    """The blocks of other rows; blocks that hold both kinds are cut into rows."""
    kept: list[Block] = []
    for block in blocks:
        own = block.chunk.rows if block.row is None else (block.chunk.rows[block.row],)
        if not rows.intersection(own):
            kept.append(block)
        elif block.row is None:
            for i, row in enumerate(own):
                if row not in rows:
                    kept.append(Block(block.chunk, i, block.start, block.a[i : i + 1], block.b[i : i + 1]))
    return kept


def _assemble_on_host(
    where: str,
    news: Sequence[_New],
    old: Mapping[Row, Any],
    ranks: Mapping[Row, int],
    pool: Pool,
    allow_nonfinite: bool,
) -> tuple[Block, ...]:
    factors: dict[Row, tuple[np.ndarray, np.ndarray]] = {}
    for new in news:
        p, spec = new.placement, new.placement.site.spec
        row = (p.site, p.row)
        if row not in factors:
            a = np.zeros((spec.slices, ranks[row], spec.in_features), spec.dtype)
            b = np.zeros((ranks[row], spec.out_features), spec.dtype)
            if row in old:
                shared = min(ranks[row], old[row][1].shape[0])
                a[:, :shared], b[:shared] = old[row][0][:, :shared], old[row][1][:shared]
            factors[row] = (a, b)
        start = sum(spec.out_sizes[: p.first])
        stop = start + sum(spec.out_sizes[p.first : p.first + p.count])
        into = factors[row]
        own_a, own_b = into[0][p.first, : p.rank].copy(), into[1][: p.rank, start:stop].copy()
        for label, array in (("A", new.a), ("B", new.b)):
            if array is not None and not allow_nonfinite and not all_finite(np.asarray(array)):
                raise AdapterFormatError(f"{where}: {p.module}: {label} holds NaN or infinity; expected finite numbers")
        # A half that stays keeps the power of two that it was stored with, and so must the other.
        at = f"{where}: {p.module}"
        if new.a is not None:
            own_a = in_slot_dtype(at, np.asarray(new.a), p.site, None, p.shift)
        if new.b is not None:
            own_b = in_slot_dtype(at, np.asarray(new.b).T, p.site, p.scaling, -p.shift)
        covered = slice(p.first, p.first + p.count)
        into[0][covered], into[1][:, start:stop] = 0, 0
        into[0][covered, : p.rank], into[1][: p.rank, start:stop] = own_a, own_b
    return pack(pool.chunks, factors)


# --- on the device ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Static description of one module in `_assemble`."""

    first: int
    count: int
    rank: int
    shift: int
    has_a: bool
    has_b: bool


@dataclass(frozen=True, eq=False)
class _Shape:
    """What `_assemble` computes, as one object that is quick to compare: `_shape` makes one of each.

    Attributes:
      groups: rows of a spec that come out together: the spec, the first ranks of their blocks, and of each row whether
        its old factors are not needed, and its modules.
      order: which of the new arrays comes next: the halves of these modules, one after the other.
    """

    groups: tuple[tuple[SlotSpec, tuple[int, ...], tuple[tuple[bool, tuple[_Part, ...]], ...]], ...]
    order: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _shape(groups: Any, order: tuple[int, ...]) -> _Shape:
    return _Shape(groups, order)


@dataclass(frozen=True, eq=False)
class _Plan:
    """An update from device arrays of certain names and shapes.

    Attributes:
      names, shapes: of the arrays that it is for.
      rows: what it writes.
      blocks: (chunk, row of it, first ranks) of the blocks that come out, a group of rows each.
      old: rows whose old factors are needed, in the order in which `_assemble` takes them.
      scales: of the modules.
      shape: the static part.
    """

    names: tuple[str, ...]
    shapes: list[Any]
    rows: set[Row]
    blocks: list[tuple[Chunk, int | None, tuple[int, ...]]]
    old: list[Row]
    scales: np.ndarray
    shape: _Shape


def _plan(
    names: tuple[str, ...],
    shapes: list[Any],
    news: Sequence[_New],
    old: Mapping[Row, Any],
    ranks: Mapping[Row, int],
    pool: Pool,
) -> _Plan:
    by_row: dict[Row, list[_New]] = {}
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
    scales: list[float] = []
    groups: list[Any] = []
    for chunk, i, rows in chosen:
        starts = tuple(rank_starts(chunk.spec, max(ranks[row] for row in rows)))
        parts: list[tuple[bool, tuple[_Part, ...]]] = []
        for row in rows:
            if row in old:
                kept.append(row)
            keys.extend(key for new in by_row[row] for key in new.keys)
            scales.extend(new.placement.scaling for new in by_row[row])
            parts.append((row not in old, tuple(_part(new) for new in by_row[row])))
        blocks.append((chunk, i, starts))
        groups.append((chunk.spec, starts, tuple(parts)))
    place = {name: i for i, name in enumerate(names)}
    shape = _shape(tuple(groups), tuple(place[key] for key in keys))
    return _Plan(names, shapes, set(by_row), blocks, kept, np.asarray(scales, np.float32), shape)


def _assemble_on_device(
    where: str, plan: _Plan, arrays: Mapping[str, Any], old: Mapping[Row, Any], allow_nonfinite: bool
) -> tuple[Block, ...]:
    kept: list[Any] = []
    if plan.old:
        tops = {row: starts[-1] + rank_step(chunk.spec) for chunk, _, starts in plan.blocks for row in chunk.rows}
        kept = [_fitted(old[row], tops[row]) for row in plan.old]
    given = _off_explicit(list(arrays.values()))
    with _auto_axes():
        assemble = _assembler(jax.default_backend())
        made, finite = assemble(plan.shape, given, kept, plan.scales)
    if not allow_nonfinite and not bool(finite):
        raise AdapterFormatError(
            f"{where}: the new weights hold NaN or infinity, or values that the slots' dtype cannot hold; expected "
            "finite numbers"
        )
    return tuple(
        Block(chunk, i, start, a, b)
        for (chunk, i, starts), pairs in zip(plan.blocks, made, strict=True)
        for start, (a, b) in zip(starts, pairs, strict=True)
    )


@contextlib.contextmanager
def _auto_axes() -> Generator[None, None, None]:
    """With the axes of the mesh that is set as Auto ones: the compiler finds where each value lies."""
    mesh = jax.sharding.get_mesh()
    with contextlib.nullcontext() if mesh.empty else jax.set_mesh(_auto(mesh)):
        yield


def _off_explicit(arrays: list[Any]) -> list[Any]:
    """The arrays, on Auto axes where they lie on a mesh: nothing moves."""
    if not any(isinstance(getattr(array, "sharding", None), NamedSharding) for array in arrays):
        return arrays
    return list(map(_placed, arrays))


def _placed(array: Any) -> Any:
    if not isinstance(array, jax.Array) or not isinstance(array.sharding, NamedSharding):
        return array
    mesh = array.sharding.mesh
    assert isinstance(mesh, Mesh)
    return jax.device_put(array, NamedSharding(_auto(mesh), array.sharding.spec))


def _auto(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _part(new: _New) -> _Part:
    p = new.placement
    return _Part(p.first, p.count, p.rank, p.shift, new.a is not None, new.b is not None)


def _fitted(factors: tuple[np.ndarray, np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A [n, r, K] and B [r, N] cut or padded with zeros to `rank`."""
    a, b = factors
    more = max(0, rank - b.shape[0])
    return np.pad(a[:, :rank], ((0, 0), (0, more), (0, 0))), np.pad(b[:rank], ((0, more), (0, 0)))


@functools.cache
def _assembler(platform: str) -> Callable[..., tuple[Any, jax.Array]]:
    """`_assemble`, compiled. As a CUDA graph each of its arrays would be told anew: they are never the same."""
    return jax.jit(_assemble, static_argnums=0, compiler_options=without_graphs(platform))


def _assemble(
    shape: _Shape, given: Sequence[jax.Array], old: Sequence[Any], scales: jax.Array
) -> tuple[Any, jax.Array]:
    """The blocks of every group of rows, and whether all of their values are finite."""
    feed, kept, scale = (given[i] for i in shape.order), iter(old), iter(scales)
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
                a, b = _fill(spec, part, a, b, feed, next(scale))
            all_a.append(a)
            all_b.append(b)
        stacked_a, stacked_b = jnp.stack(all_a), jnp.stack(all_b)
        finite &= jnp.isfinite(stacked_a).all() & jnp.isfinite(stacked_b).all()
        step = rank_step(spec)
        stacked_a, stacked_b = _stored(stacked_a, spec.in_blocks), _stored(stacked_b, spec.out_blocks)
        made.append([(stacked_a[:, :, s : s + step], stacked_b[:, s : s + step]) for s in starts])
    return made, finite


def _stored(factors: jax.Array, blocks: Sequence[tuple[int, int]]) -> jax.Array:
    """Factors [.., features] with their features as they are stored: see `SlotSpec.in_blocks`."""
    if not blocks:
        return factors
    parts = [
        jnp.zeros((*factors.shape[:-1], count), factors.dtype) if first < 0 else factors[..., first : first + count]
        for first, count in blocks
    ]
    return jnp.concatenate(parts, axis=-1)


def _fill(
    spec: SlotSpec, part: _Part, a: jax.Array, b: jax.Array, feed: Iterator[jax.Array], scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One module's halves in the factors of its row."""
    start = sum(spec.out_sizes[: part.first])
    stop = start + sum(spec.out_sizes[part.first : part.first + part.count])
    if part.has_a:
        new = (next(feed).astype(jnp.float32) * 2.0**part.shift).astype(spec.dtype)
        rows = jnp.zeros((a.shape[1], spec.in_features), spec.dtype).at[: part.rank].set(new)
        a = a.at[part.first : part.first + part.count].set(rows[None])
    if part.has_b:
        new = (next(feed).T.astype(jnp.float32) * scale * 2.0**-part.shift).astype(spec.dtype)
        columns = jnp.zeros((b.shape[0], stop - start), spec.dtype).at[: part.rank].set(new)
        b = b.at[:, start:stop].set(columns)
    return a, b
