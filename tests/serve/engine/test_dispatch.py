"""The dispatching thread over idle steps. Requests end when it fails or stops, and wake-ups are prompt."""

import threading
from types import SimpleNamespace

from jlora.errors import LoRAError
from jlora.serve.engine.dispatch import Dispatcher
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.request import EngineClosedError
from jlora.serve.engine.scheduler import SlotUse
from tests.serve.client import until
from tests.serve.conftest import sequence_of


class Ends(list):
    """A writer that records how sequences ended."""

    def put(self, news):
        self.extend((one.sequence.lora, one.end) for one in news if one.end is not None)


def dispatcher_of(ends, **loras):
    """Return a dispatcher whose thread is not started. `loras` replaces methods of its idle adapters."""
    idle = {
        "look": lambda waiting, running: {},
        "all_pinned": lambda: None,
        "slots": lambda running: SlotUse(2, set(), set(), 0),
        "loaded": lambda name: True,
        "not_wanted": lambda sequence: None,
        **loras,
    }
    steps = SimpleNamespace(rows=2, chunk=8, capacity=16, close=lambda: None)
    counts = EngineMetrics(lambda name: True)
    manager = SimpleNamespace(prepare=lambda names, timeout: fail(RuntimeError("on fire")))
    return Dispatcher(manager, steps, SimpleNamespace(**idle), ends, counts, 8)


def fail(error):
    raise error


def test_request_submitted_during_the_last_turn_ends():
    ends, inside, go = Ends(), threading.Event(), threading.Event()

    def look(waiting, running):
        inside.set()
        assert go.wait(30)
        return {}

    dispatcher = dispatcher_of(ends, look=look)
    dispatcher.thread.start()
    assert inside.wait(30)
    dispatcher.submit(sequence_of("a"))
    dispatcher.stop()
    go.set()
    dispatcher.thread.join(30)
    assert [(lora, type(end)) for lora, end in ends] == [("a", EngineClosedError)]


def test_request_that_cannot_begin_ends_alone():
    ends = Ends()
    dispatcher = dispatcher_of(ends)
    dispatcher.submit(sequence_of("a"))
    dispatcher.thread.start()
    until(lambda: ends)
    dispatcher.stop()
    dispatcher.thread.join(30)
    ((lora, end),) = ends
    assert (lora, type(end)) == ("a", LoRAError)
    assert "on fire" in str(end)
    assert dispatcher.failure is None


def test_late_notification_wakes_idle_loop():
    """A wake-up just after a look leads to another one soon. An idle thread would sleep a second before each."""
    looks = []

    def look(waiting, running):
        looks.append(waiting)
        if len(looks) < 300:
            dispatcher.wake()
        return {}

    dispatcher = dispatcher_of(Ends(), look=look)
    dispatcher.thread.start()
    until(lambda: len(looks) >= 300, 120)
    dispatcher.stop()
    dispatcher.thread.join(30)
    assert not dispatcher.thread.is_alive()
