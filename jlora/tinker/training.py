"""One thread that trains the models of all clients: it packs their examples into steps of one `Trainer`."""

import logging
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import numpy as np
from jaxtyping import Array, Float, Int

import jlora
from jlora import Adapter, LoRAManager
from jlora.errors import LoRAUsageError
from jlora.training import losses
from jlora.training.report import Report

ALPHA = 32.0  # `lora_alpha` of each adapter, whatever its rank
_LINGER = 0.01  # most seconds that a step waits for rows of other models while no step runs
_POLL = 0.002  # seconds between looks at whether a step has ended
_TOGETHER = 8  # most models that move in one program, which holds the optimizer states of as many once more
LOSSES = losses.LOSSES[:4]  # those of the protocol
_ENDED = "the model was unloaded, or its session has ended"
_log = logging.getLogger("jlora.serve")

State: TypeAlias = dict[str, Any]
_Bucket: TypeAlias = tuple[bool, int]  # of a step: without gradients, index into the shapes


class Example(NamedTuple):
    """A sequence: int32 inputs and targets [n], and float32 weights, sampled log-probabilities and advantages [n]."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    sampled: np.ndarray
    advantages: np.ndarray


@dataclass(eq=False)
class Computation:
    """A pass over examples, without gradients if `forward_only`. ppo and cispo clip to the ratios `low` and `high`.

    Its results are the log-probabilities of the targets, float32 [n], and the sum of the losses of each example.
    """

    examples: Sequence[Example]
    loss: str
    low: float = 0.8
    high: float = 1.2
    forward_only: bool = False
    error: Exception | None = None

    def __post_init__(self):
        self.logprobs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(self.examples)
        self.losses, self.left = [0.0] * len(self.examples), len(self.examples)


@dataclass(frozen=True)
class Update:
    """A step of the optimizer with these numbers. Its result is the norm of the gradient."""

    numbers: Mapping[str, float]


class Job(NamedTuple):
    """A request of a model. `finish` is called on the training thread with its result or its error."""

    work: Computation | Update | Callable[[], Any]
    finish: Callable[[Any], object]


@dataclass(eq=False)
class Model:
    """A model of a client, of the training thread but for its `jobs`.

    Attributes:
      name, rank, seed, targets: of its adapter; no targets are all modules.
      jobs: requests that were not started.
      rows: (computation, index of the example) that wait.
      running: computations that did not finish.
      state: its factors and optimizer on the host, while it is not in the trainer.
      fresh: True until its weights are used.
      summed: number of examples since the last step.
      failed: the error of a `forward_backward` since the last step.
      ended: True once it is unloaded.
    """

    name: str
    rank: int
    seed: int
    targets: Collection[str] | None = None
    jobs: deque[Job] = field(default_factory=deque[Job])
    rows: dict[_Bucket, deque[tuple[Computation, int]]] = field(default_factory=lambda: defaultdict(deque))
    running: dict[Computation, Job] = field(default_factory=dict[Computation, Job])
    state: State | None = None
    fresh: bool = True
    summed: int = 0
    failed: Exception | None = None
    ended: bool = False


_Rows: TypeAlias = list[tuple[Model, Computation, int]]  # examples of a step: model, computation, index
_Moved: TypeAlias = list[tuple[tuple[Array, ...], list[Job]]]  # norms that were not fetched, and their requests


def policy_loss(
    model: Any,
    batch: jlora.LoRABatch,
    tokens: Int[Array, "B L"],
    targets: Int[Array, "B L"],
    kinds: Int[Array, "B"],
    weights: Float[Array, "B L"],
    sampled: Float[Array, "B L"],
    advantages: Float[Array, "B L"],
    low: Float[Array, "B 1"],
    high: Float[Array, "B 1"],
) -> tuple[Float[Array, "B"], Float[Array, "B"], dict[str, Any]]:
    """Return the loss of each sequence, its weights, and the log-probabilities of all targets."""
    with jlora.use(batch):
        logits = model(tokens)
    logprobs, policy = losses.token_logprobs(logits, targets), {"sampled": sampled, "advantages": advantages}
    summed, total, _ = losses.by_row(kinds, logprobs, weights, **policy, low=low, high=high)
    return summed, total, {"logprobs": logprobs, "losses": summed}


class Training:
    """The training thread. Requests of a model run in its order, and those of several models share steps.

    A model that no step needs moves to the host when another needs its place, and comes back with its next request.
    `submit` may be called from any thread. The methods of models run on the training thread, as the work of a `Job`.

    Args:
      manager: the manager of the model.
      shapes: (sequences, tokens of each) of the steps, which are compiled by `start`.
      capacity: most models in device memory.
      max_rank: largest rank.
    """

    def __init__(self, manager: LoRAManager, shapes: Sequence[tuple[int, int]], *, capacity: int, max_rank: int):
        self._shapes, self._max_rank = sorted(shapes, key=lambda shape: shape[1]), max_rank
        self._trainer = manager.trainer(policy_loss, capacity=capacity, max_rank=max_rank)
        self._models: dict[str, Model] = {}  # served the longest ago first
        self._placed: dict[str, Model] = {}  # in the trainer, used the longest ago first
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="jlora-train", daemon=True)
        self.longest = self._shapes[-1][1]  # tokens of an example
        self._together = min(capacity, _TOGETHER)

    @property
    def alive(self) -> bool:
        """True while requests are served."""
        return self._thread.is_alive() and not self._closed

    def start(self) -> None:
        """Compile every step, and start the thread."""
        model = Model("warm-up", 1, 0)
        self.create(model)
        for bucket in [(forward, i) for i in range(len(self._shapes)) for forward in (True, False)]:
            length = self._shapes[bucket[1]][1]
            example = Example(*np.zeros((2, length), np.int32), *np.zeros((3, length), np.float32))
            jax.block_until_ready(self._step(bucket, [(model, Computation([example], "ppo"), 0)]).rows)
        for count in {1, self._together}:
            self._trainer.apply([model.name] + [None] * (count - 1), learning_rate=0.0)
        self._park(model)
        for in_slot_dtype in (False, True):
            self.snapshot(model, in_slot_dtype=in_slot_dtype)()
        self._drop(model)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current step. Requests that wait get no answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, model: Model, job: Job) -> None:
        """Queue a request of a model. Returns at once."""
        with self._changed:
            if not model.ended:
                self._models.setdefault(model.name, model)
                model.jobs.append(job)
                self._changed.notify_all()
                return
        job.finish(LoRAUsageError(_ENDED))

    # --- requests of a model ------------------------------------------------------------------------------------------

    def create(self, model: Model, state: State | None = None) -> None:
        """Draw the adapter of a model, or continue from a state. Raises LoRAError."""
        try:
            if not 1 <= model.rank <= self._max_rank or not 0 <= model.seed < 2**63:
                most = f"a rank from 1 to {self._max_rank} (--max-lora-rank) and a seed from 0 to 2**63 - 1"
                raise LoRAUsageError(f"lora_config needs {most}, got {model.rank} and {model.seed}")
            model.state = state
            self._place([model])
        except BaseException:
            self._drop(model)
            raise

    def load(self, model: Model, state: State) -> None:
        """Replace the weights of a model before their first use. Raises LoRAUsageError."""
        if not model.fresh:
            raise LoRAUsageError(
                "load_weights comes before all else; create a client with create_training_client_from_state"
            )
        self._place([model])
        before = jax.device_get(self._copied(model))
        self._remove(model)
        model.state = state
        try:
            self._place([model])
        except BaseException:
            model.state = before
            raise

    def refuse(self, model: Model, error: Exception, *, forward_only: bool) -> None:
        """Raise the error of a computation that is wrong. The next step fails with it too, unless `forward_only`."""
        if not forward_only:
            model.failed = error
        raise error

    def _update(self, jobs: Sequence[tuple[Model, Job]]) -> _Moved:
        """Launch the steps of models by the gradients since the last of each, `_together` in one program."""
        ready: list[tuple[Model, Job]] = []
        for model, job in jobs:
            try:
                self._check_gradients(model)
            except Exception as error:  # the thread goes on; the client gets the error
                job.finish(_noted(error))
            else:
                ready.append((model, job))
        moved: _Moved = []
        for i in range(0, len(ready), self._together):
            part = ready[i : i + self._together]
            try:
                norms = self._applied({model: cast("Update", job.work).numbers for model, job in part})
            except Exception as error:  # the thread goes on; the clients get the error
                noted = _noted(error)
                for _, job in part:
                    job.finish(noted)
            else:
                moved.append((norms, [job for _, job in part]))
        return moved

    def _finish_updates(self, moved: _Moved) -> None:
        """Fetch the norms of the gradients, and end the requests that moved models by them."""
        while moved:
            norms, jobs = moved.pop(0)
            try:
                found = [
                    float(norm) if math.isfinite(norm)
                    else LoRAUsageError(f"the norm of the gradient is {norm}, so the model does not move")
                    for norm in jax.device_get(norms)[: len(jobs)]
                ]  # fmt: skip
            except Exception as error:  # the thread goes on; the clients get the error
                found = [_noted(error)] * len(jobs)
            for job, each in zip(jobs, found, strict=True):
                job.finish(each)

    def _check_gradients(self, model: Model) -> None:
        """Raise LoRAUsageError, and forget its gradients, unless a model has those of all computations."""
        if model.failed is None and model.summed:
            return
        why = "there was none" if model.failed is None else f"one failed: {model.failed}"
        model.failed = None
        if model.summed:
            model.summed = 0  # its gradients are left behind
            self._park(model)
        raise LoRAUsageError(f"the step needs each forward_backward since the last, and {why}")

    def _applied(self, steps: Mapping[Model, Mapping[str, float]]) -> tuple[Array, ...]:
        """Launch one step of at most `_together` models, and return the norms before they are computed."""
        self._place(steps)
        numbers: dict[str, dict[str, float]] = defaultdict(dict)
        for model, own in steps.items():
            for number, value in own.items():
                numbers[number][model.name] = value
        names = [model.name for model in steps]
        padding = self._together - len(names) if len(names) > 2 else 0
        norms = self._trainer.apply([*names, *[None] * padding], divide=False, **numbers)
        for model in steps:
            model.summed = 0
        return norms

    def snapshot(
        self, model: Model, *, in_slot_dtype: bool = False, with_state: bool = False
    ) -> Callable[[], tuple[Adapter, State | None]]:
        """Copy a model on the device, and return a function, for any thread, that returns it on the host.

        It returns the adapter, in float32 or as it is sampled, and the state.
        """
        self._place([model])
        adapter = self._trainer.snapshot(model.name, in_slot_dtype=in_slot_dtype)
        state = self._copied(model) if with_state else None
        return lambda: (adapter(), jax.device_get(state))

    def end(self, model: Model) -> None:
        """Forget a model. Its requests that wait fail."""
        self._drop(model)
        for job in model.jobs:
            job.finish(LoRAUsageError(_ENDED))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        before: tuple[Report | Exception | None, _Rows] = None, []  # the step before, whose results are not fetched
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(m.jobs or m.running for m in self._models.values()))
                if self._closed:
                    return
                self._start()
                calls = [(m, m.jobs.popleft()) for m in self._models.values() if m.jobs and not m.running]
            moved = self._update([(model, job) for model, job in calls if isinstance(job.work, Update)])
            for _, job in calls:
                if not callable(job.work):
                    continue
                try:
                    found = job.work()
                except Exception as error:  # the thread goes on; the client gets the error
                    found = _noted(error)
                job.finish(found)
            if not self._fills_in_time(before[0]):  # clients that wait for these results may have the next rows
                self._finish(*before)
                self._finish_updates(moved)
                before = None, []
                with self._changed:
                    self._changed.wait_for(self._fills_step, _LINGER)
            with self._changed:
                bucket, rows = self._packed()
            try:
                report = self._step(bucket, rows) if rows else None
            except Exception as error:  # as above
                report = _noted(error)
            self._finish(*before)  # while the device computes this step
            self._finish_updates(moved)
            before = report, rows

    def _start(self) -> None:
        """Start the computations that are next."""
        for model in self._models.values():
            while model.jobs and isinstance(work := model.jobs[0].work, Computation):
                model.running[work] = model.jobs.popleft()
                for i, example in enumerate(work.examples):
                    shape = next(i for i, (_, length) in enumerate(self._shapes) if len(example.tokens) <= length)
                    model.rows[work.forward_only, shape].append((work, i))

    def _fills_in_time(self, running: Report | Exception | None) -> bool:
        """Return True once the next step has all of its rows, False if the running one ends before."""
        with self._changed:
            while len(self._models) > 1 and not self._fills_step():
                if not isinstance(running, Report) or cast("Any", running.rows["losses"]).is_ready():
                    return False
                self._changed.wait(_POLL)
        return True

    def _fills_step(self) -> bool:
        """Return True if a step has all of its rows, or no rows wait. Starts the computations that are next."""
        self._start()
        if (bucket := self._next()) is None:
            return True
        waiting = sum(len(model.rows[bucket]) for model in self._models.values())
        return waiting >= self._shapes[bucket[1]][0] or self._closed

    def _next(self) -> _Bucket | None:
        """Return the bucket of the next step: that of the model that was served the longest ago."""
        return next((bucket for model in self._models.values() for bucket, rows in model.rows.items() if rows), None)

    def _packed(self) -> tuple[_Bucket, _Rows]:
        """Take the rows of the next step, of all models that have some."""
        taken: _Rows = []
        if (bucket := self._next()) is None:
            return (False, 0), taken
        most = self._shapes[bucket[1]][0]
        for model in [model for model in self._models.values() if model.rows[bucket]][: self._trainer.capacity]:
            if room := most - len(taken):
                waiting = model.rows[bucket]
                taken += [(model, *waiting.popleft()) for _ in range(min(room, len(waiting)))]
                self._models[model.name] = self._models.pop(model.name)
        return bucket, taken

    def _step(self, bucket: _Bucket, rows: _Rows) -> Report:
        """Launch one microbatch, and return its results before they are computed."""
        count, length = self._shapes[bucket[1]]
        self._place([model for model, _, _ in rows])
        ints, floats = np.zeros((2, count, length), np.int32), np.zeros((3, count, length), np.float32)
        kinds, limits = np.zeros(count, np.int32), np.ones((2, count, 1), np.float32)
        for row, (_, work, i) in enumerate(rows):
            n = len(work.examples[i].tokens)
            ints[:, row, :n], floats[:, row, :n] = work.examples[i][:2], work.examples[i][2:]
            kinds[row], limits[:, row, 0] = losses.LOSSES.index(work.loss), (work.low, work.high)
        names = [model.name for model, _, _ in rows] + [None] * (count - len(rows))
        call = self._trainer.evaluate if bucket[0] else self._trainer.gradients
        report = call(self._trainer.prepare(names), *ints, kinds, *floats, *limits)
        for model, _, _ in rows:
            model.fresh, model.summed = False, model.summed + (not bucket[0])
        return report

    def _finish(self, report: Report | Exception | None, rows: _Rows) -> None:
        """Store the results of each example of a step, and end the computations that have all of theirs."""
        error = report if isinstance(report, Exception) else None
        try:
            if isinstance(report, Report):
                logprobs, summed = jax.device_get([report.rows[key] for key in ("logprobs", "losses")])
                for row, (_, work, i) in enumerate(rows):
                    work.logprobs[i] = logprobs[row, : len(work.examples[i].tokens)]
                    work.losses[i] = float(summed[row])
        except Exception as failed:  # the thread goes on; the clients get the error
            error = _noted(failed)
        for model, work, _ in rows:
            work.error = work.error or error
            work.left -= 1
            if not work.left:
                if work.error is not None and not work.forward_only:
                    model.failed = work.error
                model.running.pop(work).finish(work.error or work)

    # --- places in the trainer ----------------------------------------------------------------------------------------

    def _place(self, models: Iterable[Model]) -> None:
        """Move models into the trainer, and those used the longest ago to the host where there is no room."""
        wanted = {model.name: model for model in models}
        for name, model in wanted.items():
            if model.ended:
                raise LoRAUsageError(_ENDED)
            if self._placed.pop(name, None) is None:
                if len(self._trainer.names) == self._trainer.capacity:
                    self._park(next(model for other, model in self._placed.items() if other not in wanted))
                state = model.state
                if state is not None and "gradients" not in state:
                    zeros = jax.tree.map(np.zeros_like, state["factors"])
                    state = {**state, "gradients": zeros, "sums": np.zeros(2, np.float32)}
                options: dict[str, Any] = {"target_modules": model.targets, "seed": model.seed, "state": state}
                self._trainer.add(name, rank=model.rank, alpha=ALPHA, **options)
                model.state = None
            self._placed[name] = model

    def _park(self, model: Model) -> None:
        state = jax.device_get(self._copied(model, with_sums=bool(model.summed)))
        self._remove(model)
        model.state = state

    def _copied(self, model: Model, *, with_sums: bool = False) -> State:
        """Return the state of a placed model, copied on the device. The sums are those since its last step."""
        state = self._trainer.state_of(model.name)
        return {key: state[key] for key in state if with_sums or key not in ("gradients", "sums")}

    def _remove(self, model: Model) -> None:
        if self._placed.pop(model.name, None) is not None:
            self._trainer.remove(model.name)

    def _drop(self, model: Model) -> None:
        self._remove(model)
        with self._changed:
            model.ended, model.state = True, None
            self._models.pop(model.name, None)


def fresh_optimizer(state: State) -> State:
    """Return a state with the optimizer as before its first step."""
    return {**state, "optimizer": jax.tree.map(np.zeros_like, state["optimizer"])}


def _noted(error: Exception) -> Exception:
    """Log an error that no client caused."""
    if not isinstance(error, LoRAUsageError):
        _log.exception("a training request failed", exc_info=error)
    return error
