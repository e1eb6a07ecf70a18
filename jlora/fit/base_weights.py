"""Checks that base weights stored with an adapter equal the weights of the model."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from jlora.adapters.lora import HostArray
from jlora.fit.names import SiteIndex
from jlora.fit.shapes import refuse
from jlora.layers.site import Site
from jlora.layers.wrap.wrapped import WrappedModel, checkpoint_weight, dequantized_weight
from jlora.slots.codec import outputs


def check_base_shapes(where: str, weights: Mapping[str, HostArray], index: SiteIndex) -> None:
    """Raise AdapterMismatchError if the name or the shape of a base weight does not match the model."""
    problems: list[str] = []
    for name, weight in weights.items():
        if index.skips(name):
            continue
        found = _site(name, index)
        if isinstance(found, str):
            problems.append(f"{name}.base_layer.weight: {found}")
            continue
        site, _, first, count = found
        outputs, inputs = sum(site.spec.out_sizes[first : first + count]), site.spec.in_features
        shape = (inputs, outputs) if site.kind == "embedding" else (outputs, inputs)
        if shape != weight.shape:
            problems.append(f"{name}.base_layer.weight: shape {weight.shape}, and the model's own has {shape}")
    refuse(where, problems)


def _site(name: str, index: SiteIndex) -> tuple[Site, int, int, int] | str:
    """Return the place of the module `name`, or the reason why there is none."""
    place: tuple[Site, int, int, int] | str = ""
    for kind in ("embedding", "linear"):
        place = index.find(kind, name)
        if not isinstance(place, str):
            return place
    return f"no wrapped module can be compared with it ({place})"


def check_base_weights(
    where: str, weights: Mapping[str, np.ndarray], wrapped: WrappedModel, index: SiteIndex
) -> list[str]:
    """Check that stored base weights equal the model's. Return one warning for each that cannot be compared.

    PEFT stores the base weights of an embedding or lm_head beside its LoRA factors, and trains neither.

    Raises:
      AdapterMismatchError: A weight differs from the model's in its name, shape or values.
    """
    check_base_shapes(where, weights, index)
    problems, warnings = list[str](), list[str]()
    for name, weight in weights.items():
        found = _site(name, index)
        if index.skips(name) or isinstance(found, str):
            continue
        if (served := _served(wrapped, *found)) is None:
            warnings.append(
                f"{name}.base_layer.weight cannot be compared with the model's weight, which is quantized; it is taken "
                "to be the same, as PEFT stores it by default"
            )
        elif (problem := difference(weight, *served)) is not None:
            problems.append(f"{name}.base_layer.weight: {problem}")
    refuse(where, problems)
    return warnings


_finfo: Any = ml_dtypes.finfo  # not typed
_ROWS = 1024  # rows that are compared at once: a table of 2**30 values would take 8 GB in float64
_Served: TypeAlias = tuple[np.ndarray, np.ndarray | None, np.dtype | None]


def _served(wrapped: WrappedModel, site: Site, entry: int, first: int, count: int) -> _Served | None:
    """Return the arguments of `difference` for slices of a layer, or None if no comparison is possible."""
    codes: np.dtype | None = None
    if (base := checkpoint_weight(wrapped, site, entry)) is not None:
        weight, known = base
    elif (values := dequantized_weight(wrapped, site)) is not None:
        (weight, codes), known = values, None
    else:
        return None
    if site.kind == "linear":
        rows = outputs(site.spec, first, count)
        weight, known = weight[rows], known if known is None else known[rows]
    return weight, known, codes


def difference(
    stored: np.ndarray, weight: np.ndarray, known: np.ndarray | None = None, codes: np.dtype | None = None
) -> str | None:
    """Return how a stored base weight differs from the model's, or None if both are one weight, rounded.

    Values may differ by the resolution of the coarser of the two dtypes. A float32 weight of bfloat16 or float16 values
    counts as one of that dtype. A quantized weight may be half a quantum of its codes further away.

    Args:
      stored: [N, K], or [V, D] of an embedding.
      weight: The model's weight, of the same layout.
      known: Mask of the values of `weight` that this process has; None for all.
      codes: int8 or float8 dtype of the codes from which `weight` was dequantized; None if it was not.
    """
    if weight.shape != stored.shape:
        return f"shape {stored.shape}, and the model's own weight has {weight.shape}"
    infos = [_finfo(_values_dtype(array)) for array in ([stored, weight] if codes is None else [stored])]
    relative, absolute = (max(float(getattr(info, name)) for info in infos) for name in ("eps", "smallest_subnormal"))
    half_quantum = None if codes is None else _half_quantum(codes, weight)
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        ours, theirs = weight[rows].astype(np.float64), stored[rows].astype(np.float64)
        apart = np.abs(ours - theirs) - relative * np.maximum(np.abs(ours), np.abs(theirs)) - absolute
        near = apart <= (0 if half_quantum is None else half_quantum(np.abs(ours)))
        if not (near if known is None else near | ~known[rows]).all():
            return "its values differ from the model's own weight: it was trained on another base model"
    return None


def _values_dtype(array: np.ndarray) -> np.dtype:
    """Return the coarsest of bfloat16, float16 and the array's dtype that holds its values exactly."""
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float16):
            if all((part.astype(dtype).astype(array.dtype) == part).all() for part in array):
                return np.dtype(dtype)
    return array.dtype


def _half_quantum(codes: np.dtype, weight: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from the magnitudes of output columns [rows, K] to half the distance between their codes.

    A column may have a scale of its own, one for each block of inputs, or share one with the others. `weight` is the
    whole dequantized weight. The result leaves room for the rounding of scales.
    """
    if np.issubdtype(codes, np.integer):
        least = float(np.min(np.abs(weight), where=weight != 0, initial=np.inf))  # the quantum, if all columns share it
        least = least if least < np.inf else 0
        return lambda top: 0.501 * np.maximum(top.max(axis=1, keepdims=True) / np.iinfo(codes).max, least)
    info = _finfo(codes)
    least = float(np.abs(weight).max(initial=0)) / float(info.max) * float(info.smallest_subnormal)
    return lambda top: 0.501 * np.maximum(top * float(info.eps), least)
