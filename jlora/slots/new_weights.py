"""Packed adapters with new weights, from host arrays, or from device arrays without a copy to the host.

An update from device arrays is compiled for their names and shapes.
"""

import collections
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jlora._compat import explicit_transfers, without_graphs
from jlora.adapters.checkpoint import sorted_keys
from jlora.adapters.int8 import quanta_for
from jlora.adapters.peft_config import scaling_of
from jlora.adapters.tensor_data import all_finite
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAUsageError, nearest
from jlora.layers.site import SlotSpec
from jlora.slots.arrays import SlotArrays
from jlora.slots.blocks import Block, Chunk, Entry, pack, rank_block, rank_starts, unpack
from jlora.slots.casting import check_scaling, in_slot_dtype
from jlora.slots.codec import Part, encode, outputs
from jlora.slots.packed import PackedAdapter, Placement, largest_rank
from jlora.slots.packing import rank_values, with_scales
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


@dataclass(frozen=True, eq=False)
class _Shape:
    """Static argument of `_assemble`. Compared by identity for speed, since `_shape` makes one object of each.

    Attributes:
      chunks: (spec, first ranks of the blocks, entries) for each chunk. Each entry is (True if its old factors are not
        needed, its modules, whose factors are True if they are given).
      order: Indices of the new arrays in the order in which the factors of these modules use them.
    """

    chunks: tuple[tuple[SlotSpec, tuple[int, ...], tuple[tuple[bool, tuple[Part, ...]], ...]], ...]
    order: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _shape(chunks: Any, order: tuple[int, ...]) -> _Shape:
    return _Shape(chunks, order)


@dataclass(frozen=True, eq=False)
class _UpdateProgram:
    """Program of an update from device arrays of given names and shapes.

    Attributes:
      names: Names of the arrays.
      shapes: Shapes and dtypes of the arrays.
      entries: The entries that are written.
      blocks: (chunk, entry of it or None for all, first ranks) of the blocks of each chunk.
      old: Entries whose old factors are needed, in the order in which `_assemble` uses them.
      shape: The static argument of `_assemble`.
    """

    names: tuple[str, ...]
    shapes: list[Any]
    entries: set[Entry]
    blocks: list[tuple[Chunk, int | None, tuple[int, ...]]]
    old: list[Entry]
    shape: _Shape


def updated(
    packed: PackedAdapter, arrays: Mapping[str, Any], slot_arrays: SlotArrays[Any], *, allow_nonfinite: bool
) -> tuple[PackedAdapter, tuple[Block, ...]]:
    """Return (packed adapter with new weights, its blocks that changed). `packed` is not changed.

    Args:
      packed: The current packed adapter.
      arrays: PEFT tensor name -> A [r, K] or B [N, r]. A factor without a new array keeps its weights. The
        rank of a module can change if both of its factors are given. Its scaling is then computed from its alpha.
      slot_arrays: The slot arrays, whose chunks and sites are used.
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
    program: _UpdateProgram | None = packed.update_program
    if on_device and program is not None and program.names == names and program.shapes == shapes:
        written = with_scales(_blocks_on_device(where, program, arrays, {}, allow_nonfinite), packed.placements)
        return packed.with_blocks((*_untouched(packed.blocks, program.entries), *written)), written
    had = {placement.module: placement for placement in packed.placements if placement.site.kind != "head"}
    try:
        keys_of = _sorted_keys(names, where)
    except AdapterMismatchError as error:
        raise AdapterMismatchError(f"{error}. {_taken(packed)}") from error
    news = [_check(where, had.get(module), packed, module, keys, arrays) for module, keys in keys_of.items()]
    changed = {new.placement.module: new for new in news}
    placements = tuple(changed[p.module].placement if p.module in changed else p for p in packed.placements)
    entries = {(new.placement.site, new.placement.entry) for new in news}
    ranks: dict[Entry, int] = {}
    for p in placements:
        ranks[p.site, p.entry] = max(ranks.get((p.site, p.entry), 0), p.rank)
    covered = collections.Counter[Entry]()
    for new in news:
        p, spec = new.placement, new.placement.site.spec
        if (new.a is not None or not spec.in_features) and (new.b is not None or not spec.out_features):
            covered[p.site, p.entry] += p.count
    old = unpack(packed.blocks, {entry for entry in entries if covered[entry] < entry[0].spec.slices})
    program = None
    if on_device:
        program = _program_of(names, shapes, news, old, ranks, slot_arrays)
        written = _blocks_on_device(where, program, arrays, old, allow_nonfinite)
        if old:  # the program is not reusable, because the next update has other old factors
            program = None
    else:
        written = _assemble_on_host(where, news, old, ranks, slot_arrays, allow_nonfinite)
    written = with_scales(written, placements)
    new = replace(
        packed,
        about=packed.about.with_fingerprint(None),
        placements=placements,
        ranks=rank_values(slot_arrays.sites, placements),
        rank=largest_rank(placements),
        blocks=(*_untouched(packed.blocks, entries), *written),
        update_program=program,
    )
    return new, written


def to_host(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks with all arrays in host memory."""
    return tuple(block.with_arrays(iter(jax.device_get(block.arrays))) for block in blocks)


@functools.lru_cache(maxsize=8)  # a training loop updates the same names every time
def _sorted_keys(names: tuple[str, ...], where: str) -> Mapping[str, Mapping[str, str]]:
    return sorted_keys(names, where)


def _taken(packed: PackedAdapter) -> str:
    """Return a sentence with the tensor names that an update takes."""
    modules = [placement.module for placement in packed.placements if placement.site.kind != "head"]
    more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    return (
        "update_adapter takes the tensor names of PEFT's files, MODULE.lora_A.weight and MODULE.lora_B.weight "
        "(MODULE.lora_embedding_A and _B for an embedding), with or without the prefix base_model.model., where MODULE "
        f"is one of {', '.join(modules[:_SHOWN])}{more}; load_inplace=True replaces all weights"
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
        near = nearest(module, [own.module for own in packed.placements])
        raise AdapterMismatchError(f"{at}: the adapter has no such module{near}. {_taken(packed)}")
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
    columns = outputs(site.spec, placement.first, placement.count)
    size = columns.stop - columns.start
    for label, array, expected in (("A", a, (rank, site.spec.in_features)), ("B", b, (size, rank))):
        if array is not None and tuple(array.shape) != expected:
            raise AdapterMismatchError(f"{at}: {label} has shape {tuple(array.shape)}; expected {expected}")
    if not 1 <= rank <= site.spec.max_rank:
        raise AdapterMismatchError(f"{at}: rank {rank} is not from 1 to max_lora_rank={site.spec.max_rank}")
    if rank != placement.rank:
        scaling = scaling_of(placement.alpha, rank, packed.about.use_rslora)
        check_scaling(at, scaling)
        placement = replace(placement, rank=rank, scaling=scaling)
    return _NewFactors(placement, a, b, tuple(keys[name] for name in names if name in keys))


def _untouched(blocks: Sequence[Block], entries: set[Entry]) -> list[Block]:
    """Return the blocks of all other entries. Blocks that also hold some of `entries` are divided."""
    kept: list[Block] = []
    for block in blocks:
        own = block.entries
        if not entries.intersection(own):
            kept.append(block)
        elif block.entry is None:
            with explicit_transfers():  # the blocks may be page-locked
                for i, entry in enumerate(own):
                    if entry not in entries:
                        own = slice(i, i + 1)
                        quanta = None if block.quanta is None else block.quanta[:, own]
                        kept.append(
                            replace(block, entry=i, quanta=quanta).with_arrays(array[own] for array in block.arrays)
                        )
    return kept


def _assemble_on_host(
    where: str,
    news: Sequence[_NewFactors],
    old: Mapping[Entry, Any],
    ranks: Mapping[Entry, int],
    slot_arrays: SlotArrays[Any],
    allow_nonfinite: bool,
) -> tuple[Block, ...]:
    """Return the blocks of the entries that an update writes, assembled from new and old factors."""
    parts: dict[Entry, list[Part]] = {}
    for new in news:
        p, dtype, halves = new.placement, np.dtype(new.placement.site.spec.dtype), list[Any]()
        for label, array in (("A", new.a), ("B", new.b)):
            if array is not None and not allow_nonfinite and not all_finite(np.asarray(array)):
                raise AdapterFormatError(f"{where}: {p.module}: {label} holds NaN or infinity; expected finite numbers")
            cast = None if array is None else in_slot_dtype(f"{where}: {p.module}", label, np.asarray(array), dtype)
            halves.append(cast)
        parts.setdefault((p.site, p.entry), []).append(Part(p.first, p.count, p.rank, *halves))
    entries = {entry: encode(entry[0].spec, [(old.get(entry), of)], ranks[entry], np) for entry, of in parts.items()}
    return pack(slot_arrays.chunks, entries)


def _program_of(
    names: tuple[str, ...],
    shapes: list[Any],
    news: Sequence[_NewFactors],
    old: Mapping[Entry, Any],
    ranks: Mapping[Entry, int],
    slot_arrays: SlotArrays[Any],
) -> _UpdateProgram:
    """Return the program of an update.

    Args:
      names: Names of the arrays.
      shapes: Shapes and dtypes of the arrays.
      news: The new factors of each module.
      old: The current factors of entries that keep some of their values.
      ranks: Ranks of the entries that are written.
      slot_arrays: The slot arrays, whose chunks are used.
    """
    by_entry: dict[Entry, list[_NewFactors]] = {}
    for new in news:
        by_entry.setdefault((new.placement.site, new.placement.entry), []).append(new)
    chosen: list[tuple[Chunk, int | None, list[Entry]]] = []
    for chunk in slot_arrays.chunks:
        touched = [i for i, entry in enumerate(chunk.entries) if entry in by_entry]
        if len(touched) == chunk.count:
            chosen.append((chunk, None, list(chunk.entries)))
        else:
            chosen.extend((chunk, i, [chunk.entries[i]]) for i in touched)
    blocks: list[tuple[Chunk, int | None, tuple[int, ...]]] = []
    kept: list[Entry] = []
    keys: list[str] = []
    chunks: list[Any] = []
    for chunk, i, entries in chosen:
        starts = tuple(rank_starts(chunk.spec, max(ranks[entry] for entry in entries)))
        sources: list[tuple[bool, tuple[Part, ...]]] = []
        for entry in entries:
            if entry in old:
                kept.append(entry)
            keys.extend(key for new in by_entry[entry] for key in new.keys)
            sources.append((entry not in old, tuple(_module(new) for new in by_entry[entry])))
        blocks.append((chunk, i, starts))
        chunks.append((chunk.spec, starts, tuple(sources)))
    position = {name: i for i, name in enumerate(names)}
    shape = _shape(tuple(chunks), tuple(position[key] for key in keys))
    return _UpdateProgram(names, shapes, set(by_entry), blocks, kept, shape)


def _blocks_on_device(
    where: str, program: _UpdateProgram, arrays: Mapping[str, Any], old: Mapping[Entry, Any], allow_nonfinite: bool
) -> tuple[Block, ...]:
    """Return the blocks that an update writes, on the device. Messages start with `where`.

    Raises:
      AdapterFormatError: The blocks hold NaN or infinity, and `allow_nonfinite` is False.
    """
    kept = [old[entry] for entry in program.old]
    given = _off_explicit(list(arrays.values()))
    with auto_axes(), explicit_transfers():
        assemble = _assembler(jax.default_backend())
        made, finite = assemble(program.shape, given, kept)
        largest = jax.device_get([of_chunk for _, of_chunk in made])
    if not allow_nonfinite and not jax.device_get(finite):
        raise AdapterFormatError(
            f"{where}: the new weights hold NaN or infinity, or values that the slots' dtype cannot hold; expected "
            "finite numbers"
        )
    return tuple(
        Block(chunk, i, start, a, b, None if own is None else quanta_for(own))
        for (chunk, i, starts), (factors, _), of_chunk in zip(program.blocks, made, largest, strict=True)
        for start, (a, b), own in zip(starts, factors, of_chunk, strict=True)
    )


def _off_explicit(arrays: list[Any]) -> list[Any]:
    """Return the arrays with the axes of their meshes as Auto axes. No data moves."""
    try:
        kinds = set(map(type, map(_sharding, arrays)))
    except AttributeError:  # some arrays are on the host
        kinds = {NamedSharding}
    return list(map(with_auto_axes, arrays)) if any(issubclass(kind, NamedSharding) for kind in kinds) else arrays


def _module(new: _NewFactors) -> Part:
    p = new.placement
    return Part(p.first, p.count, p.rank, *(None if factor is None else True for factor in (new.a, new.b)))


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
    for spec, starts, entries in shape.chunks:
        width = rank_block(spec)
        given_entries: list[tuple[Any, list[Part]]] = []
        for whole, modules in entries:
            parts = [part._replace(a=part.a and next(feed), b=part.b and next(feed)) for part in modules]
            given_entries.append((None if whole else next(kept), parts))
        a, b, largest = encode(spec, given_entries, starts[-1] + width, jnp)
        for values in (a, b) if largest is None else (largest,):
            finite &= jnp.isfinite(values).all()
        factors = [(a[:, :, s : s + width], b[:, s : s + width]) for s in starts]
        made.append((factors, [None if largest is None else largest[..., s : s + width] for s in starts]))
    return made, finite
