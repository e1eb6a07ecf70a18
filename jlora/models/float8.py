"""Read tensors in float8 from safetensors files. NumPy itself has no such dtype, so safetensors does not read them."""

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np


class Float8File:
    """The float8_e4m3fn tensors of a file that `safetensors.safe_open` has opened, so that its header is valid."""

    def __init__(self, file: Path):
        self.file = file

    @functools.cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """The offset of the data, and the header's entry of each tensor."""
        with open(self.file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            return 8 + size, json.loads(opened.read(size))

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Read a part of a tensor, and no other bytes of its data."""
        start, fields = self._header
        field = fields[name]
        stored = np.memmap(
            self.file, np.uint8, mode="r", offset=start + field["data_offsets"][0], shape=tuple(field["shape"])
        )
        return np.array(stored[part]).view(ml_dtypes.float8_e4m3fn)
