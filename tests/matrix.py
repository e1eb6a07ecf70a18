"""A matrix of cases of which `make test` runs a part, and `make test-slow` the rest."""

from collections.abc import Sequence
from typing import Any

import pytest


def thinned(cases: Sequence[Any], *kept: int) -> list[Any]:
    """The cases, to be parametrised over: all but those of these indices are slow."""
    return [case if i in kept else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
