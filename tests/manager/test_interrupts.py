"""Ctrl-C during loads, swaps, replacements, updates and steps raises soon and leaves the manager intact.

During steps of a trainer it leaves the state before a step or the one after it.
"""

import asyncio
import contextlib
import gc
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from tests.manager.hostile import Harm, Judge, adapter
from tests.manager.tiny import World, make_world
from tests.records import on_host

NAMES = "abcd"
HANGS = 60.0  # seconds after which a signal counts as unanswered; `benchmarks.soak` measures how soon it is answered
ROOT = Path(__file__).parents[2]
JLORA = str(Path(jlora.__file__).parent)


@contextlib.contextmanager
def swallowed_interrupts() -> Iterator[list[str]]:
    """List the tracebacks of interrupts that Python swallows: those raised in a callback of the collector or of a weak
    reference, or in a `__del__`, are only reported.
    """
    found: list[str] = []
    before = sys.unraisablehook

    def note(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            found.append("".join(traceback.format_tb(unraisable.exc_traceback)))
        else:
            before(unraisable)

    sys.unraisablehook = note
    try:
        yield found
    finally:
        sys.unraisablehook = before


@dataclass
class Signals:
    """Work in the main thread while another sends SIGINT at random moments; check everything after each.

    Attributes:
      tasks: whether to work in a task of asyncio.
      harm: the first violated invariant, with which the work ends.
      caught: number of signals caught.
      swallowed: number of signals that Python swallowed in a callback or finalizer outside of jlora.
      slowest: seconds from a signal to its KeyboardInterrupt, the largest.
    """

    seed: int = 0
    tasks: bool = False
    harm: list[Harm] = field(default_factory=list)
    caught: int = 0
    swallowed: int = 0
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._doing = "nothing"
        self._folders = Path(tempfile.mkdtemp(prefix="jlora-signals-"))
        for name in NAMES:
            for version in range(2):
                adapter(name, version).save_pretrained(self._folders / f"{name}{version}")
        self.world = make_world(max_loras=2, max_cpu_loras=4)
        self.judge = Judge(self.world)

        def forward(model: Any, tokens: jax.Array, batch: jlora.LoRABatch) -> jax.Array:
            self.world.traces.append(1)
            with jlora.use(batch):
                return model(tokens)

        self.world.forward = self.world.manager.jit(forward)
        # Compile all: ranks differ, and JAX swallows an interrupt in a bare `except` when it compiles.
        for name in NAMES:
            for verb in self._verbs(name).values():
                verb(self.world)
        self._check()
        gc.collect()
        gc.freeze()  # so that the collections of every check are short

    def _request(self, name: str, **fields: bool) -> jlora.LoRARequest:
        return jlora.LoRARequest(name, str(self._folders / f"{name}{self._rng.randrange(2)}"), **fields)

    def _step(self, world: World) -> None:
        names: list[str | None] = [*self._rng.sample(NAMES, 2), None]
        for name in names:
            if name is not None and name not in on_host(world.manager):
                world.manager.add_adapter(self._request(name))
        self.judge.serve(names, self._versions)

    def _update(self, world: World, name: str) -> None:
        world.manager.add_adapter(adapter(name), load_inplace=True)
        module, lora = next((m, lora) for m, lora in adapter(name).modules.items() if lora.kind != "embedding")
        of = self._rng.choice([np.zeros_like, jnp.zeros_like])
        halves = {"A": of(lora.a), "B": of(lora.b)}
        world.manager.update_adapter(name, {f"{module}.lora_{half}.weight": array for half, array in halves.items()})
        world.manager.remove_adapter(name)  # its answers are those of no version

    def _verbs(self, name: str) -> dict[str, Callable[[World], object]]:
        return {
            "step": self._step,
            "load in place": lambda w: w.manager.add_adapter(self._request(name, load_inplace=True)),
            "prepare a request": lambda w: w.manager.prepare([self._request(name), None, None]).close(),
            "prefetch": lambda w: w.manager.prefetch(self._request(name)).result(),
            "add": lambda w: (w.manager.add_adapter(self._request(name)), w.manager.prepare([name]).close()),
            "remove": lambda w: w.manager.remove_adapter(name),
            "update": lambda w: self._update(w, name),
        }

    @staticmethod
    def _versions(name: str) -> list[jlora.Adapter]:
        return [adapter(name), adapter(name, 1)]

    def _check(self) -> None:
        self.judge.check(self._versions)
        for name in NAMES:
            self.world.manager.add_adapter(self._request(name))

    def run(self, times: int) -> None:
        for _ in range(times):
            try:
                self._interrupted()
                # An update that was cut short left weights of no version.
                for name in NAMES:
                    self.world.manager.remove_adapter(name)
                self._check()
            except Harm as harm:
                self.harm.append(harm)
                return

    def _interrupted(self) -> None:
        """Work until a signal comes."""
        main, sent = threading.main_thread().ident, []
        assert main is not None

        def send() -> None:
            sent.append(time.monotonic())
            signal.pthread_kill(main, signal.SIGINT)

        timer = threading.Timer(self._rng.random() * 0.03, send)
        self._doing = "nothing"
        with swallowed_interrupts() as swallowed:
            try:
                timer.start()
                self._work(lambda: not (swallowed or (sent and time.monotonic() - sent[0] > HANGS)))
            except KeyboardInterrupt:
                took = time.monotonic() - sent[0]
            else:
                if not swallowed or JLORA in swallowed[0]:
                    raise Harm("lost", f"a signal, in {self._doing}: {swallowed}")
                self.swallowed += 1
                return
        self.caught += 1
        self.slowest = max(self.slowest, took)
        if took > HANGS:
            raise Harm("hung", f"{self._doing} for {took:.2f} s after a signal")

    def _work(self, going: Callable[[], bool]) -> None:
        def work() -> None:
            verbs = self._verbs(self._rng.choice(NAMES))
            self._doing = self._rng.choice(sorted(verbs))
            verbs[self._doing](self.world)

        async def serve() -> None:
            while going():
                work()
                await asyncio.sleep(0)

        if self.tasks:
            # The first SIGINT under `asyncio.run` cancels this task, and raises no exception in the verb that runs.
            asyncio.run(serve())
        while going():
            work()


def run(seed: int, times: int, tasks: bool = False) -> None:
    """For a process of its own: send signals, and print the figures as JSON in one line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes without it
    signals = Signals(seed, tasks)
    signals.run(times)
    figures = {
        "caught": signals.caught,
        "swallowed_outside_of_jlora": signals.swallowed,
        "slowest": round(signals.slowest, 4),
        "harm": [(one.kind, str(one)) for one in signals.harm],
    }
    print("\n" + json.dumps(figures), flush=True)


HOW = ("script", "asyncio")


def in_a_process(times: int, *calls: str) -> list[dict[str, Any]]:
    """Call functions of this module, and return the figures of each. A signal that came late would hit the process that
    sends it.
    """
    code = "\n".join(["from tests.manager import test_interrupts", *(f"test_interrupts.{call}" for call in calls)])
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 3 * times, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_manager(figures: dict[str, Any], times: int) -> None:
    """Check the figures of `run`."""
    assert figures["harm"] == []
    swallowed = figures["swallowed_outside_of_jlora"]
    assert figures["caught"] + swallowed == times
    assert swallowed <= 1 + times // 50


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_signals_harm_nothing(how: str) -> None:
    (figures,) = in_a_process(50, f"run(1, 50, tasks={how == 'asyncio'})")
    check_manager(figures, 50)


def train(times: int) -> None:
    """For a process of its own: send signals during steps of a trainer, and print the figures as JSON in one line.

    A second trainer, without signals, has the state after each number of steps.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main, rng, tokens = threading.main_thread().ident, random.Random(0), np.arange(12, dtype=np.int32).reshape(3, 4)
    assert main is not None

    def loss(model: Any, batch: jlora.LoRABatch, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jlora.use(batch):
            return jnp.square(model(tokens)).mean((1, 2)), jnp.ones(len(tokens))

    manager = make_world(max_loras=2).manager
    manager.add_adapter(adapter("a"))
    interrupted, other = (manager.trainer(loss, capacity=1) for _ in range(2))
    for trainer in (interrupted, other):
        trainer.add("a")
    own, others = (trainer.prepare(["a", None, "a"]) for trainer in (interrupted, other))
    interrupted.step(own, tokens)
    other.step(others, tokens)

    def digest(trainer: Any) -> str:
        leaves = jax.device_get(jax.tree.leaves(trainer.state))
        return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()

    figures = {"before": 0, "after": 0, "swallowed": 0, "other": 0, "lost": 0}
    for _ in range(times):
        timer = threading.Timer(rng.random() * 0.02, signal.pthread_kill, (main, signal.SIGINT))
        done = 0
        with swallowed_interrupts() as swallowed, contextlib.suppress(KeyboardInterrupt):
            timer.start()
            while not swallowed:
                interrupted.step(own, tokens)
                done += 1
        figures["swallowed"] += bool(swallowed)
        for _ in range(done):
            other.step(others, tokens)
        try:
            found = digest(interrupted)
        except RuntimeError:  # the arrays were deleted
            figures["lost"] += 1
            interrupted.state = other.state
            continue
        if found == digest(other):
            figures["before"] += 1
            continue
        other.step(others, tokens)
        figures["after" if found == digest(other) else "other"] += 1
    print("\n" + json.dumps(figures), flush=True)


def check_trainer(figures: dict[str, Any], times: int) -> None:
    """Check the figures of `train`."""
    assert figures["before"] + figures["after"] == times, figures


@pytest.mark.slow
def test_signals_leave_the_state_of_a_trainer() -> None:
    (figures,) = in_a_process(300, "train(300)")
    check_trainer(figures, 300)


def test_a_few_signals_harm_neither_a_manager_nor_a_trainer() -> None:
    """In one process, since JAX is imported for seconds."""
    of_manager, of_trainer = in_a_process(12, "run(1, 6, tasks=True)", "train(6)")
    check_manager(of_manager, 6)
    check_trainer(of_trainer, 6)
