"""Compile many programs at once, and time a jitted chain of layers by wall clock."""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

Job = tuple[Any, Sequence[Any]]  # a jitted function and its arguments, arrays or shapes


def compile_all(jobs: Iterable[Job]) -> list[Any]:
    """Compile each (jitted function, arguments) concurrently; an error is returned in place of the program."""

    def compiled(job: Job) -> Any:
        run, args = job
        try:
            return run.lower(*args).compile()
        except Exception as error:  # returned, since only the caller can decide about it
            return error

    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 2)) as pool:
        return list(pool.map(compiled, jobs))


def wall_us(run: Callable[..., Any], base: Any, *args: Any, repeats: int = 5, calls: int = 10) -> tuple[float, float]:
    """Return the microseconds of a call, the median of `repeats` means of `calls` enqueued calls, and the spread.

    Each call takes the result of the one before as `base`, which may be donated.
    """
    base = run(base, *args)
    base = jax.block_until_ready(run(base, *args))
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            base = run(base, *args)
        jax.block_until_ready(base)
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times), max(times) - min(times)
