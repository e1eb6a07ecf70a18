"""Exceptions of jlora. Each message names the adapter, file, tensor or field at fault."""

import difflib
import re
from collections.abc import Iterable, Mapping

_NUMBER = re.compile(r"[0-9]+")
_MOST_COMPARED = 1000  # names in one search, at about 30 us each


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
