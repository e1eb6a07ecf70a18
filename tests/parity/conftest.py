"""PyTorch runs on one thread: its matrices are tiny here, and other workers need the cores."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
