"""Does an adapter fit the model? Its shapes are checked before its values, and then cast and scaled for the slots."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from jlora._memory import fresh
from jlora._threads import on_threads
from jlora.adapters import Adapter, BaseShape
from jlora.adapters.checkpoint import all_finite
from jlora.adapters.expert_formats import decide_exchanged
from jlora.adapters.lora import ExpertsLoRA, LoRA, ModuleLoRA
from jlora.adapters.shapes import ExpertsShapes
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError
from jlora.layers.site import Site
from jlora.layers.wrapped import WrappedModel, own_order_of
from jlora.manager.base_weights import difference, misfits
from jlora.manager.blocks import Block, Chunk, Frame, Row, bits_of
from jlora.manager.casting import check_scaling, in_slot_dtype, widened, write
from jlora.manager.content import Placement
from jlora.manager.locks import within
from jlora.manager.names import Place, SiteIndex


@runtime_checkable
class Shapes(Protocol):
    """What is known of a module before its tensors are read."""

    @property
    def kind(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def a_shape(self) -> tuple[int, ...]: ...
    @property
    def b_shape(self) -> tuple[int, ...]: ...


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


def describe(name: str, path: str | None) -> str:
    return f"adapter {name!r}" + (f" ({path})" if path else "")


def place(where: str, modules: Mapping[str, Shapes], index: SiteIndex) -> dict[str, Place]:
    """Module name -> its place; the first expert's row where it is of all experts.

    Raises:
      AdapterMismatchError: there is no module, a tensor that no module of the model takes, a rank above max_lora_rank,
        shapes that disagree with the model's, two modules for the same slice.
    """
    if not modules:
        raise AdapterMismatchError(f"{where} brings no LoRA weights: expected at least one module, found none")
    problems: list[str] = []
    too_large: dict[int, dict[str, int]] = {}  # max_lora_rank -> the modules of larger ranks
    placed: dict[str, Place] = {}
    taken: dict[tuple[Site, int, int], str] = {}
    for name, module in modules.items():
        if index.skips(name):
            continue
        found = index.find(module.kind, name)
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
            continue
        site, row, first, count = found
        if module.rank > site.spec.max_rank:
            too_large.setdefault(site.spec.max_rank, {})[name] = module.rank
            continue
        if problem := _misfit(site, module, first, count):
            problems.append(f"{name}: {problem}")
            continue
        filled = ((site, r, i) for r in _rows_of(module, site, row) for i in range(first, first + count))
        clash = next((place for place in filled if taken.setdefault(place, name) != name), None)
        if clash is not None:
            which = f"slice {clash[2]} of {site.path!r}"
            which += f" for expert {clash[1] % site.spec.experts}" if site.spec.experts else ""
            problems.append(f"{name}: fills {which}, which {taken[clash]} fills too")
            continue
        placed[name] = found
    _raise(where, [*map(too_large_rank, too_large.values(), too_large), *problems])
    if not placed:
        raise AdapterMismatchError(f"{where} brings weights for skipped modules only: nothing of it would be served")
    return placed


def fit(
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
    _raise(where, problems)
    of_experts = [name for name, (site, *_) in placed.items() if site.spec.experts]
    shared = bool(of_experts) and all(_is_shared(where, modules[name], *placed[name]) for name in of_experts)
    ranks: dict[Row, int] = {}
    for name, (site, first_row, _, _) in placed.items():
        for held, rows in _held(modules[name], site, first_row, shared):
            for row in rows:
                ranks[held, row] = max(ranks.get((held, row), 0), modules[name].rank)
    frame = Frame(chunks, ranks)

    def fill(name: str) -> list[Placement]:
        module = modules.pop(name)
        with within(np.errstate(over="ignore", invalid="ignore")):
            return _fill(where, name, module, wrapped, *placed[name], shared, frame)

    filled = on_threads(fill, list(placed), sum(block.nbytes for block in frame.blocks))
    return tuple(itertools.chain(*filled)), frame.blocks


def _rows_of(module: Shapes, site: Site, row: int) -> range:
    """The rows that a module fills, which has its place at `row`."""
    return range(row, row + (site.spec.experts or 1)) if module.kind == "experts" else range(row, row + 1)


def _held(module: Shapes, site: Site, row: int, shared: bool) -> list[tuple[Site, range]]:
    """The sites that hold the factors of a module at `row` of `site`, and the rows of each."""
    rows = _rows_of(module, site, row)
    if not (shared and site.spec.experts):
        return [(site, rows)]
    layer = row // site.spec.experts
    return [(half, rows if half.spec.experts else range(layer, layer + 1)) for half in site.shared]


def _is_shared(where: str, module: LoRA, site: Site, row: int, first: int, count: int) -> bool:
    """Whether the experts of a module share the factor that the site's shared slots hold once."""
    if not site.shared or isinstance(module, ModuleLoRA):
        return False
    a, b = (module.b, module.a) if _exchanged(where, module, site, first, count) else (module.a, module.b)
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
    if _exchanged(where, module, site, first, count):
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
    frame: Frame,
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
        for run, parts in frame.runs(held, rows.start, len(rows)):
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


def _exchanged(where: str, module: ExpertsLoRA | ExpertsShapes, site: Site, first: int, count: int) -> bool:
    """Whether a module of all experts has in and out exchanged. Raises where that cannot be told, or sizes differ."""
    sizes = module.a_shape[2], module.b_shape[1]
    expected = site.spec.in_features, sum(site.spec.out_sizes[first : first + count])
    if module.exchanged is None:
        return decide_exchanged(sizes, expected, module.peft_version, where)
    if sizes != (expected[::-1] if module.exchanged else expected):
        raise AdapterMismatchError(f"A takes {sizes[0]} and B gives {sizes[1]}; {site.path!r} has {expected}")
    return module.exchanged


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


def too_large_rank(modules: Mapping[str, int], limit: int) -> str:
    """Return the message for modules (name -> rank) whose ranks are above a `max_lora_rank`."""
    largest = max(modules, key=modules.__getitem__)
    rank, which = (
        modules[largest],
        f"{largest!r}" if len(modules) == 1 else f"{len(modules)} modules, first {largest!r}",
    )
    return (
        f"rank {rank} is above max_lora_rank={limit} ({which}); raise it: LoRAConfig(max_lora_rank={rank}), or "
        f"jlora serve --max-lora-rank {rank}"
    )


def _raise(where: str, problems: list[str]) -> None:
    if problems:
        shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise AdapterMismatchError(f"{where} does not fit this model:\n  " + "\n  ".join(shown))


def _misfit(site: Site, module: Shapes, first: int, count: int) -> str | None:
    if isinstance(module, ExpertsLoRA | ExpertsShapes):
        return _experts_misfit(site, module, first, count)
    rank, spec = module.rank, site.spec
    outputs = sum(spec.out_sizes[first : first + count])
    expected = ((rank, spec.in_features), (outputs, rank))
    found = (tuple(module.a_shape), tuple(module.b_shape))
    if found != expected:
        return f"A and B have shapes {found[0]} and {found[1]}, and {site.path!r} takes {expected[0]} and {expected[1]}"
    return None


def _experts_misfit(site: Site, module: ExpertsLoRA | ExpertsShapes, first: int, count: int) -> str | None:
    spec = site.spec
    for label, shape in (("A", module.a_shape), ("B", module.b_shape)):
        if shape[0] not in (1, spec.experts):
            return f"{label} is of {shape[0]} experts, and {site.path!r} has {spec.experts}"
    try:
        _exchanged("", module, site, first, count)
    except LoRAError as error:
        return str(error).removeprefix(": ")
    return None


def check_finite(where: str, adapter: Adapter) -> None:
    """Raises AdapterFormatError for NaN and infinity."""
    for name, module in adapter.modules.items():
        for label, factor in (("A", module.a), ("B", module.b)):
            if not all_finite(factor):
                raise AdapterFormatError(
                    f"{where}: {name}: {label} holds NaN or infinity; expected finite numbers "
                    "(LoRAConfig.allow_nonfinite lets them through)"
                )


def _balance(piece: _Piece, scaling: float, together: bool) -> list[int]:
    """For each row, or for all `together`, the power of two by which A grows and B shrinks so that their largest values
    come closest."""
    largest: list[list[float]] = []
    for factor in (piece.a, widened(piece.b) * np.float32(scaling)):
        sizes = np.abs(factor, dtype=np.float32).max(axis=(1, 2), initial=0, where=np.isfinite(factor))
        largest.append(np.broadcast_to(sizes.max() if together else sizes, len(piece.names)).tolist())
    return [round((math.log2(b) - math.log2(a)) / 2) if a and b else 0 for a, b in zip(*largest, strict=True)]


def check_base_shapes(where: str, weights: Mapping[str, BaseShape], index: SiteIndex) -> None:
    """Raises AdapterMismatchError where base weights of these shapes cannot be the model's own."""
    _raise(where, misfits(weights, index))
