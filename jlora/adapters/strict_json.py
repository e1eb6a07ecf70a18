"""Parse a JSON object from an untrusted file, without duplicate names and without Python's extensions of JSON."""

import json
import re
from typing import Any, NoReturn, TypeAlias, cast

from jlora.adapters.escaping import kind_of, shown
from jlora.errors import AdapterFormatError, printable

# Any JSON value. Items of lists and objects need the same checks before use.
Json: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(data: bytes, where: str, noun: str = "field") -> dict[str, Json]:
    """Parse one JSON object.

    Args:
      data: The whole text in UTF-8.
      where: Source of the text, for messages.
      noun: Word for a name in an object, for messages.

    Raises:
      AdapterFormatError: The text is not JSON, not UTF-8, nested too deeply or not an object, or it holds a name twice,
        NaN, Infinity, an integer of thousands of digits, or half a surrogate pair (which UTF-8 cannot encode).
    """

    def once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise AdapterFormatError(f"{where}: {noun} {shown(twice)} is given twice")
        return found

    def constant(word: str) -> NoReturn:
        raise AdapterFormatError(f"{where}: holds {word}, which is not a JSON number")

    try:
        text = data.decode("utf-8")
        found = json.loads(text, object_pairs_hook=once, parse_constant=constant)
        if _SURROGATE.search(text):  # fails for a half pair; most escapes are whole pairs
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise AdapterFormatError(f"{where}: is not JSON: a string holds {error.object[error.start]!r}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{where}: is not JSON: {printable(str(error))}") from error
    if not isinstance(found, dict):
        raise AdapterFormatError(f"{where}: must hold a JSON object, found {kind_of(found)}")
    return cast("dict[str, Json]", found)
