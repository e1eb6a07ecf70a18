"""Run for hours the scenarios that the tests run for seconds: interrupts, concurrent threads, the stateful test.

    JAX_PLATFORMS=cpu python -m benchmarks.soak --steps 100000 --minutes 5 --signals 300

Each selected part writes its figures to `benchmarks/results/soak.json` and leaves those of the others unchanged.
Failures are counted by kind (`tests.manager.hostile.Harm`) and described, and a new world is started after each. The
exit status is 1 if there were any. Run it from the repository, with the group `test` installed.
"""

import argparse
import datetime
import faulthandler
import json
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import flax
import hypothesis
import jax
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

import jlora
from tests.manager.hostile import Harm, Judge
from tests.manager.test_interrupts import HOW, in_a_process
from tests.manager.test_machine import Books, ManagerMachine, Open
from tests.manager.test_threads import Crowd
from tests.manager.tiny import World, make_world

RESULTS = Path(__file__).parent / "results" / "soak.json"
KINDS = ("wrong", "dead", "leaked", "hung", "lost", "compiled")
DESCRIBED = 20  # number of failures that are described; all are counted
SOON = 0.2  # seconds within which a signal must be answered
STALL = 180.0  # seconds without progress after which the run counts as hung
STEPS_AN_EXAMPLE = 200


class Part:
    """The results of one part.

    Attributes:
      harm: Number of failures by kind.
      last: Kind of the last failure.
      described: Descriptions of the first failures.
      figures: Other results. `done` holds counters.
    """

    def __init__(self, name: str, out: Path):
        self.name = name
        self.out = out
        self.harm: Counter[str] = Counter()
        self.last = ""
        self.described: list[str] = []
        self.figures: dict[str, Any] = {}
        self.done: Counter[str] = Counter()
        self.began = self.alive = time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def blame(self, error: BaseException, where: str = "") -> None:
        """Count a failure. Errors other than `Harm` count as "dead"."""
        kind = error.kind if isinstance(error, Harm) else "dead"
        self.harm[kind] += 1
        self.last = kind
        text = str(error) if isinstance(error, Harm) else f"{type(error).__name__}: {error}"
        print(f"{self.name}: {where} {text}", file=sys.stderr, flush=True)
        if len(self.described) < DESCRIBED:
            self.described.append(f"{where} {text}"[:400].strip())

    def answers(self) -> bool:
        """Return True if the manager still responds after the last failure."""
        return self.last != "hung"

    def compiled(self, step: int, write: int) -> None:
        """Record how often the step and the write of a world were compiled, the maximum over all worlds."""
        most = self.figures.setdefault("compilations", {"step": 0, "write": 0})
        most["step"], most["write"] = max(step, most["step"]), max(write, most["write"])

    def end(self) -> bool:
        """Write the results. Return True if there was no failure."""
        self._over.set()
        results = json.loads(self.out.read_text()) if self.out.exists() else {}
        results[self.name] = {
            "date": datetime.date.today().isoformat(),
            "command": f"python -m benchmarks.soak {' '.join(sys.argv[1:])}",
            "versions": {
                "jlora": jlora.__version__,
                "jax": jax.__version__,
                "flax": flax.__version__,
                "numpy": np.__version__,
                "hypothesis": hypothesis.__version__,
                "python": platform.python_version(),
            },
            "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}, {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
            **self.figures,
            **dict(self.done),
            **{kind: self.harm[kind] for kind in KINDS},
            "described": self.described,
            "seconds": round(time.monotonic() - self.began, 1),
        }
        self.out.parent.mkdir(exist_ok=True)
        self.out.write_text(json.dumps(results, indent=2) + "\n")
        print(json.dumps({self.name: results[self.name]}, indent=2), flush=True)
        return not self.harm.total()

    def _watch(self) -> None:
        """End the process if there is no progress for `STALL` seconds."""
        while not self._over.wait(1.0):
            if time.monotonic() - self.alive > STALL:
                faulthandler.dump_traceback()
                self.blame(Harm("hung", f"nothing for {STALL:g} s"))
                self.end()
                os._exit(1)


def signals(part: Part, seed: int, times: int) -> None:
    """Interrupt a script and asyncio tasks by real signals, each in its own process."""
    for how in HOW:
        part.alive = time.monotonic() + 3 * times
        try:
            (figures,) = in_a_process(times, f"run({seed}, {times}, tasks={how == 'asyncio'})")
        except Exception as error:  # counted as dead; the next program runs
            part.blame(error, f"{how}:")
            continue
        if figures["slowest"] > SOON:
            part.blame(Harm("hung", f"{figures['slowest']} s after a signal"), f"{how}:")
        for kind, text in figures.pop("harm"):
            part.blame(Harm(kind, text.removeprefix(f"{kind}: ")), f"{how}:")
        part.figures[how] = figures


def crowds(part: Part, seed: int, seconds: float) -> None:
    """Run eight threads, half of the time with steps of `manager.jit`, then two to seven threads for a while each."""
    turns = [8, 8, 2, 3, 4, 5, 6, 7]
    for i, count in enumerate(turns):
        part.alive = time.monotonic() + seconds
        chex.clear_trace_counter()
        folder = Path(tempfile.mkdtemp(prefix="jlora-soak-"))
        crowd = Crowd(folder, max(1.0, seconds * (0.35 if count == 8 else 0.05)), seed + i, DESCRIBED)
        step = crowd.steps if i % 2 else crowd.runs
        jobs = [step, crowd.swaps, crowd.loads, step, crowd.removes, crowd.loads, crowd.swaps]
        crowd.work(*[*jobs, crowd.swaps if i % 2 else crowd.holds][:count])
        for error in crowd.failures:
            part.blame(error, f"{count} threads:")
        if part.answers():
            part.compiled(crowd.step._cache_size(), crowd.world.manager.stats().compilations)
        part.done += crowd.done
        part.done["answers"] += crowd.judge.answers
    part.figures["threads"] = turns


class Counted(ManagerMachine):
    """The stateful test with a count of its steps, and with the error that Hypothesis would wrap."""

    part: Part
    error: BaseException | None = None

    @invariant()
    def count(self) -> None:
        self.part.done["steps"] += 1
        self.part.alive = time.monotonic()

    def step(self, batch: Open) -> Any:
        self.part.done["forwards"] += 1
        return super().step(batch)

    def teardown(self) -> None:
        error = sys.exception()
        if error is not None and Counted.error is None and not type(error).__module__.startswith("hypothesis"):
            Counted.error = error
            traceback.print_exception(error)
        super().teardown()


def stateful(part: Part, seed: int, steps: int) -> None:
    """Apply random rules and compare the state with a record, and logits of open batches with the NumPy model."""
    Counted.part = part

    def new() -> World:
        world = make_world()
        ManagerMachine.world, ManagerMachine.judge = world, Judge(world)
        Books.last = {}
        return world

    def close(world: World) -> None:
        part.done["answers"] += ManagerMachine.judge.answers
        stats = world.manager.stats()
        part.compiled(len(world.traces), stats.compilations)
        for name in ("host_loads", "host_evictions", "slot_loads", "slot_evictions", "slot_hits"):
            part.done[name] += getattr(stats, name)

    world = new()
    while part.done["steps"] < steps and part.harm.total() < DESCRIBED:
        Counted.error = None
        seed += 1
        left = -(-(steps - part.done["steps"]) // STEPS_AN_EXAMPLE)
        try:
            run_state_machine_as_test(
                hypothesis.seed(seed)(Counted),
                settings=settings(
                    max_examples=min(20, left), stateful_step_count=STEPS_AN_EXAMPLE, deadline=None, database=None,
                    derandomize=False, suppress_health_check=list(HealthCheck), phases=[Phase.generate],
                ),
            )  # fmt: skip
            if len(world.traces) > 1:
                raise Harm("compiled", "the step")
        except Exception as error:  # count it as above, and continue with the next seed
            part.blame(Counted.error or error, f"seed {seed}:")
            if part.answers():
                close(world)
            world = new()
    close(world)
    part.figures["steps_asked_for"] = steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=0, help="steps of the stateful test")
    parser.add_argument("--minutes", type=float, default=0.0, help="minutes with many threads")
    parser.add_argument("--signals", type=int, default=0, help="number of real interrupts in each kind of program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    parts: dict[str, tuple[Any, Callable[..., None], float]] = {
        "signals": (args.signals, signals, args.signals),
        "threads": (args.minutes, crowds, args.minutes * 60),
        "stateful": (args.steps, stateful, args.steps),
    }
    well = True
    for name, (wanted, work, amount) in parts.items():
        if wanted:
            part = Part(name, args.out)
            work(part, args.seed, amount)
            well &= part.end()
    os._exit(not well)  # threads that hang must not keep it from ending


if __name__ == "__main__":
    main()
