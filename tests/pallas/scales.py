"""Ranks with scales, as the backends take them."""

import jax
import jax.numpy as jnp


def with_scales(ranks, scales=1.0) -> jax.Array | None:
    """Return float32 [G, n, 2] of ranks [G, n] and scales, which are broadcast to [G, n]; None for None."""
    if ranks is None:
        return None
    ranks = jnp.asarray(ranks, jnp.float32)
    return jnp.stack([ranks, jnp.broadcast_to(jnp.asarray(scales, jnp.float32), ranks.shape)], axis=2)
