"""What processes that serve one model tell each other, and what process 0 decides: without a model."""

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import jlora
from jlora.errors import AdapterNotFoundError, LoadTimeoutError, LoRAError, LoRAUsageError
from jlora.serve import Engine, SamplingParams, peers
from jlora.serve.generation import Answer
from jlora.serve.loras_in_step import LorasInStep
from jlora.serve.peers import Alone, Follower, Leader, _let_in
from jlora.serve.request import EngineBusyError, EngineClosedError
from jlora.serve.sequence import Sequence
from jlora.serve.text import Decoding
from jlora.serve.turn import Order, Turn, read, written
from tests.serve.client import until


def request_of(name, **options):
    return jlora.LoRARequest(name, f"/adapters/{name}", **options)


# --- turns ------------------------------------------------------------------------------------------------------------


def test_a_turn_is_read_as_it_was_written():
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, logprobs=2, seed=2**64 - 1, stop=("x",), stop_token_ids={5}
    )
    one = Sequence(
        [1, 2], params, 2**64 - 1, 7, frozenset({5, 2}), "team/a", None, None, Answer(2, str), Decoding(None, ())
    )
    one.number = 3
    orders = (
        Order("fail", "b", error=EngineBusyError("full", 1.0)),
        Order("fail", "c", error=AdapterNotFoundError("gone\n")),
        Order("load", "d", 7, request_of("d", revision="main", is_3d_lora_weight=False)),
    )
    line = written(Turn((one,), ((1, "late"),), True, orders, True))
    assert line.index(b"\n") == len(line) - 1
    found = read(line)
    (other,) = found.arrived
    assert (other.number, other.prompt, other.seed, other.limit) == (3, [1, 2], 2**64 - 1, 7)
    assert (other.stops, other.lora) == (frozenset({2, 5}), "team/a")
    assert other.params == SamplingParams(temperature=0.5, top_p=0.9, top_k=3, logprobs=2)
    assert (found.over, found.looked, found.stop) == (((1, "late"),), True, True)
    assert found.orders[2] == orders[2]
    errors = [order.error for order in found.orders[:2]]
    assert [(type(error), str(error)) for error in errors] == [
        (LoRAError, "EngineBusyError: full"), (AdapterNotFoundError, "gone\n"),
    ]  # fmt: skip
    assert read(written(Turn())) == Turn()


# --- who is let in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "process"),
    [
        (b'[1, "secret", "same"]\n', 1),
        (b'[2, "secret", "same"]\n', 2),
        (b'[3, "secret", "same"]\n', None),
        (b'[0, "secret", "same"]\n', None),
        (b'["1", "secret", "same"]\n', None),
        (b'[1, "wrong", "same"]\n', None),
        (b'[1, "secret", "same"', None),
        (b'[1, "secret"]\n', None),
        (b"{}\n", None),
        (b"\xff\n", None),
        (b"[" * 8192, None),
        (b" " * 2000, None),
        (b"", None),
    ],
)
def test_who_does_not_know_the_secret_is_not_let_in(said, process):
    here, there = socket.socketpair()
    with here, there:
        there.sendall(said)
        there.shutdown(socket.SHUT_WR)
        found = _let_in(here, "secret", 3, time.monotonic() + 30)
        assert found == ((None, None) if process is None else (process, "same"))


def test_who_says_it_byte_by_byte_is_waited_for_no_longer_than_others():
    here, there = socket.socketpair()
    stop = threading.Event()

    def dribble():
        while not stop.wait(0.01):
            there.sendall(b" ")

    thread = threading.Thread(target=dribble)
    with here, there:
        thread.start()
        started = time.monotonic()
        assert _let_in(here, "secret", 3, started + 0.1) == (None, None)
        assert time.monotonic() - started < 5  # all of it would take ten
        stop.set()
        thread.join()


@pytest.fixture
def service(monkeypatch):
    """The coordination service of one machine, on which this is process 1."""
    said, there = {}, threading.Event()

    def tell(name, value):
        said[name] = value
        there.set()

    def hear(name, milliseconds):
        assert there.wait(milliseconds / 1000)
        return said[name]

    fake = SimpleNamespace(key_value_set=tell, blocking_key_value_get=hear, key_value_delete=said.pop)
    monkeypatch.setattr(peers, "coordination", lambda: fake)
    monkeypatch.setattr(peers, "coordinator_host", lambda: "127.0.0.1")
    monkeypatch.setattr(peers, "jax", SimpleNamespace(process_index=lambda: 1))


def nothing(*_):
    pass


def test_nothing_stays_open_where_not_all_come(service):
    leader, follower = Leader("x", 3, 0.5, "same"), Follower("x", 3, 30, "same")
    with ThreadPoolExecutor() as pool:
        meeting = pool.submit(leader.meet, nothing, nothing)
        follower.meet(nothing, nothing)
        with pytest.raises(LoRAError, match=r"1 of 3 processes did not come within 0\.5 s"):
            meeting.result(30)
    leader.close()  # as an engine does that cannot start
    with pytest.raises(EngineClosedError, match="process 0 is gone"):
        follower.share(Turn)
    follower.close()
    assert follower._lines.closed
    assert [one.fileno() for one in (follower._leader, *leader._others.values())] == [-1, -1]


def test_engines_that_differ_do_not_serve_together(service):
    leader, follower = Leader("x", 2, 30, "four rows"), Follower("x", 2, 30, "eight rows")
    with ThreadPoolExecutor() as pool:
        meeting = pool.submit(leader.meet, nothing, nothing)
        follower.meet(nothing, nothing)
        with pytest.raises(LoRAError, match="process 0 has an engine with four rows, and process 1 one with eight"):
            meeting.result(30)
    leader.close()
    with pytest.raises(EngineClosedError, match="process 0 is gone"):
        follower.share(Turn)
    follower.close()


def test_follow_needs_an_engine_that_has_started():
    for state in ("new", "starting", "closed"):
        dispatcher = SimpleNamespace(thread=threading.Thread())
        engine = SimpleNamespace(_peers=SimpleNamespace(leads=False), _state=state, _dispatcher=dispatcher)
        with pytest.raises(LoRAUsageError, match="follow"):
            Engine.follow(engine)


# --- what process 0 decides -------------------------------------------------------------------------------------------


class Two(Alone):
    """What this process of two would tell process 0."""

    count = 2

    def __init__(self):
        self.told = []

    def meet(self, report, lost):
        self.report = report

    def tell(self, load, error):
        self.told.append((load, error))


class Manager:
    """Adapters that are read when `came` says so."""

    config = SimpleNamespace(max_loras=2, max_cpu_loras=12)

    def __init__(self):
        self.known, self.there = {}, set()  # evicted ones, and those of the host
        self.given_up, self.pinned = [], []
        self.fails = None

    def list_adapters(self):
        return {}

    def level(self, name):
        return "host" if name in self.there else "evicted" if name in self.known else None

    def evicted(self, name):
        return self.known.get(name)

    def prefetch(self, request):
        if self.fails is not None:
            raise self.fails
        return Future()

    def give_up(self, request, *, reading):
        self.given_up.append((request.name, reading))

    def add_adapter(self, request):
        self.there.add(request.name)
        self.known.pop(request.name, None)
        return True

    def pin_adapter(self, name):
        self.pinned.append(name)


class World:
    """The adapters of process 0 of two, whose turns the test takes."""

    def __init__(self, pool):
        self.pool = pool
        self.manager, self.peers = Manager(), Two()
        self.loras = LorasInStep(self.manager, lambda: None, self.peers)
        self.loras.start(nothing)

    def call(self, function, *args):
        """A call of another thread, which waits for turns."""
        asked = len(self.loras._asked)
        made = self.pool.submit(function, *args)
        until(lambda: made.done() or len(self.loras._asked) > asked)
        return made

    def wants(self, name):
        request = request_of(name)
        self.loras.wanted(request)
        return SimpleNamespace(lora=name, request=request)

    def turn(self, *waiting):
        """What is told: (kind, name) -> number."""
        orders = self.loras.look(waiting)
        self.failed = self.loras.carry_out(orders)
        return {(order.kind, order.name): order.number for order in orders}

    def came(self, number, error=None):
        self.peers.report(number, 0, None)
        self.peers.report(number, 1, error)


@pytest.fixture
def two():
    with ThreadPoolExecutor(8) as pool:
        made = World(pool)
        try:
            yield made
        finally:
            made.loras.close()


def test_reads_of_callers_and_those_that_nobody_waits_for_keep_no_place(two):
    calls = [two.call(two.loras.add, request_of(f"call{i}"), None) for i in range(5)]
    waiting = [two.wants(f"w{i}") for i in range(5)]
    told = two.turn(*waiting)
    assert list(told) == [("load", f"call{i}") for i in range(5)] + [("load", f"w{i}") for i in range(4)]
    assert two.turn(*waiting) == {}
    two.loras.not_wanted("w2")
    del waiting[2]
    assert list(two.turn(*waiting)) == [("drop", "w2"), ("load", "w4")]
    assert two.manager.given_up == [("w2", False)]  # it may hang, and who asks again waits for it
    for i in range(5):
        two.came(told["load", f"call{i}"])
    assert list(two.turn(*waiting)) == [("admit", f"call{i}") for i in range(5)]
    assert [call.result(30) for call in calls] == [None] * 5


def test_what_was_read_is_forgotten_unless_another_order_is_for_the_same(two):
    first, second = (two.call(two.loras.add, request_of("a"), None) for _ in range(2))
    orders = two.loras.look(())
    two.loras.carry_out(orders)
    numbers = [order.number for order in orders]
    two.came(numbers[0], AdapterNotFoundError("not here"))
    assert two.turn() == {("drop", "a"): numbers[0]}
    assert two.manager.given_up == []
    two.came(numbers[1])
    assert two.turn() == {("admit", "a"): numbers[1]}
    assert two.manager.given_up == [("a", False)]
    with pytest.raises(AdapterNotFoundError, match="not here"):
        first.result(30)
    assert second.result(30) is None
    third = two.call(two.loras.add, request_of("b"), None)
    two.came(two.turn()["load", "b"], AdapterNotFoundError("not here"))
    assert list(two.turn()) == [("drop", "b")]
    assert two.manager.given_up == [("a", False), ("b", True)]  # what one of them reads still is of no use
    with pytest.raises(AdapterNotFoundError, match="not here"):
        third.result(30)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), AdapterNotFoundError("no 'a'")])
def test_a_read_that_cannot_begin_fails_those_who_wait_for_it(two, error):
    two.manager.fails = error
    one = two.wants("a")
    number = two.turn(one)["load", "a"]
    ((load, told),) = two.peers.told
    assert load == number
    assert isinstance(told, LoRAError)
    assert str(error) in str(told)
    two.came(number, told)
    assert list(two.turn(one)) == [("drop", "a"), ("fail", "a")]
    assert two.failed == {"a": told}


def test_a_request_that_cannot_be_told_is_refused(two):
    odd, one = request_of("a"), two.wants("b")
    for request in (odd, one.request):
        object.__setattr__(request, "revision", b"main")
    adding = two.call(two.loras.add, odd, None)
    assert list(two.turn(one)) == [("fail", "b")]
    assert isinstance(two.failed["b"], LoRAUsageError)
    with pytest.raises(LoRAUsageError, match=r"revision=b'main'.* cannot be told to the other processes: .*bytes"):
        adding.result(30)


def test_what_is_pinned_is_read_apart_before(two):
    two.manager.known["a"] = request_of("a")
    pinning = two.call(two.loras.pin, "a")
    number = two.turn()["load", "a"]
    two.loras.remove("a")
    assert two.turn() == {}  # not before whoever brings it back has done so
    two.came(number)
    assert two.turn() == {("admit", "a"): number}
    until(lambda: two.loras._asked)
    assert next(iter(two.turn())) == ("pin", "a")
    assert two.manager.pinned == ["a"]
    pinning.result(30)


def test_a_load_that_took_too_long_by_itself_says_so(two):
    adding = two.call(two.loras.add, request_of("a"), None)
    two.came(two.turn()["load", "a"], LoadTimeoutError("the hub took too long"))
    two.turn()
    with pytest.raises(LoadTimeoutError, match="the hub took too long"):
        adding.result(30)


def test_nothing_is_changed_after_the_last_turn(two):
    two.manager.there.add("a")
    two.loras.close()
    for call in (two.loras.remove, two.loras.pin, two.loras.unpin):
        with pytest.raises(EngineClosedError):
            call("a")
    with pytest.raises(EngineClosedError):
        two.loras.add(request_of("b"), None)
    assert two.loras.unloading() == frozenset()
