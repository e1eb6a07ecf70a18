"""JSON of a file that somebody else wrote: one object, each name given once, and nothing that Python alone takes."""

import json
import re
from typing import Any, NoReturn, TypeAlias, cast

from jlora.adapters.escaping import kind_of, printable, shown
from jlora.errors import AdapterFormatError

# What a file may hold at any place; lists and objects are looked into with the same care.
Json: TypeAlias = dict[str, Any] | list[Any] | str | int | float | bool | None

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(data: bytes, where: str, noun: str = "field") -> dict[str, Json]:
    """Parses one JSON object.

    Args:
      data: the whole text, UTF-8.
      where: what holds it, for messages.
      noun: what the names of an object stand for, for messages.

    Raises:
      AdapterFormatError: not JSON, not UTF-8, nested too deeply, not an object, a name given twice, NaN or Infinity, an
        integer of thousands of digits, or half a surrogate pair (which no UTF-8 file can hold).
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
        if _SURROGATE.search(text):  # most are halves of a whole pair
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise AdapterFormatError(f"{where}: is not JSON: a string holds {error.object[error.start]!r}") from error
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{where}: is not JSON: {printable(str(error))}") from error
    if not isinstance(found, dict):
        raise AdapterFormatError(f"{where}: must hold a JSON object, found {kind_of(found)}")
    return cast("dict[str, Json]", found)
