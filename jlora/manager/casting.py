"""Factors in the dtype of slots: scaled, rounded once, and written into their blocks."""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from jlora.adapters.checkpoint import all_finite
from jlora.errors import AdapterMismatchError
from jlora.layers.site import Site
from jlora.manager.blocks import bits_of

_LARGEST = float(np.finfo(np.float32).max)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TILE = 1 << 18  # numbers that are cast together: they stay in the cache


def write(
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
    """`write` of what is small enough to stay in the cache."""
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


def in_slot_dtype(where: str, factor: np.ndarray, site: Site, scaling: float | None, power: int = 0) -> np.ndarray:
    """A, or B with its scaling, times two to the power: in slot dtype.

    Raises:
      AdapterMismatchError: a scaling or a value that slot dtype cannot hold.
    """
    if scaling is not None:
        check_scaling(where, scaling)
    dtype = np.dtype(site.spec.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
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


def check_scaling(where: str, scaling: float) -> None:
    if not abs(scaling) <= _LARGEST:  # NaN is not
        raise AdapterMismatchError(f"{where}: scaling must be a finite float32, found {scaling}")


def _cast(factor: np.ndarray, dtype: np.dtype, scaling: float | None, powers: np.ndarray | None) -> np.ndarray:
    """A factor times its scaling and powers of two, rounded once, in the order that it has in memory."""
    if scaling is None and powers is None:
        return factor if factor.dtype == dtype else narrowed(factor, dtype)
    wide = factor if scaling is None and factor.dtype == np.float64 else widened(factor)
    if scaling is not None:
        wide *= np.float32(scaling)
    return narrowed(wide if powers is None else np.ldexp(wide, powers), dtype)


def _too_large(factor: np.ndarray, cast: np.ndarray) -> np.ndarray | None:
    """Where a finite number became infinite; None if nowhere."""
    if cast is factor or all_finite(cast.ravel("K")):
        return None
    overflow = ~np.isfinite(cast) & np.isfinite(factor)
    return overflow if overflow.any() else None


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
