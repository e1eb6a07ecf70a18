"""Casts of factors to slot dtype, written into their blocks."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from jlora.adapters.int8 import quanta_of, rounded
from jlora.adapters.tensor_data import all_finite
from jlora.errors import AdapterMismatchError

_LARGEST = float(np.finfo(np.float32).max)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_UINT16 = np.dtype(np.uint16)
_TILE = 1 << 18  # elements that are cast together, few enough to stay in the cache


def bits_of(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which to copy arrays of `dtype`: uint16 for bfloat16, else `dtype`.

    NumPy holds the interpreter lock while it copies arrays of dtypes that are not its own.
    """
    return _UINT16 if dtype == _BFLOAT16 else dtype


def write(
    factor: np.ndarray,
    run: slice,
    dtype: np.dtype,
    into: Sequence[tuple[int, np.ndarray]],
    quanta: np.ndarray | None = None,
) -> bool:
    """Cast a run of entries of a factor and write it into blocks.

    The factor is read in its memory order, in tiles that are transposed in the cache.

    Args:
      factor: [entries, r, X], or [1, r, X] if all entries share it.
      run: The entries to write.
      dtype: The dtype of the slots.
      into: (first rank, [entries, slices, rank_block, X] viewed as `bits_of(dtype)`) of each block to write.
      quanta: For int8, the quantum of each rank of the run, [entries, r] or [1, r].

    Returns:
      True if slot dtype holds all values. If False, some values are not written.
    """
    shared = len(factor) == 1
    part = factor if shared else factor[run]
    sizes = part.shape
    quanta = None if quanta is None else np.broadcast_to(quanta, sizes[:2])
    if not shared and part.size <= _TILE:  # fast path for adapters of tens of thousands of small factors
        return _write_tile(part, slice(None), slice(0, sizes[1]), slice(None), dtype, into, quanta)
    outer = max(range(3), key=lambda axis: part.strides[axis] * (sizes[axis] > 1)) if part.size > _TILE else 0
    most = max(1, _TILE * sizes[outer] // part.size)
    for at in range(0, sizes[outer], most):
        entries, ranks, columns = (
            slice(at, min(at + most, size)) if axis == outer else slice(0, size) for axis, size in enumerate(sizes)
        )
        values, of_values = part[entries, ranks, columns], None if quanta is None else quanta[entries, ranks]
        if shared:
            entries = slice(None)
        if not _write_tile(values, entries, ranks, columns, dtype, into, of_values):
            return False
    return True


def _write_tile(
    values: np.ndarray,
    entries: slice,
    ranks: slice,
    columns: slice,
    dtype: np.dtype,
    into: Sequence[tuple[int, np.ndarray]],
    quanta: np.ndarray | None,
) -> bool:
    """Apply `write` to one tile, which is small enough to stay in the cache."""
    cast = _cast(values, dtype if quanta is None else _FLOAT32)
    if _too_large(values, cast) is not None:
        return False
    cast = cast if quanta is None else rounded(cast, quanta)
    bits = cast.view(bits_of(dtype))[:, None]
    for first, target in into:
        begin, end = max(ranks.start, first), min(ranks.stop, first + target.shape[2])
        if begin < end:
            part = bits[:, :, begin - ranks.start : end - ranks.start]
            target[entries, :, begin - first : end - first, columns] = part
    return True


def quanta_of_factor(factor: np.ndarray) -> np.ndarray:
    """Return the int8 quanta [entries, r] of a factor [entries, r, X], in float32 and in parts that fit the cache."""
    most = max(1, _TILE * len(factor) // factor.size)
    return np.concatenate([quanta_of(_cast(factor[i : i + most], _FLOAT32)) for i in range(0, len(factor), most)])


def in_slot_dtype(where: str, label: str, factor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a factor in slot dtype, float32 for int8. Messages start with `where` and call the factor `label`.

    Raises:
      AdapterMismatchError: Slot dtype cannot hold a value.
    """
    dtype = _FLOAT32 if dtype == np.int8 else dtype
    with np.errstate(over="ignore", invalid="ignore"):
        cast = _cast(factor, dtype)
    overflow = _too_large(factor, cast)
    if overflow is not None:
        largest = float(np.abs(factor.astype(np.float64)).max(initial=0, where=overflow))
        raise AdapterMismatchError(
            f"{where}: {label} must be finite in the slots' dtype {dtype}, and reaches {largest:.3g}; set "
            "LoRAConfig.dtype to a wider one"
        )
    return cast


def fits_float32(value: float) -> bool:
    """Return True if a number is finite as a float32."""
    if isinstance(value, np.floating):
        value = float(value)  # NumPy would round the limit to float16, where it is infinite
    return bool(abs(value) <= _LARGEST)  # False for NaN too


def check_scaling(where: str, scaling: float) -> None:
    """Raise AdapterMismatchError if the scaling is not a finite float32."""
    if not fits_float32(scaling):
        raise AdapterMismatchError(f"{where}: scaling must be a finite float32, found {scaling}")


def _cast(factor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a factor in `dtype`, rounded to nearest, ties to even, in the memory order of the factor.

    Float64 becomes bfloat16 by way of float32. Casts of bfloat16 use integer operations, because those of ml_dtypes are
    slow and hold the interpreter lock.
    """
    if factor.dtype == dtype:
        return factor
    if factor.dtype == _BFLOAT16:
        bits = factor.view(np.uint16).astype(np.uint32)
        return np.left_shift(bits, 16, out=bits).view(np.float32).astype(dtype, copy=False)
    if dtype != _BFLOAT16:
        return factor.astype(dtype)
    wide = factor.astype(np.float32, copy=False)
    bits = wide.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= 16
    nan = np.isnan(wide)
    if nan.any():  # rounding can carry the bits of a NaN out of its mantissa
        rounded[nan] = 0x7FC0
    return rounded.astype(np.uint16).view(_BFLOAT16)


def _too_large(factor: np.ndarray, cast: np.ndarray) -> np.ndarray | None:
    """Return the mask of finite values that became infinite, or None if there are none."""
    if cast is factor or all_finite(cast):
        return None
    overflow = ~np.isfinite(cast) & np.isfinite(factor)
    return overflow if overflow.any() else None
