"""Timing on an accelerator: a jitted chain of layers with distinct weights, timed by the wall and by the profiler."""

import collections
import datetime
import json
import os
import platform
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp

from benchmarks.specs import SLOTS, Projection
from jlora.pallas.plan import make_plan

_FIRST, _SECOND = ("lora_shrink", "lora_product"), ("lora_expand", "lora_product_sum")


def machine() -> dict[str, str]:
    """What a file of results says of where and when its figures were taken."""
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def processor_seconds(pid: int) -> float:
    """What a process took on all cores, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_rows(path: Path, about: dict, rows: list[dict]) -> None:
    """JSON of `about` and "rows", each on a line of its own."""
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]}}\n')


def random_layers(projection: Projection, rank: int, layers: int, slots: int = SLOTS, dtype=jnp.bfloat16):
    """`layers` pairs of slot arrays a [S, n, R, K], b [S, R, N] with values that keep a chain's sums near one."""
    n = len(projection.slices)

    @jax.jit
    def pair(key):
        ka, kb = jax.random.split(key)
        a = jax.random.normal(ka, (slots, n, rank, projection.k), dtype) * projection.k**-0.5
        b = jax.random.normal(kb, (slots, rank, projection.n), dtype) * (rank * layers) ** -0.5
        return a.astype(dtype), b.astype(dtype)

    return [pair(key) for key in jax.random.split(jax.random.key(0), layers)]


def chain(apply, *, slots: int = SLOTS, donate: bool = True):
    """Jits base -> layer after layer added to base, one plan for all: f(base, x, layers, ids, ranks).

    `apply(base, x, a, b, plan, ranks)` is one layer; identical layers compile once. The wall time wants base donated,
    lest each call copy it; the profiler, which calls twice with the same arguments, wants it kept.
    """
    layer = jax.jit(apply)

    def run(base, x, layers, ids, ranks):
        plan = make_plan(ids, num_groups=slots)
        for a, b in layers:
            base = layer(base, x, a, b, plan, ranks)
        return base

    return jax.jit(run, donate_argnums=0 if donate else ())


def compile_all(jobs: list[tuple]) -> list:
    """Compiles each (jitted function, arguments), side by side; an error is returned in its place."""

    def compiled(job):
        run, args = job
        try:
            return run.lower(*args).compile()
        except Exception as error:  # handed to the caller, who knows whether it may happen
            return error

    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 2)) as pool:
        return list(pool.map(compiled, jobs))


def wall_us(run, base, *args, repeats: int = 5, calls: int = 10) -> tuple[float, float]:
    """Microseconds of a call: the median of `repeats` means of `calls` enqueued together; their spread."""
    base = run(base, *args)
    base = jax.block_until_ready(run(base, *args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            base = run(base, *args)
        jax.block_until_ready(base)
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times), max(times) - min(times)


def kind_of(kernel: str) -> str:
    """A kernel's name without the number that XLA gives it among those of one kind."""
    return re.sub(r"([._]\d+)+$", "", kernel)


def kernel_us(run, *args) -> dict[str, float]:
    """Microseconds that one call of a compiled function spends in each kind of GPU kernel, from the profiler.

    The profiler loses records at times, so a measurement in which the first and second launches of LoRA differ in
    number is repeated.
    """
    from jax.experimental.mosaic.gpu import profiler

    for _ in range(10):
        measured = profiler.Cupti().measure(run, aggregate=False)(*args)[1]
        records = cast(list[tuple[str, float]], measured or [])  # (kernel, milliseconds)
        count = collections.Counter(kind_of(name).rstrip("_") for name, _ in records)
        if records and sum(count[name] for name in _FIRST) == sum(count[name] for name in _SECOND):
            break
    else:
        raise RuntimeError("the profiler lost records ten times over")
    total: dict[str, float] = {}
    for name, ms in records:
        total[name] = total.get(name, 0.0) + ms * 1e3
    return total
