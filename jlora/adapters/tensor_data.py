"""The numbers of a safetensors file, each read once into the array that is kept, and checked in the cache."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from jlora._memory import fresh
from jlora._threads import on_threads
from jlora.adapters.escaping import shown
from jlora.adapters.files import StableFile
from jlora.adapters.tensor_file import TensorInfo
from jlora.errors import AdapterFormatError

# safetensors' name of each served dtype
DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# Of each dtype, the integers of its size, and the bits of infinity: what has greater ones below the sign is NaN.
_BITS = {
    DTYPES["F16"]: (np.int16, np.uint16, 0x7C00),
    DTYPES["BF16"]: (np.int16, np.uint16, 0x7F80),
    DTYPES["F32"]: (np.int32, np.uint32, 0x7F80_0000),
    DTYPES["F64"]: (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
}
_PART = 1 << 25  # bytes that one thread reads
# Bytes from which an array is whole. Few enough that what its tensors leave goes back to the system long before the
# last of an adapter is done with; enough that malloc has memory of its own for it, and keeps none.
_WHOLE = 1 << 26
_PIECE = 1 << 19  # bytes that are read and looked at together: they stay in the cache


class Share(NamedTuple):
    """What is read of a tensor that is of several experts, [leading, experts, ...] in the file.

    It is kept [experts, leading, ...], as zeros where it is not read, which take no memory.

    Attributes:
      leading: how often the experts take turns: 1 where each has its bytes together.
      experts: how many there are.
      own: those that are read, in their order; none at all leaves the tensor out.
    """

    leading: int
    experts: int
    own: tuple[range, ...]


@dataclass
class _Run:
    """Tensors that follow each other in the file and are kept in one array: there may be tens of thousands.

    Attributes:
      stored, kept: dtype in the file, and of the array.
      base: whether they are base weights.
      names: of the tensors.
      begin, end: bytes of the file.
    """

    stored: np.dtype
    kept: np.dtype
    base: bool
    names: list[str]
    begin: int
    end: int

    def places(self, begin: int, end: int) -> slice:
        """Where these bytes of the file are in the array."""
        return slice(*((at - self.begin) // self.stored.itemsize for at in (begin, end)))


class _Part(NamedTuple):
    """What one thread reads at a time.

    Attributes:
      run, whole: of which run, and its array.
      turns: the tensor, if it is one in which experts take turns.
      begin, end: bytes of the file.
    """

    run: _Run
    whole: np.ndarray
    turns: str | None
    begin: int
    end: int


_Keep: TypeAlias = Callable[[np.ndarray, np.ndarray, Callable[[np.ndarray], str]], None]


def read_tensors(
    file: StableFile,
    tensors: Mapping[str, TensorInfo],
    base: Collection[str],
    *,
    where: str,
    dtype: np.dtype | None = None,
    allow_nonfinite: bool = False,
    shares: Mapping[str, Share] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """Reads tensors of served dtypes.

    A tensor in which experts take turns, of which some are wanted, is read once and sorted piece by piece: no more of
    it is in memory than is kept, and a piece.

    Args:
      file: the open file.
      tensors: what its header says, in the order of their bytes.
      base: names of base weights, which are never converted, and share no memory with the others.
      where: adapter and file, for messages.
      dtype: convert to this dtype; None keeps the file's.
      allow_nonfinite: let NaN and infinity through.
      shares: of tensors that are not read whole, what is read of them. Nothing is said of the numbers of the rest.

    Returns:
      name -> read-only array. Neighbours in the file are views of one array, up to some size of it. Of the file's
      shape, but [experts, leading, ...] where experts take turns and some are read.

    Raises:
      AdapterFormatError: NaN or infinity; a value too large for `dtype`; a file that changed while it was read.
    """
    runs = list(_runs(tensors, base, dtype))
    wholes = [_memory(run, shares) for run in runs]
    parts = [
        _Part(run, whole, turns, at, min(at + step, end))
        for run, whole in zip(runs, wholes, strict=True)
        for begin, end, turns in _spans(tensors, run, shares)
        for step in [_PART if turns is None else _step(tensors[turns], shares[turns], _PART)]
        for at in range(begin, end, step)
    ]

    def keep(found: np.ndarray, kept: np.ndarray, name_of: Callable[[np.ndarray], str]) -> None:
        """Looks at the numbers that were read, and brings them where they are kept."""
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

    def fill(part: _Part) -> None:
        if part.turns is None:
            _read_span(file, part, tensors, keep)
        else:
            _read_turns(file, part, part.turns, tensors, shares[part.turns], keep)

    on_threads(fill, parts, sum(part.end - part.begin for part in parts))
    arrays: dict[str, np.ndarray] = {}
    for run, whole in zip(runs, wholes, strict=True):
        whole.flags.writeable = False  # before views of it are made, which could be set writeable otherwise
        for name in run.names:
            info, share = tensors[name], shares.get(name)
            shape = info.shape if share is None or share.leading == 1 else (share.experts, share.leading, -1)
            arrays[name] = whole[run.places(info.start, info.end)].reshape(shape)
    return arrays


def _read_span(file: StableFile, part: _Part, tensors: Mapping[str, TensorInfo], keep: _Keep) -> None:
    """Reads bytes that are kept as they follow each other."""
    run = part.run
    for at in range(part.begin, part.end, _PIECE):
        piece = part.whole[run.places(at, min(at + _PIECE, part.end))]
        found = piece if run.kept == run.stored else np.empty(len(piece), run.stored)
        file.read_into(at, found.view(np.uint8).data)
        keep(found, piece, lambda wrong, at=at: _at_fault(tensors, run, at, wrong))


def _read_turns(
    file: StableFile, part: _Part, name: str, tensors: Mapping[str, TensorInfo], share: Share, keep: _Keep
) -> None:
    """Reads rows in which experts take turns, and keeps some experts of them."""
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
    """Bytes of whole rows of a tensor in which experts take turns: as many as `most` bytes have, or one."""
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
    """The bytes of a run that are read, and of which tensor they are, if it is one in which experts take turns."""
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
    """What to copy numbers as: NumPy holds the interpreter while it copies those of a foreign dtype."""
    return np.dtype(_BITS[dtype][1])


def _at_fault(tensors: Mapping[str, TensorInfo], run: _Run, start: int, wrong: np.ndarray) -> str:
    """The tensor that the first wrong number of a piece is of; the piece begins at byte `start` of the file."""
    at = start + int(np.argmax(wrong)) * run.stored.itemsize
    return next(name for name in run.names if tensors[name].start <= at < tensors[name].end)


def all_finite(array: np.ndarray) -> bool:
    """Whether a C-contiguous float array holds neither NaN nor infinity.

    The bits of infinity are those of the largest number and one more; with the sign they are greater than those of any
    finite number, read without it, and without the sign greater than those of any, read with it. So two maxima tell,
    which need no memory and are several times as fast as `np.isfinite`.
    """
    if (found := _BITS.get(array.dtype)) is None:
        return bool(np.isfinite(array).all())
    signed, unsigned, infinity = found
    flat = array.reshape(-1)
    step = _PIECE // array.dtype.itemsize
    sign = 1 << (8 * array.dtype.itemsize - 1)
    for at in range(0, flat.size, step):
        part = flat[at : at + step]
        if int(part.view(signed).max()) >= infinity or int(part.view(unsigned).max()) >= sign + infinity:
            return False
    return True
