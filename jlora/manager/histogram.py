"""Histograms of durations."""

import bisect

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)

HistogramCounts = tuple[tuple[float, ...], tuple[int, ...], float]  # upper bounds, counts, sum


class Histogram:
    """A histogram of seconds with the upper bounds `BOUNDS`. The last bucket counts values above all bounds.

    It has no lock of its own.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def read(self) -> HistogramCounts:
        return BOUNDS, tuple(self._counts), self._sum
