"""Does an adapter fit the model? Its shapes are checked before its values, and then cast and scaled for the slots."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
from jlora.manager.blocks import Row
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
    factors: Mapping[Row, tuple[np.ndarray, np.ndarray]]


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


def fit(adapter: Adapter, wrapped: WrappedModel, index: SiteIndex, where: str) -> Fitted:
    """Check every tensor of `adapter` against the model and bring it into slot dtype.

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
    placements: list[Placement] = []
    factors: dict[Row, tuple[np.ndarray, np.ndarray]] = {}
    ranks: dict[Row, int] = {}
    for name, (site, first_row, _, _) in placed.items():
        for row in _rows_of(adapter.modules[name], site, first_row):
            ranks[site, row] = max(ranks.get((site, row), 0), adapter.modules[name].rank)
    pieces = (
        piece
        for name, found in placed.items()
        for piece in _pieces(where, name, adapter.modules[name], wrapped, *found)
    )
    for name, module, site, first_row, first, count, own_a, own_b in pieces:
        spec, row = site.spec, (site, first_row)
        a, b, shift = scaled(f"{where}: {name}", own_a, own_b.T, module.scaling, site)
        placements.append(
            Placement(name, site, first_row, first, count, module.rank, module.alpha, module.scaling, shift)
        )
        if count == spec.slices == 1:
            factors[row] = (a[None], b)
            continue
        if row not in factors:
            factors[row] = (
                np.zeros((spec.slices, ranks[row], spec.in_features), spec.dtype),
                np.zeros((ranks[row], spec.out_features), spec.dtype),
            )
        put(factors[row], site, first, count, a, b)
    return Fitted(tuple(placements), factors)


def _rows_of(module: Shapes, site: Site, row: int) -> range:
    """The rows that a module fills, which has its place at `row`."""
    return range(row, row + (site.spec.experts or 1)) if module.kind == "experts" else range(row, row + 1)


def _pieces(
    where: str,
    name: str,
    module: ModuleLoRA | ExpertsLoRA,
    wrapped: WrappedModel,
    site: Site,
    row: int,
    first: int,
    count: int,
) -> Iterator[tuple[str, ModuleLoRA | ExpertsLoRA, Site, int, int, int, np.ndarray, np.ndarray]]:
    """(name, module, site, row, first slice, slices, a [r, K], b [N, r]) of a module; of each expert and each slice,
    under the name that checkpoints give it, where it is of all experts at once."""
    if isinstance(module, ModuleLoRA):
        yield name, module, site, row, first, count, module.a, module.b
        return
    spec = site.spec
    assert spec.experts is not None
    a, b = module.a, module.b
    if _exchanged(where, module, site, first, count):
        a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
    columns = spec_of(wrapped.modules[site], site)
    alternate = columns.columns_out if isinstance(columns, LinearSpec) else None
    if module.own_order and count == spec.slices and alternate is not None and alternate.size == alternate.total:
        b = b[:, alternate.positions]
    block, _, own = name.rpartition(".")
    called: dict[int, str] = {}  # the first name of each slice
    for key, (i, n) in site.parts.items():
        if n == 1:
            called.setdefault(i, key.rpartition(".")[2])
    starts = np.cumsum((0, *spec.out_sizes[first : first + count]))
    for expert in range(spec.experts):
        own_a, own_b = a[expert % len(a)], b[expert % len(b)]
        for i in range(count):
            part = own if count == 1 else called[first + i]
            halves = own_a, own_b[starts[i] : starts[i + 1]]
            yield f"{block}.{expert}.{part}", module, site, row + expert, first + i, 1, *halves


def _exchanged(where: str, module: ExpertsLoRA | ExpertsShapes, site: Site, first: int, count: int) -> bool:
    """Whether a module of all experts has in and out exchanged. Raises where that cannot be told, or sizes differ."""
    sizes = module.a_shape[2], module.b_shape[1]
    expected = site.spec.in_features, sum(site.spec.out_sizes[first : first + count])
    if module.exchanged is None:
        return decide_exchanged(sizes, expected, module.peft_version, where)
    if sizes != (expected[::-1] if module.exchanged else expected):
        raise AdapterMismatchError(f"A takes {sizes[0]} and B gives {sizes[1]}; {site.path!r} has {expected}")
    return module.exchanged


def put(into: tuple[np.ndarray, np.ndarray], site: Site, first: int, count: int, a: np.ndarray, b: np.ndarray) -> None:
    """Write A [r, K] and B [r, N of the slices] into the factors of a row."""
    start = sum(site.spec.out_sizes[:first])
    into[0][first : first + count, : len(a)] = a
    into[1][: len(b), start : start + b.shape[1]] = b


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


def scaled(
    where: str, a: np.ndarray, b: np.ndarray, scaling: float, site: Site, shift: int | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """A [r, K] and B [r, N] in slot dtype with the scaling folded into B, and the power of two that went from B to A.

    The scaling is folded in float32, before the one rounding. float16 keeps full precision over 30 powers of two only,
    so there the two factors are brought to the same largest value first, by a power of two, which rounds nothing.

    Raises:
      AdapterMismatchError: a scaling or a value that slot dtype cannot hold.
    """
    if not abs(scaling) <= _LARGEST:  # NaN is not
        raise AdapterMismatchError(f"{where}: scaling must be a finite float32, found {scaling}")
    dtype = np.dtype(site.spec.dtype)
    with within(np.errstate(over="ignore", invalid="ignore")):
        folded = widened(b) * np.float32(scaling)
        if shift is None:
            shift = _balance(a, folded) if dtype == np.float16 else 0
        wide_a = a
        if shift:
            wide_a, folded = np.ldexp(widened(a), shift), np.ldexp(folded, -shift)
        cast_a, cast_b = (wide_a if wide_a.dtype == dtype else wide_a.astype(dtype)), narrowed(folded, dtype)
    for cast, original, label in ((cast_a, a, "A"), (cast_b, b, "scaling * B")):
        if cast is original or all_finite(cast):
            continue
        overflow = ~np.isfinite(cast) & np.isfinite(original)
        if overflow.any():
            exact = np.abs(original.astype(np.float64)) * (1 if label == "A" else abs(scaling))
            largest = float(exact.max(initial=0, where=overflow))
            raise AdapterMismatchError(
                f"{where}: {label} must be finite in the slots' dtype {dtype}, and reaches {largest:.3g}; set "
                "LoRAConfig.dtype to a wider one"
            )
    return cast_a, cast_b, shift


_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def widened(array: np.ndarray) -> np.ndarray:
    """float32 of any float array. bfloat16 by its bits: the casts of ml_dtypes are slow, and hold the interpreter."""
    if array.dtype != _BFLOAT16:
        return array.astype(np.float32, order="C")
    bits = array.view(np.uint16).astype(np.uint32, order="C")
    return np.left_shift(bits, 16, out=bits).view(np.float32)


def narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 rounded to nearest, ties to even. bfloat16 by its bits, as in `widened`."""
    if dtype != _BFLOAT16:
        return array.astype(dtype)
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan = np.isnan(array)
    if nan.any():  # rounding could carry a NaN's bits into the exponent
        rounded = np.where(nan, np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16).view(_BFLOAT16)


def _balance(a: np.ndarray, b: np.ndarray) -> int:
    """The power of two by which A grows and B shrinks so that their largest values come closest."""
    largest = [float(np.abs(factor, dtype=np.float32).max(initial=0, where=np.isfinite(factor))) for factor in (a, b)]
    if not all(largest):
        return 0
    return round((math.log2(largest[1]) - math.log2(largest[0])) / 2)


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
