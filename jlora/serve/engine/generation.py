"""The completion of one request, passed from the engine's threads to one consumer."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jlora import AdapterHandle
from jlora.errors import LoRAError, LoRAUsageError
from jlora.serve.engine.request import Completion, Piece, RequestTimeoutError

_log = logging.getLogger("jlora")
Event = Piece | LoRAError


class Generation:
    """A running request, from `Engine.submit`. Its events have one consumer: `listen`, iteration or `result`.

    Args:
      prompt: Token ids of the prompt.
      wake: Called once it is cancelled. Must not block.

    Attributes:
      prompt: Token ids of the prompt.
      cached_tokens: Number of tokens of the prompt that were copied from another sequence; final once there is a
        token.
      cancelled: True once `cancel` was called.
      handle: Names the version of the adapter that it runs with, also after its end; None before it has begun, and for
        the base model.
    """

    def __init__(self, prompt: Sequence[int], wake: Callable[[], None]):
        self.prompt = prompt
        self._wake = wake
        self.cached_tokens = 0
        self.cancelled = False
        self.handle: AdapterHandle | None = None
        self._changed = threading.Condition(threading.RLock())  # a callback may call a method of this object
        self._events: deque[Event] = deque()
        self._callback: Callable[[Event], None] | None = None
        self._taken: str | None = None
        self._pieces: list[Piece] = []  # collected by `result`
        self._error: LoRAError | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.prompt)

    def listen(self, callback: Callable[[Event], None]) -> None:
        """Call `callback` with every event in order: past events now, later ones on a thread of the engine.

        The callback must not block. If it raises, the error is logged and it is not called again.

        Raises:
          LoRAUsageError: the events have a consumer already.
        """
        self._take("listen")
        with self._changed:
            self._callback = callback
            while self._events and self._callback is not None:
                self._call(self._events.popleft())

    def __iter__(self) -> Iterator[Piece]:
        """Return an iterator over the pieces as they arrive.

        Raises:
          LoRAError: the error that ended the request; raised by the iterator.
          LoRAUsageError: the events have a consumer already.
        """
        self._take("iteration")
        return self._iterate()

    def _iterate(self) -> Iterator[Piece]:
        while True:
            event = self._next(None)
            assert event is not None
            if isinstance(event, LoRAError):
                raise event
            yield event
            if event.finish_reason is not None:
                return

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the whole completion. May be called again, also after a timeout.

        Args:
          timeout: Seconds to wait; None for no limit.

        Raises:
          LoRAError: the error that ended the request.
          RequestTimeoutError: the completion is not ready after `timeout` seconds; the request goes on.
          LoRAUsageError: the events have a consumer already.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._take("result")
        while self._error is None and not (self._pieces and self._pieces[-1].finish_reason):
            event = self._next(deadline)
            if event is None:
                raise RequestTimeoutError(f"the answer is not there after {timeout} s; its request goes on")
            if isinstance(event, LoRAError):
                self._error = event
            else:
                self._pieces.append(event)
        if self._error is not None:
            raise self._error
        finish = self._pieces[-1].finish_reason
        assert finish is not None
        return Completion(
            text="".join(piece.text for piece in self._pieces),
            tokens=tuple(token for piece in self._pieces for token in piece.tokens),
            logprobs=tuple(one for piece in self._pieces for one in piece.logprobs),
            finish_reason=finish,
            prompt_tokens=self.prompt_tokens,
            embedding=self._pieces[-1].embedding,
            prompt_logprobs=tuple(one for piece in self._pieces for one in piece.prompt_logprobs),
        )

    def cancel(self) -> None:
        """End the request soon. Has no effect once it has ended."""
        self.cancelled = True
        self._wake()

    def put(self, event: Event) -> None:
        """Deliver the next event. Called by the engine."""
        with self._changed:
            if self._callback is None:
                self._events.append(event)
                self._changed.notify_all()
            else:
                self._call(event)

    def _call(self, event: Event) -> None:
        assert self._callback is not None
        try:
            self._callback(event)
        except Exception:
            _log.exception("a listener of a generation raised, and hears no more")
            self._callback = _deaf

    def _next(self, deadline: float | None) -> Event | None:
        with self._changed:
            while not self._events:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)
            return self._events.popleft()

    def _take(self, how: str) -> None:
        with self._changed:
            if self._taken is not None and not (how == self._taken == "result"):
                raise LoRAUsageError(f"the events of a generation come to one consumer, and are taken by {self._taken}")
            self._taken = how


def _deaf(_: Event) -> None:
    return None
