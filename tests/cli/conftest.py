"""Fixtures of the command line's tests."""

import shutil

import pytest

from jlora.cli.demo import DEMO


@pytest.fixture(scope="session")
def unread_model(tmp_path_factory) -> str:
    """The demo model without its weights, for errors that come before the weights are read."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO / "model" / name, folder)
    return str(folder)
