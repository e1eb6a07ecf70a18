"""What every endpoint knows: the engine, the names it serves, keys, limits, and whether it serves yet."""

import asyncio
import hashlib
import hmac
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jlora import LoRAManager
from jlora.serve.engine.engine import Engine
from jlora.serve.http.adapters import Adapters
from jlora.serve.http.body import Limits
from jlora.serve.http.errors import UNAVAILABLE, ApiError
from jlora.serve.http.loop_bridge import LoopBridge
from jlora.serve.http.template import ChatTemplate
from jlora.serve.http.tokens import TokenTexts

T = TypeVar("T")
Phase = Literal["warming", "serving", "closing", "failed"]


class Keys:
    """Who may ask for answers, and who may change what is served.

    Args:
      users: keys for everything, unless there are keys for `admins`: then for answers alone. None: everybody may.
      admins: keys for everything.
    """

    def __init__(self, users: Sequence[str] = (), admins: Sequence[str] = ()):
        self._users = [_digest(os.fsencode(key)) for key in (*users, *admins)] if users else []
        self._admins = [_digest(os.fsencode(key)) for key in admins or users]

    def admit(self, authorization: str, *, admin: bool) -> bool:
        """Whether a header `Authorization: Bearer KEY` is enough. Takes as long for any key of the same length."""
        keys = self._admins if admin else self._users
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip(" \t").encode("latin-1", "replace"))  # as which Starlette shows bytes
        same = [hmac.compare_digest(given, one) for one in keys]  # all of them, whichever fits
        return not keys or (scheme.lower() == "bearer" and any(same))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@dataclass
class Service:
    """One server. Its `state` changes on the event loop alone.

    Attributes:
      engine, manager, tokenizer: what answers; a `tokenizers.Tokenizer`.
      names: of the base model, the first one its own.
      root: the model's folder, as `/v1/models` shows it.
      max_model_len: positions of a sequence.
      adapters: those that may be asked for, and how they are loaded.
      chat: the model's chat template, if it has one.
      keys, limits: of clients.
      administration: whether adapters may be pinned over HTTP; they may be loaded where `adapters` has sources.
      progress: how much of the warm-up is done, and of how much.
    """

    engine: Engine
    manager: LoRAManager
    tokenizer: Any
    names: tuple[str, ...]
    root: str
    max_model_len: int
    adapters: Adapters
    chat: ChatTemplate | None = None
    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    administration: bool = False
    state: Phase = "warming"
    progress: tuple[int, int] = (0, 0)
    started: float = field(default_factory=time.time)

    def __post_init__(self):
        self.texts = TokenTexts(self.tokenizer)
        # Loads may hang on a disk or a network: they have threads of their own, so that requests never wait for one.
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="jlora-http")
        self._loaders = ThreadPoolExecutor(32, thread_name_prefix="jlora-http-load")
        self._bridge: LoopBridge | None = None
        self._lock = threading.Lock()
        self._calls = 0  # under way on a thread

    @property
    def condition(self) -> Phase:
        """`state`, but for an engine that failed while it served."""
        return "failed" if self.state == "serving" and not self.engine.ready else self.state

    def check_ready(self) -> None:
        """Raises `ApiError` (503) while nothing is served."""
        state = self.condition
        if state == "serving":
            return
        what = {"warming": "is warming up", "closing": "is closing", "failed": "has failed"}[state]
        raise ApiError(503, UNAVAILABLE, f"the server {what}", retry_after=5 if state == "warming" else 1)

    def bridge(self) -> LoopBridge:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            self._bridge = LoopBridge(loop)
        return self._bridge

    async def work(self, call: Callable[[], T]) -> T:
        """A call that takes milliseconds, or waits for locks, on a thread."""
        return await self._on(self._workers, call)

    async def load(self, call: Callable[[], T]) -> T:
        """A call that may take minutes, on a thread."""
        return await self._on(self._loaders, call)

    async def _on(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        def counted() -> T:
            with self._lock:
                self._calls += 1
            try:
                return call()
            finally:
                with self._lock:
                    self._calls -= 1

        return await asyncio.get_running_loop().run_in_executor(pool, counted)

    def close(self) -> bool:
        """No more calls. Those under way are not waited for: False where there are any."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            return self._calls == 0
