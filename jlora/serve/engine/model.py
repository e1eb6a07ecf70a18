"""The model interface of the engine, and slicing of its cache by row and position."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jlora.errors import LoRAUsageError


class ModelSizes(Protocol):
    """Sizes of a model that an engine reads. `jlora.models.DecoderConfig` is one."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in tokens."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Token ids that end a sequence."""
        ...


@runtime_checkable
class ServableModel(Protocol):
    """Interface of a model that an engine serves, an `nnx.Module`. `jlora.models.Decoder` is one.

    `extend` may have a keyword `extent`, a static int. It then reads positions 0..extent-1 of the cache only, and
    returns the whole cache. Without the keyword all of the cache is read. A model with `reads_what_is_live = True`
    derives the live positions of decode steps from `positions`; its decode step is compiled for one extent.
    """

    @property
    def config(self) -> ModelSizes:
        """Vocabulary, context length and end-of-sequence tokens."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Any:
        """Return an empty cache: a pytree of arrays, each with one axis of size `batch` and one of size `capacity`.

        Index c along the capacity axis holds only data of position c of a sequence. A row is reused for the next
        sequence without being cleared.
        """
        ...

    def extend(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], cache: Any, last: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Any]:
        """Append tokens to sequences whose earlier positions are in the cache.

        Args:
          tokens: [B, L] token ids, padded on the right.
          positions: [B, L] position of each token, increasing by one, also through the padding. Each token attends to
            the positions up to its own.
          cache: As from `init_cache`, maybe with fewer sequences or a smaller capacity. Beyond a sequence's last real
            token it may hold any values, also NaN and infinity, and these must not reach a product. A weight of 0 is
            not enough, since 0 x NaN is NaN. Select keys and values instead: `jnp.where(seen, values, 0)`.
          last: [B] index of each sequence's last real token.

        Returns:
          Float32 logits [B, V] after each sequence's last token, and the cache with these tokens. The logits of a
          sequence must not depend on the others. NaN logits end their own sequence only.
        """
        ...


@runtime_checkable
class ScoringModel(ServableModel, Protocol):
    """Interface of a model that also computes log probabilities of prompts. `jlora.models.Decoder` is one.

    `extend` is `hidden_states` followed by `logits` of each sequence's last real token. The engine then prefills by
    these two, and computes the logits of a prompt in blocks of positions.
    """

    def hidden_states(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], cache: Any, last: Int[Array, "B"]
    ) -> tuple[Float[Array, "B L E"], Any]:
        """Append tokens as `extend` does, with its keyword `extent` if that has one.

        Returns:
          The input of the head [B, L, E] at every position, and the cache with these tokens.
        """
        ...

    def logits(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Return float32 logits of some of these rows, [B, E] or [B, l, E]."""
        ...


def context_of(model: Any) -> int:
    """Return the longest sequence of the model, in tokens.

    Raises:
      LoRAUsageError: the model has no `config.max_position_embeddings`.
    """
    try:
        return int(model.config.max_position_embeddings)
    except AttributeError:
        raise LoRAUsageError(
            f"{type(model).__name__} has no config with vocab_size, max_position_embeddings and eos_token_ids; see "
            "jlora.serve.ServableModel"
        ) from None


def check_place(model: Any, manager: Any) -> None:
    """Raise LoRAUsageError if the model is not the manager's, or is on devices of several processes."""
    if manager.model is not model:
        raise LoRAUsageError("the manager serves another model than the engine was given")
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(nnx.state(model)) if isinstance(leaf, jax.Array)):
        raise LoRAUsageError(
            "an engine serves from one process, and the model lies on devices of several; step it in a loop of "
            "your own, as examples/serve_multihost.py does"
        )


def cache_axes(model: ServableModel) -> list[tuple[int, int]]:
    """Return (sequence axis, position axis) of every array of a cache, found by comparing shapes of different sizes.

    Raises:
      LoRAUsageError: an array lacks one of the axes, so its rows could not be separated or padding would change it.
    """

    def shapes(batch: int, capacity: int) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(batch, capacity)))]

    found: list[tuple[int, int]] = []
    for one, batches, longer in zip(shapes(2, 8), shapes(4, 8), shapes(2, 16), strict=True):
        rows = [i for i, size in enumerate(one) if batches[i] != size]
        positions = [i for i, size in enumerate(one) if longer[i] != size]
        if len(rows) != 1 or len(positions) != 1 or rows == positions:
            raise LoRAUsageError(
                f"init_cache(2, 8) has an array of shape {one}: expected one axis of sequences and one of positions"
            )
        found.append((rows[0], positions[0]))
    return found


def row_of(axis: int, positions: int, array: jax.Array, *, row: jax.Array, extent: int) -> jax.Array:
    """Return the first `extent` positions of one row."""
    array = jax.lax.slice_in_dim(array, 0, extent, axis=positions)
    return jax.lax.dynamic_slice_in_dim(array, row, 1, axis=axis)


def with_row(axis: int, positions: int, array: jax.Array, own: jax.Array, *, row: jax.Array) -> jax.Array:
    """Return `array` with the positions `own` written into one row."""
    starts = [jnp.int32(0)] * array.ndim
    starts[axis] = row
    return jax.lax.dynamic_update_slice(array, own, starts)
