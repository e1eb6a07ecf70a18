"""`--lora-state`: every change answered with 200 survives the end of the process."""

import json
import os
import re
import signal

import httpx
import pytest

import jlora
from jlora.errors import LoRAError
from jlora.serve.http.state import StateFolder
from tests.manager.tiny import as_new, make_world, request
from tests.serve.client import make_service, post
from tests.serve.demo_process import ADAPTERS, DemoServer
from tests.serve.fake_engine import FakeEngine


@pytest.fixture
def world():
    return make_world()


@pytest.fixture
def begin():
    """Returns a function that restores a state. The folders are unlocked after the test."""
    begun = []

    def make(folder, world):
        state = StateFolder(folder)
        begun.append(state)
        return state, state.restore(world.manager)

    yield make
    for state in begun:
        end(state)


def end(state):
    """Release the locks of the folder, which only the end of a process does."""
    locks = state._locks
    while locks:
        os.close(locks.pop())


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
    state.changed()
    assert names(tmp_path / "state") == ["b", "a"]
    state.unloading = lambda: {"b"}
    state.changed()
    assert names(tmp_path / "state") == ["a"]
    state.close()
    end(state)
    state, known = begin(tmp_path / "state", as_new(world))
    assert known == {"a", "b"}
    assert list(world.manager.list_adapters()) == ["a"]


def test_log_names_what_was_restored(world, tmp_path, begin, caplog):
    folder = tmp_path / "state"
    with caplog.at_level("INFO", "jlora.serve"):
        state, _ = begin(folder, world)
        assert not caplog.records  # nothing was saved
        for name in "abc":
            world.manager.add_adapter(request(tmp_path, name))
        world.manager.pin_adapter("a")
        state.changed()
        world.manager.remove_adapter("b")
        state.changed()
        end(state)
        begin(folder, as_new(world))
    (line,) = [record.getMessage() for record in caplog.records]
    found = json.loads(line.removeprefix("restored by --lora-state "))
    assert found == {"folder": str(folder), "count": 2, "adapters": ["c", "a"], "pinned": ["a"], "in_slots": ["a"],
                     "unloaded": ["b"]}  # fmt: skip


@pytest.mark.parametrize("lock_file", ["kept", "deleted"])
def test_folder_belongs_to_one_server(world, tmp_path, begin, lock_file):
    state, _ = begin(tmp_path, world)
    if lock_file == "deleted":
        (tmp_path / "server.lock").unlink()
    with pytest.raises(LoRAError, match="another server keeps its adapters there"):
        StateFolder(tmp_path)
    end(state)
    begin(tmp_path, world)


def test_state_that_cannot_be_used_is_refused(world, tmp_path, begin):
    (tmp_path / "file").write_text("x")
    with pytest.raises(LoRAError, match=r"--lora-state .*file"):
        StateFolder(tmp_path / "file")
    state, _ = begin(tmp_path / "state", make_world(seed=1))
    state.changed()
    end(state)
    with pytest.raises(jlora.AdapterMismatchError, match="another base model"):
        begin(tmp_path / "state", world)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapters.json").write_text("{")
    with pytest.raises(jlora.AdapterFormatError, match=r"adapters\.json"):
        begin(tmp_path / "broken", world)


class Disk:
    """A manager whose disk may be full. `names` are the adapters on disk."""

    def __init__(self, engine):
        self.engine, self.full, self.names = engine, False, set(engine.loras)

    def save(self, folder, *, without=()):
        if self.full:
            raise LoRAError("no space left")
        self.names = set(self.engine.loras)


@pytest.mark.parametrize(("verb", "status"), [("load", 400), ("unload", 404), ("pin", 200), ("unpin", 200)])
def test_unsaved_change_is_saved_before_a_retry_is_acknowledged(tmp_path, verb, status):
    engine = FakeEngine()
    disk, state = Disk(engine), StateFolder(tmp_path / "state")
    state.restore(disk)
    service = make_service(engine, root=tmp_path)
    service.saved = state
    (tmp_path / "new").mkdir()
    body = {"lora_name": "new", "lora_path": "new"} if verb == "load" else {"lora_name": "sort"}
    disk.full = True
    for _ in range(2):
        answer = post(service, f"/v1/{verb}_lora_adapter", body)
        assert (answer.status, "no space left" in answer.error["message"]) == (500, True)
    assert disk.names == {"sort", "reverse"}
    disk.full = False
    assert post(service, f"/v1/{verb}_lora_adapter", body).status == status
    assert disk.names == set(engine.loras)
    assert (len(disk.names), disk.full) == ({"load": 3, "unload": 1}.get(verb, 2), False)
    state.close()
    end(state)


def server_with(state, root, *more):
    """Start `jlora serve` on the demo model with two slots."""
    return DemoServer([
        "serve", "jlora/demo/model", "--served-model-name", "demo", "--port", "0", "--dtype", "float32",
        "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "32", "--max-num-seqs", "2",
        "--max-model-len", "64", "--lora-root", str(root), "--lora-state", str(state), *more,
    ])  # fmt: skip


def end_with(server, number):
    """Send a signal, and return the exit status."""
    server.process.send_signal(number)
    status = server.process.wait(60)
    server.stop()
    return status


@pytest.mark.slow
def test_acknowledged_changes_survive_sigkill(tmp_path):
    root, state = ADAPTERS, tmp_path / "state"
    flags = ("--lora-modules", f"one={root / 'sort'}", f"two={root / 'reverse'}")
    cache = ("--compilation-cache-dir", str(tmp_path / "cache"))
    server = server_with(state, root, *flags, *cache)
    want = server.text("one"), server.text("two")
    for verb, body in (
        ("unload", {"lora_name": "two"}),
        ("load", {"lora_name": "one", "lora_path": "reverse", "load_inplace": True}),
        ("load", {"lora_name": "three", "lora_path": "sort"}),
        ("pin", {"lora_name": "three"}),
    ):
        answer = server.post(f"{verb}_lora_adapter", **body)
        assert answer.status_code == 200, answer.text
    end_with(server, signal.SIGKILL)

    server = server_with(state, root, *flags, *cache, "--port", str(server.port))
    listed = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert {one["id"] for one in listed} == {"demo", "one", "three"}  # the state takes precedence over --lora-modules
    assert server.ask("two").status_code == 404
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert re.search(r'lora_adapter_loaded\{[^}]*adapter_name="three"[^}]*pinned="true"', metrics), metrics
    assert (server.text("three"), server.text("one")) == want
    assert server.children == []
    assert end_with(server, signal.SIGTERM) == 0
