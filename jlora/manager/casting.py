"""Casts of factors to slot dtype, with scaling and a single rounding, written into their blocks."""

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
_TILE = 1 << 18  # elements that are cast together, few enough to stay in the cache


def write(
    factor: np.ndarray,
    run: slice,
    dtype: np.dtype,
    scaling: float | None,
    powers: np.ndarray | None,
    into: Sequence[tuple[int, np.ndarray]],
) -> bool:
    """Cast a run of rows of a factor and write it into blocks.

    The factor is read in its memory order, in tiles that are transposed in the cache.

    Args:
      factor: [rows, r, X], or [1, r, X] if all rows share it.
      run: The rows to write.
      dtype: The dtype of the slots.
      scaling: Multiplied in float32 before the rounding. None for 1.
      powers: Exponents of two to multiply each row by, [rows, 1, 1] of the run. None for 0.
      into: (first rank, [rows, slices, step, X] viewed as `bits_of(dtype)`) of each block to write.

    Returns:
      True if slot dtype holds all values. If False, some values are not written.
    """
    shared = len(factor) == 1
    own = factor if shared else factor[run]
    sizes = own.shape
    if not shared and own.size <= _TILE:  # fast path for adapters of tens of thousands of small factors
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
    """Apply `write` to one tile, which is small enough to stay in the cache."""
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
    """Return `factor * scaling * 2**power` in slot dtype. `scaling` is None for A.

    Raises:
      AdapterMismatchError: The scaling is not a finite float32, or slot dtype cannot hold a value.
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
    """Raise AdapterMismatchError if the scaling is not a finite float32."""
    if not abs(scaling) <= _LARGEST:  # False for NaN too
        raise AdapterMismatchError(f"{where}: scaling must be a finite float32, found {scaling}")


def _cast(factor: np.ndarray, dtype: np.dtype, scaling: float | None, powers: np.ndarray | None) -> np.ndarray:
    """Return `factor * scaling * 2**powers`, rounded once, in the memory order of `factor`."""
    if scaling is None and powers is None:
        return factor if factor.dtype == dtype else narrowed(factor, dtype)
    wide = factor if scaling is None and factor.dtype == np.float64 else widened(factor)
    if scaling is not None:
        wide *= np.float32(scaling)
    return narrowed(wide if powers is None else np.ldexp(wide, powers), dtype)


def _too_large(factor: np.ndarray, cast: np.ndarray) -> np.ndarray | None:
    """Return the mask of finite values that became infinite, or None if there are none."""
    if cast is factor or all_finite(cast.ravel("K")):
        return None
    overflow = ~np.isfinite(cast) & np.isfinite(factor)
    return overflow if overflow.any() else None


def times_a_power_of_two(factor: np.ndarray, scaling: float | None) -> np.ndarray | None:
    """Multiply a bfloat16 factor by a power of two, in a third of the time, by adding to the exponent bits.

    Most adapters have such a scaling. The factor itself is returned if `scaling` is None. Return None if `scaling` is
    not a positive power of two, or if a value is zero, subnormal or not finite before or after.
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
    """Return a float32 copy of any float array.

    bfloat16 is converted with integer operations. The casts of ml_dtypes are slow and hold the interpreter lock.
    """
    if array.dtype != _BFLOAT16:
        return array.astype(np.float32)
    bits = array.view(np.uint16).astype(np.uint32)
    return np.left_shift(bits, 16, out=bits).view(np.float32)


def narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the array in `dtype`, rounded to nearest, ties to even.

    float32 and float16 are converted to bfloat16 with integer operations, as in `widened`.
    """
    if dtype != _BFLOAT16 or array.dtype == np.float64:
        return array.astype(dtype, copy=False)
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    nan = np.isnan(array)
    if nan.any():  # rounding can carry the bits of a NaN out of its mantissa
        rounded[nan] = 0x7FC0
    return rounded.astype(np.uint16).view(_BFLOAT16)
