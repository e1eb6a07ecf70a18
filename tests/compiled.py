"""The number of programs that a jitted function has compiled."""

from typing import Any


def compiled_programs(jitted: Any) -> int:
    """Return the number of programs of a function of `jax.jit`.

    JAX has no public count. Traces do not show it, because new shardings compile again without a trace.
    """
    return jitted._cache_size()
