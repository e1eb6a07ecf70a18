import functools

import jax.numpy as jnp
import pytest

import jlora.models
from tests.models import goldens


@pytest.fixture(scope="session")
def golden():
    """`golden(name)` -> the decoder of a committed checkpoint in float32, read once."""
    return functools.cache(lambda name: jlora.models.from_pretrained(goldens.FOLDER / name, dtype=jnp.float32))
