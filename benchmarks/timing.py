"""Timing on an accelerator: a jitted chain of layers with distinct weights, timed by the wall and by the profiler."""

import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks.specs import SLOTS, Projection
from jlora.pallas.plan import make_plan


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


def chain(apply, *, slots: int = SLOTS, max_active: int | None = None, tile_m: int | None = None):
    """Jits base -> layer after layer added to base, one plan for all: f(base, x, layers, ids). base is donated.

    `apply(base, x, a, b, plan)` is one layer; identical layers compile once.
    """
    layer = jax.jit(apply)

    def run(base, x, layers, ids):
        plan = make_plan(ids, num_groups=slots, max_active=max_active, tile_m=tile_m)
        for a, b in layers:
            base = layer(base, x, a, b, plan)
        return base

    return jax.jit(run, donate_argnums=0)


def wall_us(run, base, x, layers, ids, repeats: int = 5, calls: int = 10) -> tuple[float, float]:
    """Microseconds a layer, plan included: the median of `repeats` means of `calls` enqueued together; their spread."""
    base = run(base, x, layers, ids)
    base = jax.block_until_ready(run(base, x, layers, ids))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            base = run(base, x, layers, ids)
        base.block_until_ready()
        times.append((time.perf_counter() - start) * 1e6 / calls / len(layers))
    return statistics.median(times), max(times) - min(times)


def kernel_us(run, base, x, layers, ids) -> dict[str, float]:
    """Microseconds a layer spent in each kind of GPU kernel, from the profiler; of the whole chain, plan included."""
    from jax.experimental.mosaic.gpu import profiler

    _, times = profiler.measure(lambda base, *rest: run(jnp.copy(base), *rest), aggregate=False)(base, x, layers, ids)
    total: dict[str, float] = {}
    for name, ms in times:
        total[name] = total.get(name, 0.0) + ms * 1e3 / len(layers)
    return total
