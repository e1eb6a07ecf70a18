"""State shared by all endpoints: the engine, its names, keys, limits, and the phase of the server."""

import asyncio
import hashlib
import hmac
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from jlora import LoRAManager
from jlora.serve.engine.engine import Engine
from jlora.serve.engine.generation import Event
from jlora.serve.http.body import Limits
from jlora.serve.http.errors import UNAVAILABLE, ApiError
from jlora.serve.http.responses import TokenTexts
from jlora.serve.http.sources import AllowedSources
from jlora.serve.http.state import StateFolder
from jlora.serve.http.template import ChatTemplate

T = TypeVar("T")
Phase = Literal["warming", "serving", "paused", "closing", "failed"]

_UPLOADS = 4  # adapters in bodies that are received and loaded at a time, for their memory; others wait


class Keys:
    """API keys of users, who may request completions, and of administrators, who may also change adapters.

    Args:
      users: Keys of users, and of administrators if `admins` is empty. Empty: no key is needed.
      admins: Keys of administrators, accepted for everything.
    """

    def __init__(self, users: Sequence[str] = (), admins: Sequence[str] = ()):
        self._users = [_digest(os.fsencode(key)) for key in (*users, *admins)] if users else []
        self._admins = [_digest(os.fsencode(key)) for key in admins or users]

    def admit(self, authorization: str, *, admin: bool) -> bool:
        """Return whether a header `Authorization: Bearer KEY` grants access. Constant time for keys of one length."""
        keys = self._admins if admin else self._users
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip(" \t").encode("latin-1", "replace"))  # Starlette decodes headers as Latin-1
        same = [hmac.compare_digest(given, one) for one in keys]  # compare all, for constant time
        return not keys or (scheme.lower() == "bearer" and any(same))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class LoopBridge:
    """Delivers events of the engine's threads on an event loop, with one wake-up for all pending events."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._waiting: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._woken = False

    def post(self, deliver: Callable[[Event], None], event: Event) -> None:
        """Schedule `deliver(event)` on the loop. May be called from any thread, and never blocks."""
        self._waiting.append((deliver, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # cleared first, so that later events schedule another call
        while self._waiting:
            deliver, event = self._waiting.popleft()
            deliver(event)


@dataclass
class Service:
    """One server. Its `state` changes only on the event loop.

    Attributes:
      engine: The engine.
      manager: The model's manager.
      tokenizer: A `tokenizers.Tokenizer`.
      names: Names of the base model, its own first.
      root: The model's folder, as `/v1/models` shows it.
      max_model_len: Positions of a sequence.
      sources: Sources that requests may load adapters from.
      saved: Persistent state of the adapters; None without one.
      chat: The model's chat template; None without one.
      keys: Keys of clients.
      limits: Limits of client requests.
      administration: True if administrators have a key, so that adapters may be uploaded. They may be loaded from a
        path if there are `sources`, and unloaded and pinned in both cases.
      dtype: Name of the model's dtype.
      state: Phase of the server.
      progress: (steps done, steps in all) of the warm-up.
      step_started: Start of the current step of the warm-up, `time.monotonic()` in seconds.
      started: Start of the server, in Unix seconds.
    """

    engine: Engine
    manager: LoRAManager
    tokenizer: Any
    names: tuple[str, ...]
    root: str
    max_model_len: int
    sources: AllowedSources = field(default_factory=AllowedSources)
    saved: StateFolder | None = None
    chat: ChatTemplate | None = None
    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    administration: bool = False
    dtype: str = "float32"
    state: Phase = "warming"
    progress: tuple[int, int] = (0, 0)
    step_started: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.time)

    def __post_init__(self):
        self.texts = TokenTexts(self.tokenizer)
        # Loads may hang on a disk or a network, so they have threads of their own and never delay requests. This bounds
        # the threads that wait; the manager limits the loads.
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="jlora-http")
        self._loaders = ThreadPoolExecutor(32, thread_name_prefix="jlora-http-load")
        self.uploads = asyncio.Semaphore(_UPLOADS)
        self._lock = threading.Lock()
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()  # locks in use, by name
        if self.saved is not None:
            self.saved.unloading = self.engine.unloading_loras
        self._bridge: LoopBridge | None = None
        self._calls: set[Future[Any]] = set()  # queued or running on a thread

    @property
    def condition(self) -> Phase:
        """The phase, which is "failed" or "paused" if the engine is while serving."""
        if self.state != "serving":
            return self.state
        return "failed" if not self.engine.ready else "paused" if self.engine.paused else "serving"

    @property
    def step_seconds(self) -> int:
        """Seconds since the current step of the warm-up began."""
        return round(time.monotonic() - self.step_started)

    def check_ready(self) -> None:
        """Check that requests are served. Raises `ApiError` (503) otherwise."""
        state = self.condition
        if state in ("serving", "paused"):
            return
        what = {"warming": "is warming up", "closing": "is closing", "failed": "has failed"}[state]
        raise ApiError(503, UNAVAILABLE, f"the server {what}", retry_after=5 if state == "warming" else 1)

    def bridge(self) -> LoopBridge:
        """Return the bridge to the running event loop."""
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            self._bridge = LoopBridge(loop)
        return self._bridge

    async def work(self, call: Callable[[], T]) -> T:
        """Run a short call on a thread: milliseconds of work, or a wait for a lock."""
        return await self._on(self._workers, call)

    async def load(self, call: Callable[[], T]) -> T:
        """Run a long call, such as a load, on a thread of its own pool."""
        return await self._on(self._loaders, call)

    async def _on(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        future = pool.submit(call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(future)

    @contextmanager
    def change(self, name: str) -> Generator[None, None, None]:
        """Return the context of a change of one adapter, on any thread. Changes of one name run one at a time.

        A change is saved before the context ends, as is an earlier one that could not be saved before it begins. Raises
        LoRAError if a change cannot be saved.
        """
        with self._lock:
            turn = self._turns.setdefault(name, threading.Lock())
        with turn:
            if self.saved is not None and self.saved.behind:
                self.saved.changed()
            yield
            if self.saved is not None:
                self.saved.changed()

    def close(self) -> bool:
        """Refuse further calls without waiting for running ones. Returns False if some are running."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        return not self._calls
