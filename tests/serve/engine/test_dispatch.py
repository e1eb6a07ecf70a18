"""The dispatching thread over idle steps. Requests end when it fails or stops, and wake-ups are prompt."""

import threading
from types import SimpleNamespace

from jlora.errors import LoRAError
from jlora.serve import SamplingParams
from jlora.serve.engine.detokenizer import Detokenizer
from jlora.serve.engine.dispatch import Dispatcher
from jlora.serve.engine.generation import Answer
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.request import EngineClosedError
from jlora.serve.engine.scheduler import SlotUse
from jlora.serve.engine.sequence import Sequence
from tests.serve.client import until


class Ends(list):
    """A writer that records how sequences ended."""

    def put(self, news):
        self.extend((one.sequence.lora, one.end) for one in news if one.end is not None)


def dispatcher_of(ends, **loras):
    """Return a dispatcher whose thread is not started. `loras` replaces methods of its idle adapters."""
    idle = {
        "look": lambda waiting: {},
        "all_pinned": lambda: None,
        "slots": lambda: SlotUse(2, set(), set(), 0),
        "loaded": lambda name: True,
        "not_wanted": lambda name: None,
        "num_held": 0,
        **loras,
    }
    steps = SimpleNamespace(rows=2, chunk=8, capacity=16, close=lambda: None)
    counts = EngineMetrics(lambda name: True)
    return Dispatcher(None, steps, SimpleNamespace(**idle), ends, counts, 8)


def sequence(lora=None):
    params, answer = SamplingParams(temperature=0), Answer(1, lambda: None)
    return Sequence([1], params, 0, 1, frozenset(), lora, None, None, answer, Detokenizer(None, ()))


def fail(error):
    raise error


def test_failure_ends_waiting_requests():
    ends = Ends()
    dispatcher = dispatcher_of(ends, look=lambda waiting: fail(RuntimeError("no memory")))
    dispatcher.submit(sequence("a"))
    dispatcher.thread.start()
    dispatcher.thread.join(30)
    ((lora, end),) = ends
    assert (lora, type(end)) == ("a", EngineClosedError)
    assert "no memory" in str(end)


def test_request_submitted_during_the_last_turn_ends():
    ends, inside, go = Ends(), threading.Event(), threading.Event()

    def look(waiting):
        inside.set()
        assert go.wait(30)
        return {}

    dispatcher = dispatcher_of(ends, look=look)
    dispatcher.thread.start()
    assert inside.wait(30)
    dispatcher.submit(sequence("a"))
    dispatcher.stop()
    go.set()
    dispatcher.thread.join(30)
    assert [(lora, type(end)) for lora, end in ends] == [("a", EngineClosedError)]


def test_request_that_cannot_begin_ends_alone():
    ends = Ends()
    dispatcher = dispatcher_of(ends, begin=lambda name: fail(RuntimeError("on fire")))
    dispatcher.submit(sequence("a"))
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

    def look(waiting):
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
