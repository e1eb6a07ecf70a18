"""Sessions of clients, the order of their requests, and the answers that clients come back for.

All state is of one event loop, and no method blocks. Ids of models and samplers begin with their session's, as clients
derive them too.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jlora.errors import LoRAError, LoRAUsageError
from jlora.serve.http.errors import ApiError, bad_request
from jlora.tinker.checkpoints import Checkpoint
from jlora.tinker.training import Job, Model

Answer = bytes | dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """Limits of what clients may hold.

    Attributes:
      sessions, models: of the server at a time.
      samplers: of a session; the oldest ends where there are more.
      snapshots: sampling weights of a model without a name; the oldest are deleted where there are more.
      futures, bytes: requests and answers that are kept, and their bytes.
      ahead: how far a `seq_id` may be ahead of the next one.
      session_seconds: until a session without a heartbeat ends.
      gap_seconds: until requests fail that an earlier `seq_id` is missing for.
      answer_seconds: until an answer may be forgotten, where the room is needed.
      poll_seconds: until a client that comes for an answer is told to come again.
      url_seconds: until the URL of a download expires.
      metadata_bytes: of metadata, as JSON.
      datums, samples: of a request.
    """

    sessions: int = 256
    models: int = 64
    samplers: int = 4096
    snapshots: int = 16
    futures: int = 20_000
    bytes: int = 2**28
    ahead: int = 10_000
    session_seconds: float = 600.0
    gap_seconds: float = 120.0
    answer_seconds: float = 60.0
    poll_seconds: float = 30.0
    url_seconds: float = 3600.0
    metadata_bytes: int = 4096
    datums: int = 1024
    samples: int = 256


class Future:
    """The answer to a request, and further fields `about` it of the reply to the request itself."""

    def __init__(self, id: str, size: int):
        self.id, self.size, self.about = id, size, dict[str, Any]()
        self.answer: Answer | None = None
        self.done, self.finished = asyncio.Event(), math.inf  # of `time.monotonic()`


@dataclass(eq=False)
class Run:
    """A model of a session, and the order of its requests.

    Attributes:
      model: the model.
      next: the `seq_id` that comes next.
      early: requests that came before an earlier one, by `seq_id`.
      broken: why it takes no more requests.
      snapshots: its sampling weights without a name, the oldest first.
      used: `time.time()` of its last request.
    """

    model: Model
    next: int = 1
    early: dict[int, tuple[Job, Future]] = field(default_factory=dict[int, "tuple[Job, Future]"])
    broken: LoRAUsageError | None = None
    snapshots: list[Checkpoint] = field(default_factory=list[Checkpoint])
    used: float = field(default_factory=time.time)


@dataclass(eq=False)
class Session:
    """A session: models and samplers (None is the base model) by id, and `time.monotonic()` of its last request."""

    id: str
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    samplers: dict[str, Checkpoint | None] = field(default_factory=dict[str, "Checkpoint | None"])
    heard: float = field(default_factory=time.monotonic)


class Sessions:
    """All sessions and answers of a server. `submit` gets the requests of a model in their order."""

    def __init__(self, limits: Limits, submit: Callable[[Model, Job], None]):
        self.limits, self._submit = limits, submit
        self.open: dict[str, Session] = {}
        self._futures: dict[str, Future] = {}  # the oldest first
        self._bytes = 0

    def begin(self) -> Session:
        """Begin a session. Raises ApiError (429) if there are too many."""
        if len(self.open) >= self.limits.sessions:
            raise busy(f"{self.limits.sessions} sessions are open")
        session = Session(secrets.token_hex(16))
        self.open[session.id] = session
        return session

    def session(self, id: str) -> Session:
        """Return the session of an id that begins with its own. Raises ApiError (410)."""
        if (found := self.open.get(id.partition(":")[0])) is None:
            raise gone(id)
        found.heard = time.monotonic()
        return found

    def silent(self) -> list[Session]:
        """Return the sessions that were not heard of for too long."""
        least = time.monotonic() - self.limits.session_seconds
        return [session for session in self.open.values() if session.heard < least]

    def close(self, session: Session) -> None:
        """Forget a session. Its requests that an earlier one is missing for fail."""
        self.open.pop(session.id, None)
        for run in session.runs.values():
            self._break(run, LoRAUsageError("the session has ended"))

    def run(self, id: str) -> Run:
        """Return the model of an id. Raises ApiError (410)."""
        if (found := self.session(id).runs.get(id)) is None:
            raise gone(id)
        found.used = time.time()
        return found

    def add_run(self, session: Session, id: str, model: Model) -> Run:
        """Add a model to a session. Raises LoRAUsageError."""
        if id in session.runs:
            raise LoRAUsageError(f"the model {id} exists")
        if sum(len(each.runs) for each in self.open.values()) >= self.limits.models:
            raise LoRAUsageError(f"{self.limits.models} models are open (--max-models); finish a session or unload one")
        session.runs[id] = run = Run(model)
        return run

    def add_sampler(self, session: Session, number: int, source: Checkpoint | None) -> str:
        """Add the sampler of a number, and return its id."""
        id = f"{session.id}:sample:{number}"
        session.samplers.setdefault(id, source)
        if len(session.samplers) > self.limits.samplers:
            del session.samplers[next(iter(session.samplers))]
        return id

    def take(self, run_id: str, seq_id: int | None, size: int, make: Callable[[Run, Future], Job]) -> Future:
        """Queue a request of `size` bytes in the order of `seq_id`, from 1. One that is known has its first future.

        Raises:
          ApiError: 400 for a wrong `seq_id`, 410 for an unknown model or an answer that is forgotten, 429 if too much
            waits.
        """
        run = self.run(run_id)
        most = run.next + self.limits.ahead
        if seq_id is None or not 1 <= seq_id <= most:
            raise bad_request(f"seq_id must be from 1 to {most}, got {seq_id}", "seq_id")
        id = f"{run_id}:{seq_id}"
        if (future := self.known(id)) is not None:
            return future
        if seq_id < run.next:
            raise gone(id)
        future = self.future(id, size)
        if run.broken is not None:
            self.finish(future, run.broken)
            return future
        missing = run.next if run.early else None
        run.early[seq_id] = make(run, future), future
        while (turn := run.early.pop(run.next, None)) is not None:
            run.next += 1
            self._submit(run.model, turn[0])
        if run.early and run.next != missing:
            asyncio.get_running_loop().call_later(self.limits.gap_seconds, self._give_up, run, run.next)
        return future

    def _give_up(self, run: Run, missing: int) -> None:
        if run.next == missing:
            error = f"the request with seq_id {missing} did not come within {self.limits.gap_seconds:g} seconds of a "
            error += "later one, and the model's order is lost; create a training client from its last checkpoint"
            self._break(run, LoRAUsageError(error))

    def _break(self, run: Run, error: LoRAUsageError) -> None:
        run.broken = run.broken or error
        for _, future in run.early.values():
            self.finish(future, error)
        run.early.clear()

    def known(self, id: str) -> Future | None:
        """Return the future of a request that is known."""
        return self._futures.get(id)

    def future(self, id: str, size: int) -> Future:
        """Return a new future. Raises ApiError (429) if too many requests and answers are kept."""
        while len(self._futures) >= self.limits.futures or self._bytes + size > self.limits.bytes:
            least = time.monotonic() - self.limits.answer_seconds
            old = next((each for each in self._futures.values() if each.finished <= least), None)
            if old is None:
                raise busy(f"{len(self._futures)} requests and answers of {self._bytes} bytes are kept")
            self.forget(old)
        future = self._futures[id] = Future(id, size)
        self._bytes += size
        return future

    def forget(self, future: Future) -> None:
        """Forget a request and its answer."""
        del self._futures[future.id]
        self._bytes -= future.size

    def finish(self, future: Future, answer: Answer | Exception) -> None:
        """Store the answer to a request. That to a wrong one is an error of the category "user", else "server"."""
        if future.answer is not None:
            return
        if isinstance(answer, Exception):
            text = str(answer) if isinstance(answer, LoRAError) else f"{type(answer).__name__}: {answer}"
            category = "user" if isinstance(answer, LoRAUsageError) else "server"
            answer = {"error": text[:2000], "category": category}
        size = len(answer) if isinstance(answer, bytes) else 256
        self._bytes += size - future.size
        future.size, future.answer, future.finished = size, answer, time.monotonic()
        future.done.set()

    async def wait(self, id: str) -> Answer | None:
        """Return the answer to a request; None if it is not there in time. Raises ApiError (410)."""
        if (future := self.known(id)) is None:
            raise gone(id)
        try:
            await asyncio.wait_for(future.done.wait(), self.limits.poll_seconds)
        except TimeoutError:
            return None
        return future.answer


def gone(id: str) -> ApiError:
    """Return the error for an id that is unknown."""
    return ApiError(410, "GoneError", f"{id[:120]!r} is unknown: the server was restarted, or it has ended or expired")


def busy(why: str) -> ApiError:
    """Return the error for a request that is to come again."""
    return ApiError(429, "TooManyRequestsError", f"{why}; try again later", retry_after=1)
