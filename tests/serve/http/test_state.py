"""`--lora-state`: every change answered with 200 survives the end of the process."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

import jlora
from jlora.errors import LoRAError
from jlora.serve.http.state import State
from tests.manager.tiny import as_new, make_world, request
from tests.serve.client import make_service, post
from tests.serve.fake_engine import FakeEngine

ROOT = Path(__file__).parents[3]
ADAPTERS = ROOT / "jlora/demo/adapters"


@pytest.fixture(scope="module")
def one_world():
    return make_world()


@pytest.fixture
def world(one_world):
    return as_new(one_world)


@pytest.fixture
def begin():
    """Returns a function that restores a state. The folders are unlocked after the test."""
    begun = []

    def make(folder, world):
        state = State(folder)
        begun.append(state)
        return state, state.restore(world.manager)

    yield make
    for state in begun:
        end(state)


def end(state):
    """Release the locks of the folder, which only the end of a process does."""
    while state._locks:
        os.close(state._locks.pop())


def names(folder):
    return [one["name"] for one in json.loads((folder / "adapters.json").read_text())["saved"]["adapters"]]


def test_change_is_saved_before_the_call_returns(world, tmp_path, begin):
    state, known = begin(tmp_path / "state", world)
    assert known == frozenset()
    for name in "ab":
        world.manager.add_adapter(request(tmp_path, name))
        state.changed()
    assert names(tmp_path / "state") == ["a", "b"]
    world.manager.add_adapter(request(tmp_path, "a"))  # moves it to the end of the order of use
    state.close()
    assert names(tmp_path / "state") == ["b", "a"]


def test_adapter_being_unloaded_is_not_restored(world, tmp_path, begin):
    state, _ = begin(tmp_path / "state", world)
    state.unloading = lambda: {"b"}
    for name in "ab":
        world.manager.add_adapter(request(tmp_path, name))
    state.changed()
    assert names(tmp_path / "state") == ["a"]
    state.close()
    assert names(tmp_path / "state") == ["a"]
    end(state)
    _, known = begin(tmp_path / "state", as_new(world))
    assert known == {"a", "b"}
    assert list(world.manager.list_adapters()) == ["a"]


def test_folder_belongs_to_one_server(world, tmp_path, begin):
    state, _ = begin(tmp_path, world)
    with pytest.raises(LoRAError, match="another server keeps its adapters there"):
        State(tmp_path)
    end(state)
    begin(tmp_path, world)


def test_second_server_is_refused_without_the_lock_file(world, tmp_path, begin):
    state, _ = begin(tmp_path, world)
    (tmp_path / "server.lock").unlink()
    with pytest.raises(LoRAError, match="another server keeps its adapters there"):
        State(tmp_path)
    end(state)
    begin(tmp_path, world)


def test_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(LoRAError, match=r"--lora-state .*file"):
        State(tmp_path / "file")


def test_damaged_state_is_refused(world, tmp_path, begin):
    (tmp_path / "adapters.json").write_text("{")
    with pytest.raises(jlora.AdapterFormatError, match=r"adapters\.json"):
        begin(tmp_path, world)


def test_state_of_another_model_is_refused(world, tmp_path, begin):
    state, _ = begin(tmp_path / "state", make_world(seed=1))
    state.changed()
    end(state)
    with pytest.raises(jlora.AdapterMismatchError, match="another base model"):
        begin(tmp_path / "state", world)


def test_failed_last_save_is_logged(world, tmp_path, begin, caplog):
    state, _ = begin(tmp_path / "state", world)
    (tmp_path / "state" / "weights").write_text("in the way")
    with caplog.at_level(logging.ERROR, "jlora"):
        state.close()
    assert "could not be saved" in caplog.text


class Full:
    """A state whose disk is full."""

    behind = False

    def changed(self):
        raise LoRAError("/state: adapters could not be saved: No space left on device")


@pytest.mark.parametrize("verb", ["load", "unload", "pin", "unpin"])
def test_unsaved_change_is_not_acknowledged(tmp_path, verb):
    service = make_service(FakeEngine(), root=tmp_path)
    service.adapters.state = Full()
    (tmp_path / "new").mkdir()
    body = {"lora_name": "new", "lora_path": "new"} if verb == "load" else {"lora_name": "sort"}
    answer = post(service, f"/v1/{verb}_lora_adapter", body)
    assert answer.status == 500
    assert "could not be saved: No space left on device" in answer.error["message"]


class Disk:
    """A manager whose disk may be full. `names` are the adapters on disk."""

    def __init__(self, engine):
        self.engine, self.full, self.names = engine, False, set(engine.loras)

    def save(self, folder, *, without=()):
        if self.full:
            raise LoRAError("no space left")
        self.names = set(self.engine.loras)


@pytest.mark.parametrize(("verb", "status"), [("load", 400), ("unload", 404)])
def test_unsaved_change_is_saved_before_a_retry_is_acknowledged(tmp_path, verb, status):
    """Retries fail while the disk is full. A later retry saves the change, and gets the status of a repeated call."""
    engine = FakeEngine()
    disk, state = Disk(engine), State(tmp_path / "state")
    state.restore(disk)
    service = make_service(engine, root=tmp_path)
    service.adapters.state = state
    (tmp_path / "new").mkdir()
    body = {"lora_name": "new", "lora_path": "new"} if verb == "load" else {"lora_name": "sort"}
    disk.full = True
    assert [post(service, f"/v1/{verb}_lora_adapter", body).status for _ in range(2)] == [500, 500]
    assert disk.names == {"sort", "reverse"}
    disk.full = False
    assert post(service, f"/v1/{verb}_lora_adapter", body).status == status
    assert disk.names == ({"sort", "reverse", "new"} if verb == "load" else {"reverse"})
    state.close()
    end(state)


# --- a server that is killed ------------------------------------------------------------------------------------------


class Server:
    """`jlora serve` on the demo model."""

    def __init__(self, state, root, *more):
        command = [
            sys.executable, "-m", "jlora", "serve", "jlora/demo/model", "--served-model-name", "demo", "--port", "0",
            "--dtype", "float32", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "32",
            "--max-num-seqs", "2", "--max-model-len", "64", "--lora-root", str(root), "--lora-state", str(state), *more,
        ]  # fmt: skip
        self.log = []
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self.reader.start()
        first = self.process.stdout.readline()
        found = re.fullmatch(r"jlora serves demo at (http://\S+)\n", first)
        assert found, (first, self.log)
        self.url = found[1]

    def post(self, path, **body):
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=60)

    def load(self, name, path, **more):
        answer = self.post("load_lora_adapter", lora_name=name, lora_path=path, **more)
        assert answer.status_code == 200, answer.text

    def answer(self, name, prompt="planet="):
        found = self.post("completions", model=name, prompt=prompt, temperature=0, max_tokens=8)
        return found.json()["choices"][0]["text"] if found.status_code == 200 else found.status_code

    def names(self):
        return {one["id"] for one in httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"]} - {"demo"}

    def end(self, number):
        self.process.send_signal(number)
        status = self.process.wait(60)
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return status


@pytest.mark.slow
def test_acknowledged_changes_survive_sigkill(tmp_path):
    """The server is killed right after a response. A missing folder is an error when its adapter is used."""
    root, state = tmp_path / "root", tmp_path / "state"
    root.mkdir()
    for name in ("sort", "reverse", "shift", "swap"):
        (root / name).mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (root / name / file).write_bytes((ADAPTERS / name / file).read_bytes())
    flags = ("--lora-modules", f"one={root / 'sort'}", f"two={root / 'reverse'}")
    cache = ("--compilation-cache-dir", str(tmp_path / "cache"))
    server = Server(state, root, *flags, *cache)
    want = server.answer("one"), server.answer("two")
    assert server.post("unload_lora_adapter", lora_name="two").status_code == 200
    server.load("one", "reverse", load_inplace=True)
    server.load("three", "sort")
    assert server.post("pin_lora_adapter", lora_name="three").status_code == 200
    server.end(signal.SIGKILL)

    server = Server(state, root, *flags, *cache)
    assert server.names() == {"one", "three"}  # the state takes precedence over --lora-modules
    assert server.answer("two") == 404
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert re.search(r'lora_adapter_loaded\{[^}]*adapter_name="three"[^}]*pinned="true"', metrics), metrics
    assert (server.answer("three"), server.answer("one")) == want
    server.load("four", "swap")
    four = server.answer("four")
    assert server.end(signal.SIGTERM) == 0

    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    server = Server(state, root, *cache)
    assert server.names() == {"one", "three", "four"}
    assert server.answer("four") == 404
    (tmp_path / "elsewhere").rename(root)
    assert (server.answer("three"), server.answer("one"), server.answer("four")) == (*want, four)
    assert server.end(signal.SIGTERM) == 0
