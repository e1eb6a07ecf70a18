"""Packing of the modules of an adapter into blocks, cast to slot dtype."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

import numpy as np
from jaxtyping import Float

from jlora._memory import fresh
from jlora._threads import on_threads
from jlora.adapters.lora import ExpertsLoRA, Layer
from jlora.errors import AdapterFormatError, AdapterMismatchError
from jlora.layers.site import Site
from jlora.layers.wrap.wrapped import WrappedModel, own_order_of
from jlora.slots.blocks import Block, Chunk, Entry, Packing
from jlora.slots.casting import bits_of, check_scaling, in_slot_dtype, quanta_of_factor, write
from jlora.slots.codec import A, B, outputs, places
from jlora.slots.packed import Placement, SiteSlices


class _Piece(NamedTuple):
    """Factors of one module, or of all experts for one slice, in consecutive entries.

    Attributes:
      name: Name in the checkpoint for all entries together.
      names: Name of the module of each entry.
      first: The first output slice.
      slices: Number of output slices.
      a: [entries, r, K], or [1, r, K] if all entries share it.
      b: [entries, r, N], or [1, r, N] if all entries share it.
    """

    name: str
    names: Sequence[str]
    first: int
    slices: int
    a: np.ndarray
    b: np.ndarray


def pack_modules(
    where: str,
    modules: dict[str, Layer],
    slices_of: Mapping[str, SiteSlices],
    wrapped: WrappedModel,
    chunks: Sequence[Chunk],
) -> tuple[tuple[Placement, ...], tuple[Block, ...]]:
    """Cast the modules of an adapter to slot dtype and pack them into blocks.

    A factor that experts share is stored once if the model has slots for shared factors and all expert modules of the
    adapter share one. Experts on devices of other processes stay zeros.

    Args:
      where: Description of the adapter, for messages.
      modules: The modules of the adapter by name. Each is removed from the dict once it is packed, so that its memory
        is freed while the blocks fill and an adapter of gigabytes is not in memory twice.
      slices_of: The slices that each module fills, from `find_slices`.
      wrapped: The wrapped model.
      chunks: The chunks of the slot arrays.

    Returns:
      The placements, in the order of `slices_of`, and the blocks.

    Raises:
      AdapterMismatchError: Slot dtype cannot hold a value.
    """
    of_experts = [name for name, (site, *_) in slices_of.items() if site.spec.experts]
    shared = bool(of_experts) and all(_is_shared(where, modules[name], *slices_of[name]) for name in of_experts)
    ranks: dict[Entry, int] = {}
    for name, (site, first_entry, _, _) in slices_of.items():
        for target, entries in _targets(modules[name], site, first_entry, shared):
            for entry in entries:
                ranks[target, entry] = max(ranks.get((target, entry), 0), modules[name].rank)
    packing = Packing(chunks, ranks)

    def fill(name: str) -> list[Placement]:
        module = modules.pop(name)
        with np.errstate(over="ignore", invalid="ignore"):
            return _fill(where, name, module, wrapped, *slices_of[name], shared, packing)

    filled = on_threads(fill, list(slices_of), sum(block.nbytes for block in packing.blocks))
    placements = tuple(itertools.chain(*filled))
    return placements, with_scales(packing.blocks, placements)


def entries_of(module: Layer, site: Site, entry: int) -> range:
    """Return the entries that a module fills, beginning at `entry`."""
    return range(entry, entry + (site.spec.experts or 1)) if module.kind == "experts" else range(entry, entry + 1)


def is_exchanged(where: str, module: ExpertsLoRA, site: Site, first: int, count: int) -> bool:
    """Return whether the input and output features of a module of all experts are exchanged.

    Raises:
      AdapterMismatchError: The sizes differ from the model's.
      AdapterFormatError: The file does not determine the order, and neither do the sizes, which are equal.
    """
    sizes = module.a.shape[2], module.b.shape[1]
    expected = site.spec.in_features, sum(site.spec.out_sizes[first : first + count])
    exchanged = sizes != expected if module.exchanged is None else module.exchanged
    if sizes != (expected[::-1] if exchanged else expected):
        raise AdapterMismatchError(f"A takes {sizes[0]} and B gives {sizes[1]}; {site.path!r} has {expected}")
    if module.exchanged is None and expected[0] == expected[1]:
        raise AdapterFormatError(
            f"{where}: in and out are both {expected[0]}, and nothing tells whether the file has them exchanged; train "
            "the block's other parameter too, or save the adapter expert by expert or with three axes"
        )
    return exchanged


def _targets(module: Layer, site: Site, entry: int, shared: bool) -> list[tuple[Site, range]]:
    """Return the sites that hold the factors of a module at `entry` of `site`, and the entries in each."""
    entries = entries_of(module, site, entry)
    if not (shared and site.spec.experts):
        return [(site, entries)]
    layer = entry // site.spec.experts
    return [(half, entries if half.spec.experts else range(layer, layer + 1)) for half in site.shared]


def _is_shared(where: str, module: Layer, site: Site, entry: int, first: int, count: int) -> bool:
    """Return whether the experts of a module share the factor that the shared slots of the site hold once."""
    if not site.shared or not isinstance(module, ExpertsLoRA):
        return False
    a, b = (module.b, module.a) if is_exchanged(where, module, site, first, count) else (module.a, module.b)
    return len(b if site.shared[0].spec.experts else a) == 1


def _pieces(
    where: str,
    name: str,
    module: Layer,
    wrapped: WrappedModel,
    site: Site,
    first: int,
    count: int,
) -> list[_Piece]:
    """Return the factors of a module in one piece, or in one for each slice.

    The latter are those of all experts, and those of one expert if the checkpoint has the slices in another order. They
    have the names that checkpoints give to one slice of one expert.
    """
    spec, of_all = site.spec, isinstance(module, ExpertsLoRA)
    if isinstance(module, ExpertsLoRA):
        a, b = module.a, module.b.swapaxes(1, 2)
        if is_exchanged(where, module, site, first, count):
            a, b = b, a
    else:
        a, b = module.a[None], module.b.T[None]
    positions = None
    if spec.experts and count == spec.slices > 1:  # gate and up in one tensor, which has the checkpoint's order
        positions = own_order_of(wrapped.modules[site], site)
    if positions is not None:
        b = _columns(b, positions, spec.own_experts)
    elif not of_all:
        return [_Piece(name, [name], first, count, a, b)]
    called: dict[int, str] = {}  # slice -> its first name
    for key, (i, n) in site.parts.items():
        if n == 1:
            called.setdefault(i, key.rpartition(".")[2])
    starts = np.cumsum((0, *spec.out_sizes[first : first + count]))
    pieces: list[_Piece] = []
    for i in range(count):
        of_slice = name if count == 1 else _renamed(name, called[first + i])
        block, _, part = of_slice.rpartition(".")
        names = [f"{block}.{expert}.{part}" for expert in range(spec.experts or 0)] if of_all else [of_slice]
        pieces.append(_Piece(of_slice, names, first + i, 1, a, b[:, :, starts[i] : starts[i + 1]]))
    return pieces


def _renamed(name: str, part: str) -> str:
    """Return the name of a module with its last key that is no number replaced by `part`."""
    keys = name.split(".")
    at = max(i for i, key in enumerate(keys) if not key.isdecimal())
    return ".".join((*keys[:at], part, *keys[at + 1 :]))


def _columns(b: np.ndarray, positions: np.ndarray, own: Sequence[range]) -> np.ndarray:
    """Return `b[:, :, positions]` in the memory layout of `b`. Experts outside `own` are zeros."""
    if len(b) > sum(map(len, own)) and len(b) > 1:
        found = fresh(b.size, b.dtype, sparse=True).reshape(b.shape)
        for each in own:
            entries = slice(each.start, each.stop)
            found.view(bits_of(b.dtype))[entries] = _columns(b[entries], positions, own).view(bits_of(b.dtype))
        return found
    order = sorted(range(3), key=lambda axis: -b.strides[axis])
    bits = b.view(bits_of(b.dtype)).transpose(order).take(positions, order.index(2))
    return bits.view(b.dtype).transpose(np.argsort(order))


def _fill(
    where: str,
    name: str,
    module: Layer,
    wrapped: WrappedModel,
    site: Site,
    entry: int,
    first: int,
    count: int,
    shared: bool,
    packing: Packing,
) -> list[Placement]:
    """Write a module into its blocks and return its placements.

    If `shared` is True, factors of experts go to the slots for shared factors.

    Raises:
      AdapterMismatchError: The scaling is not a finite float32, or slot dtype cannot hold a value.
    """
    pieces = _pieces(where, name, module, wrapped, site, first, count)
    check_scaling(f"{where}: {pieces[0].names[0]}", module.scaling)
    dtype = packing.dtype(site)
    fills = [(target, entries, piece) for target, entries in _targets(module, site, entry, shared) for piece in pieces]
    for target, entries, piece in fills:
        slices = slice(piece.first, piece.first + piece.slices)
        # In int8 each slice has quanta of its own.
        spans = [(i, 1) for i in range(slices.start, slices.stop)]
        spans = spans if dtype == np.int8 else [(piece.first, piece.slices)]
        parts = [_part(piece, site, *span) for span in spans]
        for run, blocks in packing.runs(target, entries.start, len(entries)):
            fits = True
            of_a, of_b = None, [None] * len(spans)
            if dtype == np.int8:
                of_a, of_b = _quanta(piece, run, parts, together=shared and bool(site.spec.experts))
                for begin, _, _, quanta in blocks:
                    assert quanta is not None
                    ranks = slice(begin, begin + quanta.shape[3])
                    for j, own in enumerate((of_a[:, None, ranks], np.stack(of_b, axis=1)[..., ranks])):
                        quanta[j, :, slices, : own.shape[2]] = own
            for features, stored in places(target.spec, A) if target.spec.in_features else ():
                into_a = [(begin, a[:, slices, :, stored]) for begin, a, _, _ in blocks]
                fits &= write(piece.a[:, :, features], run, dtype, into_a, of_a)
            for span, part, quanta in zip(spans, parts, of_b, strict=True):
                for features, stored in places(target.spec, B, *span) if target.spec.out_features else ():
                    into_b = [(begin, b[:, None, :, stored]) for begin, _, b, _ in blocks]
                    fits &= write(part[:, :, features], run, dtype, into_b, quanta)
            if not fits:
                _refuse(where, dtype, pieces)
    extras = {
        variant: in_slot_dtype(f"{where}: {name}", variant, array, np.dtype(np.float32))
        for variant, array in module.vectors.items()
    }
    return [
        Placement(
            module=piece.names[i] if target.spec.experts or target is site else piece.name,
            site=target,
            entry=entry,
            first=piece.first,
            count=piece.slices,
            rank=module.rank,
            alpha=module.alpha,
            scaling=module.scaling,
            extras=extras,
        )
        for target, entries, piece in fills
        for i, entry in enumerate(entries)
    ]


def _part(piece: _Piece, site: Site, first: int, count: int) -> np.ndarray:
    """Return the columns of B of a piece that belong to some of its output slices."""
    start = outputs(site.spec, piece.first, piece.slices).start
    own = outputs(site.spec, first, count)
    return piece.b[:, :, own.start - start : own.stop - start]


def _quanta(
    piece: _Piece, run: slice, parts: Sequence[np.ndarray], *, together: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the int8 quanta [entries or 1, r] of A, and of each of the `parts` of B, in a run of entries.

    If `together` is True and the entries share B, they share a quantum for A too, as a slot then has one scale for all.
    """
    a, *parts = (factor if len(factor) == 1 else factor[run] for factor in (piece.a, *parts))
    shared = together and len(piece.b) == 1
    return quanta_of_factor(piece.a).max(axis=0, keepdims=True) if shared else quanta_of_factor(a), list(
        map(quanta_of_factor, parts)
    )


def _refuse(where: str, dtype: np.dtype, pieces: Sequence[_Piece]) -> NoReturn:
    """Raise AdapterMismatchError for the first entry of a module with a value that slot dtype cannot hold."""
    for i in range(len(pieces[0].names)):
        for piece in pieces:
            for label, factor in (("A", piece.a), ("B", piece.b)):
                in_slot_dtype(f"{where}: {piece.names[i]}", label, factor[i % len(factor)], dtype)
    raise AssertionError("slot dtype holds all values of all entries")


def rank_values(sites: tuple[Site, ...], placements: tuple[Placement, ...]) -> Float[np.ndarray, "values"]:
    """Return the true rank and the scale of each output slice of every entry, float32, in the order of `sites`.

    In int8, where blocks have the scales, it is the true rank alone. Slices without factors, or with scale 0 and no
    extras, have rank 0: the base output keeps its bits there.
    """
    shapes = [site.spec.arrays["ranks"].slot_shape for site in sites]
    sizes = list(map(math.prod, shapes))
    values = np.zeros(sum(sizes), np.float32)
    views = np.split(values, np.cumsum(sizes)[:-1])
    of_site = {site: view.reshape(-1, *shape[-2:]) for site, view, shape in zip(sites, views, shapes, strict=True)}
    for p in placements:
        if np.float32(p.scaling) or p.extras:
            own = of_site[p.site][p.entry, p.first : p.first + p.count]
            own[:, 0], own[:, 1:] = p.rank, p.scaling
    return values


def with_scales(blocks: Sequence[Block], placements: Iterable[Placement]) -> tuple[Block, ...]:
    """Return the blocks, in int8 with the scale of each rank: the product of its quanta and of the delta's scale."""
    if all(block.quanta is None for block in blocks):
        return tuple(blocks)
    of_entry: dict[Entry, np.ndarray] = {}
    for p in placements:
        zeros = np.zeros(p.site.spec.slices)
        of_entry.setdefault((p.site, p.entry), zeros)[p.first : p.first + p.count] = p.scaling
    found: list[Block] = []
    for block in blocks:
        if block.quanta is not None:
            own = np.stack([of_entry.get(entry, np.zeros(block.chunk.spec.slices)) for entry in block.entries])
            with np.errstate(over="ignore", invalid="ignore"):  # values that the configuration lets through
                scales = (block.quanta.prod(axis=0) * own[..., None]).astype(np.float32)
            block = replace(block, scales=scales)
        found.append(block)
    return tuple(found)
