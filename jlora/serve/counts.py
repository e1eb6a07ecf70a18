"""What an engine counts."""

import bisect
import threading
import time
from collections import Counter, deque

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
_RECENT = 64


class Histogram:
    """Counts of seconds by upper bounds; the last count is of those above all bounds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def read(self) -> tuple[tuple[float, ...], tuple[int, ...], float]:
        return _SECONDS, tuple(self._counts), self._sum


class Counts:
    """Counts since the start. Every field is changed and read under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.failed_steps = 0
        self.finished: Counter[str] = Counter()
        self.by_lora: Counter[str] = Counter()
        self.first_token, self.per_token, self.whole = Histogram(), Histogram(), Histogram()
        self._begun: deque[float] = deque(maxlen=_RECENT)  # when requests left the queue

    def begun(self) -> None:
        with self.lock:
            self._begun.append(time.monotonic())

    def retry_after(self) -> float:
        """Seconds until a place in a full queue is likely to be free, by the last few that were."""
        with self.lock:
            if len(self._begun) < 2:
                return 1.0
            seconds = (time.monotonic() - self._begun[0]) / (len(self._begun) - 1)
        return min(max(seconds, 0.1), 60.0)
