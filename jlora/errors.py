"""Every error jlora raises on purpose. Each message names the adapter, the file and the tensor or field at fault."""


class LoRAError(Exception):
    """Base of all jlora errors. Raised itself where no narrower class says more: a layer called outside `jlora.use`, a
    batch baked into a compiled function, a model that cannot be wrapped."""


class LoRAUsageError(LoRAError, ValueError):
    """A mistake in a call: arguments of the wrong kind, or that disagree."""


class AdapterFormatError(LoRAError):
    """The adapter's files are missing or malformed: bad JSON, truncated safetensors, wrong dtype or shape, NaN."""


class AdapterMismatchError(LoRAError):
    """The files are well formed but this model or configuration cannot serve them exactly: a tensor no module takes,
    a rank above `max_lora_rank`, an unsupported PEFT feature."""


class AdapterNotFoundError(LoRAError):
    """No adapter of that name is known, or its path does not exist."""


class AdapterInUseError(LoRAError):
    """Open batches held an adapter for longer than a call that removes, deactivates, replaces or updates it waits."""


class LoadTimeoutError(LoRAError, TimeoutError):
    """Loading an adapter took longer than the call waits for it."""


class NoFreeSlotError(LoRAError):
    """Every slot (or host-cache entry) that could be freed is pinned or held by an open batch."""


def error_of(name: str, message: str) -> LoRAError:
    """The error that another process told of, by its class where that is one of these."""
    cls = globals().get(name)
    if isinstance(cls, type) and issubclass(cls, LoRAError):
        return cls(message)
    return LoRAError(f"{name}: {message}")


# Joiners that emoji, Persian and Indic scripts are written with, and the spaces of other scripts.
_ORDINARY = frozenset("\u200c\u200d\u00a0\u3000\u202f\u2009")


def printable(text: str) -> str:
    r"""Return text from outside as one line: control characters, line ends, bidi marks and lone surrogates are escaped
    as `\x1b`, `\n`, `\u202e`, so that it cannot forge a line or command a terminal."""
    return "".join(c if c.isprintable() or c in _ORDINARY else c.encode("unicode_escape").decode() for c in text)
