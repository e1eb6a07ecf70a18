"""Adapters over HTTP: vLLM's bodies and statuses, and permitted sources."""

import contextlib
import re
import threading
import time

import pytest

from jlora.errors import AdapterAccessError, AdapterNotFoundError, AdapterUnavailableError, NoFreeSlotError
from jlora.serve.engine.request import EngineClosedError
from jlora.serve.http.errors import ApiError
from jlora.serve.http.sources import AllowedSources
from tests.serve.client import ask, load_into, make_service, post, until
from tests.serve.fake_engine import BROKEN

LOAD, UNLOAD, PIN, UNPIN = (f"/v1/{verb}_lora_adapter" for verb in ("load", "unload", "pin", "unpin"))


@pytest.fixture
def service(engine, root):
    return make_service(engine, root=root)


def names(service):
    return [card["id"] for card in ask(service, "GET", "/v1/models").json["data"]]


def test_load_adds_an_adapter(service, engine, root):
    answer = post(service, LOAD, {"lora_name": "new", "lora_path": "one"})
    assert answer.status == 200
    assert answer.text == "Success: LoRA adapter 'new' added successfully."
    assert answer.headers["content-type"].startswith("text/plain")
    request = engine.loras["new"]
    assert (request.path, request.load_inplace, request.is_3d_lora_weight) == (str(root / "one"), False, None)
    assert names(service) == ["base", "alias", "sort", "reverse", "new"]
    assert post(service, "/v1/completions", {"model": "new", "prompt": "a"}).json["choices"][0]["text"] == "new|a"
    for i, (given, parent) in enumerate(((None, "base"), ("", "base"), ("alias", "alias"))):
        body = {"lora_name": f"team/{i}", "lora_path": "one", "base_model_name": given, "is_3d_lora_weight": True}
        assert post(service, LOAD, body).status == 200
        assert engine.loras[f"team/{i}"].is_3d_lora_weight is True
        assert ask(service, "GET", f"/v1/models/team/{i}").json["parent"] == parent


def test_paths_that_are_not_utf8_are_displayed(engine, root):
    """As Python decodes arguments and names of files: bytes of UTF-8 under a C locale, and other bytes."""
    service = make_service(engine, root=root)
    for name, path in (("a", "caf\udcc3\udca9"), ("b", "caf\udce9")):
        load_into(service, name, path)
    service.root = "mod\udcc3\udca8le"
    cards = {card["id"]: card["root"] for card in ask(service, "GET", "/v1/models").json["data"]}
    assert (cards["a"], cards["b"], cards["base"]) == ("café", "caf\\xe9", "modèle")
    listed = {one["name"]: one["path"] for one in ask(service, "GET", "/status.json").json["adapters"]}
    assert (listed["a"], listed["b"]) == ("café", "caf\\xe9")


def test_a_slash_after_a_path_has_no_effect(service):
    assert ask(service, "GET", "/v1/models/").json == ask(service, "GET", "/v1/models").json
    assert ask(service, "GET", "/health/").status == 200
    answer = post(service, "/v1/completions/", {"model": "sort", "prompt": "a"})
    assert answer.json["choices"][0]["text"] == "sort|a"
    for path in ("/v1/models//", "/v1/models/nobody/", "/v1/nothing/"):
        assert ask(service, "GET", path).status == 404
    assert post(service, LOAD, {"lora_name": "team/", "lora_path": "one"}).status == 200
    assert ask(service, "GET", "/v1/models/team/").json["id"] == "team/"


def test_loaded_name_needs_load_inplace(service, engine, root):
    before = dict(engine.loras)
    answer = post(service, LOAD, {"lora_name": "sort", "lora_path": "one"})
    assert (answer.status, answer.error["type"], answer.error["code"]) == (400, "InvalidUserInput", 400)
    assert "load_inplace" in answer.error["message"]
    assert engine.loras == before
    assert post(service, LOAD, {"lora_name": "sort", "lora_path": "one", "load_inplace": True}).status == 200
    assert engine.loras["sort"].path == str(root / "one")
    cards = {card["id"]: card for card in ask(service, "GET", "/v1/models").json["data"]}
    assert cards["sort"]["root"] == "one"
    assert len(cards) == 4


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"lora_path": "one"},
        {"lora_name": "new", "lora_path": ""},
        {"lora_name": "new", "lora_path": "one", "load_inplace": "yes"},
        {"lora_name": "new", "lora_path": "one", "is_3d_lora_weight": 1},
        *({"lora_name": "new", "lora_path": "one", "base_model_name": other} for other in ("x", ["base"])),
        {"lora_name": "base", "lora_path": "one"},
        {"lora_name": "new\nINFO forged", "lora_path": "one"},
        {"lora_name": "x" * 257, "lora_path": "one"},
    ],
)
def test_invalid_input_is_refused(service, engine, body):
    answer = post(service, LOAD, body)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (400, "InvalidUserInput", 400)
    assert answer.json == {**answer.error, "error": answer.error}  # the shapes of older and newer vLLM
    assert engine.calls["add"] == 0


def test_paths_outside_the_root_are_refused(service, engine, root):
    """404 reveals that a path inside the root is missing. Paths outside get 400, whether they exist or not."""
    (root.parent / "adapters2").mkdir()
    missing = ("missing", "file", "team/missing", "one/adapter_model.safetensors", "~", "~root", "file:///etc")
    outside = ("/etc", "..", "../outside", "one/../../outside", "link", "link/x", "/", "loop", "a\0b", "//etc")
    outside += ("owner/name/../../../outside", "../adapters2")
    for path in missing + outside:
        answer = post(service, LOAD, {"lora_name": "new", "lora_path": path})
        assert answer.status == (404 if path in missing else 400), path
        assert answer.error["type"] == ("NotFoundError" if path in missing else "InvalidUserInput")
    assert engine.calls["add"] == 0


def test_absolute_paths_and_links_inside_the_root_are_permitted(root, tmp_path):
    (tmp_path / "current").symlink_to(root)
    assert AllowedSources(tmp_path / "current").find(str(tmp_path / "current" / "one")) == str(root / "one")
    places = AllowedSources(root)
    assert places.find("one") == places.find(str(root / "one")) == places.find("inner") == str(root / "one")
    assert places.find("team/three") == str(root / "team" / "three")
    assert places.find("./one/../two") == str(root / "two")


def test_only_listed_hub_repositories_are_permitted(root, tmp_path):
    places = AllowedSources(None, ("owner/one", "team/*"))
    assert places.find("owner/one") == "owner/one"
    assert places.find("team/any") == "team/any"
    for path in ("owner/two", "team", "team/", "team/a/b", "other/one", "/etc", ".", str(root / "one"), "team/../x"):
        with pytest.raises(ApiError) as caught:
            places.find(path)
        assert caught.value.status == 400
    # huggingface_hub would load a local folder of that name.
    (tmp_path / "owner" / "one").mkdir(parents=True)
    with contextlib.chdir(tmp_path), pytest.raises(ApiError, match="folder"):
        places.find("owner/one")
    assert AllowedSources(root, ("owner/two",)).find("one") == str(root / "one")
    unlisted = "--lora-hub-repos other/one or other/* would list the repository"
    for places, path, words in (
        (AllowedSources(None, ("team/*",)), "other/one", unlisted),
        (AllowedSources(root, ("team/*",)), "other/one", unlisted),
        (AllowedSources(None, ("team/*",)), "team/one@v2", "a repository has no revision here: 'team/one'"),
        (AllowedSources(root), "team/one@v2", "a repository has no revision here: 'team/one'"),
    ):
        with pytest.raises(ApiError, match=re.escape(words)):
            places.find(path)
    # Folders below the root come first.
    assert AllowedSources(root, ("team/*",)).find("team/three") == str(root / "team" / "three")
    assert AllowedSources(root, ("team/*",)).find("team/four") == "team/four"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BROKEN, 500, "InternalServerError"),
        (OSError("the disk failed"), 500, "InternalServerError"),
        (AdapterNotFoundError("gone meanwhile"), 404, "NotFoundError"),
        (AdapterAccessError("the repository is gated: HF_TOKEN"), 403, "PermissionDeniedError"),
        (AdapterUnavailableError("the hub cannot be reached"), 503, "ServiceUnavailableError"),
        (EngineClosedError("closing"), 503, "ServiceUnavailableError"),
        (NoFreeSlotError("the host has no room"), 503, "ServiceUnavailableError"),
    ],
)
def test_failed_load_changes_nothing(service, engine, caplog, error, status, kind):
    engine.broken["one"] = error
    before = names(service)
    with caplog.at_level("INFO", "jlora.serve"):
        answer = post(service, LOAD, {"lora_name": "new", "lora_path": "one"})
    assert len([record for record in caplog.records if str(error) in record.getMessage()]) <= 1
    assert (answer.status, answer.error["type"]) == (status, kind)
    assert ("retry-after" in answer.headers) == (status == 503)
    assert names(service) == before
    again = post(service, LOAD, {"lora_name": "sort", "lora_path": "one", "load_inplace": True})
    assert (again.status, names(service), engine.loras["sort"].path) == (status, before, "/adapters/sort")
    engine.broken.clear()
    assert post(service, LOAD, {"lora_name": "new", "lora_path": "one"}).status == 200


def test_loads_of_one_name_take_turns_while_others_run(service, engine):
    engine.gate.clear()
    answers = {}

    def load(key, name):
        answers[key] = post(service, LOAD, {"lora_name": name, "lora_path": "one"}).status

    threads = [threading.Thread(target=load, args=(i, "new")) for i in range(3)]
    threads.append(threading.Thread(target=load, args=(3, "other")))
    for thread in threads:
        thread.start()
    until(lambda: engine.calls["add"] == 2)  # one of each name
    time.sleep(0.2)
    assert engine.calls["add"] == 2
    assert post(service, "/v1/completions", {"model": "sort", "prompt": "a"}).status == 200  # meanwhile
    engine.gate.set()
    for thread in threads:
        thread.join()
    assert sorted(answers[i] for i in range(3)) == [200, 400, 400]
    assert answers[3] == 200


def test_tokenizer_of_an_adapter_is_ignored_with_one_log_line(service, root, caplog):
    (root / "one" / "tokenizer.json").touch()
    (root / "one" / "chat_template.jinja").touch()
    (root / "one" / "modules.json").touch()
    with caplog.at_level("INFO", "jlora.serve"):
        assert post(service, LOAD, {"lora_name": "new", "lora_path": "one"}).status == 200
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert "tokenizer.json" in line
    assert "chat_template.jinja" in line
    assert "modules.json" in line


def test_unload_removes_an_adapter(service, engine):
    answer = post(service, UNLOAD, {"lora_name": "sort", "lora_int_id": 3})
    assert (answer.status, answer.text) == (200, "Success: LoRA adapter 'sort' removed successfully.")
    assert "sort" not in engine.loras
    assert names(service) == ["base", "alias", "reverse"]
    assert post(service, "/v1/completions", {"model": "sort", "prompt": "a"}).status == 404
    answer = post(service, UNLOAD, {"lora_name": "sort"})
    assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    for body in ({}, {"lora_name": ""}, {"lora_name": "sort", "x": 1}):
        answer = post(service, UNLOAD, body)
        assert (answer.status, answer.error["type"]) == (400, "InvalidUserInput")


def test_pin_and_unpin(service, engine):
    assert (post(service, PIN, {"lora_name": "sort"}).status, engine.pinned) == (200, {"sort"})
    assert (post(service, UNPIN, {"lora_name": "sort"}).status, engine.pinned) == (200, set())
    for path in (PIN, UNPIN):
        assert post(service, path, {"lora_name": "unknown"}).status == 404
        assert post(service, path, {}).status == 400
    for error in (NoFreeSlotError("each slot is pinned"), AdapterUnavailableError("'/sort' is gone")):
        engine.failing["pin"] = error
        answer = post(service, PIN, {"lora_name": "sort"})
        assert (answer.status, answer.headers["retry-after"], answer.error["message"]) == (503, "1", str(error))


@pytest.mark.parametrize("options", [{}, {"administration": True}])
def test_no_root_means_no_load_endpoints(engine, options):
    service = make_service(engine, **options)
    answer = post(service, LOAD, {"lora_name": "sort", "lora_path": "one"})
    assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    assert "--lora-root DIR or --lora-hub-repos" in answer.error["message"]
    for path in (PIN, UNPIN, UNLOAD):
        answer = post(service, path, {"lora_name": "sort"})
        assert answer.status == (200 if options else 404)
        assert options or "--admin-api-key" in answer.error["message"]
    assert engine.calls["add"] == 0


def test_model_cards(service):
    body = ask(service, "GET", "/v1/models").json
    keys = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
    assert all(card.keys() == keys and card["object"] == "model" for card in body["data"])
    found = [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in body["data"][:3]]
    bases = [(name, "models/base", None, 128) for name in ("base", "alias")]
    assert found == [*bases, ("sort", "/adapters/sort", "base", 128)]
    assert ask(service, "GET", "/v1/models/sort").json == body["data"][2]
    assert ask(service, "GET", "/v1/models/unknown").status == 404
