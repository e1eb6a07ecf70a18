"""The numbers of a safetensors file, each read once into the array that is kept, and checked in the cache."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jlora._threads import on_threads
from jlora.adapters.files import StableFile
from jlora.adapters.messages import shown
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


def read_tensors(
    file: StableFile,
    tensors: Mapping[str, TensorInfo],
    base: Collection[str],
    *,
    where: str,
    dtype: np.dtype | None = None,
    allow_nonfinite: bool = False,
) -> dict[str, np.ndarray]:
    """Reads tensors of served dtypes.

    Args:
      file: the open file.
      tensors: what its header says, in the order of their bytes.
      base: names of base weights, which are never converted, and share no memory with the others.
      where: adapter and file, for messages.
      dtype: convert to this dtype; None keeps the file's.
      allow_nonfinite: let NaN and infinity through.

    Returns:
      name -> read-only array. Neighbours in the file are views of one array, up to some size of it.

    Raises:
      AdapterFormatError: NaN or infinity; a value too large for `dtype`; a file that changed while it was read.
    """
    runs = list(_runs(tensors, base, dtype))
    wholes = [np.empty((run.end - run.begin) // run.stored.itemsize, run.kept) for run in runs]
    parts = [
        (run, whole, begin)
        for run, whole in zip(runs, wholes, strict=True)
        for begin in range(run.begin, run.end, _PART)
    ]

    def fill(part: tuple[_Run, np.ndarray, int]) -> None:
        run, whole, begin = part
        end = min(begin + _PART, run.end)
        for at in range(begin, end, _PIECE):
            piece = whole[run.places(at, min(at + _PIECE, end))]
            _read_piece(file, tensors, run, at, piece, where, allow_nonfinite)

    on_threads(fill, parts, sum(run.end - run.begin for run in runs))
    arrays: dict[str, np.ndarray] = {}
    for run, whole in zip(runs, wholes, strict=True):
        whole.flags.writeable = False  # before views of it are made, which could be set writeable otherwise
        for name in run.names:
            info = tensors[name]
            arrays[name] = whole[run.places(info.start, info.end)].reshape(info.shape)
    return arrays


def _read_piece(
    file: StableFile,
    tensors: Mapping[str, TensorInfo],
    run: _Run,
    at: int,
    piece: np.ndarray,
    where: str,
    allow_nonfinite: bool,
) -> None:
    """Reads what begins at byte `at` of the file into a piece of a run's array, and looks at it."""
    into = piece if run.kept == run.stored else np.empty(len(piece), run.stored)
    file.read_into(at, into.view(np.uint8).data)
    if not (allow_nonfinite or all_finite(into)):
        name = _at_fault(tensors, run.names, at, into, ~np.isfinite(into))
        raise AdapterFormatError(
            f"{where}: tensor {shown(name)} holds NaN or infinity; expected finite numbers "
            "(allow_nonfinite=True lets them in)"
        )
    if into is piece:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        piece[...] = into
    if not (np.can_cast(run.stored, run.kept) or all_finite(piece)):
        too_large = np.isinf(piece) & np.isfinite(into)
        if too_large.any():
            name = _at_fault(tensors, run.names, at, into, too_large)
            raise AdapterFormatError(
                f"{where}: tensor {shown(name)} ({run.stored}) holds values too large for {run.kept}"
            )


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


def _at_fault(
    tensors: Mapping[str, TensorInfo], names: list[str], start: int, piece: np.ndarray, wrong: np.ndarray
) -> str:
    """The tensor that the first wrong number of a piece is of; the piece begins at byte `start` of the file."""
    at = start + int(np.argmax(wrong)) * piece.dtype.itemsize
    return next(name for name in names if tensors[name].start <= at < tensors[name].end)


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
