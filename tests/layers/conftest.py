"""Fixtures of the tests of layers."""

from collections.abc import Iterator

import pytest

from jlora.layers.wrap.discover import _describe


@pytest.fixture
def registered() -> Iterator[None]:
    """Forget the classes that a test registers."""
    before = dict(_describe)
    yield
    _describe.clear()
    _describe.update(before)
