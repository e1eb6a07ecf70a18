"""Text from other people's files, made fit for an error message: escaped, so that it cannot forge lines, and cut."""

import os

_LONGEST = 200


def printable(text: str) -> str:
    """The text with control characters, line ends and lone surrogates escaped; not quoted, not cut."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(name: str, longest: int = _LONGEST) -> str:
    """The name in quotes, escaped, cut to about `longest` characters."""
    return repr(name if len(name) <= longest else name[: longest - 3] + "...")


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path as a message names it: whole, since it must be found again, and escaped."""
    return printable(os.fspath(path))


def shown_value(value: object, longest: int = 80) -> str:
    """`repr` of a value read from JSON, cut."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of more than 4300 digits have no repr
        return f"{kind_of(value)} too large to print"
    return text if len(text) <= longest else text[: longest - 3] + "..."


def kind_of(value: object) -> str:
    """What JSON calls a value of this kind."""
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null or nothing",
    }
    return names.get(type(value), "a number")
