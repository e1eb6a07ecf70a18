"""Rounding of LoRA factors to int8, with one quantum for each row of A and of an output slice of B.

A value is code * quantum. Codes are whole numbers from -127 to 127, and the quantum is the largest magnitude of the row
divided by 127, so a value changes by half a quantum at most.
"""

import math

import numpy as np
from jaxtyping import Float, Int8

from jlora.adapters.lora import LoRA

_LARGEST_CODE = 127
_RUN = 4096  # values that are compared with one another along contiguous memory


def quanta_of(factor: Float[np.ndarray, "*lead r X"]) -> Float[np.ndarray, "*lead r"]:
    """Return the quantum of each row, float64. It is 0 for zeros, and NaN for a row with NaN or infinity."""
    values = np.abs(factor)
    if values.shape[-1] > _RUN > values.strides[-1] // values.itemsize > 1:
        # The rows alternate in memory. Compare long runs of it, not one value of each row at a time.
        more = values.shape[-1] % _RUN
        runs = values[..., more:].reshape(*values.shape[:-1], -1, _RUN).max(axis=-2)
        values = np.concatenate([runs, values[..., :more]], axis=-1)
    return quanta_for(values.max(axis=-1, initial=0))


def quanta_for(largest: Float[np.ndarray, "*lead r"]) -> Float[np.ndarray, "*lead r"]:
    """Return the quanta of rows of these largest magnitudes, float64. A row rounded again keeps its quantum."""
    return np.where(np.isfinite(largest), largest.astype(np.float64) / _LARGEST_CODE, np.nan)


def rounded(values: Float[np.ndarray, "*lead r X"], quanta: Float[np.ndarray, "*lead r"]) -> Int8[np.ndarray, "..."]:
    """Return the codes of values for the quanta of their rows, rounded to nearest, ties to even.

    The codes of a row whose quantum is NaN have no meaning.
    """
    inverse = np.divide(1, quanta, out=np.zeros(quanta.shape), where=quanta > 0)
    wide = np.float64 if (inverse > np.finfo(np.float32).max).any() else np.float32
    with np.errstate(invalid="ignore"):
        codes = np.multiply(values, inverse.astype(wide)[..., None], dtype=wide)
        return np.rint(codes, out=codes).astype(np.int8)


def restored(codes: Int8[np.ndarray, "*lead r X"], quanta: Float[np.ndarray, "*lead r"]) -> Float[np.ndarray, "..."]:
    """Return the float32 values of codes."""
    return (codes * quanta[..., None]).astype(np.float32)


def error_of(module: LoRA) -> float:
    """Return the Frobenius norm of the change of a module's delta by int8, relative to that of the delta; 0 for zeros.

    With the changes dA and dB of the factors, the delta changes by dB A + (B + dB) dA. Its norm is computed from
    products [2r, 2r] of the factors.
    """
    a, b = (factor.astype(np.float32) for factor in (module.a, module.b.swapaxes(-1, -2)))
    new_a, new_b = (restored(rounded(each, quanta), quanta) for each, quanta in ((a, quanta_of(a)), (b, quanta_of(b))))
    changed = _squared_norm(np.concatenate([a, new_a - a], axis=-2), np.concatenate([new_b - b, new_b], axis=-2))
    total = _squared_norm(a, b)
    return math.sqrt(changed / total) if total else 0.0


def _squared_norm(a: Float[np.ndarray, "... r K"], b: Float[np.ndarray, "... r N"]) -> float:
    """Return the squared Frobenius norm of the products b.T @ a of all experts."""
    grams = [(each @ each.swapaxes(-1, -2)).astype(np.float64) for each in (a, b)]
    return max(0.0, float((grams[0] * grams[1]).sum()))
