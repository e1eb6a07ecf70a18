"""Which of the waiting requests runs next: pure host code, which knows adapters by name and slots by their number."""

import bisect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Waiting:
    """One waiting request.

    Attributes:
      lora: the name of its adapter; None for the base model.
      item: what it is to the caller.
      passed: how many requests that came later have been taken before it.
      arrival: its place in the order of arrival; the queue's.
    """

    lora: str | None
    item: Any = field(default=None, repr=False)
    passed: int = 0
    arrival: int = 0


@dataclass(frozen=True)
class SlotUse:
    """What the slots are used for now.

    Attributes:
      total: how many there are.
      running: adapters whose slot is taken for sure: of running sequences, and pinned ones.
      resident: adapters that are in a slot.
      taken: slots that running sequences and pinned adapters take; more than `running` where some run on an older
        version.
    """

    total: int
    running: Collection[str]
    resident: Collection[str]
    taken: int

    def admits(self, lora: str | None) -> bool:
        """Whether a sequence with this adapter can begin: no more different ones run at once than there are slots."""
        return lora is None or lora in self.running or self.taken < self.total


class Queue:
    """Requests in order of arrival, but for those whose adapter is in a slot, within a bound.

    Next is the first whose adapter takes no slot from another, or else the first of all. But who has been passed
    `max_wait_ratio` times by later ones is next as soon as its adapter is loaded, and whoever came after it waits: so
    nobody starves. Of those whose adapter is loaded nobody is passed more often.
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
        self._arrived += 1
        one.arrival = self._arrived
        self._waiting.append(one)

    def put_back(self, one: Waiting) -> None:
        """Where it was: it was taken, and could not begin."""
        place = bisect.bisect(self._waiting, one.arrival, key=lambda other: other.arrival)
        for earlier in self._waiting[:place]:
            earlier.passed -= 1
        self._waiting.insert(place, one)

    def remove(self, one: Waiting) -> None:
        self._waiting.remove(one)

    def take(self, slots: SlotUse, loaded: Callable[[str], bool]) -> Waiting | None:
        """Take out the request that is to begin now; None where none can. `loaded` tells of an adapter's name."""
        first: int | None = None  # which needs a slot of another
        for i, one in enumerate(self._waiting):
            admitted, overdue = slots.admits(one.lora), one.passed >= self._max_passed
            if not (admitted or overdue) or (one.lora is not None and not loaded(one.lora)):
                continue
            if overdue:
                return self._taken(i if admitted else first)  # nobody who came later
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
