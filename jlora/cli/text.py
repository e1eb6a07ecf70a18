"""What comes from files, arguments and models, made fit to print: it cannot forge a line or command a terminal."""

from jlora.errors import printable

_LONGEST_ERROR = 2000


def shown_lines(text: str, indent: str) -> str:
    """The same for text of several lines, such as a model's answer: line ends and tabs stay, and every line but the
    first is indented, so that none can pass for the start of another answer."""
    lines = text.replace("\r\n", "\n").split("\n")
    return f"\n{indent}".join("\t".join(map(printable, line.split("\t"))) for line in lines)


def one_line(error: object) -> str:
    """An error's message on one line, cut where it is longer than anybody reads."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 4] + " ..."


def error_lines(error: object) -> str:
    """An error's message, cut as `one_line` does; its lines stay lines, and those after the first are indented."""
    lines = [printable(" ".join(line.split())) for line in str(error).split("\n") if line.strip()]
    text = "\n  ".join(lines) or type(error).__name__
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 4] + " ..."


def size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"
