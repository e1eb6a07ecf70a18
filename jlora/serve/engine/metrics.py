"""Counters and histograms of an engine."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection

from jlora import Histogram
from jlora.serve.engine.request import EngineStats
from jlora.serve.engine.sequence import Sequence

_RECENT = 64
_UNSORTED = 1000  # new names after which unregistered ones are merged


class EngineMetrics:
    """Counters and histograms since the start. Read and write every field under `lock`.

    Args:
      registered: Returns whether requests may still name this adapter.
    """

    def __init__(self, registered: Callable[[str], bool]):
        self._registered = registered
        self._room = _UNSORTED
        self.lock = threading.Lock()
        self.prompt_tokens = 0
        self.prefilled_tokens = self.cached_tokens = 0
        self.generated_tokens = 0
        self.failed_steps = 0
        self.finished: Counter[str] = Counter()
        self.by_lora: Counter[str] = Counter()
        self.unloaded = 0
        self.first_token, self.per_token, self.whole = Histogram(), Histogram(), Histogram()
        self.mean_per_token = Histogram()
        self.queued, self.absent = Histogram(), Histogram()
        self._begun: deque[float] = deque(maxlen=_RECENT)  # `time.monotonic()` at which recent requests left the queue

    def begun(self, sequence: Sequence) -> None:
        """Count a sequence that has left the queue, with its adapter in a slot."""
        now = time.monotonic()
        with self.lock:
            self._begun.append(now)
            self.queued.add(now - sequence.arrived)
            if sequence.absent:
                self.absent.add(now - sequence.arrived)
            self.by_lora[sequence.lora or ""] += 1
            if len(self.by_lora) > self._room:
                self.sort_out()
                self._room = 2 * len(self.by_lora) + _UNSORTED

    def filled(self, computed: int, copied: int = 0) -> None:
        """Count the tokens of a prompt that were computed, and those that were copied."""
        with self.lock:
            self.prefilled_tokens += computed
            self.cached_tokens += copied

    def sort_out(self) -> None:
        """Merge the counts of adapters that are no longer registered into `unloaded`. Call under `lock`."""
        for name in [name for name in self.by_lora if name and not self._registered(name)]:
            self.unloaded += self.by_lora.pop(name)

    def retry_after(self) -> float:
        """Estimate the seconds until a full queue has room, by the rate at which recent requests began; 0.1 to 60."""
        with self.lock:
            if len(self._begun) < 2:
                return 1.0
            seconds = (time.monotonic() - self._begun[0]) / (len(self._begun) - 1)
        return min(max(seconds, 0.1), 60.0)

    def stats(self, under_way: Collection[Sequence], rows: int, longest: int) -> EngineStats:
        """Return the counters, with the requests under way.

        Args:
          under_way: Requests that have not ended.
          rows: Number of rows of the cache.
          longest: Positions of a row.
        """
        running = [one for one in under_way if one.row >= 0]
        waiting = [one for one in under_way if one.row < 0]
        names = [
            one.lora
            for one in waiting
            if one.lora is not None
            # A name still with the resolver is arbitrary client input, and names become metric labels.
            and (one.request is not None or self._registered(one.lora))
        ]
        used = sum(min(one.filled + len(one.tokens), longest) for one in running)
        with self.lock:
            self.sort_out()
            return EngineStats(
                running=len(running),
                waiting=len(waiting),
                running_by_lora=Counter(one.lora for one in running if one.lora is not None),
                waiting_by_lora=Counter(names),
                cache_usage=min(1.0, used / (rows * longest)),
                prompt_tokens=self.prompt_tokens,
                prefilled_tokens=self.prefilled_tokens,
                cached_tokens=self.cached_tokens,
                generated_tokens=self.generated_tokens,
                finished=dict(self.finished),
                failed_steps=self.failed_steps,
                by_lora=dict(self.by_lora),
                by_unloaded=self.unloaded,
                time_to_first_token=self.first_token.read(),
                inter_token_latency=self.per_token.read(),
                request_time_per_output_token=self.mean_per_token.read(),
                request_seconds=self.whole.read(),
                queue_seconds=self.queued.read(),
                adapter_wait_seconds=self.absent.read(),
            )
