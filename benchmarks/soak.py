"""Hours of what the tests do in seconds: interrupts at every line, real ones, crowds of threads, the stateful test.

    JAX_PLATFORMS=cpu python -m benchmarks.soak --steps 100000 --minutes 60

takes what it did, and how much of what was asked for, to `benchmarks/results/soak.json`. It ends at the first wrong
answer, hang, leak or error. Run it from the repository, with the extra `test` installed.
"""

import argparse
import datetime
import json
import platform
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import chex
import flax
import jax
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import jlora
from tests.manager.hostile import Judge
from tests.manager.test_interrupts import VERBS, Arena, give_back, signals, take
from tests.manager.test_machine import Books, ManagerMachine
from tests.manager.test_threads import Crowd
from tests.manager.tiny import make_world

RESULTS = Path(__file__).parent / "results" / "soak.json"
RULES_AN_EXAMPLE = 50


class Counted(ManagerMachine):
    """The stateful test, which counts its steps."""

    steps = 0

    def logits_agree(self) -> None:
        super().logits_agree()
        Counted.steps += 1


def machine(steps: int, end: float, seed: int) -> dict[str, Any]:
    """Random rules until there were so many steps, or the time is up."""
    began = time.monotonic()
    world = make_world()
    ManagerMachine.world, ManagerMachine.judge = world, Judge(world)
    Books.last = {}
    while Counted.steps < steps and time.monotonic() < end:
        examples = min(20, -(-(steps - Counted.steps) // RULES_AN_EXAMPLE))
        run_state_machine_as_test(
            Counted,
            settings=settings(
                max_examples=examples, stateful_step_count=RULES_AN_EXAMPLE, deadline=None, database=None,
                derandomize=False, suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
    ManagerMachine.judge.close()
    assert max(len(world.traces), world.manager.stats().compilations) <= 1
    stats = world.manager.stats()
    return {
        "steps": Counted.steps,
        "steps_asked_for": steps,
        "wrong": 0,
        "traces_of_the_step": len(world.traces),
        "compilations_of_the_write": stats.compilations,
        "host_loads": stats.host_loads,
        "slot_loads": stats.slot_loads,
        "slot_evictions": stats.slot_evictions,
        "seconds": round(time.monotonic() - began, 1),
    }


def interrupts(end: float, seed: int) -> dict[str, Any]:
    """An interrupt at every line of every verb, in an order of chance, until all are done or the time is up."""
    began = time.monotonic()
    arena = Arena(Path(tempfile.mkdtemp(prefix="jlora-soak-")))
    points = [(name, at) for name in VERBS for at in range(1, arena.trial(VERBS[name], None).lines + 1)]
    lost = {"give_back": give_back, "take": take}
    points += [(name, at) for name, trial in lost.items() for at in range(1, trial(None).lines + 1)]
    done = Counter[str]()
    for i in np.random.default_rng(seed).permutation(len(points)):
        if time.monotonic() > end:
            break
        name, at = points[i]
        injector = lost[name](at) if name in lost else arena.trial(VERBS[name], at)
        done["lines" if injector.fired else "not_reached"] += 1
    arena.close()
    return {
        "lines_in_all": len(points),
        **done,
        "wrong": 0,
        "dead": 0,
        "leaked": 0,
        "seconds": round(time.monotonic() - began, 1),
    }


def crowds(end: float, seed: int) -> dict[str, Any]:
    """Eight threads, half of the time by turns and half of it not."""
    done = Counter[str]()
    began = time.monotonic()
    for turn in range(2):
        chex.clear_trace_counter()
        crowd = Crowd(Path(tempfile.mkdtemp(prefix="jlora-soak-")), max(1.0, (end - began) / 2), seed + turn)
        step = crowd.steps if turn else crowd.runs
        others = [crowd.swaps] if turn else [crowd.holds]
        crowd.run(step, step, step, crowd.swaps, crowd.loads, crowd.loads, crowd.removes, *others)
        done += crowd.done
    return {"threads": 8, **done, "wrong": 0, "hangs": 0, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100_000, help="of the stateful test")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most, in all")
    parser.add_argument("--signals", type=int, default=200, help="real interrupts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    begin, seconds = time.monotonic(), args.minutes * 60
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": f"python -m benchmarks.soak --steps {args.steps} --minutes {args.minutes:g} --seed {args.seed}",
        "versions": {
            "jlora": jlora.__version__,
            "jax": jax.__version__,
            "flax": flax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}, {platform.machine()}",
    }
    started = time.monotonic()
    caught = signals(args.signals, args.seed)
    results["real_interrupts"] = {
        "sent": args.signals, "caught_in": caught, "wrong": 0, "dead": 0, "leaked": 0,
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    # A quarter of the time each for lines and threads; the rest is for the steps.
    results["interrupts"] = interrupts(time.monotonic() + seconds / 4, args.seed)
    results["threads"] = crowds(time.monotonic() + seconds / 4, args.seed)
    results["stateful"] = machine(args.steps, begin + seconds, args.seed)
    results["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(results, indent=2))
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
