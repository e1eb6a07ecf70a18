"""Transfer of events from the engine's threads to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from jlora.serve.engine.generation import Event


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
