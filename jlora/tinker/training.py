"""One thread that trains the models of all clients: it packs their examples into steps of one `Trainer`."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Int

import jlora
from jlora import Adapter, LoRAManager
from jlora.errors import LoRAUsageError
from jlora.training import losses

ALPHA = 32.0
"""PEFT's `lora_alpha` of each adapter, whatever its rank."""

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")

_ENDED = "the model was unloaded, or its session has ended"
_Bucket: TypeAlias = tuple[bool, int]  # without gradients, index into the shapes
_log = logging.getLogger("jlora.serve")


@dataclass(frozen=True)
class Example:
    """One sequence to train on. All arrays have a value for each of its n tokens.

    Attributes:
      tokens: int32 [n], the input.
      targets: int32 [n], the token that is to follow each.
      weights: float32 [n].
      sampled: float32 [n], log-probabilities of the targets when they were sampled.
      advantages: float32 [n].
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    sampled: np.ndarray
    advantages: np.ndarray


@dataclass(eq=False)
class Computation:
    """A forward pass of examples, with or without gradients, and its results as they come.

    Attributes:
      examples: the examples.
      loss: one of `LOSSES`.
      low, high: ratios that ppo and cispo clip to.
      forward_only: leave the gradients out.
      logprobs: float32 [n] of the targets of each example.
      losses: sum of the losses of each example.
    """

    examples: Sequence[Example]
    loss: str
    low: float = 0.8
    high: float = 1.2
    forward_only: bool = False

    def __post_init__(self):
        self.logprobs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(self.examples)
        self.losses = [0.0] * len(self.examples)
        self.left = len(self.examples)
        self.error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """A request of a model, in its order.

    Attributes:
      work: a computation, or a call on the training thread whose result is the answer.
      finish: called on that thread with the result, or with the error.
    """

    work: Computation | Callable[[], Any]
    finish: Callable[[Any], None]


@dataclass(eq=False)
class Model:
    """A model of a client. Its fields are of the training thread, except for `jobs`.

    Attributes:
      name: name of its adapter in the trainer.
      rank, seed: of its adapter.
      targets: modules of its adapter; None for all.
      jobs: requests that were not started.
      rows: (computation, index of the example) that wait, by kind of step.
      running: computations that were started and did not finish.
      state: its factors and optimizer on the host, while it is not in the trainer.
      fresh: True until a request has used its weights.
      summed: number of gradients since the last step.
      failed: the error of a `forward_backward` since the last step.
      ended: True once it is unloaded.
    """

    name: str
    rank: int
    seed: int
    targets: Collection[str] | None = None
    jobs: deque[Job] = field(default_factory=deque[Job])
    rows: dict[_Bucket, deque[tuple[Computation, int]]] = field(
        default_factory=dict[_Bucket, "deque[tuple[Computation, int]]"]
    )
    running: dict[Computation, Job] = field(default_factory=dict[Computation, Job])
    state: dict[str, Any] | None = None
    fresh: bool = True
    summed: int = 0
    failed: Exception | None = None
    ended: bool = False


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
) -> tuple[Float[Array, "B"], Float[Array, "B"], dict[str, Array]]:
    """Return the loss of each sequence, its weights, and the log-probabilities of all targets."""
    with jlora.use(batch):
        logits = model(tokens)
    logprobs = losses.token_logprobs(logits, targets)
    options = {"sampled": sampled, "advantages": advantages, "low": low, "high": high}
    summed, total, _ = losses.by_row(kinds, logprobs, weights, **options)
    return summed, total, {"logprobs": logprobs, "losses": summed}


class Training:
    """The training thread, with the models of all clients.

    Requests of a model run in their order; those of several models share steps. A model that no step needs is moved to
    the host when another needs its place, and comes back with its next request. `submit` and `add` may be called from
    any thread; all else runs on the training thread, as the work of a `Job`.

    Args:
      manager: the manager of the model.
      shapes: (sequences, tokens of each) of the steps, which are compiled by `start`.
      capacity: most models in device memory.
      max_rank: largest rank.
    """

    def __init__(
        self,
        manager: LoRAManager,
        shapes: Sequence[tuple[int, int]],
        *,
        capacity: int,
        max_rank: int,
    ):
        self.shapes = sorted(shapes, key=lambda shape: shape[1])
        self._trainer = manager.trainer(policy_loss, capacity=capacity, max_rank=max_rank)
        self._max_rank = max_rank
        self._models: dict[str, Model] = {}  # least recently served first
        self._placed: dict[str, Model] = {}  # in the trainer, least recently used first
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="jlora-train", daemon=True)

    @property
    def longest(self) -> int:
        """Most tokens of an example."""
        return self.shapes[-1][1]

    @property
    def alive(self) -> bool:
        """True while requests are served."""
        return self._thread.is_alive() and not self._closed

    def start(self) -> None:
        """Compile every step, and start the thread."""
        model = Model("warm-up", 1, 0)
        try:
            self.create(model)
            for i, (_, length) in enumerate(self.shapes):
                example = Example(*np.zeros((2, length), np.int32), *np.zeros((3, length), np.float32))
                for forward_only in (True, False):
                    self._step((forward_only, i), [(model, Computation([example], "ppo"), 0)])
            self.optim_step(model, {"learning_rate": 0.0})
            self._park(model)
            self._place([model])
        finally:
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

    # --- requests -----------------------------------------------------------------------------------------------------

    def create(self, model: Model, state: dict[str, Any] | None = None) -> None:
        """Draw the adapter of a model, or continue from a state. Raises LoRAError."""
        if not 1 <= model.rank <= self._max_rank:
            raise LoRAUsageError(f"lora_config.rank is {model.rank}; expected 1 to {self._max_rank} (--max-lora-rank)")
        try:
            self._place([model], state)
        except BaseException:
            self._drop(model)
            raise

    def load(self, model: Model, state: dict[str, Any]) -> None:
        """Replace the weights of a model before their first use. Raises LoRAUsageError."""
        if not model.fresh:
            raise LoRAUsageError(
                "load_weights is the first request of a model, or none; create another training client from the "
                "checkpoint (create_training_client_from_state)"
            )
        before = self.state(model)
        self._remove(model)
        try:
            self._place([model], state)
        except BaseException:
            model.state = before
            raise

    def optim_step(self, model: Model, numbers: dict[str, float]) -> float:
        """Move a model by the gradients since the last step, and return their norm. Raises LoRAUsageError."""
        if model.failed is not None or not model.summed:
            failed, model.failed = model.failed, None
            self._forget(model)
            if failed is not None:
                raise LoRAUsageError(
                    f"a forward_backward of this step failed, so the model does not move: {failed}"
                )
            raise LoRAUsageError("there was no forward_backward since the last step, so the model does not move")
        self._place([model])
        norm = float(self._trainer.apply(model.name, divide=False, **numbers))
        model.summed = 0
        if not math.isfinite(norm):
            raise LoRAUsageError(f"the norm of the gradient is {norm}, so the model does not move")
        return norm

    def state(self, model: Model) -> dict[str, Any]:
        """Return the factors and the optimizer of a model, copied to the host."""
        self._place([model])
        state = jax.device_get(self._trainer.state_of(model.name))
        if not model.summed:  # zeros
            del state["gradients"]
        return state

    def adapter(self, model: Model) -> Adapter:
        """Return the adapter of a model, in float32 on the host."""
        self._place([model])
        return self._trainer.adapter(model.name)

    def end(self, model: Model) -> None:
        """Forget a model. Its requests that wait fail."""
        self._drop(model)
        waiting, model.jobs = model.jobs, deque()
        for job in waiting:
            job.finish(LoRAUsageError(_ENDED))

    def refuse(self, model: Model, error: Exception, *, forward_only: bool) -> None:
        """Raise the error of a computation that is wrong. The next step fails with it too, unless `forward_only`."""
        model.fresh = False
        if not forward_only:
            model.failed = error
        raise error

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(map(_wants, self._models.values())))
                if self._closed:
                    return
                calls = self._started()
                bucket, rows = self._packed()
            for _, job in calls:
                try:
                    found = job.work() if callable(job.work) else None
                except Exception as error:
                    found = _noted(error)
                job.finish(found)
            if not rows:
                continue
            try:
                self._step(bucket, rows)
            except Exception as error:
                for model, work, _ in rows:
                    work.error = work.error or _noted(error)
            for model, work, _ in rows:
                work.left -= 1
                if not work.left and work in model.running:
                    if work.error is not None and not work.forward_only:
                        model.failed = work.error
                    model.running.pop(work).finish(work if work.error is None else work.error)

    def _started(self) -> list[tuple[Model, Job]]:
        """Start the computations that are next, and return the calls that are, at most one of each model."""
        calls: list[tuple[Model, Job]] = []
        for model in self._models.values():
            while model.jobs and isinstance(work := model.jobs[0].work, Computation):
                model.running[work] = model.jobs.popleft()
                for i, example in enumerate(work.examples):
                    shape = next(i for i, (_, length) in enumerate(self.shapes) if len(example.tokens) <= length)
                    model.rows.setdefault((work.forward_only, shape), deque()).append((work, i))
            if model.jobs and not model.running:
                calls.append((model, model.jobs.popleft()))
        return calls

    def _packed(self) -> tuple[_Bucket, list[tuple[Model, Computation, int]]]:
        """Take the rows of a step: of the model that was served the longest ago, and of others that need the same."""
        waiting = [model for model in self._models.values() if any(model.rows.values())]
        if not waiting:
            return (False, 0), []
        bucket = next(bucket for bucket, rows in waiting[0].rows.items() if rows)
        sharing = [model for model in waiting if model.rows.get(bucket)][: self._trainer.capacity]
        taken: list[tuple[Model, Computation, int]] = []
        while sharing and len(taken) < self.shapes[bucket[1]][0]:  # one of each model in turn
            model = sharing.pop(0)
            taken.append((model, *model.rows[bucket].popleft()))
            if model.rows[bucket]:
                sharing.append(model)
        for name in {model.name: None for model, _, _ in taken}:
            self._models[name] = self._models.pop(name)
        return bucket, taken

    def _step(self, bucket: _Bucket, rows: Sequence[tuple[Model, Computation, int]]) -> None:
        """Compute one microbatch, and store the results of each of its examples."""
        forward_only, shape = bucket
        count, length = self.shapes[shape]
        self._place({model.name: model for model, _, _ in rows}.values())
        ints = np.zeros((2, count, length), np.int32)
        floats = np.zeros((3, count, length), np.float32)
        kinds, limits = np.zeros(count, np.int32), np.ones((2, count, 1), np.float32)
        for row, (_, work, i) in enumerate(rows):
            example = work.examples[i]
            n = len(example.tokens)
            ints[:, row, :n] = example.tokens, example.targets
            floats[:, row, :n] = example.weights, example.sampled, example.advantages
            kinds[row], limits[:, row, 0] = losses.LOSSES.index(work.loss), (work.low, work.high)
        names = [model.name for model, _, _ in rows] + [None] * (count - len(rows))
        call = self._trainer.evaluate if forward_only else self._trainer.gradients
        report = call(self._trainer.prepare(names), *ints, kinds, *floats, *limits)
        for model, _, _ in rows:
            model.fresh = False
            model.summed += not forward_only
        found = jax.device_get({key: report.rows[key] for key in ("logprobs", "losses")})
        for row, (_, work, i) in enumerate(rows):
            work.logprobs[i] = found["logprobs"][row, : len(work.examples[i].tokens)]
            work.losses[i] = float(found["losses"][row])

    # --- places in the trainer ----------------------------------------------------------------------------------------

    def _place(self, models: Iterable[Model], state: dict[str, Any] | None = None) -> None:
        """Move models into the trainer, and those used the longest ago to the host where there is no room."""
        wanted = {model.name: model for model in models}
        for name, model in wanted.items():
            if model.ended:
                raise LoRAUsageError(_ENDED)
            if self._placed.pop(name, None) is None:
                if len(self._trainer.names) == self._trainer.capacity:
                    self._park(next(model for other, model in self._placed.items() if other not in wanted))
                if (state := state or model.state) is not None and "gradients" not in state:
                    zeros = jax.tree.map(np.zeros_like, state["factors"])
                    state = {**state, "gradients": zeros, "sums": np.zeros(2, np.float32)}
                options = {"rank": model.rank, "alpha": ALPHA, "target_modules": model.targets, "seed": model.seed}
                self._trainer.add(name, **options, state=state)
                model.state = state = None
            self._placed[name] = model

    def _park(self, model: Model) -> None:
        state = self.state(model)
        self._remove(model)
        model.state = state

    def _remove(self, model: Model) -> None:
        if self._placed.pop(model.name, None) is not None:
            self._trainer.remove(model.name)

    def _drop(self, model: Model) -> None:
        self._remove(model)
        with self._changed:
            model.ended, model.state = True, None
            self._models.pop(model.name, None)

    def _forget(self, model: Model) -> None:
        """Forget the gradients of a model."""
        if model.summed:
            model.summed = 0
            self._park(model)


def fresh_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the optimizer as before its first step."""
    return {**state, "optimizer": jax.tree.map(np.zeros_like, state["optimizer"])}


def _wants(model: Model) -> bool:
    return bool(model.jobs or model.running)


def _noted(error: Exception) -> Exception:
    """Log an error that no client caused."""
    if not isinstance(error, LoRAUsageError):
        _log.exception("a training request failed", exc_info=error)
    return error
