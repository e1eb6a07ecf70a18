"""The dispatching thread, over steps that do nothing: whom it ends when it fails or stops, and when it looks."""

import threading
import time
from types import SimpleNamespace

from jlora.errors import LoRAError
from jlora.serve import SamplingParams
from jlora.serve.engine import dispatch
from jlora.serve.engine.detokenizer import Detokenizer
from jlora.serve.engine.dispatch import Dispatcher
from jlora.serve.engine.generation import Answer
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.request import EngineClosedError
from jlora.serve.engine.scheduler import SlotUse
from jlora.serve.engine.sequence import Sequence
from tests.serve.client import until


class Ends(list):
    """A writer: how sequences ended."""

    def put(self, news):
        self.extend((one.sequence.lora, one.end) for one in news if one.end is not None)


def dispatcher_of(ends, **loras):
    """One whose thread is not started; `loras`: what the adapters do instead of nothing."""
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


def test_requests_that_a_failing_turn_has_heard_of_end():
    ends = Ends()
    dispatcher = dispatcher_of(ends, look=lambda waiting: fail(RuntimeError("no memory")))
    dispatcher.submit(sequence("a"))
    dispatcher.thread.start()
    dispatcher.thread.join(30)
    ((lora, end),) = ends
    assert (lora, type(end)) == ("a", EngineClosedError)
    assert "no memory" in str(end)
    assert not dispatcher._live


def test_requests_that_the_last_turn_hears_of_end():
    ends, inside, go = Ends(), threading.Event(), threading.Event()
    dispatcher = dispatcher_of(ends)

    def decode():
        inside.set()
        assert go.wait(30)
        return False

    dispatcher._decode = decode
    dispatcher.thread.start()
    assert inside.wait(30)
    dispatcher.submit(sequence("a"))
    dispatcher.stop()
    go.set()
    dispatcher.thread.join(30)
    assert [(lora, type(end)) for lora, end in ends] == [("a", EngineClosedError)]


def test_a_request_that_cannot_begin_ends_alone():
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


def test_what_it_was_told_of_just_after_a_look_is_looked_at_soon_though_nobody_waits():
    waits = []
    dispatcher = dispatcher_of(Ends())
    dispatcher._signal.wait = waits.append
    dispatcher._looked = time.monotonic() + 60
    dispatcher.wake()
    dispatcher._turn()
    dispatcher._looked = 0.0
    dispatcher._turn()
    assert waits == [dispatch._OFTEN, dispatch._IDLE]
