"""Threads that step, swap, load, fail, cancel, remove and hold at once: no wrong answer, no hang, one compilation.

The guard: slots are written inside `prepare` alone, under the dispatch lock. Steps of `manager.jit`
take that lock too, so no step is being dispatched while a write consumes the arrays. A thread that calls its step
directly has a batch of its own open, and while any other thread has one, a write copies the arrays and consumes the
copies: JAX never meets an array that one thread donates while another takes it, in whatever order. (It takes the holds
of a call's arguments one by one: a step with the arrays in another order than the write's hung for ever.)
"""

import faulthandler
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.manager.hostile import Harm, Judge, adapter
from tests.manager.tiny import SEQUENCES, make_world
from tests.records import evict, slot_names

pytestmark = pytest.mark.device

NAMES = "abcdef"
SECONDS = 1.5  # of each run of the suite; benchmarks/soak.py takes minutes
WATCHDOG = 60.0  # beyond that, a call counts as hung
COUNTED = ("steps", "swaps", "loads", "removes")  # jobs of all crowds

# A thread that can only wait must raise in time.
BUSY = (jlora.NoFreeSlotError, jlora.AdapterInUseError, jlora.AdapterNotFoundError, jlora.LoadTimeoutError)


class Crowd:
    """Threads that work on one world until the time is up, or until there are `most_failures`.

    `done` counts each job, and `failures` are exceptions that must not occur. On a busy machine they work longer, until
    each of the jobs that `COUNTED` names was done `least` times.
    """

    def __init__(self, folder: Path, seconds: float, seed: int = 0, most_failures: int = 1, least: int = 0):
        self.folder = folder
        self.seconds = seconds
        self.seed = seed
        self.most_failures = most_failures
        self.least = least
        self.world = make_world(max_loras=3, max_cpu_loras=5)
        self.judge = Judge(self.world)
        self.done: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._end = 0.0
        self._traced = chex.assert_max_traces(self._step, n=1)
        self.step = self.world.forward = jax.jit(self._traced)  # so that the judge compiles nothing
        self.own_step = self.world.manager.jit(chex.assert_max_traces(lambda *args: self._step(*args), n=1))
        for name in NAMES:
            adapter(name).save_pretrained(folder / name)
        good = folder / "a" / "adapter_model.safetensors"
        broken = folder / "broken"
        adapter("broken").save_pretrained(broken)
        (broken / "adapter_model.safetensors").write_bytes(good.read_bytes()[:100])
        # The step and the write are compiled before the crowd comes.
        self.world.manager.add_adapter(adapter("a"))
        with self.world.manager.prepare(["a", None, None]) as batch:
            self.step(self.world.model, self.world.tokens, batch)

    @staticmethod
    def _step(model: nnx.Module, tokens: jax.Array, batch: jlora.LoRABatch) -> jax.Array:
        with jlora.use(batch):
            return model(tokens)  # type: ignore[operator]

    def request(self, name: str) -> jlora.LoRARequest:
        return jlora.LoRARequest(name, str(self.folder / name))

    # --- jobs, each done once ---------------------------------------------------------------------------------------

    def serve(self, rng: np.random.Generator, step: Callable[..., Any]) -> None:
        """A batch, and a few steps of it, which must all be right."""
        names = [None if rng.random() < 0.25 else str(rng.choice(list(NAMES[:4]))) for _ in range(SEQUENCES)]
        asked = [None if name is None else self.request(name) for name in names]
        with self.world.manager.prepare(asked, timeout=0.5) as batch:
            for _ in range(rng.integers(1, 4)):
                self.right(step(self.world.model, self.world.tokens, batch), names)
        self.done["steps"] += 1

    def right(self, logits: jax.Array, names: list[str | None]) -> None:
        for row, (name, got) in enumerate(zip(names, np.asarray(logits), strict=True)):
            if not self.judge.right(got, row, None if name is None else adapter(name)):
                raise Harm("wrong", f"the answer for {name!r} in row {row} of {names}")

    def runs(self, rng: np.random.Generator) -> None:
        self.serve(rng, self.own_step)

    def steps(self, rng: np.random.Generator) -> None:
        self.serve(rng, self.step)

    def swaps(self, rng: np.random.Generator) -> None:
        name = str(rng.choice(list(NAMES)))
        self.world.manager.add_adapter(self.request(name), timeout=5)
        self.world.manager.prepare([name, None, None], timeout=0.2).close()
        self.done["swaps"] += 1

    def loads(self, rng: np.random.Generator) -> None:
        """Loads that fail, that are cancelled, that run on, and that replace."""
        m, name = self.world.manager, str(rng.choice(list(NAMES)))
        match int(rng.integers(4)):
            case 0:
                with pytest.raises(jlora.AdapterFormatError):
                    m.add_adapter(self.request("broken"))
            case 1:
                future = m.prefetch(self.request(name))
                if not future.cancel():
                    future.result(20)
            case 2:
                m.prepare([self.request(name), None, None], timeout=0).close()
            case _:
                m.add_adapter(adapter(name), load_inplace=True, timeout=0.2)
        self.done["loads"] += 1

    def removes(self, rng: np.random.Generator) -> None:
        m, name = self.world.manager, str(rng.choice(list(NAMES)))
        match int(rng.integers(3)):
            case 0:
                m.remove_adapter(name, timeout=0.05)
            case 1:
                evict(m)
            case _:
                m.list_adapters(), m.stats(), slot_names(m), m.leases()
        self.done["removes"] += 1
        time.sleep(0.002)

    def holds(self, rng: np.random.Generator) -> None:
        m, name = self.world.manager, str(rng.choice(list(NAMES[:4])))
        m.add_adapter(self.request(name), timeout=5)
        with m.hold(name) as handle:
            m.add_adapter(adapter(name), load_inplace=True, timeout=0.2)
            with m.prepare([handle, name, None], timeout=0.5) as batch:
                self.right(self.own_step(self.world.model, self.world.tokens, batch), [name, name, None])
        self.done["holds"] += 1

    # --- all of them ------------------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        late = time.monotonic() - self._end
        return late < 0 or (late < WATCHDOG / 2 and min(self.done[job] for job in COUNTED) < self.least)

    def work(self, *jobs: Callable[[np.random.Generator], None]) -> None:
        """Run each job in its own thread until the time is up, and check the rest."""

        def work(i: int, job: Callable[[np.random.Generator], None]) -> None:
            rng = np.random.default_rng([self.seed, i])
            while self.goes_on() and len(self.failures) < self.most_failures:
                try:
                    job(rng)
                except BUSY:
                    self.done["busy"] += 1
                except CancelledError:
                    self.done["cancelled"] += 1
                except BaseException as error:
                    self.failures.append(error)

        if self.runs in jobs or self.holds in jobs:  # after the first call, all steps must be of `manager.jit`
            with self.world.manager.prepare([None] * SEQUENCES) as batch:
                self.own_step(self.world.model, self.world.tokens, batch)
        self._end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=work, args=(i, job), daemon=True) for i, job in enumerate(jobs)]
        faulthandler.dump_traceback_later(self.seconds + WATCHDOG - 1)  # before they are given up
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._end + WATCHDOG - time.monotonic()))
        faulthandler.cancel_dump_traceback_later()
        hung = sum(thread.is_alive() for thread in threads)
        self.failures += [Harm("hung", "a thread")] * hung
        if hung:
            return
        try:
            self.judge.check(lambda name: [adapter(name)])
        except Harm as harm:
            self.failures.append(harm)
        compiled = self.step._cache_size(), self.own_step._cache_size(), self.world.manager.stats().compilations
        if compiled not in ((1, 0, 1), (1, 1, 1)):
            self.failures.append(Harm("compiled", f"the steps and the write {compiled} times"))


@pytest.fixture
def crowd(tmp_path: Path) -> Crowd:
    return Crowd(tmp_path, SECONDS, least=6)


def test_eight_threads_that_take_turns(crowd: Crowd) -> None:
    crowd.work(
        crowd.runs, crowd.runs, crowd.swaps, crowd.swaps, crowd.loads, crowd.loads, crowd.removes, crowd.holds
    )  # fmt: skip
    assert crowd.failures == []
    assert min(crowd.done[job] for job in COUNTED) > 5


def test_eight_threads_that_do_not(crowd: Crowd) -> None:
    crowd.work(
        crowd.steps, crowd.steps, crowd.steps, crowd.swaps, crowd.swaps, crowd.loads, crowd.loads, crowd.removes
    )  # fmt: skip
    assert crowd.failures == []
    assert min(crowd.done[job] for job in COUNTED) > 5
