"""`on_threads`: what a loop would give and raise, by several threads, none of which is left at work."""

import gc
import signal
import threading
import time
import weakref

import pytest

from jlora import _threads
from jlora._threads import on_threads
from tests.manager.hostile import Injector

WORTHWHILE = 1000
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def four_processors(monkeypatch):
    monkeypatch.setattr(_threads, "_WORTHWHILE", WORTHWHILE)
    monkeypatch.setattr(_threads, "_processors", lambda: 4)


def working():
    return [thread for thread in threading.enumerate() if thread.name == "jlora-work" and thread.is_alive()]


def who(items, nbytes=WORTHWHILE):
    """The threads that acted; each waits until there are as many of them as there can be."""
    met, there = threading.Condition(), set()

    def act(item):
        with met:
            there.add(threading.current_thread())
            met.notify_all()
            met.wait_for(lambda: len(there) == min(4, len(items)), 0.1 if nbytes < WORTHWHILE else PATIENCE)
        return item * item

    assert on_threads(act, items, nbytes) == [item * item for item in items]
    return there


@pytest.mark.parametrize("nbytes", [0, WORTHWHILE - 1, WORTHWHILE, 10 * WORTHWHILE])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 100])
def test_the_results_in_their_order(nbytes, count):
    def act(item):
        time.sleep(0.002 * (item % 3) if count < 50 else 0)
        return None if item == 2 else [item]

    assert on_threads(act, range(count), nbytes) == [None if i == 2 else [i] for i in range(count)]
    assert not working()


def test_each_item_once_and_in_order():
    begun, taken = [], threading.Lock()

    def act(item):
        with taken:
            begun.append(item)
        time.sleep(0.001)

    on_threads(act, "abcdefghijklmnop", WORTHWHILE)
    assert sorted(begun) == list("abcdefghijklmnop")
    assert all(abs(begun.index(item) - i) < 4 for i, item in enumerate("abcdefghijklmnop"))


def test_how_many_threads(monkeypatch):
    me = threading.current_thread()
    assert len(found := who(range(9))) == 4
    assert me in found
    assert len(who(range(3))) == 3
    assert who(range(1)) == {me}
    assert who(range(3), WORTHWHILE - 1) == {me}
    monkeypatch.setattr(_threads, "_processors", lambda: 64)
    assert len(who(range(9))) == 4
    monkeypatch.setattr(_threads, "_processors", lambda: 1)
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    assert on_threads(lambda item: threading.current_thread(), range(5), 1 << 40) == [me] * 5
    assert not started


def test_processors_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.undo()
    assert _threads._processors() >= 1
    monkeypatch.setattr(_threads.os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert _threads._processors() == 2
    monkeypatch.delattr(_threads.os, "sched_getaffinity")
    monkeypatch.setattr(_threads.os, "cpu_count", lambda: 7)
    assert _threads._processors() == 7
    monkeypatch.setattr(_threads.os, "cpu_count", lambda: None)
    assert _threads._processors() == 1


# ---- errors


class Wrong(Exception):
    pass


@pytest.mark.parametrize("count", [1, 2, 5, 40])
@pytest.mark.parametrize("nbytes", [0, WORTHWHILE])
def test_the_first_in_order_is_raised_and_no_other_is_begun(count, nbytes):
    """Whichever thread meets it, and however late: those behind it wait, so that they fail first."""
    for first in {0, count // 2, count - 1}:
        begun = []

        def act(item, first=first, begun=begun):
            begun.append(item)
            if item < first:
                return
            time.sleep(0.02 if item == first else 0)
            raise Wrong(item)

        with pytest.raises(Wrong) as found:
            on_threads(act, range(count), nbytes)
        assert found.value.args == (first,)
        assert max(begun) < first + 4
        assert not working()
        names = [entry.name for entry in found.traceback]
        assert names[0].startswith("test_")
        assert names[-1] == "act"


@pytest.mark.parametrize("error", [Wrong, KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("on_helper", [False, True])
def test_whatever_is_raised_on_whatever_thread(error, on_helper):
    me, met, begun = threading.current_thread(), threading.Barrier(4), []

    def act(item):
        begun.append(item)
        if item < 4:
            met.wait(PATIENCE)
            if (threading.current_thread() is not me) == on_helper:
                raise error(item)
        time.sleep(0.05)

    with pytest.raises(error) as found:
        on_threads(act, range(100), WORTHWHILE)
    assert found.value.args[0] in range(4)
    assert len(begun) < 8
    assert not working()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_before_an_error(interrupt):
    met = threading.Barrier(4)

    def act(item):
        met.wait(PATIENCE)
        raise interrupt if item == 2 else Wrong(item)

    with pytest.raises(interrupt):
        on_threads(act, range(100), WORTHWHILE)


class SlowTurn:
    """Gives 0, to the first that asks, only when what came after it has failed."""

    def __init__(self, failed):
        self.failed = failed
        self.counting, self.last = threading.Lock(), -1

    def __iter__(self):
        return self

    def __next__(self):
        with self.counting:
            self.last += 1
            mine = self.last
        if mine == 0:
            assert self.failed.wait(PATIENCE)
            time.sleep(0.05)
        return mine


def test_what_is_taken_is_begun_though_another_has_failed(monkeypatch):
    failed = threading.Event()
    monkeypatch.setattr(_threads.itertools, "count", lambda: SlowTurn(failed))

    def act(item):
        failed.set()
        raise Wrong(item)

    with pytest.raises(Wrong) as found:
        on_threads(act, range(100), WORTHWHILE)
    assert found.value.args == (0,)


def test_no_more_threads(monkeypatch):
    """What the system says, once those that did start are done."""
    started, original = [], threading.Thread.start

    def start(thread):
        if thread.name == "jlora-work":
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        on_threads(lambda item: time.sleep(0.01), range(1000), WORTHWHILE)
    assert len(started) == 2
    assert not working()


class Held:
    """What a large array would be."""


def test_what_was_raised_keeps_nothing_in_memory():
    held, met = Held(), threading.Barrier(4)
    alive = weakref.ref(held)

    def act(item):
        met.wait(PATIENCE)
        raise Wrong(item[0])

    items = [(i, held) for i in range(4)]
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Wrong):
            on_threads(act, items, WORTHWHILE)
        del held, items
        assert alive() is None
        alive = weakref.ref(result := Held())
        assert on_threads(lambda item: result, range(5), WORTHWHILE) == [result] * 5
        del result
        assert alive() is None
    finally:
        gc.enable()


# ---- interrupts


@pytest.fixture
def interruptible():
    """Whatever started the tests may have left SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_real_interrupt_while_others_are_waited_for():
    """It is seen at once, and nothing is begun after it."""
    me, met, go, begun, done = threading.current_thread(), threading.Barrier(5), threading.Event(), [], []

    def act(item):
        begun.append(item)
        met.wait(PATIENCE)
        if threading.current_thread() is not me:
            go.wait(PATIENCE)
            done.append(item)

    def interrupt():
        met.wait(PATIENCE)
        time.sleep(0.2)
        signal.pthread_kill(me.ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            on_threads(act, range(4), WORTHWHILE)
        assert not done
    finally:
        go.set()
        thread.join()
    deadline = time.monotonic() + PATIENCE
    while len(done) < 3 and time.monotonic() < deadline:  # CPython 3.11 says that a thread is over whose join is not
        time.sleep(0.01)
    assert len(done) == 3
    assert len(begun) == 4


@pytest.mark.usefixtures("interruptible")
def test_a_real_interrupt_at_work():
    me, begun = threading.current_thread(), []

    def act(item):
        begun.append(item)
        if len(begun) == 10:
            signal.pthread_kill(me.ident, signal.SIGINT)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        on_threads(act, range(1000), WORTHWHILE)
    assert len(begun) < 30
    assert not working()


@pytest.mark.parametrize("error", [KeyboardInterrupt, Wrong])
@pytest.mark.parametrize("in_helpers", [False, True])
def test_an_interrupt_at_every_line(monkeypatch, in_helpers, error):
    """Raised, or all results are there; and whatever was begun ends."""
    monkeypatch.setattr(threading, "excepthook", lambda *args: None)  # at a helper's first line, before it has any work
    at, fired = 1, True
    while fired:
        begun = []

        def act(item, begun=begun):
            begun.append(item)
            time.sleep(0.001)
            return item

        injector = Injector(at, error)
        found = None
        with injector.in_new_threads() if in_helpers else injector.here():
            try:
                found = on_threads(act, range(12), WORTHWHILE)
            except error:
                assert injector.fired
        assert found in (None, list(range(12)))
        assert found or injector.fired
        deadline = time.monotonic() + PATIENCE
        while working():
            assert time.monotonic() < deadline, injector.fired
            time.sleep(0.001)
        count = len(begun)
        assert sorted(begun) == sorted(set(begun))
        time.sleep(0.005)
        assert len(begun) == count
        at, fired = at + 1, injector.fired is not None
    assert at > 20
