"""The checks of annotations that `tests/conftest.py` installs."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import beartype

# An int is a float here, as in every other checker of annotations (PEP 484).
_compile = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_compiled: dict[Any, Callable[..., Any]] = {}


def check(function: FunctionType) -> Callable[..., Any]:
    """Return `function` with checks of its annotations, compiled once for all functions of one name and annotations.

    jaxtyping gives stubs, which have only the name and the parameters of what is checked. It gives those of a function
    inside another in every call of the other.
    """
    key = (function.__module__, function.__qualname__, function.__code__, *function.__annotations__.items())
    try:
        kept = _compiled.get(key)
    except TypeError:  # an annotation that cannot be hashed
        return _compile(function)
    if kept is None or function.__defaults__ or function.__kwdefaults__:
        kept = _compiled[key] = _compile(function)
    return kept
