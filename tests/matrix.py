"""A matrix of cases of which `make test` runs a part, and `make test-slow` the rest."""

from collections.abc import Sequence
from typing import Any

import pytest


def thinned(cases: Sequence[Any], *kept: int) -> list[Any]:
    """The cases, to be parametrised over: all but those of these indices are slow. A tuple is of several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] * (i not in kept))
        for i, case in enumerate(cases)
    ]
