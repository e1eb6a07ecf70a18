"""Invocation tokens of activated LoRA (aLoRA, arXiv:2504.12397): check them, and find them in a prompt.

The rules follow `ALoraLinearVariant` and `calculate_alora_offsets` of PEFT 0.21 (`peft/tuners/lora/variants.py`): the
adapter is active from the first token of the last occurrence on, and nowhere without an occurrence.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from jlora._typing import is_list_or_tuple
from jlora.errors import AdapterFormatError, LoRAUsageError, shown_value

# The first active row of a sequence without any. It is past the last row of every forward, padding included.
NOWHERE = 2**31 - 1


def active_from(
    tokens: Sequence[int] | Integer[np.ndarray, "tokens"], invocation_tokens: Sequence[int], *, start: int = 0
) -> int:
    """Return the first row of a forward pass on which an activated LoRA acts.

    Args:
      tokens: Token ids of the whole prompt, also if the forward pass gets a chunk of it.
      invocation_tokens: `Adapter.invocation_tokens`. Empty for a plain adapter, which acts on all rows.
      start: Number of tokens that are in the cache already. Row 0 is `tokens[start]`.

    Returns:
      Start of the last occurrence of `invocation_tokens` in `tokens`, minus `start`, at least 0. Without an occurrence
      `jlora.NOWHERE`.

    Raises:
      LoRAUsageError: `tokens` or `invocation_tokens` is not a sequence of ints, or `start` is not from 0 to
        `len(tokens)`.
    """
    prompt, called = _ids("tokens", tokens), _ids("invocation_tokens", invocation_tokens)
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= len(prompt):
        raise LoRAUsageError(f"active_from: start must be an int from 0 to {len(prompt)}, got {start!r}")
    if not len(called):
        return 0
    starts = np.arange(max(0, len(prompt) - len(called) + 1))
    for i, token in enumerate(called):
        starts = starts[prompt[starts + i] == token]
    return max(0, int(starts[-1]) - start) if len(starts) else NOWHERE


def check_invocation_tokens(value: Any, where: str) -> tuple[int, ...]:
    """Return a list or tuple of token ids as a tuple.

    Raises:
      AdapterFormatError: The value is of another type, or an element is not an int from 0 to 2**31 - 1.
    """
    if not is_list_or_tuple(value) or not all(type(v) is int and 0 <= v < 2**31 for v in value):
        raise AdapterFormatError(f"{where} must be a list of token ids below 2**31, found {shown_value(value)}")
    return tuple(value)


def _ids(name: str, values: Any) -> Integer[np.ndarray, "n"]:
    ids = np.asarray(values)
    if ids.ndim == 1 and not ids.size:  # np.asarray([]) is of floats
        return ids.astype(np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise LoRAUsageError(f"active_from: {name} must be a sequence of ints, got {shown_value(values)}")
    return ids
