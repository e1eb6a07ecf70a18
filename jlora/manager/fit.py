"""Does an adapter fit the model? Its shapes are checked before its values, and then cast and scaled for the slots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from jlora.adapters import Adapter, BaseShape
from jlora.adapters.checkpoint import all_finite
from jlora.adapters.expert_formats import decide_exchanged
from jlora.adapters.lora import ExpertsLoRA, ModuleLoRA
from jlora.adapters.shapes import ExpertsShapes
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError
from jlora.layers.site import Site
from jlora.layers.specs import LinearSpec
from jlora.layers.wrap import WrappedModel, checkpoint_weight, spec_of
from jlora.manager.blocks import Block, Chunk, Frame, Row, bits_of
from jlora.manager.content import Placement
from jlora.manager.locks import within
from jlora.manager.names import SiteIndex

_LARGEST = float(np.finfo(np.float32).max)


@runtime_checkable
class Shapes(Protocol):
    """What is known of a module before its tensors are read."""

    @property
    def kind(self) -> str: ...
    @property
    def a_shape(self) -> tuple[int, ...]: ...
    @property
    def b_shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Fitted:
    """Where the modules of an adapter go, and their factors in slot dtype, scaling folded in."""

    placements: tuple[Placement, ...]
    blocks: tuple[Block, ...]


class _Piece(NamedTuple):
    """Factors that lie in the same slices of rows that follow each other.

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


def place(where: str, modules: Mapping[str, Shapes], index: SiteIndex) -> dict[str, tuple[Site, int, int, int]]:
    """Module name -> (site, row, first slice, slices); the first expert's row where it is of all experts.

    Raises:
      AdapterMismatchError: there is no module, a tensor that no module of the model takes, a rank above max_lora_rank,
        shapes that disagree with the model's, two modules for the same slice.
    """
    if not modules:
        raise AdapterMismatchError(f"{where} brings no LoRA weights: expected at least one module, found none")
    problems: list[str] = []
    placed: dict[str, tuple[Site, int, int, int]] = {}
    taken: dict[tuple[Site, int, int], str] = {}
    for name, module in modules.items():
        if index.skips(name):
            continue
        found = index.find(module.kind, name)
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
            continue
        site, row, first, count = found
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
    _raise(where, problems)
    if not placed:
        raise AdapterMismatchError(f"{where} brings weights for skipped modules only: nothing of it would be served")
    return placed


def fit(adapter: Adapter, wrapped: WrappedModel, index: SiteIndex, chunks: Sequence[Chunk], where: str) -> Fitted:
    """Check every tensor of `adapter` against the model and bring it into slot dtype and the blocks of its `chunks`.

    Where the model has slots for that, a factor that experts share goes into them once, if all of the adapter's do.

    Raises:
      AdapterMismatchError: as `place`; base weights that differ from the model's; values that slot dtype cannot hold.
    """
    placed = place(where, adapter.modules, index)
    problems = [
        f"{name}.base_layer.weight: {problem}"
        for name, weight in adapter.base_weights.items()
        if not index.skips(name) and (problem := _base_differs(name, weight, wrapped, index))
    ]
    _raise(where, problems)
    of_experts = [(adapter.modules[name], *place) for name, place in placed.items() if place[0].spec.experts]
    shared = bool(of_experts) and all(_is_shared(where, *module) for module in of_experts)
    ranks: dict[Row, int] = {}
    for name, (site, first_row, _, _) in placed.items():
        for held, rows in _held(adapter.modules[name], site, first_row, shared):
            for row in rows:
                ranks[held, row] = max(ranks.get((held, row), 0), adapter.modules[name].rank)
    frame = Frame(chunks, ranks)

    with within(np.errstate(over="ignore", invalid="ignore")):
        placements = [
            p
            for name, found in placed.items()
            for p in _fill(where, name, adapter.modules[name], wrapped, *found, shared, frame)
        ]
    return Fitted(tuple(placements), frame.blocks)


def _rows_of(module: Shapes, site: Site, row: int) -> range:
    """The rows that a module fills, which has its place at `row`."""
    return range(row, row + (site.spec.experts or 1)) if module.kind == "experts" else range(row, row + 1)


def _held(module: Shapes, site: Site, row: int, shared: bool) -> list[tuple[Site, range]]:
    """The sites that hold a module's factors, and the rows of each; its place is at `row` of `site`."""
    rows = _rows_of(module, site, row)
    if not (shared and site.spec.experts):
        return [(site, rows)]
    layer = row // site.spec.experts
    return [(half, rows if half.spec.experts else range(layer, layer + 1)) for half in site.shared]


def _is_shared(where: str, module: ModuleLoRA | ExpertsLoRA, site: Site, row: int, first: int, count: int) -> bool:
    """Whether the experts of a module share the factor that the site's shared slots hold once."""
    if not site.shared or isinstance(module, ModuleLoRA):
        return False
    a, b = (module.b, module.a) if _exchanged(where, module, site, first, count) else (module.a, module.b)
    return len(b if site.shared[0].spec.experts else a) == 1


def _pieces(
    where: str,
    name: str,
    module: ModuleLoRA | ExpertsLoRA,
    wrapped: WrappedModel,
    site: Site,
    first: int,
    count: int,
) -> list[_Piece]:
    """A module as it is; one of all experts slice by slice, under the names that checkpoints give each expert's."""
    if isinstance(module, ModuleLoRA):
        return [_Piece(name, (name,), first, count, module.a[None], module.b.T[None])]
    spec = site.spec
    assert spec.experts is not None
    a, b = module.a, module.b.swapaxes(1, 2)
    if _exchanged(where, module, site, first, count):
        a, b = b, a
    columns = spec_of(wrapped.modules[site], site)
    alternate = columns.columns_out if isinstance(columns, LinearSpec) else None
    if module.own_order and count == spec.slices and alternate is not None and alternate.size == alternate.total:
        b = _columns(b, alternate.positions)
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


def _columns(b: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`b[:, :, positions]`, read and written in the order of b's memory."""
    order = sorted(range(3), key=lambda axis: -b.strides[axis])
    bits = b.view(bits_of(b.dtype)).transpose(order).take(positions, order.index(2))
    return bits.view(b.dtype).transpose(np.argsort(order))


def _fill(
    where: str,
    name: str,
    module: ModuleLoRA | ExpertsLoRA,
    wrapped: WrappedModel,
    site: Site,
    row: int,
    first: int,
    count: int,
    shared: bool,
    frame: Frame,
) -> list[Placement]:
    """Write a module into its blocks; `shared`: those of the slots for experts that share factors.

    The scaling is folded in float32, before the one rounding. float16 keeps full precision over 30 powers of two only,
    so there the two factors are brought to the same largest value first, by a power of two, which rounds nothing.

    Raises:
      AdapterMismatchError: a scaling or a value that slot dtype cannot hold.
    """
    pieces = _pieces(where, name, module, wrapped, site, first, count)
    dtype, size = np.dtype(site.spec.dtype), len(pieces[0].names)
    _check_scaling(f"{where}: {pieces[0].names[0]}", module.scaling)
    shifts = [_balance(piece, module.scaling, shared) if dtype == np.float16 else [0] * size for piece in pieces]
    fills = [
        (held, rows, piece, shift)
        for held, rows in _held(module, site, row, shared)
        for piece, shift in zip(pieces, shifts, strict=True)
    ]
    for held, rows, piece, shift in fills:
        start = sum(site.spec.out_sizes[: piece.first])
        slices, columns = slice(piece.first, piece.first + piece.slices), slice(start, start + piece.b.shape[2])
        for run, parts in frame.runs(held, rows.start, len(rows)):
            into_a = [(begin, a[:, slices]) for begin, a, _ in parts if held.spec.in_features]
            into_b = [(begin, b[:, None, :, columns]) for begin, _, b in parts if held.spec.out_features]
            powers = np.array(shift[run]).reshape(-1, 1, 1) if any(shift[run]) else None
            minus = None if powers is None else -powers
            fits = _write(piece.a, run, dtype, None, powers, into_a)
            if not (fits and _write(piece.b, run, dtype, module.scaling, minus, into_b)):
                _refuse(where, module.scaling, site, pieces, shifts)
    return [
        Placement(
            *(piece.names[i] if held.spec.experts else piece.name, held, row, piece.first, piece.slices),
            *(module.rank, module.alpha, module.scaling, shift[i]),
        )
        for held, rows, piece, shift in fills
        for i, row in enumerate(rows)
    ]


_TILE = 1 << 16  # numbers that are cast together: they stay in the cache


def _write(
    factor: np.ndarray,
    run: slice,
    dtype: np.dtype,
    scaling: float | None,
    powers: np.ndarray | None,
    into: Sequence[tuple[int, np.ndarray]],
) -> bool:
    """Cast a run of the rows of a factor [rows or 1, r, X] into [rows, slices, step, X] from some first ranks on.

    It is read in the order of its memory, whichever of its axes comes first there, and turned around in the cache.

    Returns:
      Whether slot dtype holds its values. If not, not all of them are written.
    """
    shared = len(factor) == 1
    own = factor if shared else factor[run]
    sizes = own.shape
    if not shared and own.size <= _TILE:  # one of tens of thousands: nothing to cut
        return _write_tile(own, slice(None), slice(0, sizes[1]), slice(None), dtype, scaling, powers, into)
    outer = max(range(3), key=lambda axis: own.strides[axis] * (sizes[axis] > 1)) if own.size > _TILE else 0
    most = max(1, _TILE * sizes[outer] // own.size)
    for at in range(0, sizes[outer], most):
        rows, ranks, columns = (
            slice(at, min(at + most, size)) if axis == outer else slice(0, size) for axis, size in enumerate(sizes)
        )
        values = own[rows, ranks, columns]
        if shared:
            rows = slice(None)
        if not _write_tile(values, rows, ranks, columns, dtype, scaling, powers, into):
            return False
    return True


def _write_tile(
    values: np.ndarray,
    rows: slice,
    ranks: slice,
    columns: slice,
    dtype: np.dtype,
    scaling: float | None,
    powers: np.ndarray | None,
    into: Sequence[tuple[int, np.ndarray]],
) -> bool:
    """`_write` of what is small enough to stay in the cache."""
    cast = times_a_power_of_two(values, scaling) if powers is None and values.dtype == dtype == _BFLOAT16 else None
    if cast is None:
        cast = _cast(values, dtype, scaling, None if powers is None else powers[rows])
        if _too_large(values, cast) is not None:
            return False
    bits = cast.view(bits_of(dtype))[:, None]
    for first, target in into:
        begin, end = max(ranks.start, first), min(ranks.stop, first + target.shape[2])
        if begin < end:
            part = bits[:, :, begin - ranks.start : end - ranks.start]
            target[rows, :, begin - first : end - first, columns] = part
    return True


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


def _raise(where: str, problems: list[str]) -> None:
    if problems:
        shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise AdapterMismatchError(f"{where} does not fit this model:\n  " + "\n  ".join(shown))


def _misfit(site: Site, module: Shapes, first: int, count: int) -> str | None:
    if isinstance(module, ExpertsLoRA | ExpertsShapes):
        return _experts_misfit(site, module, first, count)
    (rank, *_), spec = module.a_shape, site.spec
    if rank > spec.max_rank:
        return f"rank {rank} is above max_lora_rank={spec.max_rank}"
    outputs = sum(spec.out_sizes[first : first + count])
    expected = ((rank, spec.in_features), (outputs, rank))
    found = (tuple(module.a_shape), tuple(module.b_shape))
    if found != expected:
        return f"A and B have shapes {found[0]} and {found[1]}, and {site.path!r} takes {expected[0]} and {expected[1]}"
    return None


def _experts_misfit(site: Site, module: ExpertsLoRA | ExpertsShapes, first: int, count: int) -> str | None:
    spec = site.spec
    if module.rank > spec.max_rank:
        return f"rank {module.rank} is above max_lora_rank={spec.max_rank}"
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


def in_slot_dtype(where: str, factor: np.ndarray, site: Site, scaling: float | None, power: int = 0) -> np.ndarray:
    """A, or B with its scaling, times two to the power: in slot dtype.

    Raises:
      AdapterMismatchError: a scaling or a value that slot dtype cannot hold.
    """
    if scaling is not None:
        _check_scaling(where, scaling)
    dtype = np.dtype(site.spec.dtype)
    with within(np.errstate(over="ignore", invalid="ignore")):
        cast = _cast(factor, dtype, scaling, np.array(power) if power else None)
    overflow = _too_large(factor, cast)
    if overflow is not None:
        exact = np.abs(factor.astype(np.float64)) * (1 if scaling is None else abs(scaling))
        largest = float(exact.max(initial=0, where=overflow))
        raise AdapterMismatchError(
            f"{where}: {'A' if scaling is None else 'scaling * B'} must be finite in the slots' dtype {dtype}, and "
            f"reaches {largest:.3g}; set LoRAConfig.dtype to a wider one"
        )
    return cast


def _check_scaling(where: str, scaling: float) -> None:
    if not abs(scaling) <= _LARGEST:  # NaN is not
        raise AdapterMismatchError(f"{where}: scaling must be a finite float32, found {scaling}")


def _cast(factor: np.ndarray, dtype: np.dtype, scaling: float | None, powers: np.ndarray | None) -> np.ndarray:
    """A factor times its scaling and powers of two, rounded once, in the order that it has in memory."""
    if scaling is None and powers is None:
        return factor if factor.dtype == dtype else narrowed(factor, dtype)
    wide = widened(factor)
    if scaling is not None:
        wide *= np.float32(scaling)
    return narrowed(wide if powers is None else np.ldexp(wide, powers), dtype)


def _too_large(factor: np.ndarray, cast: np.ndarray) -> np.ndarray | None:
    """Where a finite number became infinite; None if nowhere."""
    if cast is factor or all_finite(cast.ravel("K")):
        return None
    overflow = ~np.isfinite(cast) & np.isfinite(factor)
    return overflow if overflow.any() else None


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def times_a_power_of_two(factor: np.ndarray, scaling: float | None) -> np.ndarray | None:
    """A bfloat16 factor times a scaling such as 2, as most have, in a third of the time: its exponents are changed.

    None where the scaling is no positive power of two, or where there is a zero, a number below the normal ones, or one
    that is not finite, before or after.
    """
    if scaling is None:
        return factor
    mantissa, exponent = math.frexp(scaling)
    if mantissa != 0.5 or abs(exponent) > 100:
        return None
    bits, added = factor.view(np.uint16), (exponent - 1) << 7
    sizes = bits & np.uint16(0x7FFF)
    smallest, largest = int(sizes.min()), int(sizes.max())
    if min(smallest, smallest + added) < 0x0080 or max(largest, largest + added) >= 0x7F80:
        return None
    return np.add(bits, np.uint16(added & 0xFFFF), out=sizes).view(_BFLOAT16)


def widened(array: np.ndarray) -> np.ndarray:
    """A float32 copy of any float array. bfloat16 by its bits: the casts of ml_dtypes are slow, and hold the
    interpreter."""
    if array.dtype != _BFLOAT16:
        return array.astype(np.float32)
    bits = array.view(np.uint16).astype(np.uint32)
    return np.left_shift(bits, 16, out=bits).view(np.float32)


def narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rounded to nearest, ties to even. float32 and float16 to bfloat16 by the bits, as in `widened`."""
    if dtype != _BFLOAT16 or array.dtype == np.float64:
        return array.astype(dtype, copy=False)
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    nan = np.isnan(array)
    if nan.any():  # rounding could carry a NaN's bits into the exponent
        rounded[nan] = 0x7FC0
    return rounded.astype(np.uint16).view(_BFLOAT16)


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
    problems: list[str] = []
    for name, weight in weights.items():
        if index.skips(name):
            continue
        found = _base_site(name, index)
        if isinstance(found, str):
            problems.append(f"{name}.base_layer.weight: {found}")
            continue
        site, _, first, count = found
        outputs, inputs = sum(site.spec.out_sizes[first : first + count]), site.spec.in_features
        own = (inputs, outputs) if site.kind == "embedding" else (outputs, inputs)
        if own != tuple(weight.shape):
            problems.append(f"{name}.base_layer.weight: shape {tuple(weight.shape)}, and the model's own has {own}")
    _raise(where, problems)


def _base_site(name: str, index: SiteIndex) -> tuple[Site, int, int, int] | str:
    found: tuple[Site, int, int, int] | str = ""
    for kind in ("embedding", "linear"):
        found = index.find(kind, name)
        if not isinstance(found, str):
            return found
    return f"no wrapped module can be compared with it ({found})"


def _base_differs(name: str, weight: np.ndarray, wrapped: WrappedModel, index: SiteIndex) -> str | None:
    """PEFT may save the full embedding beside its LoRA: it must be the one that the model has."""
    found = _base_site(name, index)
    if isinstance(found, str):
        return found
    site, layer, first, count = found
    own = checkpoint_weight(wrapped, site, layer)
    if site.kind == "linear":
        start = sum(site.spec.out_sizes[:first])
        own = own[start : start + sum(site.spec.out_sizes[first : first + count])]
    if own.shape != weight.shape:
        return f"shape {weight.shape}, and the model's own weight has {own.shape}"
    with within(np.errstate(over="ignore", invalid="ignore")):
        stored = weight.astype(own.dtype)
    if not np.array_equal(own, stored):
        return "its values differ from the model's own weight: it was trained on another base model"
    return None
