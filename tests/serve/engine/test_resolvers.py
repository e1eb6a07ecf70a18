"""Unknown names and the engine's resolver, which may find, refuse, raise, hang or return a wrong value."""

import contextlib
import threading
from collections import Counter
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

import jlora
from jlora.errors import AdapterFormatError, AdapterNotFoundError, LoRAError
from jlora.serve import EngineBusyError, RequestTimeoutError
from jlora.serve.engine.loras import Loras
from jlora.serve.engine.resolvers import check_name, in_order, of_folder, of_function, of_hub
from jlora.serve.http.service import Service
from jlora.serve.http.sources import AllowedSources
from tests.serve.client import ask as http
from tests.serve.client import post, until
from tests.serve.conftest import ADAPTERS, request_of, sequence_of
from tests.serve.demo_process import RIGHT as ANSWERS
from tests.serve.engine.test_engine import GREEDY, WORD

RIGHT = {name: text for name, text in ANSWERS.items() if name in ADAPTERS}


class Store:
    """A resolver. A name SOURCE-anything is a copy of a demo adapter.

    Attributes:
      calls: number of calls by name.
      threads: threads of the calls.
      answers: name -> value to return, or exception to raise.
      hangs: names whose call blocks until `go` is set.
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
        if isinstance(answer, BaseException):
            raise answer
        if answer != name:
            return answer
        source = name.partition("-")[0]
        return request_of(name, source) if source in ADAPTERS else None


@pytest.fixture
def store(world):
    """The resolver of the test. Its threads have ended after the test."""
    world.resolve = made = Store()
    yield made
    made.go.set()
    until(lambda: not any(thread.is_alive() for thread in made.threads))


def ask(world, name, **options):
    return world.engine.submit(WORD, GREEDY, lora=name, **options)


def test_unknown_name_is_resolved_loaded_and_served(world, store):
    for name in ("sort-1", "team/reverse"):
        store.answers[name] = request_of(name, name.rpartition("/")[2].partition("-")[0])
        assert ask(world, name).result(60).text == RIGHT[store.answers[name].path.rpartition("/")[2]]
        assert name in world.engine.list_loras()
    assert ask(world, "sort-1").result(60).text == RIGHT["sort"]  # known by now
    assert store.calls == {"sort-1": 1, "team/reverse": 1}
    assert {thread.name for thread in store.threads} == {"jlora-serve-lookup"}


def test_one_call_serves_all_requests_for_a_name_and_blocks_no_other(world, store):
    store.hangs.add("sort-1")
    asked = [ask(world, "sort-1") for _ in range(5)]
    assert [ask(world, name).result(60).text for name in RIGHT] == [*RIGHT.values()]  # meanwhile
    # Unresolved names are not counted by name, so that clients cannot create labels of metrics.
    assert (world.engine.stats().waiting, world.engine.stats().waiting_by_lora) == (5, {})
    store.go.set()
    assert {one.result(60).text for one in asked} == {RIGHT["sort"]}
    assert store.calls["sort-1"] == 1


class Other(Exception):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError("there are no words")


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, AdapterNotFoundError, "knows none of that name"),
        (AdapterFormatError("it is broken"), AdapterFormatError, "it is broken"),
        (Other("the store is away"), LoRAError, "'x': the resolver failed: Other: the store is away"),
        (Mute(), LoRAError, "the resolver failed: Mute$"),
        ({"path": "y"}, LoRAError, "returned dict, expected LoRARequest or None"),
        (request_of("sort"), LoRAError, "a request for 'sort'"),
        (request_of("x", "sort", load_inplace=True), LoRAError, "load_inplace"),
        (jlora.LoRARequest("x", "/no/such/folder"), AdapterNotFoundError, "/no/such/folder"),  # the load's own
    ],
)
def test_wrong_results_end_requests_and_are_forgotten(world, store, answer, error, words):
    store.answers["x"] = answer
    asked = [ask(world, "x") for _ in range(2)]
    for one in asked:
        with pytest.raises(error, match=words) as caught:
            one.result(60)
        assert type(caught.value) is error
    world.wait_idle()
    assert "x" not in world.engine.list_loras()
    store.answers["x"] = request_of("x", "sort")  # results are not cached
    assert ask(world, "x").result(60).text == RIGHT["sort"]


def test_hanging_resolver_blocks_only_its_own_requests(world, store):
    names = [f"sort-{i}" for i in range(12)]
    store.hangs.update(names)
    late = [ask(world, name, timeout=0.3) for name in names]
    until(lambda: len(store.threads) == 8)  # at most
    for one in late:
        with pytest.raises(RequestTimeoutError, match=r"longer than 0\.3"):
            one.result(60)
    assert ask(world, "shift").result(60).text == RIGHT["shift"]
    waits = ask(world, "sort-0")  # joins the call that hangs
    gone = ask(world, "sort-11", timeout=0.2)  # not called: it ends in the line
    with pytest.raises(RequestTimeoutError):
        gone.result(60)
    store.go.set()
    assert waits.result(60).text == RIGHT["sort"]
    assert store.calls["sort-0"] == 1
    until(lambda: not any(thread.is_alive() for thread in store.threads))
    assert sum(store.calls.values()) == 8  # names without waiting requests are skipped
    assert ask(world, "sort-11").result(60).text == RIGHT["sort"]


def test_hostile_names_are_refused_without_a_call(world, store):
    hostile = ["", "../x", "a/../../b", "/etc", "//x", "a//b", "a/", "./a", "a/.", "..", ".", "~", "~root/x", "..\\x"]
    hostile += ["a\0b", "a\nb", "\x1b[31m", "\ud800", "\u202ex", "x" * 257, "a\\..\\b"]
    for name in hostile:
        with pytest.raises(AdapterNotFoundError, match="can be called"):
            ask(world, name)
    assert not store.calls
    for name in ("sql", "team/sql", "v1.2", "a..b", "...", "名前", "x" * 256, "a b", "C:"):
        check_name(name)


def test_unloaded_name_is_resolved_again(world, store):
    """As in vLLM. The name is refused while earlier requests for it wait."""
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


def test_resolved_names_over_http(world, store, tmp_path):
    service = Service(
        world.engine, world.manager, world.tokenizer, ("demo",), "demo", 64, AllowedSources(tmp_path), state="serving"
    )

    def over_http(name, **more):
        body = {"model": name, "prompt": WORD, "temperature": 0, "max_tokens": 10, **more}
        return post(service, "/v1/completions", body)

    def listed():
        return {card["id"]: card["root"] for card in http(service, "GET", "/v1/models").json["data"]}

    for _ in range(2):
        assert "sort-1" not in listed()
        answer = over_http("sort-1", n=2)
        assert [choice["text"] for choice in answer.json["choices"]] == [RIGHT["sort"]] * 2
        assert listed()["sort-1"] == str(ADAPTERS["sort"])
        assert post(service, "/v1/unload_lora_adapter", {"lora_name": "sort-1"}).status == 200
        world.wait_idle()
    for name in ("nobody", "../x", "a\nb"):
        for stream in (False, True):
            answer = over_http(name, stream=stream)
            assert (answer.status, answer.error["type"], answer.error["param"]) == (404, "NotFoundError", "model")
    assert store.calls["../x"] == 0
    store.answers |= {"broken": AdapterFormatError("it is cut short"), "away": Other("no route")}
    store.hangs.add("reverse-1")
    for name, status in (("broken", 400), ("away", 500), ("reverse-1", 504)):
        assert over_http(name, timeout=0.2 if status == 504 else 60).status == status
    asked = [ask(world, "reverse-1") for _ in range(16)]
    busy = over_http("reverse-1")
    assert (busy.status, int(busy.headers["retry-after"]) >= 1) == (429, True)
    store.go.set()
    assert {one.result(60).text for one in asked} == {RIGHT["reverse"]}


def test_request_with_its_adapter_does_not_wait_for_the_resolver(world, store):
    store.hangs.add("x")
    store.answers["x"] = request_of("x", "sort")
    asked = ask(world, "x", timeout=30)
    until(lambda: store.calls["x"])
    assert ask(world, request_of("x", "swap")).result(60).text == RIGHT["swap"]
    assert asked.result(60).text == RIGHT["swap"]


def test_flood_of_unknown_names_is_bounded():
    many, ended, calls = 2_000, [], Counter()

    def resolve(name):
        calls[name] += 1

    manager = SimpleNamespace(list_adapters=lambda names: {})
    loras = Loras(manager, lambda: None, resolve, 256, lambda sequence, error: ended.append(sequence))
    refused = 0
    for i in range(many):
        try:
            loras.wanted([sequence_of(f"made-up-{i}")])
        except EngineBusyError:
            refused += 1
        assert i + 1 - refused - len(ended) <= 256 + 8  # one more for each thread that is ending a request
    until(lambda: len(ended) == many - refused, 60)
    assert len(calls) == many - refused
    assert {str(one.lora) for one in ended} == set(calls)


def test_folder_resolver(root):
    resolve = of_folder(root)
    assert resolve("one") == jlora.LoRARequest("one", str(root / "one"))
    assert resolve("team/three") == jlora.LoRARequest("team/three", str(root / "team" / "three"))
    assert resolve("inner") == jlora.LoRARequest("inner", str(root / "one"))
    for name in ("empty", "file", "team", "none", "link", "loop", "../outside", "/etc", "one/x", "a\0b", "x" * 256):
        assert resolve(name) is None
    assert resolve("名" * 200) is None  # 600 bytes: no file system has that
    (root / "new").mkdir()
    (root / "new" / "adapter_config.json").touch()
    assert resolve("new") is not None  # results are not cached


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The calls into huggingface_hub, and the error that they raise instead."""
    state = SimpleNamespace(asked=[], error=None)

    def download(repo, file, **options):
        state.asked.append(repo)
        if state.error is not None:
            raise state.error
        return str(tmp_path / "cache" / ("a" * 40) / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    return state


def test_hub_resolver(hub, tmp_path):
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
    with pytest.raises(jlora.AdapterUnavailableError, match="the hub is away"):
        resolve("team/any")
    hub.error = GatedRepoError("gated", response=answer)
    with pytest.raises(jlora.AdapterAccessError, match="HF_TOKEN"):
        resolve("team/any")
    # huggingface_hub would load a local folder of that name.
    (tmp_path / "team" / "any").mkdir(parents=True)
    with contextlib.chdir(tmp_path), pytest.raises(LoRAError, match="folder"):
        resolve("team/any")


def mine(name):
    return None if name == "none" else request_of(name, "sort")


def test_function_resolver(tmp_path, monkeypatch):
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

    asked = []
    resolve = in_order([lambda name: asked.append(name), mine, lambda name: pytest.fail("it was found already")])
    assert (resolve("x"), asked) == (request_of("x", "sort"), ["x"])
    assert in_order([mine])("none") is None
