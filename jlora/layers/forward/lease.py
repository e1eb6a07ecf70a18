"""The lease of a batch, which keeps its adapters in slots."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from jlora.layers.forward.batch_shape import BatchShape


@runtime_checkable
class Served(Protocol):
    """An adapter held by a lease."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def invocation_tokens(self) -> tuple[int, ...]: ...


ServedTerms: TypeAlias = tuple[tuple[str, int, float], ...]  # (name, version, factor) of the adapters of a sequence


class CacheKey(NamedTuple):
    """The identity of the results of a sequence.

    Attributes:
      adapters: (name, version, scale) of each adapter of the sequence, in the order of their sum.
      active_from: the first row of the forward that the adapters change; 0 if they change all.
      items: (row group, number of its items that the sequence owns), for groups with such items.
    """

    adapters: ServedTerms
    active_from: int = 0
    items: tuple[tuple[str, int], ...] = ()


class Lease:
    """Host state of one `prepare`. While it is open, the adapters of the batch keep their slots.

    It is shared by all copies of the batch, and ends when one of them is closed or when the last of them is collected.

    Attributes:
      adapters: the distinct adapters of the batch.
      terms: for each sequence, (name, version, factor) of its adapters, in the order of their sum; () for the base
        model.
      shape: the shape of the batch.
      opened: `time.monotonic()` when it was opened, in seconds.
      thread: identifier of the thread that opened it.
      where: the stack trace of the call that opened it, if recorded.
      closed: True once it has ended.
    """

    __slots__ = (
        "__weakref__",
        "_on_close",
        "adapters",
        "closed",
        "opened",
        "shape",
        "terms",
        "thread",
        "where"
    )  # fmt: skip

    def __init__(
        self,
        adapters: Sequence[Served],
        terms: Sequence[ServedTerms],
        thread: int,
        shape: BatchShape,
        where: str | None = None,
        on_close: Callable[[], object] | None = None,
    ):
        self.adapters = tuple(adapters)
        self.terms = terms
        self.shape = shape
        self.thread = thread
        self.where = where
        self.opened = time.monotonic()
        self.closed = False
        self._on_close = on_close

    def close(self) -> None:
        """Release the slots for other adapters. Closing twice is harmless."""
        self.closed = True
        if self._on_close is not None:
            self._on_close()

    @property
    def needs_first_rows(self) -> bool:
        """True if an adapter acts from a later row on, and first active rows are not given."""
        return self.shape.active_from is None and any(each.invocation_tokens for each in self.adapters)

    def cache_keys(self, length: int | None, first: Sequence[int] | None) -> tuple[CacheKey | None, ...]:
        """Return `LoRABatch.cache_keys`.

        Args:
          length: rows of each sequence in this forward, if declared.
          first: the first active row of each sequence; None for those of `shape`.
        """
        shape = self.shape
        first = cast("Sequence[int] | None", shape.active_from) if first is None else first
        rows = shape.token_counts or (length,) * len(self.terms)
        keys: list[CacheKey | None] = []
        for i, terms in enumerate(self.terms):
            start, count = 0 if first is None else first[i], rows[i]
            inactive = not terms or (count is not None and start >= count > 0)
            items = tuple((group, owned) for group, given in shape.items.items() if (owned := given.owners.count(i)))
            keys.append(None if inactive else CacheKey(terms, start, items))
        return tuple(keys)
