"""Sessions of clients, the order of their requests, and the answers that clients come back for.

All state is of one event loop, and no method blocks. The ids of models and samplers are made of the session's, as
clients make them too.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jlora.errors import LoRAError, LoRAUsageError
from jlora.serve.http.errors import ApiError
from jlora.tinker.checkpoints import Checkpoint
from jlora.tinker.training import Job, Model

Answer = bytes | dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Limits of what clients may hold.

    Attributes:
      sessions: sessions at a time.
      models: models of all sessions.
      samplers: samplers of a session; the oldest ends where there are more.
      snapshots: unnamed sampling states of a model; the oldest is deleted where there are more.
      futures: requests whose answer was not forgotten.
      waiting_bytes: bytes of the requests that wait, and of the answers.
      ahead: how far a `seq_id` may be ahead of the next one.
      session_seconds: until a session without a heartbeat ends.
      gap_seconds: until requests fail that wait for one with an earlier `seq_id`.
      answer_seconds: until an answer is forgotten.
      poll_seconds: until a client that waits for an answer is sent away to come back.
      metadata_bytes: bytes of metadata, as JSON.
      datums: examples of a request.
      samples: sequences of a request.
      url_seconds: until a download's URL expires.
    """

    sessions: int = 256
    models: int = 64
    samplers: int = 4096
    snapshots: int = 16
    futures: int = 20_000
    waiting_bytes: int = 2**28
    ahead: int = 10_000
    session_seconds: float = 600.0
    gap_seconds: float = 120.0
    answer_seconds: float = 600.0
    poll_seconds: float = 30.0
    metadata_bytes: int = 4096
    datums: int = 1024
    samples: int = 256
    url_seconds: float = 3600.0


class Future:
    """The answer to a request, once it is there.

    Attributes:
      id: the id that clients come back with.
      size: bytes of the request, then of the answer.
      answer: the answer; None before.
      about: further fields of the reply to the request itself.
    """

    def __init__(self, id: str, size: int = 0):
        self.id, self.size, self.about = id, size, dict[str, Any]()
        self.answer: Answer | None = None
        self.done = asyncio.Event()
        self.finished = 0.0


@dataclass(eq=False)
class Run:
    """A model of a session, and the order of its requests.

    Attributes:
      model: its place in the training.
      next: the `seq_id` that comes next.
      early: requests that came before an earlier one, by `seq_id`.
      broken: why it takes no more requests.
      snapshots: its unnamed sampling states, the oldest first.
      used: `time.time()` of its last request.
    """

    model: Model
    next: int = 1
    early: dict[int, tuple[Job, Future]] = field(default_factory=dict[int, "tuple[Job, Future]"])
    broken: LoRAUsageError | None = None
    snapshots: list[Checkpoint] = field(default_factory=list[Checkpoint])
    gap: asyncio.TimerHandle | None = None
    used: float = field(default_factory=time.time)


@dataclass(eq=False)
class Session:
    """A client's session: its models and samplers by id, and the `time.monotonic()` of its last heartbeat.

    A sampler is of a checkpoint, or of the base model: None.
    """

    id: str
    metadata: dict[str, Any]
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    samplers: dict[str, Checkpoint | None] = field(default_factory=dict[str, "Checkpoint | None"])
    heard: float = field(default_factory=time.monotonic)


class Sessions:
    """All sessions and answers of a server.

    Args:
      limits: limits.
      submit: passes a request on, when it is its turn.
    """

    def __init__(self, limits: Limits, submit: Callable[[Model, Job], None]):
        self.limits, self._submit = limits, submit
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[str, Future] = {}
        self._answered: dict[str, Future] = {}  # the oldest first
        self._bytes = 0

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, metadata: dict[str, Any]) -> Session:
        """Begin a session. Raises ApiError (429) if there are too many."""
        if len(self._sessions) >= self.limits.sessions:
            raise busy(f"{self.limits.sessions} sessions are open")
        session = Session(secrets.token_hex(16), metadata)
        self._sessions[session.id] = session
        return session

    def session(self, id: str) -> Session:
        """Return the session of a session's, model's or sampler's id, which counts as heard. Raises ApiError (410)."""
        if (found := self._sessions.get(id.partition(":")[0])) is None:
            raise gone(id)
        found.heard = time.monotonic()
        return found

    def all(self) -> list[Session]:
        """Return all sessions."""
        return list(self._sessions.values())

    def silent(self) -> list[Session]:
        """Return the sessions that were not heard of for too long."""
        least = time.monotonic() - self.limits.session_seconds
        return [session for session in self._sessions.values() if session.heard < least]

    def close(self, session: Session) -> None:
        """Forget a session, with its requests that were not passed on."""
        self._sessions.pop(session.id, None)
        for run in session.runs.values():
            self._break(run, LoRAUsageError("the session has ended"))

    def run(self, id: str) -> Run:
        """Return the model of an id. Raises ApiError (410)."""
        if (found := self.session(id).runs.get(id)) is None:
            raise gone(id)
        found.used = time.time()
        return found

    def add_run(self, session: Session, number: int, make: Callable[[str], Model]) -> tuple[str, Run | None]:
        """Return the id of the session's model of a number, and the model if it is new. Raises LoRAUsageError."""
        if not 0 <= number < 10**9:
            raise LoRAUsageError(f"model_seq_id must be from 0 to 999999999, got {number}")
        id = f"{session.id}:train:{number}"
        if id in session.runs:
            return id, None
        if sum(len(each.runs) for each in self._sessions.values()) >= self.limits.models:
            raise LoRAUsageError(f"{self.limits.models} models are open (--max-models); finish a session or unload one")
        session.runs[id] = run = Run(make(id))
        return id, run

    def add_sampler(self, session: Session, number: int, source: Checkpoint | None) -> str:
        """Add the sampler of a number, and return its id."""
        id = f"{session.id}:sample:{number}"
        session.samplers.setdefault(id, source)
        if len(session.samplers) > self.limits.samplers:
            del session.samplers[next(iter(session.samplers))]
        return id

    # --- order --------------------------------------------------------------------------------------------------------

    def known(self, id: str) -> Future | None:
        """Return the future of a request that is known."""
        return self._waiting.get(id) or self._answered.get(id)

    def take(self, run_id: str, seq_id: int | None, size: int, make: Callable[[Run, Future], Job]) -> Future:
        """Queue a request of a model in the order of `seq_id`. One that is known has its first future.

        Args:
          run_id: the model's id.
          seq_id: position in the model's order, from 1.
          size: bytes of the request.
          make: returns its job, from the model and the future.

        Raises:
          ApiError: 400 for a wrong `seq_id`, 410 for an unknown model or an answer that is forgotten, 429 if too much
            waits.
        """
        run = self.run(run_id)
        if seq_id is None or seq_id < 1 or seq_id > run.next + self.limits.ahead:
            expected = f"from 1, and at most {self.limits.ahead} past the next, {run.next}"
            raise ApiError(400, "BadRequestError", f"seq_id must be a number {expected}; got {seq_id}", "seq_id")
        id = f"{run_id}:{seq_id}"
        if (future := self.known(id)) is not None:
            return future
        if seq_id < run.next:
            raise gone(id)
        future = self.future(id, size)
        if run.broken is not None:
            self.finish(future, run.broken)
            return future
        run.early[seq_id] = make(run, future), future
        while (turn := run.early.pop(run.next, None)) is not None:
            run.next += 1
            self._submit(run.model, turn[0])
        if run.gap is not None:
            run.gap.cancel()
        run.gap = None
        if run.early:
            run.gap = asyncio.get_running_loop().call_later(self.limits.gap_seconds, self._missed, run)
        return future

    def _missed(self, run: Run) -> None:
        seconds = self.limits.gap_seconds
        self._break(run, LoRAUsageError(
            f"the request with seq_id {run.next} did not come within {seconds:g} seconds of a later one, and the order "
            "of the model's requests is lost; create another training client from its last checkpoint"
        ))  # fmt: skip

    def _break(self, run: Run, error: LoRAUsageError) -> None:
        run.broken = run.broken or error
        if run.gap is not None:
            run.gap.cancel()
        run.gap = None
        for _, future in run.early.values():
            self.finish(future, error)
        run.early.clear()

    # --- answers ------------------------------------------------------------------------------------------------------

    def future(self, id: str, size: int) -> Future:
        """Return a new future. Raises ApiError (429) if too many requests wait or too many answers are kept."""
        now, limits = time.monotonic(), self.limits
        while self._answered:
            oldest = next(iter(self._answered.values()))
            full = 2 * self._bytes > limits.waiting_bytes or 2 * len(self._answered) > limits.futures
            if oldest.finished > now - (60 if full else limits.answer_seconds):
                break
            del self._answered[oldest.id]
            self._bytes -= oldest.size
        count = len(self._waiting) + len(self._answered)
        if count >= limits.futures or self._bytes + size > limits.waiting_bytes:
            raise busy(f"{count} requests of {self._bytes} bytes wait or have answers that are kept")
        future = self._waiting[id] = Future(id, size)
        self._bytes += size
        return future

    def finish(self, future: Future, answer: Answer | Exception) -> None:
        """Store the answer to a request, or its error."""
        if future.answer is not None:
            return
        if isinstance(answer, Exception):
            answer = failed(answer)
        self._bytes += (size := len(answer) if isinstance(answer, bytes) else 256) - future.size
        future.answer, future.size, future.finished = answer, size, time.monotonic()
        future.done.set()
        del self._waiting[future.id]
        self._answered[future.id] = future

    def discard(self, future: Future) -> None:
        """Forget a request that was not begun."""
        del self._waiting[future.id]
        self._bytes -= future.size

    async def wait(self, id: str) -> Answer | None:
        """Return the answer to a request; None if it is not there in time. Raises ApiError (410)."""
        if (future := self.known(id)) is None:
            raise gone(id)
        try:
            async with asyncio.timeout(self.limits.poll_seconds):
                await future.done.wait()
        except TimeoutError:
            return None
        return future.answer


def failed(error: Exception) -> dict[str, Any]:
    """Return the answer to a request that failed: of the category "user" if the request was wrong, else "server"."""
    user = isinstance(error, LoRAUsageError)
    text = str(error) if isinstance(error, LoRAError) else f"{type(error).__name__}: {error}"
    return {"error": text[:2000], "category": "user" if user else "server"}


def gone(id: str) -> ApiError:
    """Return the error for an id that is unknown, since the server was restarted or has forgotten it."""
    return ApiError(410, "GoneError", f"{id[:120]!r} is unknown: the server was restarted, or it has ended or expired")


def busy(why: str) -> ApiError:
    """Return the error for a request that is to come again later."""
    return ApiError(429, "TooManyRequestsError", f"{why}; try again later", retry_after=1)
