"""What a model brings to be served: its sizes, its steps, and which axes of its cache are sequences and positions."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jlora.errors import LoRAUsageError


class ModelSizes(Protocol):
    """What an engine must know of a model beside its steps; `DecoderConfig` is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...


@runtime_checkable
class ServableModel(Protocol):
    """What a model brings to be served: an `nnx.Module` with these; `jlora.models.Decoder` is one."""

    @property
    def config(self) -> ModelSizes:
        """Vocabulary, context and ends of sequence."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Any:
        """An empty cache: a pytree of arrays, each with one axis of size `batch` and one of size `capacity`.

        Index c along the latter holds what belongs to position c of a sequence, and nothing else. A row goes from one
        sequence to the next as it is: it is not cleared in between.
        """
        ...

    def extend(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], cache: Any, last: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Any]:
        """Append tokens to sequences whose earlier positions are in the cache.

        Args:
          tokens: [B, L], padded on the right.
          positions: [B, L] position of each token, counted up; padding goes on counting. Each attends to the positions
            up to its own.
          cache: as from `init_cache`, maybe of fewer sequences or a smaller capacity: those that are needed. Beyond a
            sequence's last real token it may hold anything, NaN and infinity as well, and none of that may reach a
            product: a weight of 0 is not enough, since 0 x NaN is NaN. Select instead, for keys and for values:
            `jnp.where(seen, values, 0)`.
          last: [B] index of each sequence's last real token.

        Returns:
          Float32 logits [B, V] after each sequence's last token, and the cache with these tokens. Logits that are NaN
          end their own sequence; those of one sequence must not depend on another's.

        A model whose `extend` has a keyword `extent` is told how much of the cache is live: positions 0..extent-1,
        static. It reads no more than that, and returns the whole cache. Without, all of the cache is read. One that has
        `reads_what_is_live` set knows it from the positions of decode steps, which are compiled for one extent then.
        """
        ...


def context_of(model: Any) -> int:
    """The most positions that a sequence of the model may have. Raises `LoRAUsageError` where it does not say."""
    try:
        return int(model.config.max_position_embeddings)
    except AttributeError:
        raise LoRAUsageError(
            f"{type(model).__name__} has no config with vocab_size, max_position_embeddings and eos_token_ids; see "
            "jlora.serve.ServableModel"
        ) from None


def cache_axes(model: ServableModel) -> list[tuple[int, int]]:
    """The axes of sequences and of positions of every array of a cache, found by asking for other sizes.

    Raises:
      LoRAUsageError: an array lacks one: a row of it could not go to another sequence, or padding would change it.
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
    """The live positions of one sequence."""
    array = jax.lax.slice_in_dim(array, 0, extent, axis=positions)
    return jax.lax.dynamic_slice_in_dim(array, row, 1, axis=axis)


def with_row(axis: int, positions: int, array: jax.Array, own: jax.Array, *, row: jax.Array) -> jax.Array:
    """`array` with these positions of one sequence."""
    starts = [jnp.int32(0)] * array.ndim
    starts[axis] = row
    return jax.lax.dynamic_update_slice(array, own, starts)
