"""Fixtures of the tests over HTTP."""

import pytest

from tests.serve.fake_engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
