"""Managers of a device with little memory, which move adapters to slots in small blocks."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def on_small_device(staging: int, make: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return `make(*args, **options)`. The manager that it makes moves at most `staging` bytes at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jlora.manager.manager.staging_bytes", lambda: staging)
        return make(*args, **options)
