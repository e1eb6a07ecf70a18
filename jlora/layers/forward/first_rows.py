"""The first active row of each sequence, before which an activated LoRA (aLoRA) changes no row: checks, and arrays."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jlora.adapters.activation import NOWHERE
from jlora.errors import LoRAUsageError
from jlora.layers.forward.row_groups import Items, integers

# One integer for each sequence. Arrays of other types and shapes get an error of `checked_first_rows`.
FirstRows: TypeAlias = Sequence[int] | jax.Array | np.ndarray

LENGTH_NEEDED = (
    "first active rows need `length`, the number of rows of each sequence in this forward, padding included: {call}, "
    "length=tokens.shape[1]), or length=1 for a decode step"
)
_GROUPS = (
    "LoRABatch.activate: this batch has the row groups {groups}, whose items take no adapter that is active from a "
    "later row on, and the first rows of a traced function are not known: activate the batch outside of it"
)
# Of the rows of a layer, where the first active rows are given.
POSITIONS_UNCLEAR = (
    "a sequence has rows of shape {between}, and `active_from` counts the rows of a sequence: expected {expected}. "
    "Say which of the batch's tokens other rows are with jlora.rows(jlora.RowMap(..., of='tokens')). Rows that are no "
    "tokens, such as an encoder's, are items: LoRAManager(..., row_groups={{module: 'audio'}}), and prepare(..., "
    "items=)"
)
ROW_UNDER_VMAP = (
    "{path}: under jax.vmap, a row of each sequence may be any of those that `active_from` counts: give the tokens "
    "with jlora.rows(jlora.RowMap(..., of='tokens')), or call the layer outside of vmap"
)
MAP_OF_SEQUENCES = (
    "{path}: a RowMap of sequences shows no positions, which `active_from` counts: give RowMap(..., of='tokens'), "
    "with {tokens}"
)
MAP_OF_OTHER_LENGTH = (
    "{path}: RowMap(of='tokens', length={length}), and `active_from` counts {declared} rows of each sequence: give "
    "that length, or 1 for the last row of each"
)


def checked_first_rows(
    option: str,
    values: FirstRows,
    num_sequences: int,
    items: Sequence[tuple[str, Items]],
) -> tuple[int, ...]:
    """Return the first active row of each sequence, at most `NOWHERE`, from a list or an array outside a trace.

    Raises:
      LoRAUsageError: they are not one integer for each sequence, one is negative, or an item belongs to a sequence
        with another first row than 0.
    """
    first = integers(option, values)
    if len(first) != num_sequences or min(first) < 0:
        raise LoRAUsageError(
            f"{option} must be one first row, from 0 on, for each of {num_sequences} sequences, got "
            f"{list(first)!r:.100}"
        )
    for group, given in items:
        for item, owner in enumerate(given.owners):
            if owner is not None and first[owner]:
                raise LoRAUsageError(
                    f"{option}: item {item} of group {group!r} belongs to sequence {owner}, whose adapter is "
                    f"active from row {first[owner]} on, and items have no place among these rows; give None as the "
                    "sequence of an item before that row"
                )
    return tuple([min(row, NOWHERE) for row in first])


def _clamped(first: Any, shape: tuple[int, ...]) -> Int[Array, "B"]:
    """Return traced first rows as int32, from 0 to `NOWHERE`. Raises `LoRAUsageError` for another shape or dtype."""
    if first.shape != shape or not jnp.issubdtype(first.dtype, jnp.integer):
        raise LoRAUsageError(
            f"LoRABatch.activate takes integers {list(shape)}, one a sequence, got {first.dtype}{list(first.shape)}"
        )
    wide = first.astype(jnp.int32) if first.dtype.itemsize < 4 else first
    return jnp.clip(wide, 0, NOWHERE).astype(jnp.int32)


def first_rows_of(
    given: Any, shape: tuple[int, ...], groups: Sequence[str], items: Sequence[tuple[str, Items]], *, traced: bool
) -> Int[Array | np.ndarray, "B"]:
    """Return the first rows of `LoRABatch.activate` as an int32 array, from 0 to `NOWHERE`.

    Args:
      given: the argument of the call.
      shape: shape of the slots of the batch.
      groups: row groups of the batch.
      items: their items, as far as they are known.
      traced: True inside a traced function, where they are not known.

    Raises:
      LoRAUsageError: as `LoRABatch.activate`.
    """
    values_traced = isinstance(given, jax.core.Tracer)
    if groups and (values_traced or traced):
        raise LoRAUsageError(_GROUPS.format(groups=groups))
    if values_traced:
        return _clamped(given, shape)
    count = int(np.prod(shape))
    rows = checked_first_rows("LoRABatch.activate: first_rows", given if shape else [given], count, items)
    return np.array(rows, np.int32).reshape(shape)


def packed_active(
    first: Sequence[int], counts: Sequence[int], owners: Int[np.ndarray, "T"]
) -> tuple[Bool[np.ndarray, "B"], Bool[np.ndarray, "T"]]:
    """Return True for each packed sequence whose last row is active, and for each row that is active.

    Args:
      first: the first active row of each sequence.
      counts: rows of each sequence.
      owners: the sequence of each row; padding may have any.
    """
    starts, sizes = np.array(first), np.array(counts)
    positions = np.arange(len(owners)) - (np.cumsum(sizes) - sizes)[owners]
    return starts < sizes, positions >= starts[owners]
