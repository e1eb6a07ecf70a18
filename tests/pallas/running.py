"""How the kernels of a backend run on the platform at hand: compiled on its own, else interpreted."""

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu


def interpret_of(backend: str) -> Any:
    """Return the `interpret` argument of a kernel of "triton" or "mosaic_tpu": False on a device of that backend."""
    here = jax.default_backend()
    if backend == "triton":
        return here != "gpu"
    return False if here == "tpu" else pltpu.InterpretParams()
