"""Parse untrusted JSON, without duplicate names and without Python's extensions of JSON."""

import json
import re
from typing import Any, NoReturn, TypeAlias, cast

from jlora.errors import kind_of, printable

# Any JSON value. Items of lists and objects need the same checks before use.
Json: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JSONError(ValueError):
    """The text is not JSON of the expected kind. The message describes the problem and names no file."""


def parse_object(data: bytes | bytearray, noun: str = "field") -> dict[str, Json]:
    """Parse one JSON object. Arguments and errors are those of `parse_json`."""
    found = parse_json(data, noun)
    if not isinstance(found, dict):
        raise JSONError(f"must hold a JSON object, found {kind_of(found)}")
    return found


def parse_json(data: bytes | bytearray, noun: str = "field") -> Json:
    """Parse one JSON value.

    Args:
      data: The whole text in UTF-8.
      noun: Word for a name in an object, for messages.

    Raises:
      JSONError: The text is not JSON, not UTF-8 or nested too deeply, or it holds a name twice, NaN, Infinity, an
        integer of thousands of digits, or half a surrogate pair (which UTF-8 cannot encode).
    """

    def once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise JSONError(f"{noun} {twice!r:.200} is given twice")
        return found

    def constant(word: str) -> NoReturn:
        raise JSONError(f"holds {word}, which is not a JSON number")

    try:
        text = data.decode("utf-8")
        found = json.loads(text, object_pairs_hook=once, parse_constant=constant)
        if _SURROGATE.search(text):  # fails for a half pair; most escapes are whole pairs
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except JSONError:
        raise
    except UnicodeEncodeError as error:
        raise JSONError(f"is not JSON: a string holds {error.object[error.start]!r}") from error
    except (ValueError, RecursionError) as error:
        raise JSONError(f"is not JSON: {printable(str(error))}") from error
    return cast("Json", found)
