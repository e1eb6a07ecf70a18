"""Read the header of a safetensors file strictly.

A file has eight bytes of header length, a JSON header with the dtype, shape and byte offsets of each tensor, and the
bytes of the tensors without gaps (https://github.com/huggingface/safetensors, "Format"). Files are read with ordinary
reads, because a memory map of a file that shrinks kills the process.
"""

import math
from typing import NamedTuple

from jlora._json import Json, JSONError, parse_object
from jlora.adapters.files import ReadFile
from jlora.errors import AdapterFormatError, shown, shown_value

# Enough for a hundred thousand modules. The format's own limit is 100 MB.
_MAX_HEADER = 32 << 20
# Dtype name -> bits of an element.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


_PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # first bytes: a zip file, and its protocols
_FIELDS = {"dtype", "shape", "data_offsets"}


class TensorInfo(NamedTuple):
    """Dtype (by safetensors' name), shape and byte offsets in the file of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: ReadFile, where: str) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file.

    Args:
      file: The open file.
      where: Adapter and file, for messages.

    Returns:
      Tensor name -> dtype, shape and offsets, in file order.

    Raises:
      AdapterFormatError: The header is cut, too long or not JSON; a tensor is named twice, has an unknown dtype, or has
        a shape that does not match its bytes; or bytes overlap, belong to no tensor, or are beyond the end of the file.
    """
    where = f"{where}: is not a whole safetensors file"
    if file.size < 8:
        raise AdapterFormatError(f"{where}: {file.size} bytes; expected 8 bytes of header length, a header and tensors")
    begin = file.read(0, 8)
    length = int.from_bytes(begin, "little")
    if length > min(file.size - 8, _MAX_HEADER):
        begins = ""
        if begin[:2] in _PICKLES:
            begins = " (it begins as PyTorch's or another pickle, which is never opened)"
        elif begin.isascii() and begin.decode().isprintable():
            begins = f" (it begins with the text {begin.decode()!r})"
        raise AdapterFormatError(
            f"{where}: its header is {length} bytes long; expected at most {min(file.size - 8, _MAX_HEADER)}{begins}"
        )
    text = file.read(8, length)
    if not text.startswith(b"{"):
        raise AdapterFormatError(f"{where}: its header must begin with a brace, found {text[:8]!r}")
    try:
        header = parse_object(text, "tensor")
    except JSONError as error:
        raise AdapterFormatError(f"{where}: its header: {error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise AdapterFormatError(f"{where}: __metadata__ must be an object of strings, found {shown_value(metadata)}")
    # pop frees the parsed entries one by one: fewer live objects mean fewer passes of the garbage collector.
    tensors = {name: _info(name, header.pop(name), 8 + length, where) for name in tuple(header)}
    tensors = {name: tensors[name] for name in sorted(tensors, key=lambda name: tensors[name][2:])}
    at = 8 + length
    for name, info in tensors.items():
        if info.start != at:
            raise AdapterFormatError(
                f"{where}: tensor {shown(name)} begins at byte {info.start}; expected {at}, where the one before ends"
            )
        at = info.end
    if at != file.size:
        raise AdapterFormatError(f"{where}: it has {file.size} bytes; expected {at}, where the last tensor ends")
    return tensors


def _info(name: str, value: Json, begin: int, where: str) -> TensorInfo:
    """Return the description of a tensor. Raise AdapterFormatError if it is malformed."""
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        fault = f"must have dtype, shape and data_offsets, found {shown_value(value)}"
    elif not isinstance(dtype := value["dtype"], str) or dtype not in _BITS:
        fault = f"has dtype {shown_value(dtype)}, which is not known"
    elif not (_whole_numbers(shape := value["shape"]) and _whole_numbers(offsets := value["data_offsets"])):
        fault = f"must have whole numbers for shape and offsets, found {shown_value(value)}"
    elif len(offsets) != 2 or len(shape) > 64:
        fault = f"has {len(offsets)} data_offsets and {len(shape)} axes; expected 2 and few"
    elif (bits := _BITS[dtype] * math.prod(shape)) != 8 * (offsets[1] - offsets[0]):
        fault = (
            f"of dtype {dtype} and shape {shown_value(shape)} has data_offsets {shown_value(offsets)}; expected "
            f"{shown_value(bits // 8)} bytes"
        )
    else:
        return TensorInfo(dtype, tuple(shape), begin + offsets[0], begin + offsets[1])
    raise AdapterFormatError(f"{where}: tensor {shown(name)} {fault}")


def _whole_numbers(value: Json) -> bool:
    return isinstance(value, list) and {int}.issuperset(map(type, value)) and min(value, default=0) >= 0
