"""From the engine's threads to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from jlora.serve.engine.generation import Event


class LoopBridge:
    """Brings what the engine's threads say to an event loop, with one wake-up for all that is waiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._waiting: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._woken = False

    def post(self, deliver: Callable[[Event], None], event: Event) -> None:
        """Have `deliver(event)` called on the loop. Any thread; never blocks."""
        self._waiting.append((deliver, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop has ended, and with it whoever would read
                self.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._woken = False  # before it is looked at: what comes from now on wakes again
        while self._waiting:
            deliver, event = self._waiting.popleft()
            deliver(event)
