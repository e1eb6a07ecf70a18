"""Reads of adapters: from a folder and from memory, in small steps, and a record of them."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jlora import _threads
from jlora.adapters import Adapter, tensor_data
from jlora.adapters.files import StableFile
from jlora.adapters.lora import tensors_of
from jlora.errors import LoRAError, printable

FILES = "adapter_model.safetensors", "adapter_config.json"
_DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}


def load_all_ways(folder: Path, *, dtype: Any = None, allow_nonfinite: bool = False, **options: Any) -> Adapter:
    """Load an adapter from its folder, from the bytes of its files and from its state dict, with equal results.

    A folder that is refused must be refused from memory for the same reasons. `options` are those that only
    `Adapter.from_pretrained` has.
    """
    common = {"dtype": dtype, "allow_nonfinite": allow_nonfinite}
    name = options.get("name") or folder.name
    results = [_outcome(lambda: Adapter.from_pretrained(folder, **common, **options), f"{printable(str(folder))}/")]
    if all((folder / file).is_file() for file in FILES):
        weights, config = ((folder / file).read_bytes() for file in FILES)
        results.append(_outcome(lambda: Adapter.from_bytes(weights, config, name=name, **common), ""))
        tensors, fields = state_dict(weights), _fields(config)
        if tensors is not None and fields is not None:
            results.append(_outcome(lambda: Adapter.from_state_dict(tensors, fields, name=name, **common), ""))
    (found, first), *others = results
    for _, other in others if not options.keys() - {"name"} else ():
        assert other == first
    if isinstance(found, LoRAError):
        raise found
    return found


def state_dict(weights: bytes) -> dict[str, np.ndarray] | None:
    """Return the tensors of a safetensors file; None if it is damaged or has other dtypes than LoRA can have."""
    try:
        size = int.from_bytes(weights[:8], "little")
        header: dict[str, Any] = json.loads(weights[8 : 8 + size])
        header.pop("__metadata__", None)
        data = weights[8 + size :]
        return {
            name: np.frombuffer(data[slice(*info["data_offsets"])], _DTYPES[info["dtype"]]).reshape(info["shape"])
            for name, info in header.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _fields(config: bytes) -> dict[str, Any] | None:
    """Return a configuration; None if Python's JSON reads it in another way than jlora's."""
    try:
        fields = json.loads(config)
        return fields if json.dumps(fields).encode() == config else None
    except ValueError:
        return None


def _outcome(load: Callable[[], Adapter], place: str) -> tuple[Adapter | LoRAError, Any]:
    """Return an adapter or its error, and all that must be equal however it was loaded."""
    try:
        found = load()
    except LoRAError as error:
        texts = [str(error), *error.problems]
        for name, file in zip(("tensors: ", "config: "), FILES, strict=True):
            texts = [text.replace(f"{place}{file}: ", name, 1) for text in texts]
        return error, (type(error), *texts)
    more = found.name, dict(found.peft_fields), found.unchecked, found.warnings()
    return found, (*contents(found), *more)


def contents(adapter: Adapter) -> tuple[Any, ...]:
    """Return all that has to come back after a save: numbers and bits of each layer, base weights and fields."""
    layers = {
        name: [repr(layer), *((part, a.dtype, a.shape, a.tobytes()) for part, a in tensors_of(layer).items())]
        for name, layer in adapter.layers.items()
    }
    base = {name: (weight.dtype, weight.shape, weight.tobytes()) for name, weight in adapter.base_weights.items()}
    fields = adapter.base_model_name, adapter.use_rslora, adapter.variants, adapter.invocation_tokens
    return layers, base, fields, adapter.fan_in_fan_out, adapter.task_type, adapter.rank, adapter.nbytes


@contextlib.contextmanager
def reading(piece: int = 1 << 19, part: int = 1 << 25, whole: int = 1 << 26, threads: bool = False) -> Iterator[None]:
    """Set the bytes that are read at a time, so that a small file takes the path of a large one.

    Args:
      piece: Bytes of one read.
      part: Bytes of one thread's work item.
      whole: Bytes at which an array takes no further tensor.
      threads: Use several threads however few bytes there are.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("_PIECE", piece), ("_PART", part), ("_WHOLE", whole)):
            patch.setattr(tensor_data, name, size)
        if threads:
            patch.setattr(_threads, "_WORTHWHILE", 0)
        yield


@contextlib.contextmanager
def before_each_read(act: Callable[[int, int], None]) -> Iterator[None]:
    """Call `act(offset, size)` before each read of an adapter's files inside the block."""
    original = StableFile.read_into

    def read_into(self, offset, buffer):
        act(offset, len(buffer))
        original(self, offset, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StableFile, "read_into", read_into)
        yield
