"""The rows of a batch: the number of sequences, and the rows of each."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from jlora.errors import LoRAUsageError
from jlora.layers.forward.first_rows import LENGTH_NEEDED, FirstRows, checked_first_rows
from jlora.layers.forward.row_groups import Items, checked_items, integer, integers
from jlora.layers.site import ModelSites


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
        """Return the sequence of each packed row, -1 for padding; None if rows are not packed."""
        if self.token_counts is None:
            return None
        rest = self.num_rows - sum(self.token_counts)
        return np.repeat(np.append(np.arange(self.num_sequences), -1), (*self.token_counts, rest))

    @property
    def one_each(self) -> bool:
        """True if rows are packed and row b is the only one of sequence b."""
        return self.num_rows == self.num_sequences and self.token_counts == (1,) * self.num_sequences


def batch_shape(
    num_sequences: int,
    token_counts: Sequence[int] | None,
    pad_to: int | None,
    length: int | None,
    active_from: FirstRows | None,
    items: Mapping[str, Items] | None,
    known: Collection[str],
) -> BatchShape:
    """Check the shape arguments of `LoRAManager.prepare` and return them as a `BatchShape`.

    Raises:
      LoRAUsageError: a value has the wrong type or sign, the values disagree, or a row group is not among the `known`.
    """
    if num_sequences < 1:
        raise LoRAUsageError("prepare needs at least one sequence")
    counts = None if token_counts is None else integers("prepare: token_counts", token_counts)
    num_rows = None if pad_to is None else integer("prepare: pad_to", pad_to)
    if length is not None:
        if counts is not None:
            raise LoRAUsageError("prepare: length is for rows that are not packed; packed rows have token_counts")
        length = checked_length("prepare: length", length)
    checked = checked_items(items, num_sequences, known)
    first = None
    if active_from is not None:
        if length is None and counts is None:
            raise LoRAUsageError(LENGTH_NEEDED.format(call="prepare(names, active_from=first_rows"))
        first = checked_first_rows("prepare: active_from", active_from, num_sequences, checked)
    return BatchShape(num_sequences, counts, _packed_rows(num_sequences, counts, num_rows), length, first, checked)


def shape_of_all(
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
    counted = sites.activated and (token_counts, length) != (None, None)
    first = [0] * num_sequences if counted else None
    return batch_shape(num_sequences, token_counts, pad_to, length, first, items, sites.groups)


def checked_length(option: str, length: Any) -> int:
    """Return the number of rows of each sequence.

    Raises:
      LoRAUsageError: it is no positive integer.
    """
    if (found := integer(option, length)) < 1:
        raise LoRAUsageError(f"{option} must be positive, got {found}")
    return found


def _packed_rows(num_sequences: int, counts: tuple[int, ...] | None, pad_to: int | None) -> int:
    if counts is None:
        if pad_to is not None:
            raise LoRAUsageError("prepare: pad_to is the number of packed rows; it needs token_counts")
        return 0
    if len(counts) != num_sequences:
        raise LoRAUsageError(f"prepare: {len(counts)} token_counts for {num_sequences} sequences")
    if min(counts) < 0:
        raise LoRAUsageError(f"prepare: token_counts must not be negative, got {min(counts)}")
    total = sum(counts)
    num_rows = total if pad_to is None else pad_to
    if num_rows < total or num_rows == 0:
        raise LoRAUsageError(f"prepare: token_counts sum to {total}, and there are {num_rows} packed rows (pad_to)")
    return num_rows
