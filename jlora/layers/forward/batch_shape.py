"""The rows of a batch: the number of sequences, and the rows of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jlora.adapters.activation import NOWHERE
from jlora.errors import LoRAUsageError
from jlora.layers.forward.row_groups import Items, checked_items, integer, integers
from jlora.layers.site import ModelSites

# One integer for each sequence. Arrays of other types and shapes get an error.
FirstRows: TypeAlias = Sequence[int] | jax.Array | np.ndarray

LENGTH_NEEDED = (
    "first active rows need `length`, the number of rows of each sequence in this forward, padding included: {call}, "
    "length=tokens.shape[1]), or length=1 for a decode step"
)
_GROUPS = (
    "LoRABatch.activate: this batch has the row groups {groups}, whose items take no adapter that is active from a "
    "later row on, and the first rows of a traced function are not known: activate the batch outside of it"
)


@dataclass(frozen=True)
class BatchShape:
    """The checked shape of a batch.

    Attributes:
      num_sequences: B.
      token_counts: packed rows of each sequence, in order; None if rows are not packed.
      num_rows: T, packed rows with padding; 0 if rows are not packed.
      length: rows of each sequence, if declared, as it must be for `active_from` of rows that are not packed.
      active_from: the first row of each sequence that takes its adapter; None for all rows.
      items: row group -> its items, as pairs, for layers whose rows are not those of the sequences.
    """

    num_sequences: int
    token_counts: tuple[int, ...] | None = None
    num_rows: int = 0
    length: int | None = None
    active_from: tuple[int, ...] | None = None
    items: tuple[tuple[str, Items], ...] = ()

    def row_owners(self) -> Int[np.ndarray, "T"] | None:
        """Return the sequence of each packed row, -1 for padding and inactive rows; None if rows are not packed."""
        if self.token_counts is None:
            return None
        counts = np.array(self.token_counts)
        owners = np.repeat(np.arange(self.num_sequences + 1), (*counts, self.num_rows - counts.sum()))
        first = np.array((*(self.active_from or [0] * len(counts)), NOWHERE))
        position = np.arange(self.num_rows) - np.append(counts.cumsum() - counts, 0)[owners]
        return np.where(position < first[owners], -1, owners)

    def last_active(self) -> Bool[np.ndarray, "B"] | None:
        """Return True for each packed sequence whose last row is active; None if rows are not packed, or all active."""
        if self.token_counts is None or self.active_from is None:
            return None
        return np.array(self.active_from) < np.array(self.token_counts)

    def first_rows(self) -> Int[np.ndarray, "B"] | None:
        """Return the first active row of each sequence, int32 [B]; None if all are active or rows are packed."""
        if self.token_counts is not None or self.active_from is None:
            return None
        return np.array(self.active_from, np.int32)

    @property
    def differ(self) -> bool:
        """True if rows of a sequence may be inactive, so that they take different adapters."""
        return self.active_from is not None

    @property
    def one_each(self) -> bool:
        """True if rows are packed and row b is the only one of sequence b."""
        return self.num_rows == self.num_sequences and self.token_counts == (1,) * self.num_sequences


def batch_shape(
    call: str,
    num_sequences: int,
    token_counts: Sequence[int] | None,
    pad_to: int | None,
    length: int | None,
    active_from: FirstRows | None,
    items: Mapping[str, Items] | None,
    sites: ModelSites,
) -> BatchShape:
    """Check the shape arguments of a call, such as "prepare", and return them as a `BatchShape`.

    Raises:
      LoRAUsageError: a value has the wrong type or sign, the values disagree, or `sites` have no such row group or no
        first active rows.
    """
    if active_from is not None and not sites.config.activated:
        raise LoRAUsageError(f"{call}: active_from needs LoRAConfig(activated=True)")
    if num_sequences < 1:
        raise LoRAUsageError(f"{call} needs at least one sequence")
    counts = None if token_counts is None else integers(f"{call}: token_counts", token_counts)
    num_rows = None if pad_to is None else integer(f"{call}: pad_to", pad_to)
    if length is not None:
        if counts is not None:
            raise LoRAUsageError(f"{call}: length is for rows that are not packed; packed rows have token_counts")
        length = checked_length(f"{call}: length", length)
    checked = checked_items(call, items, num_sequences, sites.groups)
    first = None
    if active_from is not None:
        if length is None and counts is None:
            raise LoRAUsageError(LENGTH_NEEDED.format(call="prepare(names, active_from=first_rows"))
        first = _checked_first_rows(f"{call}: active_from", active_from, num_sequences, checked)
    return BatchShape(
        num_sequences, counts, _packed_rows(call, num_sequences, counts, num_rows), length, first, checked
    )


def shape_of_all(
    call: str,
    num_sequences: int,
    token_counts: Sequence[int] | None,
    pad_to: int | None,
    length: int | None,
    items: Mapping[str, Items] | None,
    sites: ModelSites,
) -> BatchShape:
    """Return the shape of a batch whose rows are all active. Raises as `batch_shape`.

    If batches have first active rows and this one declares the rows that they count, it has them too. A step that was
    compiled for it then serves batches with inactive rows.
    """
    counted = sites.config.activated and (token_counts, length) != (None, None)
    first = [0] * num_sequences if counted else None
    return batch_shape(call, num_sequences, token_counts, pad_to, length, first, items, sites)


def checked_length(option: str, length: Any) -> int:
    """Return the number of rows of each sequence.

    Raises:
      LoRAUsageError: it is no positive integer.
    """
    if (found := integer(option, length)) < 1:
        raise LoRAUsageError(f"{option} must be positive, got {found}")
    return found


def _checked_first_rows(
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


def first_rows_of(
    given: Any, shape: tuple[int, ...], groups: Sequence[str], items: Sequence[tuple[str, Items]] | None
) -> Int[Array | np.ndarray, "B"]:
    """Return the first rows of `LoRABatch.activate` as int32 from 0 to `NOWHERE`, on the host unless they are traced.

    Args:
      given: the argument of the call.
      shape: shape of the slots of the batch.
      groups: row groups of the batch.
      items: their items; None inside a traced function, where they are not known.

    Raises:
      LoRAUsageError: as `LoRABatch.activate`.
    """
    is_traced = isinstance(cast("object", given), jax.core.Tracer)
    if groups and (is_traced or items is None):
        raise LoRAUsageError(_GROUPS.format(groups=groups))
    if not is_traced:
        each = given if shape else [given]
        rows = _checked_first_rows("LoRABatch.activate: first_rows", each, int(np.prod(shape)), items or ())
        return np.array(rows, np.int32).reshape(shape)
    if given.shape != shape or not jnp.issubdtype(given.dtype, jnp.integer):
        raise LoRAUsageError(
            f"LoRABatch.activate takes integers {list(shape)}, one a sequence, got {given.dtype}{list(given.shape)}"
        )
    wide: Array = given.astype(jnp.int32) if given.dtype.itemsize < 4 else given
    return jnp.clip(wide, 0, NOWHERE).astype(jnp.int32)


def _packed_rows(call: str, num_sequences: int, counts: tuple[int, ...] | None, pad_to: int | None) -> int:
    if counts is None:
        if pad_to is not None:
            raise LoRAUsageError(f"{call}: pad_to is the number of packed rows; it needs token_counts")
        return 0
    if len(counts) != num_sequences:
        raise LoRAUsageError(f"{call}: {len(counts)} token_counts for {num_sequences} sequences")
    if min(counts) < 0:
        raise LoRAUsageError(f"{call}: token_counts must not be negative, got {min(counts)}")
    total = sum(counts)
    num_rows = total if pad_to is None else pad_to
    if num_rows < total or num_rows == 0:
        raise LoRAUsageError(f"{call}: token_counts sum to {total}, and there are {num_rows} packed rows (pad_to)")
    return num_rows
