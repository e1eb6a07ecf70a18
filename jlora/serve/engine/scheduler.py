"""Admission order of waiting requests. Pure host code: adapters are names, and slots are counts."""

import bisect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Waiting:
    """One waiting request.

    Attributes:
      lora: adapter name; None for the base model.
      item: the caller's own object.
      passed: number of later requests that were taken before this one.
      arrival: position in the order of arrival; set by the queue.
    """

    lora: str | None
    item: Any = field(default=None, repr=False)
    passed: int = 0
    arrival: int = 0


@dataclass(frozen=True)
class SlotUse:
    """Current use of the slots.

    Attributes:
      total: number of slots.
      running: adapters that keep their slot, because sequences run with them or they are pinned.
      resident: adapters that are in a slot.
      taken: slots held by running sequences and pinned adapters; exceeds `running` if sequences run on older versions.
    """

    total: int
    running: Collection[str]
    resident: Collection[str]
    taken: int

    def admits(self, lora: str | None) -> bool:
        """Return whether a sequence with this adapter can begin without exceeding the number of slots."""
        return lora is None or lora in self.running or self.taken < self.total


class Queue:
    """Requests in order of arrival. One whose adapter is in a slot may overtake others, within a bound.

    The next request is the first whose adapter evicts no other, else the first of all. A request that was overtaken
    `max_wait_ratio` times is next as soon as its adapter is loaded. It blocks all later ones, so no request whose
    adapter is loaded starves or is overtaken more often.
    """

    def __init__(self, max_wait_ratio: int):
        self._max_passed = max_wait_ratio
        self._waiting: list[Waiting] = []  # in order of arrival
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._waiting))

    def add(self, one: Waiting) -> None:
        """Append a request."""
        self._arrived += 1
        one.arrival = self._arrived
        self._waiting.append(one)

    def put_back(self, one: Waiting) -> None:
        """Reinsert a request that was taken and could not begin, at its place by arrival."""
        place = bisect.bisect(self._waiting, one.arrival, key=lambda other: other.arrival)
        for earlier in self._waiting[:place]:
            earlier.passed -= 1
        self._waiting.insert(place, one)

    def remove(self, one: Waiting) -> None:
        """Remove a request."""
        self._waiting.remove(one)

    def take(self, slots: SlotUse, loaded: Callable[[str], bool]) -> Waiting | None:
        """Remove and return the request to begin now; None if none can.

        Args:
          slots: current use of the slots.
          loaded: returns whether the adapter of this name is in host memory or in a slot.
        """
        first: int | None = None  # first request that evicts another adapter
        for i, one in enumerate(self._waiting):
            admitted, overdue = slots.admits(one.lora), one.passed >= self._max_passed
            if not (admitted or overdue) or (one.lora is not None and not loaded(one.lora)):
                continue
            if overdue:
                return self._taken(i if admitted else first)  # no later request may overtake it
            if one.lora is None or one.lora in slots.running or one.lora in slots.resident:
                return self._taken(i)
            if first is None:
                first = i
        return self._taken(first)

    def _taken(self, index: int | None) -> Waiting | None:
        if index is None:
            return None
        for earlier in self._waiting[:index]:
            earlier.passed += 1
        return self._waiting.pop(index)
