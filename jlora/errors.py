"""Exceptions of jlora, and the text of their messages, which name the adapter, file, tensor or field at fault."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

_NUMBER = re.compile(r"[0-9]+")
_MOST_COMPARED = 1000  # names in one search, at about 30 us each
_LONGEST = 200  # characters of a name in a message
P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


class LoRAError(Exception):
    """Base class of all jlora errors.

    Raised itself if no subclass fits, for example for a layer called outside `jlora.use`, a batch captured as a
    constant of a compiled function, or a model that cannot be wrapped.

    Attributes:
      problems: One message for each problem of an adapter that was found, if there are several. The error's own message
        is about the first ones.
    """

    problems: tuple[str, ...] = ()


class LoRAUsageError(LoRAError, ValueError):
    """Arguments of a call have the wrong type or value, or contradict each other."""


class AdapterFormatError(LoRAError):
    """The adapter's files are missing or malformed, for example bad JSON, cut safetensors, wrong shapes or NaN."""


class AdapterMismatchError(LoRAError):
    """The files are well formed, but this model or configuration cannot serve them exactly.

    Examples are a tensor without a matching module, a rank above `max_lora_rank` and an unserved PEFT feature.
    """


class AdapterNotFoundError(LoRAError):
    """No adapter of that name exists, or its path does not exist."""


class AdapterAccessError(AdapterNotFoundError):
    """The Hugging Face hub refuses the files of an adapter: its repository is gated, or the token may not read it."""


class AdapterUnavailableError(AdapterNotFoundError):
    """The files of an adapter cannot be read now, and a later call may succeed.

    The Hugging Face hub cannot be reached, or an adapter that was evicted from the host cache cannot be loaded again,
    because its files are gone or damaged. The name of such an adapter stays known, and the next use loads it again.
    """


class AdapterInUseError(LoRAError):
    """Open batches hold an adapter beyond the timeout of a call that removes, replaces or updates it."""


class LoadTimeoutError(LoRAError, TimeoutError):
    """An adapter was not loaded, or copied from the slot that another needs, within the timeout. Repeat the call."""


class NoFreeSlotError(LoRAError):
    """No slot or host-cache entry can be freed, because all are pinned or held by open batches."""


def error_of(name: str, message: str) -> LoRAError:
    """Return an error reported by another process, of the class `name` if that is one of these."""
    cls = globals().get(name)
    if isinstance(cls, type) and issubclass(cls, LoRAError):
        return cls(message)
    return LoRAError(f"{name}: {message}")


class Problems:
    """The problems of one adapter that were found so far.

    Attributes:
      found: The errors, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.found: list[LoRAError] = []

    def attempt(self, default: D, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | D:
        """Return the result of a function, or the default if it refuses the adapter."""
        try:
            return function(*args, **kwargs)
        except (AdapterFormatError, AdapterMismatchError) as error:
            self.found.append(error)
            return default

    def raise_first(self) -> None:
        """Raise the first error, with the messages of all in `problems`. Do nothing if there is none."""
        if not self.found:
            return
        first = self.found[0]
        messages = [message for error in self.found for message in error.problems or (str(error),)]
        if len(messages) > 1:
            first.problems = tuple(dict.fromkeys(messages))
        raise first


def nearest(name: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """Return "; the nearest is 'layers.3.q_proj'" for the end of a message, or "" if no known name is similar.

    Names that differ only in their numbers are compared as one first. Each search compares at most the last 1,000. If
    `known` is a mapping, the value of the nearest name follows it.
    """
    name = name[:200]
    alike: dict[str, list[str]] = {}  # name without its numbers -> names
    for each in known:
        alike.setdefault(_NUMBER.sub("#", each), []).append(each)
    close = difflib.get_close_matches(_NUMBER.sub("#", name), list(alike)[-_MOST_COMPARED:], n=1, cutoff=0.4)
    if not close:
        return ""
    found = difflib.get_close_matches(name, alike[close[0]][-_MOST_COMPARED:], n=1, cutoff=0)
    return f"; the nearest is {found[0]!r}{known[found[0]] if isinstance(known, Mapping) else ''}"


# Joiners of emoji, Persian and Indic scripts, and spaces of other scripts.
_ORDINARY = frozenset("\u200c\u200d\u00a0\u3000\u202f\u2009")


def printable(text: str) -> str:
    r"""Return untrusted text as one line, with control characters, line ends, bidi marks and lone surrogates escaped.

    They become `\x1b`, `\n`, `\u202e` and so on, so that the text cannot forge a line or control a terminal.
    """
    return "".join(c if c.isprintable() or c in _ORDINARY else c.encode("unicode_escape").decode() for c in text)


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


def kind_of(value: object) -> str:
    """Return JSON's name for the type of a value."""
    names: dict[type, str] = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null or nothing",
    }
    return names.get(type(value), "a number")
