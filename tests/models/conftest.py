import functools

import jax.numpy as jnp
import pytest

import jlora.models
from jlora.models import checkpoint
from tests.models import goldens
from tests.models.recording import opened


@pytest.fixture(scope="session")
def golden():
    """Return a function from the name of a committed checkpoint to its decoder in float32, read once."""
    return functools.cache(lambda name: jlora.models.from_pretrained(goldens.FOLDER / name, dtype=jnp.float32))


@pytest.fixture
def counts(monkeypatch):
    """Return a dict from the name of a tensor to how often each of its values was read from a checkpoint."""
    found = {}
    monkeypatch.setattr(checkpoint, "safe_open", opened(found))
    return found
