"""Escape text of files, arguments and models for printing, so that it cannot forge a line or control a terminal."""

import re
from collections.abc import Sequence

from jlora.errors import LoRAUsageError, printable

_LONGEST_ERROR = 2000


def utf8(text: str) -> str:
    """Return a name or text of the command line, decoded from UTF-8 also under a C locale, where Python takes ASCII.

    Paths stay as Python decoded them, since it encodes them in the same way. Bytes that are not UTF-8 stay surrogates.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def shown_lines(text: str, indent: str) -> str:
    """Escape text of several lines, such as a model's answer, and keep its line ends and tabs.

    All lines but the first are indented, so that none looks like the start of another answer.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return f"\n{indent}".join("\t".join(map(printable, line.split("\t"))) for line in lines)


def one_line(error: object) -> str:
    """Return an error's message on one line, escaped and cut to 2,000 characters."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 4] + " ..."


def error_lines(error: object) -> str:
    """Return an error's message, escaped and cut to 2,000 characters, with lines after the first indented."""
    lines = [printable(" ".join(line.split())) for line in str(error).split("\n") if line.strip()]
    text = "\n  ".join(lines) or type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 4] + " ..."


def size(count: int) -> str:
    """Return a number of bytes in KiB, MiB or GiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def patterns(flag: str, given: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Return the compiled regular expressions of a flag. Raise `LoRAUsageError` for text that is not one."""
    try:
        return tuple(re.compile(pattern) for pattern in given)
    except re.error as error:
        raise LoRAUsageError(f"{flag}: {error.pattern!r} is not a regular expression: {error}") from None
