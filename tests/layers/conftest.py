"""What tests of layers leave behind is taken away."""

import pytest

from jlora.layers.wrap.discover import _describe


@pytest.fixture
def registered():
    """Classes registered inside a test are forgotten after it."""
    before = dict(_describe)
    yield
    _describe.clear()
    _describe.update(before)
