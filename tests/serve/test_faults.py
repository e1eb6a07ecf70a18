"""A server under load: failing disks and hubs, and adapters pushed while they are used."""

import gc
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import pytest

from jlora import Adapter
from jlora.serve import push
from jlora.serve.engine.request import SamplingParams
from jlora.serve.http.service import Keys, Service
from jlora.serve.http.sources import AllowedSources
from tests.serve.client import on_socket, post
from tests.serve.conftest import ADAPTERS
from tests.serve.demo_process import NAMES, RIGHT, DemoServer, recipe
from tests.serve.fake_hub import FakeHub

LOAD = "/v1/load_lora_adapter"
PATH = "/v1/completions"
GREEDY = {"prompt": "planet=", "temperature": 0, "max_tokens": 10}


def text(answer):
    assert answer.status == 200, answer.text
    return answer.json["choices"][0]["text"]


@pytest.fixture
def root(tmp_path):
    for name, source in (("one", "sort"), ("two", "reverse")):
        shutil.copytree(ADAPTERS[source], tmp_path / name)
    return tmp_path


@pytest.fixture
def service(world, root):
    return Service(
        world.engine, world.manager, world.tokenizer, ("demo",), "demo", 64, AllowedSources(root), state="serving"
    )


@pytest.mark.slow
def test_failed_disk_read_fails_only_its_own_load(world, service, root, disk):
    disk.folder = root / "one"
    disk.fails = 3
    before = set(world.engine.list_loras())
    greedy = SamplingParams(temperature=0, max_tokens=10)
    others = [world.engine.submit("planet=", greedy, lora=name) for name in NAMES]
    answer = post(service, LOAD, {"lora_name": "mine", "lora_path": "one"})
    assert (answer.status, answer.error["type"]) == (500, "InternalServerError")
    assert "cannot be read: Input/output error" in answer.error["message"]
    assert post(service, LOAD, {"lora_name": "other", "lora_path": "two"}).status == 200
    assert set(world.engine.list_loras()) == before | {"other"}
    assert [one.result(60).text for one in others] == [RIGHT[name] for name in NAMES]
    assert post(service, PATH, {"model": "mine", **GREEDY}).status == 404
    assert text(post(service, PATH, {"model": "other", **GREEDY})) == RIGHT["reverse"]
    assert post(service, LOAD, {"lora_name": "mine", "lora_path": "one"}).status == 200
    assert text(post(service, PATH, {"model": "mine", **GREEDY})) == RIGHT["sort"]


@pytest.fixture(scope="module")
def hub():
    folders = ("sort", "reverse", "swap", "hangs", "halves", "later")
    made = FakeHub({name: ADAPTERS.get(name, ADAPTERS["shift"]) for name in folders})
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(hub, tmp_path_factory):
    """A server with three slots, four adapters and a local hub, whose timeouts are one second."""
    place = tmp_path_factory.mktemp("hub")
    more = ["--lora-hub-repos", "team/*", "--lora-resolver", "folder", "hub"]
    limits = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_DISABLE_XET": "1"}
    made = DemoServer(recipe(*more), HF_ENDPOINT=hub.url, HF_HOME=str(place), **limits)
    yield made
    made.stop()


@pytest.mark.slow
def test_hanging_or_truncating_hub_fails_only_its_own_requests(server, hub):
    assert server.text("team/sort") == RIGHT["sort"]
    card = httpx.get(f"{server.url}/v1/models/team/sort").json()
    assert (card["root"], card["parent"]) == ("team/sort", "demo")
    assert server.post("unload_lora_adapter", lora_name="swap").status_code == 200
    assert server.text("swap") == RIGHT["swap"]  # resolved in the folder
    hub.hangs.update(("hangs", "later"))
    hub.halves.add("halves")
    with ThreadPoolExecutor(12) as pool:
        hanging = [pool.submit(server.ask, "team/hangs") for _ in range(3)]
        half = [pool.submit(server.ask, "team/halves")]
        loads = [
            pool.submit(server.post, "load_lora_adapter", lora_name=f"mine{i}", lora_path="team/later")
            for i in range(6)
        ]
        assert {name: server.text(name) for name in RIGHT} == RIGHT
        assert server.post("load_lora_adapter", lora_name="local", lora_path="sort").status_code == 200
        answers = [one.result(60) for one in (*hanging, *half)]
        loaded = [one.result(60) for one in loads]
    assert {answer.status_code for answer in answers} == {503}
    assert all("could not be fetched" in answer.json()["error"]["message"] for answer in answers)
    assert {answer.status_code for answer in loaded} == {503}
    hub.hangs.clear()
    hub.halves.clear()
    assert server.text("team/hangs") == server.text("team/halves") == RIGHT["shift"]
    assert server.post("load_lora_adapter", lora_name="mine0", lora_path="team/later").status_code == 200
    assert server.text("mine0") == RIGHT["shift"]
    for name in ("mine0", "local", "team/hangs", "team/halves"):
        assert server.post("unload_lora_adapter", lora_name=name).status_code == 200


@pytest.mark.slow
def test_rounds_of_push_and_sample_under_load(world):
    """Every answer is of the version pushed before it. The fixture checks that nothing compiles."""
    rounds, warm, stop, kept, sizes = 80, 20, threading.Event(), [], []
    loaded = [Adapter.from_pretrained(path) for path in ADAPTERS.values()]
    service = Service(
        world.engine, world.manager, world.tokenizer, ("demo",), "demo", 64, keys=Keys((), ("secret",)),
        administration=True, state="serving",
    )  # fmt: skip

    def ask(url, name):
        answer = httpx.post(f"{url}{PATH}", json={"model": name, **GREEDY}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def keep_asking(url, name):
        while not stop.is_set():
            assert ask(url, name) == RIGHT[name]

    with on_socket(service) as (host, port), ThreadPoolExecutor(2) as pool:
        url = f"http://{host}:{port}"
        others = [pool.submit(keep_asking, url, name) for name in NAMES[:2]]
        try:
            for number in range(rounds):
                version = loaded[number % len(loaded)]
                push(url, version, admin_key="secret", name="policy")
                assert ask(url, "policy") == RIGHT[version.name]
                gc.collect()  # else what is garbage would count as a leak
                kept.append(world.manager.stats().host_bytes)
                if number == warm:
                    tracemalloc.start()
                if number > warm and number % 10 == 0:
                    sizes.append(allocated())
        finally:
            stop.set()
            tracemalloc.stop()
        for other in others:
            other.result()
    assert world.manager.list_adapters(["policy"])["policy"].version >= rounds - 1
    assert max(kept[warm:]) <= 2 * min(kept[warm:])  # the newest version, and the one before it while it is in use
    # Without the first ten rounds, in which versions older than the traces are replaced.
    grown = np.diff(sizes[1:]).mean()
    assert grown < 10 * loaded[NAMES.index("sort")].nbytes / 4, sizes


def allocated():
    """Return the bytes of Python's and NumPy's allocations since the traces began, and of all arrays of JAX."""
    return tracemalloc.get_traced_memory()[0] + sum(array.nbytes for array in jax.live_arrays())
