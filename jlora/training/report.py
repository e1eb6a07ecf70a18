"""Results of the loss of a trainer, of each sequence and of each adapter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jlora.errors import LoRAUsageError

# (model, batch, *inputs) -> the sum of the losses of each sequence, the number of tokens that it sums (or weights), and
# optionally further arrays by name, [B, ...].
Loss: TypeAlias = Callable[
    ..., tuple[Float[Array, "B"], Real[Array, "B"]] | tuple[Float[Array, "B"], Real[Array, "B"], Mapping[str, Array]]
]


@dataclass(frozen=True)
class Report:
    """Results of a call of a trainer: arrays on the device.

    Attributes:
      losses: adapter -> the sum of its losses, divided by its weights if they are not 0.
      weights: adapter -> the sum of its weights.
      aux: name -> adapter -> the sum over its sequences of an array that the loss returned beside its losses.
      rows: name -> that array itself, [B, ...].
      norms: adapter -> global norm of its gradient before clipping, after `step`. If it is not finite, the adapter did
        not move.
    """

    losses: dict[str, jax.Array]
    weights: dict[str, jax.Array]
    aux: dict[str, dict[str, jax.Array]]
    rows: dict[str, jax.Array]
    norms: dict[str, jax.Array] = field(default_factory=dict[str, jax.Array])


def report(names: Sequence[str], found: Mapping[str, Any], norms: Sequence[jax.Array] = ()) -> Report:
    """Return the results of a program, which has them for each place of a batch. The last places may be free."""

    def by_name(values: Sequence[jax.Array]) -> dict[str, jax.Array]:
        return dict(zip(names, values, strict=False))

    aux = {key: by_name(values) for key, values in found["aux"].items()}
    return Report(by_name(found["losses"]), by_name(found["weights"]), aux, found["rows"], by_name(norms))


def checked(found: Any, count: int) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Return the losses, weights and further arrays that a loss returned, of each of `count` sequences."""
    if not isinstance(found, tuple | list) or len(found := cast("tuple[Any, ...]", found)) not in (2, 3):
        name = type(found).__name__
        raise LoRAUsageError(
            f"Trainer: the loss returned one {name}; expected the pair (losses [B], weights [B]), or these and a "
            "mapping of arrays [B, ...]"
        )
    losses, weights, aux = cast("Any", found if len(found) == 3 else (*found, {}))
    kinds = is_array(losses, jnp.floating) and is_array(weights, jnp.floating, jnp.integer)
    if not kinds or (np.shape(losses), np.shape(weights)) != ((count,), (count,)):
        raise LoRAUsageError(
            f"Trainer: the loss returned losses {dtype_and_shape(losses)} and weights {dtype_and_shape(weights)}; "
            f"expected floating losses [{count}] and weights [{count}]: the sum of each sequence, and the number of "
            "its tokens"
        )
    named: dict[Any, Any] = dict(cast("Any", aux)) if isinstance(aux, Mapping) else {type(aux).__name__: None}
    for key, array in named.items():
        known = isinstance(key, str) and is_array(array, jnp.floating, jnp.integer, jnp.bool_)
        if not known or np.shape(array)[:1] != (count,):
            raise LoRAUsageError(
                f"Trainer: the third result of the loss must be a mapping of names to arrays [{count}, ...]; got "
                f"{key!r:.80}: {dtype_and_shape(array)}"
            )
    return jnp.asarray(losses), jnp.asarray(weights), {key: jnp.asarray(each) for key, each in named.items()}


def is_array(value: Any, *kinds: Any) -> bool:
    """Return whether JAX takes a value for an array of one of these kinds of dtypes, or of any without kinds."""
    try:
        dtype = jax.typeof(value).dtype
    except TypeError:
        return False
    return not kinds or any(jnp.issubdtype(dtype, kind) for kind in kinds)


def dtype_and_shape(leaf: Any) -> str:
    """Return the dtype and shape of an array, as JAX holds it, or the type of another value."""
    return f"{jax.typeof(leaf).dtype}{list(np.shape(leaf))}" if is_array(leaf) else type(leaf).__name__
