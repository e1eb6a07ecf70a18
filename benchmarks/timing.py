"""Chains of layers with distinct weights, the times of their kernels by the profiler, and files of results."""

import collections
import datetime
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from benchmarks.specs import SLOTS, Projection
from jlora.pallas.plan import make_plan

Job = tuple[Any, Sequence[Any]]  # a jitted function and its arguments, arrays or shapes


def machine() -> dict[str, str]:
    """Return the device, versions and date of the figures in a file of results."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process on all cores so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_rows(path: Path, about: dict, rows: list[dict]) -> None:
    """Write `about` and "rows" as JSON, with each row on its own line."""
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]}}\n')


def random_layers(projection: Projection, rank: int, layers: int, slots: int = SLOTS, dtype=jnp.bfloat16):
    """Return `layers` pairs of slot arrays a [S, n, R, K], b [S, R, N], scaled to keep a chain's sums near one."""
    n = len(projection.slices)

    @jax.jit
    def pair(key):
        ka, kb = jax.random.split(key)
        a = jax.random.normal(ka, (slots, n, rank, projection.k), dtype) * projection.k**-0.5
        b = jax.random.normal(kb, (slots, rank, projection.n), dtype) * (rank * layers) ** -0.5
        return a.astype(dtype), b.astype(dtype)

    return [pair(key) for key in jax.random.split(jax.random.key(0), layers)]


def chain(apply, *, slots: int = SLOTS, donate: bool = True):
    """Jit f(base, x, layers, ids, ranks), which adds layer after layer to base with one plan for all.

    `apply(base, x, a, b, plan, ranks)` is one layer; identical layers compile once. For wall times base should be
    donated, otherwise each call copies it. For the profiler, which calls twice with the same arguments, it must not be.
    """
    layer = jax.jit(apply)

    def run(base, x, layers, ids, ranks):
        plan = make_plan(ids, num_groups=slots)
        for a, b in layers:
            base = layer(base, x, a, b, plan, ranks)
        return base

    return jax.jit(run, donate_argnums=0 if donate else ())


def kind_of(kernel: str) -> str:
    """Return a kernel's name without the number that XLA appends."""
    return re.sub(r"([._]\d+)+$", "", kernel)


def kernel_us(run, *args) -> dict[str, float]:
    """Return the microseconds that a call of a compiled function spends in each kind of GPU kernel, by the profiler.

    The profiler loses records at times. A measurement is repeated if the first and second launches of LoRA differ in
    number.
    """
    from jax.experimental.mosaic.gpu import profiler

    for _ in range(10):
        measured = profiler.Cupti().measure(run, aggregate=False)(*args)[1]
        records = cast(list[tuple[str, float]], measured or [])  # (kernel, milliseconds)
        count = collections.Counter(kind_of(name).rstrip("_") for name, _ in records)
        if records and count["lora_shrink"] == count["lora_expand"]:
            break
    else:
        raise RuntimeError("the profiler lost records ten times over")
    total: dict[str, float] = {}
    for name, ms in records:
        total[name] = total.get(name, 0.0) + ms * 1e3
    return total


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
