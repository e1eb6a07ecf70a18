"""Read the tensors of a safetensors file directly into their final arrays, and check them while they are in cache."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from jlora._memory import fresh
from jlora._threads import on_threads
from jlora.adapters.files import ReadFile
from jlora.adapters.tensor_file import TensorInfo
from jlora.errors import AdapterFormatError, shown

# safetensors' name of each served dtype
DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# dtype -> signed and unsigned integers of its size, and the bits of infinity. NaN has greater bits below the sign.
_BITS = {
    DTYPES["F16"]: (np.int16, np.uint16, 0x7C00),
    DTYPES["BF16"]: (np.int16, np.uint16, 0x7F80),
    DTYPES["F32"]: (np.int32, np.uint32, 0x7F80_0000),
    DTYPES["F64"]: (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
}
_PART = 1 << 25  # bytes of one thread's work item
# Bytes at which an array takes no further tensor. Small enough that memory returns to the system long before the last
# tensor of an adapter is freed; large enough that malloc maps each array separately and unmaps it when freed.
_WHOLE = 1 << 26
_PIECE = 1 << 19  # bytes read and checked at a time, so that they stay in the cache


class Share(NamedTuple):
    """The experts to read from a tensor that has shape [leading, experts, ...] in the file.

    The array in memory has shape [experts, leading, ...]. Experts that are not read are zeros that take no memory.

    Attributes:
      leading: Number of blocks before the expert axis; 1 if each expert is contiguous. Experts are interleaved if it is
        larger.
      experts: Number of experts.
      own: Ranges of experts to read, in order. With () the tensor is not read.
    """

    leading: int
    experts: int
    own: tuple[range, ...]


@dataclass
class _Run:
    """Tensors that are adjacent in the file and share one array, since a file may have tens of thousands.

    Attributes:
      stored, kept: Dtype in the file, and dtype of the array.
      base: True if the tensors are base weights.
      names: Names of the tensors.
      begin, end: Byte offsets in the file.
    """

    stored: np.dtype
    kept: np.dtype
    base: bool
    names: list[str]
    begin: int
    end: int

    def places(self, begin: int, end: int) -> slice:
        """Return the slice of the array for these bytes of the file."""
        return slice(*((at - self.begin) // self.stored.itemsize for at in (begin, end)))


class _Span(NamedTuple):
    """One thread's work item.

    Attributes:
      run, whole: The run and its array.
      turns: Name of the tensor if its experts are interleaved, else None.
      begin, end: Byte offsets in the file.
    """

    run: _Run
    whole: np.ndarray
    turns: str | None
    begin: int
    end: int


_Keep: TypeAlias = Callable[[np.ndarray, np.ndarray, Callable[[np.ndarray], str]], None]


def read_tensors(
    file: ReadFile,
    tensors: Mapping[str, TensorInfo],
    base: Collection[str],
    *,
    where: str,
    dtype: np.dtype | None = None,
    allow_nonfinite: bool = False,
    shares: Mapping[str, Share] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Read tensors of served dtypes.

    A tensor with interleaved experts of which some are wanted is read once, piece by piece. Memory holds only the
    wanted experts and one piece for each thread.

    Args:
      file: The open file.
      tensors: Tensors of the header in file order.
      base: Names of base weights. They are never converted and share no array with other tensors.
      where: Adapter and file, for messages.
      dtype: Convert to this dtype. None keeps the file's dtype.
      allow_nonfinite: Accept NaN and infinity.
      shares: Tensor name -> experts to read, for tensors that are not read whole. Unread experts are not checked for
        NaN and infinity.

    Returns:
      Tensor name -> read-only array. Adjacent tensors are views of one array of limited size. An array has the file's
      shape, or [experts, leading, ...] for a share of a tensor with interleaved experts.

    Raises:
      AdapterFormatError: The file holds NaN or infinity, holds a value too large for `dtype`, or changed during the
        read.
    """
    runs = list(_runs(tensors, base, dtype))
    wholes = [_memory(run, shares) for run in runs]
    parts = [
        _Span(run, whole, turns, at, min(at + step, end))
        for run, whole in zip(runs, wholes, strict=True)
        for begin, end, turns in _spans(tensors, run, shares)
        for step in [_PART if turns is None else _step(tensors[turns], shares[turns], _PART)]
        for at in range(begin, end, step)
    ]

    def keep(found: np.ndarray, kept: np.ndarray, name_of: Callable[[np.ndarray], str]) -> None:
        """Check the values that were read and copy them to their array."""
        if not (allow_nonfinite or all_finite(found)):
            raise AdapterFormatError(
                f"{where}: tensor {shown(name_of(~np.isfinite(found)))} holds NaN or infinity; expected finite numbers "
                "(allow_nonfinite=True lets them in)"
            )
        if found is kept:
            return
        if found.dtype == kept.dtype:
            kept.view(_unsigned(kept.dtype))[...] = found.view(_unsigned(kept.dtype))
            return
        with np.errstate(over="ignore", invalid="ignore"):
            kept[...] = found
        if not (np.can_cast(found.dtype, kept.dtype) or all_finite(kept)):
            too_large = np.isinf(kept) & np.isfinite(found)
            if too_large.any():
                raise AdapterFormatError(
                    f"{where}: tensor {shown(name_of(too_large))} ({found.dtype}) holds values too large for "
                    f"{kept.dtype}"
                )

    def fill(part: _Span) -> None:
        if part.turns is None:
            _read_span(file, part, tensors, keep)
        else:
            _read_turns(file, part, part.turns, tensors, shares[part.turns], keep)

    on_threads(fill, parts, sum(part.end - part.begin for part in parts))
    arrays: dict[str, np.ndarray] = {}
    for run, whole in zip(runs, wholes, strict=True):
        whole.flags.writeable = False  # before the views are made, so that they cannot be set writeable
        for name in run.names:
            info, share = tensors[name], shares.get(name)
            shape = info.shape if share is None or share.leading == 1 else (share.experts, share.leading, -1)
            arrays[name] = whole[run.places(info.start, info.end)].reshape(shape)
    return arrays


def _read_span(file: ReadFile, part: _Span, tensors: Mapping[str, TensorInfo], keep: _Keep) -> None:
    """Read contiguous bytes into the array."""
    run = part.run
    for at in range(part.begin, part.end, _PIECE):
        piece = part.whole[run.places(at, min(at + _PIECE, part.end))]
        found = piece if run.kept == run.stored else np.empty(len(piece), run.stored)
        file.read_into(at, found.view(np.uint8).data)
        keep(found, piece, lambda wrong, at=at: _at_fault(tensors, run, at, wrong))


def _read_turns(
    file: ReadFile, part: _Span, name: str, tensors: Mapping[str, TensorInfo], share: Share, keep: _Keep
) -> None:
    """Read rows with interleaved experts and keep the wanted experts."""
    info = tensors[name]
    run = part.run
    kept = part.whole[run.places(info.start, info.end)].reshape(share.experts, share.leading, -1)
    row, step = _step(info, share, 1), _step(info, share, _PIECE)
    buffer = np.empty(step, np.uint8)
    for at in range(part.begin, part.end, step):
        read = buffer[: min(step, part.end - at)]
        file.read_into(at, read.data)
        first, rows = (at - info.start) // row, len(read) // row
        numbers: np.ndarray = read.view(_unsigned(run.stored)).reshape(rows, share.experts, -1)
        for own in share.own:
            found = np.ascontiguousarray(numbers[:, own.start : own.stop].swapaxes(0, 1)).view(run.stored)
            keep(found, kept[own.start : own.stop, first : first + rows], lambda _: name)


def _step(info: TensorInfo, share: Share, most: int) -> int:
    """Return the bytes of as many whole rows as fit in `most` bytes, at least one, for interleaved experts."""
    row = (info.end - info.start) // share.leading
    return max(1, most // row) * row


def _memory(run: _Run, shares: Mapping[str, Share]) -> np.ndarray:
    count = (run.end - run.begin) // run.stored.itemsize
    if any(name in shares for name in run.names):
        return fresh(count, run.kept, sparse=True)
    return np.empty(count, run.kept)


def _spans(
    tensors: Mapping[str, TensorInfo], run: _Run, shares: Mapping[str, Share]
) -> Iterator[tuple[int, int, str | None]]:
    """Yield (begin, end, name) byte spans of a run to read; name is None unless the experts are interleaved."""
    begin = end = run.begin
    for name in run.names:
        info, share = tensors[name], shares.get(name)
        size = info.end - info.start
        if share is None:
            wanted = [(info.start, info.end)]
        elif share.leading == 1:
            each = size // share.experts
            wanted = [(info.start + own.start * each, info.start + own.stop * each) for own in share.own]
        else:
            wanted = []
        for first, last in wanted:
            if first != end:
                if begin < end:
                    yield begin, end, None
                begin = first
            end = last
        if share is not None and share.leading > 1 and share.own:
            if begin < end:
                yield begin, end, None
            yield info.start, info.end, name
            begin = end = info.end
    if begin < end:
        yield begin, end, None


def _runs(tensors: Mapping[str, TensorInfo], base: Collection[str], dtype: np.dtype | None) -> Iterator[_Run]:
    run: _Run | None = None
    for name, info in tensors.items():
        stored, is_base = DTYPES[info.dtype], name in base
        full = run is not None and run.end - run.begin >= _WHOLE
        if run is None or full or run.stored is not stored or run.base is not is_base:
            if run is not None:
                yield run
            run = _Run(stored, stored if is_base or dtype is None else dtype, is_base, [], info.start, info.end)
        run.names.append(name)
        run.end = info.end
    if run is not None:
        yield run


def _unsigned(dtype: np.dtype) -> np.dtype:
    """Return the unsigned dtype of the same size, for copies. NumPy holds the GIL while it copies bfloat16."""
    return np.dtype(_BITS[dtype][1])


def _at_fault(tensors: Mapping[str, TensorInfo], run: _Run, start: int, wrong: np.ndarray) -> str:
    """Return the name of the tensor with the first wrong value of a piece that starts at byte `start` of the file."""
    at = start + int(np.argmax(wrong)) * run.stored.itemsize
    return next(name for name in run.names if tensors[name].start <= at < tensors[name].end)


def all_finite(array: np.ndarray) -> bool:
    """Return True if a float array has neither NaN nor infinity.

    The bits of infinity are one more than those of the largest finite value, and those of NaN are greater still. So the
    maximum of the bits as signed integers reveals a positive infinity or NaN, and the maximum as unsigned integers a
    negative one. The two maxima need no temporary array and are several times as fast as `np.isfinite`.
    """
    if (found := _BITS.get(array.dtype)) is None:
        return bool(np.isfinite(array).all())
    signed, unsigned, infinity = found
    flat = np.ravel(array, order="K")
    step = _PIECE // array.dtype.itemsize
    sign = 1 << (8 * array.dtype.itemsize - 1)
    for at in range(0, flat.size, step):
        part = flat[at : at + step]
        if int(part.view(signed).max()) >= infinity or int(part.view(unsigned).max()) >= sign + infinity:
            return False
    return True
