"""Modules of an adapter cast and scaled for the slots, and packed in blocks."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from jlora._memory import fresh
from jlora._threads import on_threads
from jlora.adapters.lora import LoRA, ModuleLoRA
from jlora.layers.site import Site
from jlora.layers.wrap.wrapped import WrappedModel, own_order_of
from jlora.manager.base_weights import difference
from jlora.manager.blocks import Block, Chunk, Packing, Row, bits_of
from jlora.manager.casting import check_scaling, in_slot_dtype, widened, write
from jlora.manager.fit import Shapes, is_exchanged, refuse, rows_of
from jlora.manager.names import Place, SiteIndex
from jlora.manager.packed_adapter import Placement


class _Piece(NamedTuple):
    """One module's factors, or those of all experts for one slice: of rows that follow each other.

    Attributes:
      name: the checkpoint's name of all rows together.
      names: of each row's module.
      first, slices: the output slices.
      a: [rows, r, K], or [1, r, K] where all rows share it.
      b: [rows, r, N], or [1, r, N].
    """

    name: str
    names: Sequence[str]
    first: int
    slices: int
    a: np.ndarray
    b: np.ndarray


def pack_modules(
    where: str,
    modules: dict[str, LoRA],
    placed: Mapping[str, Place],
    base_weights: Mapping[str, np.ndarray],
    wrapped: WrappedModel,
    index: SiteIndex,
    chunks: Sequence[Chunk],
) -> tuple[tuple[Placement, ...], tuple[Block, ...]]:
    """Bring the modules of an adapter into slot dtype and the blocks of the model's `chunks`.

    Where the model has slots for that, a factor that experts share goes into them once, if all of the adapter's do.
    Experts that lie on devices of other processes are left zeros, and their modules' numbers are not looked at, but for
    float16 (`own_experts`).

    Args:
      where: the adapter, for messages.
      modules: its modules. What is written is taken out: memory that nobody else refers to goes back to the system
        while the blocks fill, so that an adapter of gigabytes is not there twice.
      placed: where each goes, as `place` says.
      base_weights: those that came with it.
      wrapped, index, chunks: of the model.

    Returns:
      Where the modules go, in their order, and the blocks.

    Raises:
      AdapterMismatchError: base weights that differ from the model's; values that slot dtype cannot hold.
    """
    problems = [
        f"{name}.base_layer.weight: {problem}"
        for name, weight in base_weights.items()
        if not index.skips(name) and (problem := difference(name, weight, wrapped, index))
    ]
    refuse(where, problems)
    of_experts = [name for name, (site, *_) in placed.items() if site.spec.experts]
    shared = bool(of_experts) and all(_is_shared(where, modules[name], *placed[name]) for name in of_experts)
    ranks: dict[Row, int] = {}
    for name, (site, first_row, _, _) in placed.items():
        for held, rows in _held(modules[name], site, first_row, shared):
            for row in rows:
                ranks[held, row] = max(ranks.get((held, row), 0), modules[name].rank)
    packing = Packing(chunks, ranks)

    def fill(name: str) -> list[Placement]:
        module = modules.pop(name)
        with np.errstate(over="ignore", invalid="ignore"):
            return _fill(where, name, module, wrapped, *placed[name], shared, packing)

    filled = on_threads(fill, list(placed), sum(block.nbytes for block in packing.blocks))
    return tuple(itertools.chain(*filled)), packing.blocks


def _held(module: Shapes, site: Site, row: int, shared: bool) -> list[tuple[Site, range]]:
    """The sites that hold the factors of a module at `row` of `site`, and the rows of each."""
    rows = rows_of(module, site, row)
    if not (shared and site.spec.experts):
        return [(site, rows)]
    layer = row // site.spec.experts
    return [(half, rows if half.spec.experts else range(layer, layer + 1)) for half in site.shared]


def _is_shared(where: str, module: LoRA, site: Site, row: int, first: int, count: int) -> bool:
    """Whether the experts of a module share the factor that the site's shared slots hold once."""
    if not site.shared or isinstance(module, ModuleLoRA):
        return False
    a, b = (module.b, module.a) if is_exchanged(where, module, site, first, count) else (module.a, module.b)
    return len(b if site.shared[0].spec.experts else a) == 1


def _pieces(
    where: str,
    name: str,
    module: LoRA,
    wrapped: WrappedModel,
    site: Site,
    first: int,
    count: int,
) -> list[_Piece]:
    """A module as it is; one of all experts slice by slice, under the names that checkpoints give each expert's."""
    if isinstance(module, ModuleLoRA):
        return [_Piece(name, [name], first, count, module.a[None], module.b.T[None])]
    spec = site.spec
    assert spec.experts is not None
    a, b = module.a, module.b.swapaxes(1, 2)
    if is_exchanged(where, module, site, first, count):
        a, b = b, a
    positions = own_order_of(wrapped.modules[site], site) if module.own_order and count == spec.slices else None
    if positions is not None:
        b = _columns(b, positions, spec.own_experts)
    block, _, own = name.rpartition(".")
    called: dict[int, str] = {}  # the first name of each slice
    for key, (i, n) in site.parts.items():
        if n == 1:
            called.setdefault(i, key.rpartition(".")[2])
    starts = np.cumsum((0, *spec.out_sizes[first : first + count]))
    pieces: list[_Piece] = []
    for i in range(count):
        part = own if count == 1 else called[first + i]
        names = [f"{block}.{expert}.{part}" for expert in range(spec.experts)]
        pieces.append(_Piece(f"{block}.{part}", names, first + i, 1, a, b[:, :, starts[i] : starts[i + 1]]))
    return pieces


def _columns(b: np.ndarray, positions: np.ndarray, own: Sequence[range]) -> np.ndarray:
    """`b[:, :, positions]`, read and written in the order of b's memory. Only of `own` experts if those are not all."""
    if len(b) > sum(map(len, own)) and len(b) > 1:
        found = fresh(b.size, b.dtype, sparse=True).reshape(b.shape)
        for part in own:
            rows = slice(part.start, part.stop)
            found.view(bits_of(b.dtype))[rows] = _columns(b[rows], positions, own).view(bits_of(b.dtype))
        return found
    order = sorted(range(3), key=lambda axis: -b.strides[axis])
    bits = b.view(bits_of(b.dtype)).transpose(order).take(positions, order.index(2))
    return bits.view(b.dtype).transpose(np.argsort(order))


def _fill(
    where: str,
    name: str,
    module: LoRA,
    wrapped: WrappedModel,
    site: Site,
    row: int,
    first: int,
    count: int,
    shared: bool,
    packing: Packing,
) -> list[Placement]:
    """Write a module into its blocks; `shared`: into those of the slots for experts that share factors.

    The scaling is folded in float32, before the one rounding. float16 keeps full precision over 30 powers of two only,
    so there the two factors are brought to the same largest value first, by a power of two, which rounds nothing.

    Raises:
      AdapterMismatchError: a scaling or a value that slot dtype cannot hold.
    """
    pieces = _pieces(where, name, module, wrapped, site, first, count)
    dtype, size = np.dtype(site.spec.dtype), len(pieces[0].names)
    check_scaling(f"{where}: {pieces[0].names[0]}", module.scaling)
    once = shared and site.spec.experts is not None
    shifts = [_balance(piece, module.scaling, once) if dtype == np.float16 else [0] * size for piece in pieces]
    fills = [
        (held, rows, piece, shift)
        for held, rows in _held(module, site, row, shared)
        for piece, shift in zip(pieces, shifts, strict=True)
    ]
    for held, rows, piece, shift in fills:
        start = sum(site.spec.out_sizes[: piece.first])
        slices, columns = slice(piece.first, piece.first + piece.slices), slice(start, start + piece.b.shape[2])
        for run, parts in packing.runs(held, rows.start, len(rows)):
            powers = np.array(shift[run]).reshape(-1, 1, 1) if any(shift[run]) else None
            minus = None if powers is None else -powers
            fits = True
            for features, stored in held.spec.in_runs if held.spec.in_features else ():
                into_a = [(begin, a[:, slices, :, stored]) for begin, a, _ in parts]
                fits &= write(piece.a[:, :, features], run, dtype, None, powers, into_a)
            for features, stored in _within(held.spec.out_runs, columns) if held.spec.out_features else ():
                into_b = [(begin, b[:, None, :, stored]) for begin, _, b in parts]
                fits &= write(piece.b[:, :, features], run, dtype, module.scaling, minus, into_b)
            if not fits:
                _refuse(where, module.scaling, site, pieces, shifts)
    return [
        Placement(
            *(
                piece.names[i] if held.spec.experts or held is site else piece.name,
                held,
                row,
                piece.first,
                piece.slices,
            ),
            *(module.rank, module.alpha, module.scaling, shift[i]),
        )
        for held, rows, piece, shift in fills
        for i, row in enumerate(rows)
    ]


def _within(runs: Iterable[tuple[slice, slice]], columns: slice) -> list[tuple[slice, slice]]:
    """Those parts of runs that lie in `columns`, counted from its first: (which of them, where they are stored)."""
    found: list[tuple[slice, slice]] = []
    for features, stored in runs:
        begin, end = max(features.start, columns.start), min(features.stop, columns.stop)
        if begin < end:
            at = stored.start + begin - features.start
            found.append((slice(begin - columns.start, end - columns.start), slice(at, at + end - begin)))
    return found


def _refuse(
    where: str, scaling: float, site: Site, pieces: Sequence[_Piece], shifts: Sequence[Sequence[int]]
) -> NoReturn:
    """Raise for the first of a module's rows with a value that slot dtype cannot hold."""
    for i in range(len(pieces[0].names)):
        for piece, shift in zip(pieces, shifts, strict=True):
            a, b = (factor[i % len(factor)] for factor in (piece.a, piece.b))
            in_slot_dtype(f"{where}: {piece.names[i]}", a, site, None, shift[i])
            in_slot_dtype(f"{where}: {piece.names[i]}", b, site, scaling, -shift[i])
    raise AssertionError("what a module's rows hold, the whole of it holds")


def rank_vector(sites: tuple[Site, ...], placements: tuple[Placement, ...]) -> np.ndarray:
    """The true rank of each output slice of every row, in the pool's order: int32."""
    starts: dict[Site, int] = {}
    total = 0
    for site in sites:
        starts[site] = total
        total += math.prod((*site.spec.rows, site.spec.slices))
    ranks = np.zeros(total, np.int32)
    for p in placements:
        start = starts[p.site] + p.row * p.site.spec.slices + p.first
        ranks[start : start + p.count] = p.rank
    return ranks


def _balance(piece: _Piece, scaling: float, together: bool) -> list[int]:
    """For each row, or for all `together`, the power of two by which A grows and B shrinks so that their largest values
    come closest."""
    largest: list[list[float]] = []
    for factor in (piece.a, widened(piece.b) * np.float32(scaling)):
        sizes = np.abs(factor, dtype=np.float32).max(axis=(1, 2), initial=0, where=np.isfinite(factor))
        largest.append(np.broadcast_to(sizes.max() if together else sizes, len(piece.names)).tolist())
    return [round((math.log2(b) - math.log2(a)) / 2) if a and b else 0 for a, b in zip(*largest, strict=True)]
