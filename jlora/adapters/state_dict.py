"""Lay out a PEFT state dict and its configuration in memory as the two files of an adapter folder."""

import json
from collections.abc import Mapping, Set
from typing import Any, cast

import numpy as np

from jlora._typing import is_mapping
from jlora.adapters.files import MemoryFile
from jlora.adapters.tensor_data import DTYPES
from jlora.errors import AdapterFormatError, LoRAUsageError, printable, shown

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def weights_file(adapter: str, tensors: Mapping[Any, Any]) -> MemoryFile:
    """Return the safetensors file of these tensors, as safetensors writes it. Their values are not copied.

    Args:
      adapter: Name of the adapter, for messages.
      tensors: Tensor name -> NumPy or JAX array, or another array that NumPy reads (`__array__`).

    Raises:
      AdapterFormatError: A tensor is not such an array, or has a dtype that is not served.
      LoRAUsageError: `tensors` is not a mapping of names.
    """
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise LoRAUsageError(f"adapter {shown(adapter)}: tensors must map tensor names to arrays")
    for value in tensors.values():  # starts the copies of JAX's device arrays all at once
        getattr(value, "copy_to_host_async", lambda: None)()
    where = f"adapter {shown(adapter)}: tensors: tensor"
    arrays = {name: _array(value, f"{where} {shown(name)}") for name, value in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[memoryview] = []
    at = 0
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])):  # so all are aligned
        end = at + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": (at, end)}
        parts.append(array.reshape(-1).view(np.uint8).data)
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return MemoryFile("tensors", len(text).to_bytes(8, "little"), text, *parts)


def config_file(adapter: str, config: Any) -> MemoryFile:
    """Return the JSON file of a configuration: a mapping of PEFT's fields, or an object with `to_dict`.

    Raises:
      AdapterFormatError: A field is not JSON.
      LoRAUsageError: `config` is something else.
    """
    fields = config if is_mapping(config) else getattr(config, "to_dict", lambda: None)()
    if not is_mapping(fields):
        raise LoRAUsageError(
            f"adapter {shown(adapter)}: config must hold the fields of adapter_config.json (a mapping, or PEFT's "
            f"LoraConfig), got {type(config).__name__}"
        )
    try:
        text = json.dumps(dict(fields), default=_as_list).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise AdapterFormatError(f"adapter {shown(adapter)}: config: is not JSON: {printable(str(error))}") from error
    return MemoryFile("config", text)


def _as_list(value: Any) -> list[Any]:
    """Return a set as a list, as PEFT writes it."""
    if isinstance(value, Set):
        return sorted(cast("Set[Any]", value))
    raise TypeError(f"it holds {type(value).__name__}")


def _array(value: Any, where: str) -> np.ndarray:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if not hasattr(value, "__array__"):
        raise AdapterFormatError(f"{where} is of type {kind}; expected a NumPy or JAX array")
    try:
        array = np.asarray(value, order="C")
    except Exception as error:  # PyTorch's tensors of bfloat16, with gradients or on a GPU; arrays of other processes
        raise AdapterFormatError(
            f"{where} ({kind}) cannot be read by NumPy: {printable(str(error))}; expected a NumPy or JAX array (of a "
            "PyTorch tensor: tensor.detach().float().cpu().numpy())"
        ) from error
    if array.dtype not in _NAMES:
        raise AdapterFormatError(f"{where} has dtype {array.dtype}; expected one of {', '.join(map(str, _NAMES))}")
    return array
