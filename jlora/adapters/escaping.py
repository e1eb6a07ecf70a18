"""Escape and shorten text from untrusted files for error messages, so that it cannot forge lines."""

import os
from collections.abc import Sequence

from jlora._json import kind_of
from jlora.errors import printable

_LONGEST = 200


def shown(name: str, longest: int = _LONGEST) -> str:
    """Return the name quoted, escaped and cut to about `longest` characters."""
    return repr(name if len(name) <= longest else name[: longest - 3] + "...")


def listed(names: Sequence[str]) -> str:
    """Return the first three names, quoted and escaped, and "..." if there are more."""
    return ", ".join(map(shown, names[:3])) + (", ..." if len(names) > 3 else "")


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path escaped but not cut, so that it can be copied from the message."""
    return printable(os.fspath(path))


def shown_value(value: object, longest: int = 80) -> str:
    """Return the `repr` of a JSON value, cut to `longest` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of more than 4300 digits have no repr
        return f"{kind_of(value)} too large to print"
    return text if len(text) <= longest else text[: longest - 3] + "..."
