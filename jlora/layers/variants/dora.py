"""DoRA (arXiv:2402.09353): the columns of a weight with its LoRA have norms of their own.

The slots hold the quotient of the new norm of each column and that of the weight with its LoRA
(`jlora.slots.magnitudes`).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jlora.adapters.variants import MAGNITUDE
from jlora.layers.variants.finisher import Finisher


def _scale_columns(
    y: Float[Array, "M N"],
    x: Float[Array, "M K"],
    base: Float[Array, "M N"],
    bias: Float[Array, "N"] | None,
    extras: Sequence[Float[Array, "S N"]],
    slots: Int[Array, "M"],
) -> Float[Array, "M N"]:
    """Return bias + magnitude * (y - bias), which is bitwise y where a magnitude is 1. Magnitudes have no gradient."""
    del x, base
    (magnitudes,) = extras
    scales = lax.stop_gradient(magnitudes).at[slots].get(mode="fill", fill_value=1)
    if bias is None:
        return scales * y
    bias = bias.astype(jnp.float32)[None]
    return jnp.where(scales == 1, y, bias + scales * (y - bias))


def _scaled(
    weight: Float[np.ndarray, "K N"], bias: Float[np.ndarray, "N"], extras: Sequence[Float[np.ndarray, "N"]]
) -> tuple[Float[np.ndarray, "K N"], Float[np.ndarray, "N"]]:
    (magnitudes,) = extras
    return weight * magnitudes, bias


SCALE_COLUMNS = Finisher((MAGNITUDE,), frozenset({"sum", "bias"}), _scale_columns, _scaled)
