"""Which adapters open batches hold."""

import itertools
from collections import Counter, deque
from collections.abc import Callable


class Leases:
    """Counts, for each adapter, the open batches that hold it. `open` and `held` are called under the manager's lock.

    Closing a lease only queues it. A batch may be closed by the garbage collector, in any thread and between any two
    steps of the manager itself: taking the lock there could deadlock, and changing the counts could upset a loop over
    them. It may also be closed twice at once by two threads: a lease counts once.
    """

    def __init__(self):
        self._open: dict[int, tuple[str, ...]] = {}
        self._counts: Counter[str] = Counter()
        self._closed: deque[int] = deque()
        self._ids = itertools.count()

    def open(self, adapters: tuple[str, ...]) -> Callable[[], None]:
        """Hold `adapters` (distinct names). Returns the function that closes the lease."""
        self._settle()
        lease = next(self._ids)
        self._open[lease] = adapters
        self._counts.update(adapters)
        return lambda: self._closed.append(lease)

    def held(self, name: str) -> bool:
        self._settle()
        return self._counts[name] > 0

    def _settle(self) -> None:
        while self._closed:
            for adapter in self._open.pop(self._closed.popleft(), ()):
                self._counts[adapter] -= 1
                if not self._counts[adapter]:
                    del self._counts[adapter]
