"""The rows of a batch: the number of sequences, and the rows of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """The shape of a batch, for `LoRAManager.warmup` and `verify`. `prepare` takes the same values as arguments.

    Attributes:
      num_sequences: number of sequences B.
      token_counts: number of rows of each sequence, in order, for packed rows [tokens, features].
      pad_to: total number of packed rows, at least the sum of `token_counts` (the default).
      length: number of rows of each sequence, padding included, for rows that are not packed, as in `prepare`.
      active_from: first row of each sequence that takes its adapter, as in `prepare`; None for all rows. `warmup` and
        `verify` replace it: by 0 with `LoRAConfig(activated=True)` and `length` or `token_counts`, else by None.
      items: row group -> its `Items`, as in `prepare`.

    Raises:
      LoRAUsageError: a value has the wrong type or sign, or the values disagree.

    Example:
      >>> manager.warmup(decode, jlora.BatchShape(64))
      >>> manager.warmup(prefill, jlora.BatchShape(2, token_counts=[9, 4], pad_to=16))
    """

    num_sequences: int
    token_counts: Sequence[int] | None = None
    pad_to: int | None = None
    length: int | None = None
    active_from: FirstRows | None = None
    items: Mapping[str, Items] = field(default_factory=dict[str, Items], hash=False)

    def __post_init__(self) -> None:
        if (count := integer("num_sequences", self.num_sequences)) < 1:
            raise LoRAUsageError(f"a batch needs at least one sequence, got num_sequences={count}")
        counts = None if self.token_counts is None else integers("token_counts", self.token_counts)
        length = None if self.length is None else checked_length("length", self.length)
        if length is not None and counts is not None:
            raise LoRAUsageError("length is for rows that are not packed; packed rows have token_counts")
        items, first = checked_items(self.items, count), self.active_from
        if first is not None:
            if length is None and counts is None:
                raise LoRAUsageError(LENGTH_NEEDED.format(call="prepare(names, active_from=first_rows"))
            first = _checked_first_rows("active_from", first, count, items)
        checked = {"token_counts": counts, "pad_to": _packed_rows(count, counts, self.pad_to), "active_from": first}
        vars(self).update(checked, num_sequences=count, length=length, items=items)

    def check(self, sites: ModelSites) -> None:
        """Raise LoRAUsageError if a model with these sites lacks a row group, or serves no first active rows."""
        if self.active_from is not None and not sites.config.activated:
            raise LoRAUsageError("active_from needs LoRAConfig(activated=True)")
        for name in self.items:
            if name not in sites.groups:
                declared = ", ".join(map(repr, sorted(sites.groups))) or "none"
                raise LoRAUsageError(
                    f"items has {name!r}, and the row groups of this manager are {declared}; declare it with "
                    f"LoRAManager(..., row_groups={{module: {name!r}}})"
                )

    def all_active(self, sites: ModelSites) -> "BatchShape":
        """Return the shape with all rows active. Raises as `check`.

        If batches have first active rows and this one declares the rows that they count, it has them too. A step that
        was compiled for it then serves batches with inactive rows.
        """
        self.check(sites)
        counted = sites.config.activated and (self.token_counts, self.length) != (None, None)
        return replace(self, active_from=(0,) * self.num_sequences if counted else None)

    def row_owners(self) -> Int[np.ndarray, "T"] | None:
        """Return the sequence of each packed row, -1 for padding and inactive rows; None if rows are not packed."""
        if self.token_counts is None:
            return None
        counts = np.array(self.token_counts)
        num_rows = cast("int", self.pad_to)
        owners = np.repeat(np.arange(self.num_sequences + 1), (*counts, num_rows - counts.sum()))
        first = np.array((*(self.active_from or [0] * len(counts)), NOWHERE))
        position = np.arange(num_rows) - np.append(counts.cumsum() - counts, 0)[owners]
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
        return self.pad_to == self.num_sequences and self.token_counts == (1,) * self.num_sequences


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
    items: Mapping[str, Items],
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
    for group, given in items.items():
        for item, owner in enumerate(given.owners):
            if owner is not None and first[owner]:
                raise LoRAUsageError(
                    f"{option}: item {item} of group {group!r} belongs to sequence {owner}, whose adapter is "
                    f"active from row {first[owner]} on, and items have no place among these rows; give None as the "
                    "sequence of an item before that row"
                )
    return tuple([min(row, NOWHERE) for row in first])


def first_rows_of(
    first_rows: Any, shape: tuple[int, ...], groups: Sequence[str], items: Mapping[str, Items] | None
) -> Int[Array | np.ndarray, "B"]:
    """Return the first rows of `LoRABatch.activate` as int32 from 0 to `NOWHERE`, on the host unless they are traced.

    Args:
      first_rows: the argument of the call.
      shape: shape of the slots of the batch.
      groups: row groups of the batch.
      items: their items; None inside a traced function, where they are not known.

    Raises:
      LoRAUsageError: as `LoRABatch.activate`.
    """
    is_traced = isinstance(cast("object", first_rows), jax.core.Tracer)
    if groups and (is_traced or items is None):
        raise LoRAUsageError(_GROUPS.format(groups=groups))
    if not is_traced:
        each = first_rows if shape else [first_rows]
        rows = _checked_first_rows("LoRABatch.activate: first_rows", each, int(np.prod(shape)), items or {})
        return np.array(rows, np.int32).reshape(shape)
    if first_rows.shape != shape or not jnp.issubdtype(first_rows.dtype, jnp.integer):
        raise LoRAUsageError(
            f"LoRABatch.activate takes integers {list(shape)}, one a sequence, got "
            f"{first_rows.dtype}{list(first_rows.shape)}"
        )
    wide: Array = first_rows.astype(jnp.int32) if first_rows.dtype.itemsize < 4 else first_rows
    return jnp.clip(wide, 0, NOWHERE).astype(jnp.int32)


def _packed_rows(num_sequences: int, counts: tuple[int, ...] | None, pad_to: int | None) -> int | None:
    """Return the number of packed rows with padding; None if rows are not packed."""
    num_rows = None if pad_to is None else integer("pad_to", pad_to)
    if counts is None:
        if pad_to is not None:
            raise LoRAUsageError("pad_to is the number of packed rows; it needs token_counts")
        return None
    if len(counts) != num_sequences:
        raise LoRAUsageError(f"{len(counts)} token_counts for {num_sequences} sequences")
    if min(counts) < 0:
        raise LoRAUsageError(f"token_counts must not be negative, got {min(counts)}")
    total = sum(counts)
    num_rows = total if num_rows is None else num_rows
    if num_rows < total or num_rows == 0:
        raise LoRAUsageError(f"token_counts sum to {total}, and there are {num_rows} packed rows (pad_to)")
    return num_rows
