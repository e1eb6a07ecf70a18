"""Admission order of waiting requests. Pure host code: adapters are names, and slots are counts."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from jlora.serve.engine.sequence import Sequence


@dataclass(frozen=True)
class SlotUse:
    """Current use of the slots.

    Attributes:
      total: Number of slots.
      running: Adapters that keep their slot, because sequences run with them or they are pinned.
      resident: Adapters that are in a slot.
      taken: Slots held by running sequences and pinned adapters; exceeds `running` if sequences run on older versions.
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
        self._waiting: list[Sequence] = []  # in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._waiting))

    def add(self, one: Sequence) -> None:
        """Append a request."""
        self._waiting.append(one)

    def remove(self, one: Sequence) -> None:
        """Remove a request that ends before it began, if it is in the queue."""
        if one in self._waiting:
            self._waiting.remove(one)

    def take(self, one: Sequence) -> None:
        """Remove a request that begins. It has overtaken those before it."""
        index = self._waiting.index(one)
        for earlier in self._waiting[:index]:
            earlier.passed += 1
        del self._waiting[index]

    def next(self, slots: SlotUse, loaded: Callable[[str], bool]) -> Sequence | None:
        """Return the request to begin now; None if none can.

        Args:
          slots: Current use of the slots.
          loaded: Returns whether the adapter of this name is in host memory or in a slot.
        """
        first: Sequence | None = None  # first request that evicts another adapter
        for one in self._waiting:
            admitted, overdue = slots.admits(one.lora), one.passed >= self._max_passed
            absent = one.lora is not None and one.handle is None and not loaded(one.lora)
            if not (admitted or overdue) or absent:
                continue
            if overdue:
                return one if admitted else first  # no later request may overtake it
            if one.lora is None or one.lora in slots.running or one.lora in slots.resident:
                return one
            if first is None:
                first = one
        return first
