"""Ranks with scales, as the backends take them."""

import jax
import jax.numpy as jnp
import numpy as np


def with_scales(ranks, scales=1.0) -> jax.Array | None:
    """Return float32 [G, n, 2] of ranks [G, n] and scales, which are broadcast to [G, n]; None for None."""
    if ranks is None:
        return None
    xp = jnp if isinstance(ranks, jax.core.Tracer) else np  # an eager function of JAX would be a program a shape
    ranks = xp.asarray(ranks).astype(np.float32)
    scales = xp.broadcast_to(xp.asarray(scales).astype(np.float32), ranks.shape)
    return jax.device_put(xp.stack([ranks, scales], axis=2))
