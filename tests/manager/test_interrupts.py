"""KeyboardInterrupt at every line of the manager, and real ones: nothing wrong, nothing dead, nothing leaked."""

import contextlib
import gc
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.manager.hostile import PATIENCE, Harm, Injector, Judge, adapter
from tests.manager.tiny import MAX_RANK, Model, World, expected, make_world

NAMES = "abcd"
# Lines of each verb where the suite interrupts; benchmarks/soak.py takes them all.
FEW, POINTS = 4, 25


@dataclass(frozen=True)
class Verb:
    """One thing to interrupt. `ready` is run before, in peace; it may leave what must live until the end."""

    run: Callable[[World, Path], object]
    ready: Callable[[World, Path], object] = lambda world, folders: None
    in_thread: bool = False  # the loading threads are interrupted, not the caller


def request(folders: Path, name: str, version: int = 0, **fields: bool) -> jlora.LoRARequest:
    return jlora.LoRARequest(name, str(folders / f"{name}{version}"), **fields)


def swap(world: World, names: list[str | None]) -> None:
    with world.manager.prepare(names) as batch:
        world.logits(batch)


def hold(world: World, folders: Path) -> None:
    with world.manager.hold("a") as handle:
        world.manager.add_adapter(adapter("a", 1), load_inplace=True)
        with world.manager.prepare([handle, "a", None]) as batch:
            world.logits(batch)


def close(world: World, folders: Path) -> None:
    batch = world.manager.prepare(["a", "b", None])
    copy = jax.device_put(batch)
    batch.close()
    del copy


def wait_in_vain(world: World, folders: Path) -> None:
    with world.manager.prepare(["a", "b", None]), pytest.raises(jlora.NoFreeSlotError):
        world.manager.prepare(["c", None, None], timeout=0.01)


def prefetch(world: World, folders: Path) -> None:
    future: Future[bool] = world.manager.prefetch(request(folders, "e"))
    future.result(PATIENCE)
    swap(world, ["e", None, None])


def not_wait(world: World, folders: Path) -> None:
    batch, ready = world.manager.prepare(["a", request(folders, "e"), None], wait=False)
    with batch:
        assert ready[0]


def update(world: World, folders: Path, on_device: bool = False) -> None:
    name, lora = next(iter(adapter("a").modules.items()))
    kind = "lora_embedding_" if lora.kind == "embedding" else "lora_"
    halves = {f"base_model.model.{name}.{kind}{half}": getattr(lora, half.lower()) for half in "AB"}
    if lora.kind != "embedding":
        halves = {f"{key}.weight": value for key, value in halves.items()}
    halves = {key: np.zeros_like(value) for key, value in halves.items()}
    assert world.manager.update_adapter("a", {k: jnp.asarray(v) if on_device else v for k, v in halves.items()})


def recall(world: World, folders: Path) -> None:
    swap(world, ["e", "a", None])


def evicted_request(world: World, folders: Path) -> None:
    world.manager.remove_adapter("a")
    world.manager.add_adapter(request(folders, "e"))
    while "e" in world.manager.list_adapters():
        world.manager.remove_oldest_adapter()
    world.manager.add_adapter(adapter("a"))


def older_state(world: World, folders: Path) -> None:
    """The slots of another day, put into the model by somebody else."""
    state = jax.tree.map(jnp.copy, nnx.state(world.model, jlora.SlotParam))
    swap(world, ["c", "d", None])
    nnx.update(world.model, state)


def donated(world: World, folders: Path) -> None:
    for leaf in jax.tree.leaves(nnx.state(world.model, jlora.SlotParam)):
        leaf.delete()


VERBS = {
    "swap": Verb(lambda w, f: swap(w, ["c", None, "d"])),
    "swap one": Verb(lambda w, f: swap(w, ["c", None, "b"])),
    "the same again": Verb(lambda w, f: swap(w, ["a", "b", None])),
    "run": Verb(lambda w, f: w.manager.run(swap, w, ["c", None, "d"])),
    "add": Verb(lambda w, f: w.manager.add_adapter(adapter("e"))),
    "add a request": Verb(lambda w, f: w.manager.add_adapter(request(f, "e"))),
    "replace": Verb(lambda w, f: w.manager.add_adapter(adapter("a", 1), load_inplace=True)),
    "replace by request": Verb(lambda w, f: w.manager.add_adapter(request(f, "a", 1, load_inplace=True))),
    "replace and swap": Verb(
        lambda w, f: swap(w, ["a", "b", None]),
        ready=lambda w, f: (w.manager.pin_adapter("a"), w.manager.add_adapter(adapter("a", 1), load_inplace=True)),
    ),
    "replace in prepare": Verb(
        lambda w, f: w.manager.prepare([request(f, "a", 1, load_inplace=True), "b", None]).close()
    ),
    "remove": Verb(lambda w, f: w.manager.remove_adapter("a")),
    "remove all": Verb(lambda w, f: w.manager.remove_all_adapters()),
    "remove oldest": Verb(lambda w, f: w.manager.remove_oldest_adapter()),
    "activate": Verb(lambda w, f: w.manager.activate_adapter("c")),
    "deactivate": Verb(lambda w, f: w.manager.deactivate_adapter("a")),
    "pin": Verb(lambda w, f: w.manager.pin_adapter("c")),
    "unpin": Verb(lambda w, f: w.manager.unpin_adapter("a"), ready=lambda w, f: w.manager.pin_adapter("a")),
    "hold": Verb(hold),
    "close": Verb(close),
    "wait in vain": Verb(wait_in_vain),
    "prefetch": Verb(prefetch),
    "do not wait": Verb(not_wait),
    "recall": Verb(recall, ready=evicted_request),
    "warmup": Verb(lambda w, f: w.manager.warmup(w.logits, num_sequences=3), ready=lambda w, f: w.reset()),
    "update": Verb(update),
    "update on the device": Verb(lambda w, f: update(w, f, True)),
    "heal an older state": Verb(lambda w, f: swap(w, ["a", "b", None]), ready=older_state),
    "heal after donation": Verb(lambda w, f: swap(w, ["c", "b", None]), ready=donated),
    "loading": Verb(lambda w, f: w.manager.add_adapter(request(f, "e")), in_thread=True),
    "loading in place": Verb(
        lambda w, f: w.manager.add_adapter(request(f, "a", 1, load_inplace=True)), in_thread=True
    ),
    "prefetching": Verb(prefetch, in_thread=True),
    "recalling": Verb(recall, ready=evicted_request, in_thread=True),
}  # fmt: skip


def zeroed(name: str) -> jlora.Adapter:
    """What `update` makes of it."""
    own = adapter(name)
    first, lora = next(iter(own.modules.items()))
    blank = replace(lora, a=np.zeros_like(lora.a), b=np.zeros_like(lora.b))
    return jlora.Adapter(name=name, modules={**own.modules, first: blank})


class Arena:
    """One world in which verbs are interrupted, again and again."""

    def __init__(self, folders: Path):
        self.folders = folders
        for name, version in (("e", 0), ("a", 1)):
            adapter(name, version).save_pretrained(folders / f"{name}{version}")
        self.world = make_world(max_loras=2, max_cpu_loras=4)
        self.judge = Judge(self.world)
        self.updated = zeroed("a")
        self.trial(VERBS["swap"], None)  # compiles everything
        gc.collect()
        gc.freeze()  # so that the collections of every trial are short

    def close(self) -> None:
        gc.unfreeze()

    def versions(self, name: str) -> list[jlora.Adapter]:
        return [adapter("a"), adapter("a", 1), self.updated] if name == "a" else [adapter(name)]

    def trial(self, verb: Verb, at: int | None, error: type[BaseException] = KeyboardInterrupt) -> Injector:
        """Run a verb, interrupt it at a line, and check everything."""
        world, injector = self.world, Injector(at, error)
        for name in NAMES:
            world.manager.add_adapter(adapter(name))
        swap(world, ["a", "b", None])
        kept = verb.ready(world, self.folders)
        caught = None
        try:
            with injector.in_new_threads() if verb.in_thread else injector.here():
                verb.run(world, self.folders)
        except error:
            caught = error
        except jlora.LoRAError as died:
            if not verb.in_thread or "died" not in str(died):
                raise
        except ValueError as made:  # by JAX, of whatever comes out of a comparison
            if "while checking equality" not in str(made):
                raise
            caught = error
        del kept
        if injector.fired is not None and caught is None and not verb.in_thread:
            raise Harm("lost", f"the interrupt at {injector.fired}")
        try:
            self.judge.check(self.versions)
        except BaseException as wrong:
            wrong.add_note(f"interrupted at line {at}: {injector.fired}")
            raise
        return injector


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    arena = Arena(tmp_path_factory.mktemp("folders"))
    yield arena
    arena.close()


# The thread may be hit before its first line: it dies, and says so on its way out. It may be hit between the call that
# opens a file and the `with` that closes it: then the file's own finalizer does.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore:unclosed file:ResourceWarning"
)
@pytest.mark.parametrize("count", [FEW, pytest.param(POINTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VERBS)
def test_an_interrupt_at_any_line_harms_nothing(arena: Arena, name: str, count: int) -> None:
    verb = VERBS[name]
    lines = arena.trial(verb, None).lines
    assert lines > 3
    points = sorted({round(1 + i * (lines - 1) / (count - 1)) for i in range(count)})
    fired = [arena.trial(verb, at).fired for at in points]
    assert sum(where is not None for where in fired) >= len(points) / 2  # a later run may take fewer lines


def test_healing_leaves_no_setting_of_jax_behind() -> None:
    """With another default device, a step would be compiled once more."""
    world = make_world()
    world.serve([None, None, None])
    fired = 0
    for at in range(1, 30):
        donated(world, Path())
        injector = Injector(at, function="_renew")
        with contextlib.suppress(KeyboardInterrupt), injector.here():
            world.manager.prepare([None, None, None]).close()
        fired += injector.fired is not None
        assert jax.config.jax_default_device is None, injector.fired
        world.serve([None, None, None])
    assert fired > 20
    assert len(world.traces) == 1


# --- a model given back, and one taken ------------------------------------------------------------------------------


def wrapped(model: Model) -> jlora.LoRAManager:
    return jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=MAX_RANK))


def as_before(model: Model) -> bool:
    """Whether no layer of a model has anything of ours on it."""
    return all(
        not type(module).__name__.endswith("WithLoRA") and not any(name.startswith("jlora") for name in vars(module))
        for _, module in nnx.iter_modules(model)
    )


def give_back(at: int | None) -> Injector:
    """Interrupt `unwrap`: the model is wrapped and served, or as it was."""
    model, tokens = Model(), np.arange(4)[None]
    manager, injector = wrapped(model), Injector(at)
    manager.add_adapter(adapter("a"))
    try:
        with injector.here():
            manager.unwrap()
    except KeyboardInterrupt:
        pass
    if as_before(model):
        with pytest.raises(jlora.LoRAError, match="gave its model back"):
            manager.prepare([None])
    else:
        manager.add_adapter(adapter("b"))
        with manager.prepare(["b"]) as batch, jlora.use(batch):
            want = expected(model, adapter("b"), tokens[0])
            np.testing.assert_allclose(model(tokens)[0], want, rtol=0, atol=4e-6 * np.abs(want).max())
        assert manager.unwrap() is model
        assert as_before(model)
    want = expected(model, None, tokens[0])
    np.testing.assert_allclose(model(tokens)[0], want, rtol=0, atol=4e-6 * np.abs(want).max())
    return injector


def take(at: int | None) -> Injector:
    """Interrupt `LoRAManager(...)`: there is a manager, or the model is as it was."""
    model, injector = Model(), Injector(at)
    try:
        with injector.here():
            manager = wrapped(model)
        manager.unwrap()
    except KeyboardInterrupt:
        pass
    assert as_before(model), f"interrupted at {injector.fired}"
    wrapped(model)
    return injector


@pytest.mark.parametrize("count", [2 * FEW, pytest.param(2 * POINTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("trial", [give_back, take])
def test_an_interrupt_leaves_the_model_wrapped_or_as_it_was(
    trial: Callable[[int | None], Injector], count: int
) -> None:
    lines = trial(None).lines
    points = sorted({round(1 + i * (lines - 1) / (count - 1)) for i in range(count)})
    assert all(trial(at).fired for at in points)


# --- real ones ------------------------------------------------------------------------------------------------------


@dataclass
class Signals:
    """Swap and step in the main thread while another sends SIGINT at random moments; check after each.

    Attributes:
      caught: how often it was caught, where ("prepare", "step", "add", "check"); "unraisable" where it came in a
        finalizer or in a callback of the garbage collection (JAX has one), out of which Python lets nothing.
      rounds: how many of them were worked.
      answers: how many were compared.
      harm: called with what must not be. If it returns, things go on in a new world.
    """

    seed: int = 0
    harm: Callable[[Harm], None] | None = None
    caught: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    answers: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._unraisable = 0
        self._start()

    def _start(self) -> None:
        self.world = make_world(max_loras=2, max_cpu_loras=4)
        self.judge = Judge(self.world)
        self._load()
        self.judge.check(lambda name: [adapter(name)])  # compiles

    def _load(self) -> None:
        for name in NAMES:
            self.world.manager.add_adapter(adapter(name))

    def _count(self, unraisable: "sys.UnraisableHookArgs") -> None:
        self._unraisable += 1
        sys.__unraisablehook__(unraisable)

    def run(self, times: int) -> None:
        for _ in range(times):
            try:
                sys.unraisablehook = self._count
                self._load()
                self._interrupted()
                self.judge.check(lambda name: [adapter(name)])
                self.answers += self.judge.answers
                self.judge.answers = 0
            except Harm as harm:
                if self.harm is None:
                    raise
                self.harm(harm)
                self._start()
            finally:
                sys.unraisablehook = sys.__unraisablehook__

    def _interrupted(self) -> None:
        """Work until the signal comes."""
        world, doing, main = self.world, "nothing", threading.main_thread().ident
        assert main is not None
        harm, unraisable = None, self._unraisable
        timer = threading.Timer(self._rng.random() * 0.02, signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            sent = False
            while not sent:
                sent = not timer.is_alive()  # then it has come by now, or comes in this round
                try:
                    names = self._rng.sample(NAMES, 2)
                    doing = "prepare"
                    with world.manager.prepare([*names, None]) as batch:
                        doing = "step"
                        logits = world.logits(batch)
                    doing = "check"
                    if not all(self.judge.right(logits[i], i, adapter(name)) for i, name in enumerate(names)):
                        harm = Harm("wrong", f"an answer for one of {names}")
                    doing = "add"
                    world.manager.add_adapter(adapter(names[0]), load_inplace=self._rng.random() < 0.5)
                    self.rounds += 1
                except Exception as error:  # the signal may not come out as anything else
                    harm = Harm("dead", f"in {doing}: {error!r}")
            doing = "unraisable"
            if unraisable == self._unraisable:
                harm = harm or Harm("lost", "a signal")
            self.caught[doing] += 1
        except KeyboardInterrupt:
            self.caught[doing] += 1
        timer.join()
        if harm is not None:
            raise harm


def unless_lost(harm: Harm) -> None:
    """Raise, but for a signal that JAX or Python dropped, rarely, where they let nothing out: it harmed nothing."""
    if harm.kind != "lost":
        raise harm


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system sends no signal to a thread")
@pytest.mark.parametrize("times", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_real_interrupts_harm_nothing(times: int) -> None:
    """In a process of its own: a signal that comes late must not hit pytest."""
    code = (
        "import gc; from tests.manager.test_interrupts import Signals, unless_lost\n"
        "s = Signals(harm=unless_lost); gc.collect(); gc.freeze()\n"  # so that the collections of every check are short
        f"s.run({times}); print(sum(s.caught.values()))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(times)
    ignored = [line for line in done.stderr.splitlines() if line.startswith("Exception ignored")]
    assert all("_xla_gc_callback" in line for line in ignored), done.stderr[-2000:]  # that one is JAX's own


def test_an_interrupted_block_has_closed_its_batch() -> None:
    """Its variable lives on; were the lease open, the slots would be lost for as long as that does."""
    world = make_world()
    world.manager.add_adapter(adapter("a"))
    for at in range(1, 40):
        injector = Injector(at)
        batch = None
        try:
            with world.manager.prepare(["a", None, None]) as batch, injector.here():
                batch.generations  # noqa: B018
                batch.has_adapters  # noqa: B018
        except KeyboardInterrupt:
            pass
        assert batch is not None
        assert world.manager.leases() == (), injector.fired
    with world.manager.prepare(["a", None, None]):  # and nobody else has the batch
        gc.collect()
        assert len(world.manager.leases()) == 1
    assert world.manager.leases() == ()
    with contextlib.ExitStack() as stack:
        batch = stack.enter_context(world.manager.prepare(["a", None, None]))
        assert len(world.manager.leases()) == 1
    assert world.manager.leases() == ()


def test_closing_a_batch_runs_no_python() -> None:
    """There is no room for an interrupt between the end of the block and the end of the lease."""
    world = make_world()
    calls: list[str] = []
    with world.manager.prepare([None, None, None]) as batch:
        sys.setprofile(lambda frame, event, arg: calls.append(event))
    sys.setprofile(None)
    assert "call" not in calls
    with pytest.raises(jlora.LoRAError, match="closed"):
        world.logits(batch)
