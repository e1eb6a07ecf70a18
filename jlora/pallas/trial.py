"""Time tiles of a search on the current GPU, and check the values of the finalists."""

import logging
import math
import statistics
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlora.pallas.moe import plan_experts
from jlora.pallas.plan import Plan, make_plan
from jlora.pallas.search import DECODE, Task
from jlora.pallas.tables import Tiles
from jlora.pallas.tiles import ProductTiles
from jlora.pallas.timing import Job, compile_all, wall_us
from jlora.pallas.xla import all_ranks

CHAIN_BYTES = 400e6  # bytes that a chain reads before it reads any again, several times the L2 cache
MEMORY = 3e9  # most bytes of the layers of a chain
ROUNDS = 5  # of the finalists
SAMPLE, COLUMNS = 16, slice(None, None, 5)  # rows and columns that are compared with the reference
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}  # error relative to the norm


class OnDevice:
    """The `search.Measure` of the current GPU. It holds the arrays and programs of the latest task.

    Args:
      interpret: True to interpret the kernels, which tests do.
      layers: Number of layers of a chain. None chooses enough to time them.
    """

    def __init__(self, interpret: bool = False, layers: int | None = None):
        self._options = interpret, layers
        self._chain: Chain | None = None

    def __call__(self, task: Task, tiles: Sequence[Tiles | None], finals: bool) -> Sequence[float]:
        """Return microseconds of a layer, the geometric means over mixes of adapters; see `search.Measure`."""
        if self._chain is None or self._chain.task != task:
            self._chain = None  # frees the arrays first
            self._chain = Chain(task, *self._options)
        chain = self._chain
        chain.compile(tiles)
        good = [each for each in tiles if each in chain.runs and not (finals and chain.is_wrong(each))]
        rounds: dict[Tiles | None, list[float]] = {each: [] for each in good}
        for _ in range(ROUNDS if finals else 1):
            for each in good:
                rounds[each].append(chain.us(each))
        return [statistics.median(rounds[each]) if each in rounds else math.inf for each in tiles]


class Chain:
    """A chain of layers of one shape with distinct weights, compiled for several tiles.

    Args:
      task: The shape and the number of rows.
      interpret: As for `OnDevice`.
      layers: Number of layers. None chooses enough to time them.

    Attributes:
      runs: Tiles -> compiled program, of those that compile.
    """

    def __init__(self, task: Task, interpret: bool = False, layers: int | None = None):
        self.task, self._interpret = task, interpret
        self.runs: dict[Tiles | None, Any] = {}
        layers, self.passes = (layers, 1) if layers else _lengths(task)
        self.layers = [_layer(key, task) for key in jax.random.split(jax.random.key(0), layers)]
        self.x = jax.random.normal(jax.random.key(1), (task.rows, task.shape.k), jnp.dtype(task.shape.dtype))
        self.mixes = [group_ids(task, adapters) for adapters in _mixes(task)]
        self.plans = [_plan(task, ids) for ids in self.mixes]
        self.ranks = all_ranks(task.shape.slots * task.shape.experts, len(task.shape.slices), task.shape.rank)

    def compile(self, tiles: Sequence[Tiles | None]) -> None:
        """Compile the chain with each of the tiles. Those that do not compile are left out."""
        new = [each for each in tiles if each not in self.runs]
        for each, run in zip(new, compile_all([self.job(each) for each in new]), strict=True):
            if isinstance(run, Exception):
                logging.getLogger("jlora").debug("%s: %s does not compile: %s", self.task.key, each, str(run)[:200])
            else:
                self.runs[each] = run

    def job(self, tiles: Tiles | None) -> Job:
        """Return the jitted chain and its arguments."""
        # Slow imports, needed on GPUs only.
        from jlora.pallas.triton import lora, product

        slices, interpret, fused = self.task.shape.slices, self._interpret, self.task.op == "linear_lora"
        add = partial(lora.add_lora, slice_sizes=slices, interpret=interpret)

        # The layers of a pass, and the passes, share one trace and lowering.
        @jax.jit
        def layer(base: jax.Array, x: jax.Array, weights: Any, plan: Plan, ranks: jax.Array) -> jax.Array:
            *w, a, b = weights
            if isinstance(tiles, ProductTiles):
                return product.linear_lora(
                    x, w[0], a, b, plan, ranks, slice_sizes=slices, tiles=tiles, interpret=interpret
                )
            return add(x @ w[0] if w else base, x, a, b, plan, ranks=ranks, tiles=tiles)

        @jax.jit
        def one_pass(
            start: jax.Array, x: jax.Array, layers: Any, plan: Plan, ranks: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            y, rows = start, jnp.zeros(())
            for i, weights in enumerate(layers):
                y = layer(y, x, weights, plan, ranks)
                if fused:
                    y = jax.lax.optimization_barrier(y)  # all of it is computed, and a part is passed on
                    x = x + y[:, :1] * jnp.asarray(1e-30, x.dtype)
                rows = y[:SAMPLE] if i == 0 else rows
            return (x if fused else y), rows

        def run(
            start: jax.Array, x: jax.Array, layers: Any, plan: Plan, ranks: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            x = start if fused else x
            start, rows = one_pass(start, x, layers, plan, ranks)
            for _ in range(self.passes - 1):  # with another x, or the compiler would drop equal calls
                x = start if fused else x + start[:, :1] * jnp.asarray(1e-30, x.dtype)
                start, _ = one_pass(start, x, layers, plan, ranks)
            return start, rows

        return jax.jit(run, donate_argnums=0), (self._start(), self.x, self.layers, self.plans[0], self.ranks)

    def _start(self) -> jax.Array:
        task = self.task
        return self.x + 0 if task.op == "linear_lora" else jnp.zeros((task.rows, task.shape.n), self.x.dtype)

    def us(self, tiles: Tiles | None) -> float:
        """Return the microseconds of a layer."""
        run, count = self.runs[tiles], len(self.layers) * self.passes

        def once(start: jax.Array, *args: Any) -> jax.Array:
            return run(start, *args)[0]

        calls = 10 if self.task.tokens <= DECODE else 2
        times = [
            wall_us(once, self._start(), self.x, self.layers, plan, self.ranks, repeats=3, calls=calls)[0] / count
            for plan in self.plans
        ]
        return statistics.geometric_mean(times)

    def is_wrong(self, tiles: Tiles | None) -> bool:
        """Return True if some rows differ from the reference, or from a second run."""
        error = self.error(tiles)
        wrong = not error <= TOLERANCE[self.task.shape.dtype]
        if wrong:
            logging.getLogger("jlora").warning(
                "tune: %s gives wrong values for %s (relative error %.2g) and is not used", tiles, self.task.key, error
            )
        return wrong

    def error(self, tiles: Tiles | None) -> float:
        """Return the error of some rows relative to their norm, of all mixes; inf if a second run gives other bits."""
        errors: list[float] = []
        for want, plan in zip(self._wanted, self.plans, strict=True):
            args = self.x, self.layers, plan, self.ranks
            got, again = (np.asarray(self.runs[tiles](self._start(), *args)[1], np.float32) for _ in range(2))
            if not np.array_equal(got, again, equal_nan=True):
                return math.inf
            error = np.linalg.norm(got[:, COLUMNS] - want) / max(float(np.linalg.norm(want)), 1e-30)
            errors.append(float(error))
        return float(np.max(errors))  # NaN if any is

    @cached_property
    def _wanted(self) -> list[np.ndarray]:
        return [self._reference(ids[:SAMPLE]) for ids in self.mixes]

    def _reference(self, ids: np.ndarray) -> np.ndarray:
        """Return some columns of the first rows of a layer by NumPy, in float32."""
        *w, a, b = (np.asarray(array) for array in self.layers[0])
        x = np.asarray(self.x[:SAMPLE], np.float32)
        live = np.flatnonzero(ids < len(a))
        total = np.zeros((len(x), b.shape[2]), np.float32)[:, COLUMNS]
        if w:
            total += x @ w[0][:, COLUMNS].astype(np.float32)
        whole = np.zeros((len(live), b.shape[2]), np.float32)
        end = 0
        for i, size in enumerate(self.task.shape.slices):
            begin, end = end, end + size
            for out, row in zip(whole, live, strict=True):
                h = a[ids[row], i].astype(np.float32) @ x[row]
                out[begin:end] = h @ b[ids[row], :, begin:end].astype(np.float32)
        total[live] += whole[:, COLUMNS]
        return total


def _lengths(task: Task) -> tuple[int, int]:
    """Return the number of layers, and how often the chain runs over them.

    A call must take longer than the host's part of it, about 0.2 ms.
    """
    s, fused = task.shape, task.op == "linear_lora"
    kernel = s.k * s.n if fused else 0
    pair = s.rank * (s.k * len(s.slices) + s.n)
    width = jnp.dtype(s.slot_dtype).itemsize
    adapters = min(8, task.max_active) * min(s.experts, task.rows)
    layers = math.ceil(CHAIN_BYTES / (width * (kernel + adapters * pair)))
    layers = max(2, min(layers, 16, int(MEMORY / (width * (kernel + s.slots * s.experts * pair)))))
    total = (32 if fused else 64) if task.tokens <= DECODE else 8
    return min(layers, total), max(1, total // layers)


def _mixes(task: Task) -> list[int]:
    """Return the numbers of adapters for which tiles are timed."""
    most = task.max_active
    none = [0] if task.op == "linear_lora" else []
    return sorted({*none, 1, min(8, most), most})


def group_ids(task: Task, adapters: int) -> np.ndarray:
    """Return the group of each row: rows without an adapter are none's, and one of several rows always is.

    In a decode step the adapters are in random order, and in a prefill the rows of an adapter are consecutive.
    """
    s, rng = task.shape, np.random.default_rng(0)
    none = s.slots * s.experts
    slot = rng.permutation(s.slots)[: max(1, adapters)][np.arange(task.tokens) * max(1, adapters) // task.tokens]
    if task.tokens <= DECODE:
        slot = rng.permutation(slot)
    ids = np.repeat(slot, task.per_token)
    if s.experts > 1:
        chosen = np.argsort(rng.random((task.tokens, s.experts)), axis=1)[:, : task.per_token]
        ids = ids * s.experts + chosen.reshape(-1)
    if not adapters:
        ids[:] = none
    if len(ids) > 1:
        ids[0] = none
    return ids.astype(np.int32)


def _plan(task: Task, ids: np.ndarray) -> Plan:
    s = task.shape
    if s.experts == 1:
        return _planned(jnp.asarray(ids), num_groups=s.slots, max_active=task.max_active, backend="triton")
    slots, experts = np.where(ids < s.slots * s.experts, ids // s.experts, s.slots), ids % s.experts
    rows = jnp.arange(task.rows, dtype=jnp.int32)
    bound = min(task.rows, task.max_active * s.experts)
    sizes = {"num_slots": s.slots, "num_experts": s.experts, "max_active": bound}
    return _planned_experts(jnp.asarray(slots), rows, jnp.asarray(experts), **sizes)


_planned = jax.jit(make_plan, static_argnames=("num_groups", "max_active", "backend"))
_planned_experts = jax.jit(plan_experts, static_argnames=("num_slots", "num_experts", "max_active"))


def _layer(key: jax.Array, task: Task) -> tuple[jax.Array, ...]:
    """Return random (a, b), after w for a "linear_lora"."""
    s = task.shape
    groups = s.slots * s.experts
    kw, ka, kb = jax.random.split(key, 3)
    a = _normal(ka, (groups, len(s.slices), s.rank, s.k), s.slot_dtype, s.k**-0.5)
    b = _normal(kb, (groups, s.rank, s.n), s.slot_dtype, s.rank**-0.5)
    return (a, b) if task.op != "linear_lora" else (_normal(kw, (s.k, s.n), s.dtype, s.k**-0.5), a, b)


def _draw(key: jax.Array, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.dtype(dtype)) * jnp.asarray(scale, dtype)


_normal = jax.jit(_draw, static_argnums=(1, 2, 3))
