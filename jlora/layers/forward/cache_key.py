"""The identity of the results of a sequence, for prefix caches."""

from collections.abc import Sequence
from typing import NamedTuple

from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.lease import Lease, ServedParts


class CacheKey(NamedTuple):
    """The identity of the results of a sequence.

    Attributes:
      adapters: (name, version, scale) of each adapter of the sequence, in the order of their sum.
      active_from: the first row of the forward that the adapters change; 0 if they change all.
      items: (row group, number of its items that the sequence owns), for groups with such items.
    """

    adapters: ServedParts
    active_from: int = 0
    items: tuple[tuple[str, int], ...] = ()


def keys_of(lease: Lease, length: int | None, first: Sequence[int] | None) -> tuple[CacheKey | None, ...]:
    """Return the key of each sequence of a batch, as `LoRABatch.cache_keys`.

    Args:
      lease: the lease of the batch.
      length: rows of each sequence, if declared.
      first: the first active row of each sequence; None for those of `lease.shape`.
    """
    shape = lease.shape or BatchShape(len(lease.parts))
    first = shape.active_from if first is None else first
    rows = shape.token_counts or (length,) * len(lease.parts)
    keys: list[CacheKey | None] = []
    for i, parts in enumerate(lease.parts):
        start, count = 0 if first is None else first[i], rows[i]
        inactive = not parts or (count is not None and start >= count > 0)
        items = tuple((group, owned) for group, given in shape.items if (owned := given.owners.count(i)))
        keys.append(None if inactive else CacheKey(parts, start, items))
    return tuple(keys)
