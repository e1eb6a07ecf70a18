"""Names that nobody added: looked up by the engine's resolver, which may find, refuse, raise, hang or talk nonsense."""

import os
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

import jlora
from jlora.errors import AdapterFormatError, AdapterNotFoundError, LoRAError
from jlora.serve import EngineBusyError, RequestTimeoutError
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.resolver_pool import ResolverPool, check_name
from jlora.serve.engine.resolvers import in_order, of_folder, of_function, of_hub
from jlora.serve.http.adapters import Adapters, AllowedSources
from jlora.serve.http.service import Service
from tests.serve.client import ask as http
from tests.serve.client import post, until
from tests.serve.conftest import ADAPTERS, request_of
from tests.serve.engine.test_engine import GREEDY, WORD

RIGHT = {"sort": "aelnpt", "reverse": "tenalp", "swap": "lpnate", "shift": "qmbofu"}


class Store:
    """A resolver. Names are SOURCE-anything: a copy of a demo adapter.

    Attributes:
      calls: how often each name was asked for; `threads`: on which threads.
      answers: name -> what is returned instead, or raised.
      hangs: names whose call waits for `go`.
    """

    def __init__(self):
        self.calls, self.threads = Counter(), set()
        self.answers, self.hangs, self.go = {}, set(), threading.Event()
        self.lock = threading.Lock()

    def __call__(self, name):
        with self.lock:
            self.calls[name] += 1
            self.threads.add(threading.current_thread())
        if name in self.hangs:
            assert self.go.wait(60)
        answer = self.answers.get(name, name)
        if issubclass(type(answer), BaseException):
            raise answer
        if answer != name:
            return answer
        source = name.partition("-")[0]
        return request_of(name, source) if source in ADAPTERS else None


@pytest.fixture
def store(world, monkeypatch):
    """The engine of all tests, with a resolver for the time of one."""
    made, engine = Store(), world.engine
    pool = ResolverPool(made, 16, engine._dispatcher.wake, engine._not_found)
    monkeypatch.setattr(engine, "_resolver_pool", pool)
    monkeypatch.setattr(engine._loras, "_resolver_pool", pool)
    yield made
    made.go.set()
    until(lambda: not any(thread.is_alive() for thread in made.threads))
    assert (pool._waiting, list(pool._line), pool._loading, pool._count, pool._threads) == (
        {},
        [],
        {},
        0,
        0,
    )


def ask(world, name, **options):
    return world.engine.submit(WORD, GREEDY, lora=name, **options)


def test_an_unknown_name_is_found_loaded_and_served(world, store):
    for name in ("sort-1", "team/reverse"):
        store.answers[name] = request_of(name, name.rpartition("/")[2].partition("-")[0])
        assert ask(world, name).result(60).text == RIGHT[store.answers[name].path.rpartition("/")[2]]
        assert name in world.engine.list_loras()
    assert ask(world, "sort-1").result(60).text == RIGHT["sort"]  # known by now
    assert store.calls == {"sort-1": 1, "team/reverse": 1}
    assert world.engine._dispatcher.thread not in store.threads
    assert threading.current_thread() not in store.threads


def test_submit_returns_at_once_and_one_call_serves_all_who_ask(world, store):
    store.hangs.add("sort-1")
    started = time.monotonic()
    asked = [ask(world, "sort-1") for _ in range(5)]
    assert time.monotonic() - started < 1
    assert [ask(world, name).result(60).text for name in RIGHT] == [*RIGHT.values()]  # meanwhile
    # Their name is not told: who asks for an adapter that there may not be writes no label of a metric.
    assert (world.engine.stats().waiting, world.engine.stats().waiting_by_lora) == (5, {})
    store.go.set()
    assert {one.result(60).text for one in asked} == {RIGHT["sort"]}
    assert store.calls["sort-1"] == 1


def test_who_asks_while_it_is_loaded_does_not_look_it_up_again(world, store, monkeypatch):
    loads, go, prefetch = [], threading.Event(), world.manager.prefetch

    def slow(request):
        loads.append(request)
        threading.Thread(target=lambda: go.wait(30) and prefetch(request).add_done_callback(tell)).start()
        return promise

    promise = Future()
    tell = lambda done: promise.set_result(done.result())  # noqa: E731
    monkeypatch.setattr(world.manager, "prefetch", slow)
    first = ask(world, "sort-1")
    until(lambda: loads)
    second = ask(world, "sort-1")
    first.cancel()
    assert first.result(60).finish_reason == "abort"
    go.set()
    assert second.result(60).text == RIGHT["sort"]
    assert store.calls["sort-1"] == 1


class Other(Exception):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError("there are no words")


class Proxy:
    """Of something that is away."""

    @property
    def __class__(self):
        raise Other("what it stands for is away")


async def later(name):
    return None


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, AdapterNotFoundError, "knows none of that name"),
        (AdapterNotFoundError("away"), AdapterNotFoundError, "away"),
        (AdapterFormatError("it is broken"), AdapterFormatError, "it is broken"),
        (Other("the store is away"), LoRAError, "'x': the resolver failed: Other: the store is away"),
        (SystemExit(3), LoRAError, "the resolver failed: SystemExit: 3"),
        (Mute(), LoRAError, "the resolver failed: Mute$"),
        pytest.param(Proxy(), LoRAError, "the resolver failed: Other: what it stands for is away", id="proxy"),
        ({"path": "y"}, LoRAError, "returned dict, expected LoRARequest or None"),
        (True, LoRAError, "returned bool"),
        (request_of("sort"), LoRAError, "a request for 'sort'"),
        (request_of("x", "sort", load_inplace=True), LoRAError, "load_inplace"),
        (jlora.LoRARequest("x", "/no/such/folder"), AdapterNotFoundError, "/no/such/folder"),  # the load's own
        (jlora.LoRARequest("x", str(ADAPTERS["sort"].parent)), AdapterFormatError, "adapter_config.json"),
    ],
)
def test_what_a_resolver_may_do_wrong(world, store, answer, error, words):
    store.answers["x"] = answer
    asked = [ask(world, "x") for _ in range(2)]
    for one in asked:
        with pytest.raises(error, match=words) as caught:
            one.result(60)
        assert type(caught.value) is error
    world.wait_idle()
    assert "x" not in world.engine.list_loras()
    store.answers["x"] = request_of("x", "sort")  # nothing of it is remembered
    assert ask(world, "x").result(60).text == RIGHT["sort"]


def test_a_coroutine_function_is_told(world, store):
    store.answers["x"] = later("x")
    with pytest.raises(LoRAError, match="coroutine"):
        ask(world, "x").result(60)


def test_a_resolver_that_hangs_costs_only_those_who_wait_for_it(world, store):
    names = [f"sort-{i}" for i in range(12)]
    store.hangs.update(names)
    late = [ask(world, name, timeout=0.3) for name in names]
    until(lambda: len(store.threads) == 8)  # at most
    assert ask(world, "swap").result(60).text == RIGHT["swap"]
    for one in late:
        with pytest.raises(RequestTimeoutError, match=r"longer than 0\.3"):
            one.result(60)
    assert ask(world, "shift").result(60).text == RIGHT["shift"]
    assert len(store.threads) == 8
    waits = ask(world, "sort-0")  # joins the call that hangs
    gone = ask(world, "sort-11", timeout=0.2)  # never asked for
    with pytest.raises(RequestTimeoutError):
        gone.result(60)
    store.go.set()
    assert waits.result(60).text == RIGHT["sort"]
    assert store.calls["sort-0"] == 1
    until(lambda: world.engine._resolver_pool._threads == 0)
    assert sum(store.calls.values()) == 8  # those that nobody waits for any more are not called
    assert ask(world, "sort-11").result(60).text == RIGHT["sort"]


def test_only_so_many_wait(world, store):
    store.hangs.add("sort-1")
    asked = [ask(world, "sort-1") for _ in range(16)]
    for name in ("sort-1", "sort-2"):
        with pytest.raises(EngineBusyError, match="16 requests wait") as caught:
            ask(world, name)
        assert caught.value.retry_after > 0
    assert ask(world, "swap").result(60).text == RIGHT["swap"]
    for one in asked[:8]:
        one.cancel()
        one.result(60)
    more = ask(world, "sort-2")
    store.go.set()
    assert {one.result(60).text for one in [*asked[8:], more]} == {RIGHT["sort"]}


@pytest.mark.parametrize(
    "name",
    [
        *("", "../x", "a/../../b", "/etc", "//x", "a//b", "a/", "./a", "a/.", "..", ".", "~", "~root/x", "..\\x"),
        *("a\0b", "a\nb", "\x1b[31m", "\ud800", "\u202ex", "x" * 257, "a\\..\\b"),
    ],
)
def test_hostile_names_are_not_asked_for(world, store, name):
    with pytest.raises(AdapterNotFoundError, match="can be called"):
        ask(world, name)
    assert not store.calls


def test_names_that_are_asked_for():
    for name in ("sql", "team/sql", "v1.2", "a..b", "...", "名前", "x" * 256, "a b", "C:"):
        check_name(name)


def test_an_unloaded_name_comes_back_with_the_next_request(world, store):
    """As in vLLM; while those that came before still wait, it is refused."""
    with world.paused() as go:
        store.answers["guest"] = request_of("guest", "sort")
        running = ask(world, "guest")
        until(lambda: world.engine.stats().running == 1)
        fill = [ask(world, None) for _ in range(3)]
        until(lambda: world.engine.stats().running == 4)
        waiting = ask(world, "guest")
        world.engine.remove_lora("guest")
        with pytest.raises(AdapterNotFoundError, match="guest"):
            ask(world, "guest")
        assert store.calls["guest"] == 1
        store.answers["guest"] = request_of("guest", "reverse")
        go.set()
        assert [one.result(60).text for one in (running, waiting)] == [RIGHT["sort"]] * 2
        for one in fill:
            one.result(60)
    world.wait_idle()
    assert ask(world, "guest").result(60).text == RIGHT["reverse"]
    assert store.calls["guest"] == 2


def test_an_evicted_name_comes_back_without_being_looked_up(world, store):
    names = [f"{source}-{i}" for source in ADAPTERS for i in range(2)]  # the host has room for 6
    for name in [*names, *names]:
        assert ask(world, name).result(60).text == RIGHT[name.partition("-")[0]]
    assert set(store.calls.values()) == {1}


def test_over_http(world, store, tmp_path):
    """What is resolved is listed; a name that is not is answered as where there is no resolver."""
    adapters = Adapters(world.engine, AllowedSources(tmp_path), ("demo",))
    service = Service(world.engine, world.manager, world.tokenizer, ("demo",), "demo", 64, adapters, state="serving")

    def over_http(name, **more):
        return post(service, "/v1/completions", {"model": name, "prompt": WORD, "temperature": 0, **more})

    def listed():
        return {card["id"]: card["root"] for card in http(service, "GET", "/v1/models").json["data"]}

    assert "sort-1" not in listed()
    answer = over_http("sort-1", n=2, max_tokens=10)
    assert [choice["text"] for choice in answer.json["choices"]] == [RIGHT["sort"]] * 2
    assert listed()["sort-1"] == str(ADAPTERS["sort"])
    assert http(service, "GET", "/v1/models/sort-1").status == 200
    assert http(service, "GET", "/metrics").text.count('adapter_name="sort-1",level="slot"') == 1
    for name in ("nobody", "../x", "a\nb", "/etc"):
        for stream in (False, True):
            answer = over_http(name, stream=stream)
            assert (answer.status, answer.error["type"], answer.error["param"]) == (404, "NotFoundError", "model")
            assert "does not exist" in answer.error["message"]
    assert store.calls["../x"] == store.calls["/etc"] == 0
    store.answers["broken"] = AdapterFormatError("it is cut short")
    assert over_http("broken").status == 400  # found, and cannot be served
    store.answers["away"] = Other("no route")
    assert over_http("away").status == 500
    store.hangs.add("reverse-1")
    assert over_http("reverse-1", timeout=0.2).status == 504
    asked = [ask(world, "reverse-1") for _ in range(16)]
    busy = over_http("reverse-1")
    assert (busy.status, int(busy.headers["retry-after"]) >= 1) == (429, True)
    assert over_http("sort-1", max_tokens=10).json["choices"][0]["text"] == RIGHT["sort"]
    store.go.set()
    assert {one.result(60).text for one in asked} == {RIGHT["reverse"]}
    assert post(service, "/v1/unload_lora_adapter", {"lora_name": "sort-1"}).status == 200
    assert "sort-1" not in listed()
    world.wait_idle()
    assert over_http("sort-1", max_tokens=10).json["choices"][0]["text"] == RIGHT["sort"]
    assert "sort-1" in listed()


@pytest.mark.parametrize("answer", [None, request_of("x", "sort")])
def test_who_brings_the_adapter_does_not_wait_for_the_resolver(world, store, answer):
    """And what the resolver says at last concerns nobody."""
    store.hangs.add("x")
    store.answers["x"] = answer
    asked = ask(world, "x", timeout=30)
    until(lambda: store.calls["x"])
    assert ask(world, request_of("x", "swap")).result(60).text == RIGHT["swap"]
    assert asked.result(60).text == RIGHT["swap"]


def test_made_up_names_leave_nothing_behind(world, store):
    """In the thousands, while real ones are served."""
    before = len(world.engine._metrics.by_lora)
    real, refused, count = 0, 0, 0
    while count < 1000:
        batch = []
        for _ in range(50):
            count += 1
            try:
                batch.append(ask(world, f"made-up-{count}"))
            except EngineBusyError:
                refused += 1
        if count % 500 == 0:
            assert ask(world, "sort").result(60).text == RIGHT["sort"]
            real += 1
        for one in batch:
            with pytest.raises(AdapterNotFoundError):
                one.result(60)
    assert real == 2
    assert sum(store.calls.values()) == count - refused
    assert len(store.threads) < count
    world.wait_idle()
    assert len(world.engine._metrics.by_lora) <= before + 1
    assert not any(name.startswith("made-up") for name in world.engine.stats().by_lora)
    assert not world.engine._loras._not_before


MANY = pytest.mark.parametrize("many", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])


@MANY
def test_a_flood_of_names_is_bounded(many):
    """They come faster than they are looked up: some are asked for, the others are refused."""
    ended, calls = [], Counter()

    def resolve(name):
        calls[name] += 1

    pool = ResolverPool(resolve, 256, lambda: None, lambda sequence, error: ended.append(sequence))
    refused = 0
    for i in range(many):
        try:
            pool.add(SimpleNamespace(lora=f"made-up-{i}", request=None, waits=True))
        except EngineBusyError:
            refused += 1
        assert len(pool._waiting) <= 256
    until(lambda: not pool._threads)
    assert len(ended) == len(calls) == many - refused
    assert (pool._waiting, list(pool._line), pool._loading, pool._count) == ({}, [], {}, 0)


@MANY
def test_counts_keep_no_names_that_are_gone(many):
    """Thousands of adapters, of which ten are there at a time."""
    there = deque(maxlen=10)
    counts = EngineMetrics(lambda name: name in there)
    for i in range(many):
        there.append(f"tenant-{i}")
        counts.begun(SimpleNamespace(lora=f"tenant-{i}", arrived=time.monotonic(), absent=True))
        assert len(counts.by_lora) < 1100
    counts.begun(SimpleNamespace(lora=None, arrived=time.monotonic(), absent=False))
    counts.sort_out()
    assert set(counts.by_lora) == {*there, ""}
    assert counts.unloaded == many - 10
    assert sum(counts.queued.read()[1]) == many + 1
    assert sum(counts.absent.read()[1]) == many


# --- where they look --------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "adapters"
    for name in ("one", "team/two"):
        (root / name).mkdir(parents=True)
        (root / name / "adapter_config.json").touch()
    (root / "empty").mkdir()
    (root / "file").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "adapter_config.json").touch()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    (root / "inner").symlink_to(root / "one")
    return root


def test_a_folder(root):
    resolve = of_folder(root)
    assert resolve("one") == jlora.LoRARequest("one", str(root / "one"))
    assert resolve("team/two") == jlora.LoRARequest("team/two", str(root / "team" / "two"))
    assert resolve("inner") == jlora.LoRARequest("inner", str(root / "one"))
    for name in ("empty", "file", "team", "none", "link", "loop", "../outside", "/etc", "one/x", "a\0b", "x" * 256):
        assert resolve(name) is None
    assert resolve("名" * 200) is None  # 600 bytes: no file system has that
    (root / "new").mkdir()
    (root / "new" / "adapter_config.json").touch()
    assert resolve("new") is not None  # nothing is remembered


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_folder_that_cannot_be_read(root):
    (root / "team").chmod(0)
    with pytest.raises(PermissionError):
        of_folder(root)("team/two")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """What is downloaded, and what the hub says instead."""
    state = SimpleNamespace(asked=[], error=None)

    def download(repo, file, **options):
        state.asked.append(repo)
        if state.error is not None:
            raise state.error
        return str(tmp_path / "cache" / ("a" * 40) / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    return state


def test_the_hub(hub, monkeypatch, tmp_path):
    resolve = of_hub(["owner/one", "team/*"])
    for name in ("owner/one", "team/any"):
        assert resolve(name) == jlora.LoRARequest(name, name, revision="a" * 40)
    for name in ("owner/two", "one", "team", "other/one", "team/a b", "team/a/b", "team/.."):
        assert resolve(name) is None
    assert hub.asked == ["owner/one"] * 2 + ["team/any"] * 2  # two files each
    answer = httpx2.Response(404, request=httpx2.Request("GET", "http://hub"))
    hub.error = RepositoryNotFoundError("no such repository", response=answer)
    assert resolve("team/none") is None
    hub.error = ConnectionError("the hub is away")
    with pytest.raises(LoRAError, match="the hub is away") as caught:  # it may well have it
        resolve("team/any")
    assert type(caught.value) is LoRAError
    # The library would take a folder of that name for it.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team" / "any").mkdir(parents=True)
    with pytest.raises(LoRAError, match="folder"):
        resolve("team/any")


def mine(name):
    return None if name == "none" else request_of(name, "sort")


def test_functions(tmp_path, monkeypatch):
    assert of_function(f"{__name__}:mine") is mine
    (tmp_path / "broken_resolver.py").write_text("raise ValueError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    for where, words in [
        ("folder2", "package.module:function"),
        (f"{__name__}:", "package.module:function"),
        (f"{__name__}:nothing", "nothing"),
        (f"{__name__}:RIGHT", "dict, and cannot be called"),
        ("broken_resolver:x", "not today"),
    ]:
        with pytest.raises(jlora.LoRAUsageError, match=words):
            of_function(where)


def test_one_after_the_other():
    asked = []
    resolve = in_order([lambda name: asked.append(name), mine, lambda name: pytest.fail("it was found already")])
    assert resolve("x") == request_of("x", "sort")
    assert in_order([mine])("none") is None
    assert asked == ["x"]
