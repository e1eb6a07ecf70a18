"""JSON files of a checkpoint: bounded reading, and typed look-ups whose errors name the file and the field."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jlora._json import JSONError, parse_json
from jlora.errors import LoRAError, kind_of

# An index of 100,000 tensors has about 10 MB.
_MAX_JSON_BYTES = 100 * 2**20
# Above any existing model, and small enough that a product of three stays below 2**63.
_LARGEST = 2**20
MOST_POSITIONS = 2**31 - 1
_LARGEST_OF = {
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), MOST_POSITIONS),
    "vocab_size": 2**24,
    "num_hidden_layers": 10_000,
}


class ModelError(LoRAError, ValueError):
    """A checkpoint or a request that the reference decoder cannot serve exactly.

    The message names the file and the field.
    """


class Fields:
    """Typed look-ups in one JSON object. Every error names the file, the field and the value."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def fail(self, field: str, problem: str) -> ModelError:
        """Return the error for a problem with a field."""
        return ModelError(f"{self.where}: {field} {problem}")

    def integer(self, field: str, default: int | None = None) -> int:
        """Return a positive integer that is at most the field's bound; an absent or null field takes the default.

        Raises:
          ModelError: The value is another, or the field is absent without a default.
        """
        value = self.values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"must be a positive integer, got {value!r:.80}"
            raise self.fail(field, found)
        largest = _LARGEST_OF.get(field, _LARGEST)
        if value > largest:
            raise self.fail(field, f"must be at most {largest}, got {value!r:.40}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a positive finite number; an absent or null field takes the default.

        Raises:
          ModelError: The value is another, or the field is absent without a default.
        """
        value = self.values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            found = "is missing" if value is None else f"must be a positive finite number, got {value!r:.80}"
            raise self.fail(field, found)
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """Return a boolean; an absent field takes the default."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.fail(field, f"must be true or false, got {value!r:.80}")
        return value

    def nested(self, field: str) -> "Fields":
        """Return the look-ups in an object that is a field of this one; an absent or null field is an empty object."""
        value = self.values.get(field)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.fail(field, f"must be an object, got {value!r:.80}")
        return Fields(value, f"{self.where}: {field}")


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
      ModelError: The file is not a JSON object, repeats a field, nests too deep, or is larger than any checkpoint's.
    """
    raw = _read(path)
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object, found {kind_of(raw)}")
    return raw


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read the JSON list of objects in a file. Errors are those of `read_json`."""
    raw = _read(path)
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        raise ModelError(f"{path} must hold a JSON list of objects, got {raw!r:.80}")
    return raw


def _read(path: Path) -> Any:
    length = path.stat().st_size
    if length > _MAX_JSON_BYTES:
        raise ModelError(f"{path} has {length} bytes; expected at most {_MAX_JSON_BYTES}")
    try:
        return parse_json(path.read_bytes())
    except JSONError as error:
        raise ModelError(f"{path} {error}") from error
