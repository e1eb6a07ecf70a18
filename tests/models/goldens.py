"""The committed checkpoints and their outputs by transformers (see make_goldens.py)."""

from pathlib import Path

import chex
import numpy as np
import pytest

FOLDER = Path(__file__).parent / "goldens"
EXPERTS = ("mixtral-window", "qwen2-moe-shared", "qwen3-moe-mlp-layer", "gpt-oss-square")
NAMES = (
    "llama-biases-llama3",
    "llama-tied-linear",
    "mistral-window",
    "qwen2-mixed-yarn",
    "qwen3-tied",
    *EXPERTS,
    "gemma3-tied",
)
SHARDED = "llama-biases-llama3"
BFLOAT16 = "qwen3-tied"

# Relative to the logits' scale. Measured: 1e-6 to 5e-6 here, 1.1e-5 where the rotation is fastest.
TOLERANCE = 1e-4

each = pytest.mark.parametrize("name", NAMES)


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "expected.npz") as arrays:
        return dict(arrays)


def relative_error(got, want) -> float:
    """Return the largest difference divided by the largest value of `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    chex.assert_equal_shape([got, want])
    return float(np.abs(got - want).max() / np.abs(want).max())
