"""The dispatching thread, over steps that do nothing: whom it ends when it fails or stops, and when it looks."""

import threading
import time
from types import SimpleNamespace

import pytest

from jlora.errors import AdapterNotFoundError, LoRAError
from jlora.serve import SamplingParams, dispatch
from jlora.serve.counts import Counts
from jlora.serve.dispatch import Dispatcher
from jlora.serve.generation import Answer
from jlora.serve.peers import Alone
from jlora.serve.request import EngineClosedError
from jlora.serve.scheduler import Slots
from jlora.serve.sequence import Sequence
from jlora.serve.text import Decoding
from tests.serve.client import until


class Ends(list):
    """A writer: how sequences ended."""

    def put(self, news):
        self.extend((one.sequence.lora, one.end) for one in news if one.end is not None)


class Two(Alone):
    count = 2


def dispatcher_of(ends, peers=None, **loras):
    """One whose thread is not started; `loras`: what the adapters do instead of nothing."""
    idle = {
        "look": lambda waiting: (),
        "carry_out": lambda orders: {},
        "all_pinned": lambda: None,
        "slots": lambda: Slots(2, set(), set(), 0),
        "loaded": lambda name: True,
        "not_wanted": lambda name: None,
        "close": lambda: None,
        "num_held": 0,
        **loras,
    }
    steps = SimpleNamespace(rows=2, chunk=8, capacity=16, close=lambda: None)
    counts = Counts(lambda name: True)
    return Dispatcher(None, steps, SimpleNamespace(**idle), ends, counts, peers or Alone(), 8)


def sequence(lora=None):
    params, answer = SamplingParams(temperature=0), Answer(1, lambda: None)
    return Sequence([1], params, 0, 1, frozenset(), lora, None, None, answer, Decoding(None, ()))


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


@pytest.mark.parametrize(
    ("peers", "error", "goes_on"),
    [
        (Alone(), RuntimeError("on fire"), True),
        (Two(), AdapterNotFoundError("on fire"), True),  # in all of them
        (Two(), RuntimeError("on fire"), False),
        (Two(), LoRAError("on fire"), False),
    ],
)
def test_a_request_that_cannot_begin_ends_alone_where_all_processes_know_of_it(peers, error, goes_on):
    ends = Ends()
    dispatcher = dispatcher_of(ends, peers, begin=lambda name: fail(error))
    dispatcher.submit(sequence("a"))
    dispatcher.thread.start()
    until(lambda: ends)
    dispatcher.stop()
    dispatcher.thread.join(30)
    ((lora, end),) = ends
    assert lora == "a"
    assert "on fire" in str(end)
    assert isinstance(end, EngineClosedError) == (not goes_on)
    assert isinstance(dispatcher.failure, EngineClosedError) == (not goes_on)


def test_a_step_that_fails_as_another_process_is_gone_says_that():
    """A thread hears of that, maybe later than the step."""
    ends, gone = Ends(), EngineClosedError("process 1 of 2 is gone")
    dispatcher = dispatcher_of(ends, Two(), look=lambda waiting: fail(RuntimeError("closed by peer")))
    threading.Timer(0.05, setattr, (dispatcher, "failure", gone)).start()
    dispatcher.submit(sequence("a"))
    dispatcher.thread.start()
    dispatcher.thread.join(30)
    assert ends == [("a", gone)]
    assert dispatcher.failure is gone


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


def test_those_that_ended_give_up_their_adapters_before_orders_are_carried_out():
    done = []

    def carry_out(orders):
        done.append(orders)
        return {}

    dispatcher = dispatcher_of(Ends(), look=lambda waiting: ("an order",), carry_out=carry_out)
    dispatcher._signal.wait = lambda seconds: None
    dispatcher._batch, dispatcher._stale = SimpleNamespace(close=lambda: done.append("closed")), True
    dispatcher._turn()
    assert done == ["closed", ("an order",)]
