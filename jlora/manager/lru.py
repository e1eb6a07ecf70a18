"""A mapping in least-recently-used order, with pins."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class LRU(Generic[V]):
    """A mapping of names to entries, least recently used first. Pinned entries are never returned for eviction."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, V] = OrderedDict()
        self._pinned: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the names, least recently used first."""
        return iter(tuple(self._entries))

    def __getitem__(self, name: str) -> V:
        """Return the entry, without marking a use."""
        return self._entries[name]

    def get(self, name: str) -> V | None:
        return self._entries.get(name)

    def put(self, name: str, value: V) -> None:
        """Add or replace an entry, and mark a use."""
        self._entries[name] = value
        self._entries.move_to_end(name)

    def touch(self, name: str) -> None:
        """Mark a use. Raises KeyError for an unknown name."""
        self._entries.move_to_end(name)

    def remove(self, name: str) -> V:
        """Remove and return an entry, pinned or not. Raises KeyError for an unknown name."""
        entry = self._entries.pop(name)
        self._pinned.discard(name)
        return entry

    def pin(self, name: str) -> None:
        if name not in self._entries:
            raise KeyError(name)
        self._pinned.add(name)

    def unpin(self, name: str) -> bool:
        """Unpin a name. Return True if it was pinned."""
        was = name in self._pinned
        self._pinned.discard(name)
        return was

    def pinned(self, name: str) -> bool:
        return name in self._pinned

    @property
    def pins(self) -> frozenset[str]:
        """The pinned names."""
        return frozenset(self._pinned)

    def evictable(self, busy: Callable[[str], bool]) -> Iterator[str]:
        """Yield the names that are neither pinned nor busy, least recently used first.

        The entries must not change during the iteration.
        """
        return (name for name in self._entries if name not in self._pinned and not busy(name))
