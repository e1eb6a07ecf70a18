"""Requests of cluster controllers and routers: AIBrix, production-stack, llm-d and the Gateway API inference extension.

Each test sends the requests of one of them, after its source in August 2026, which it names: path, headers, body, the
statuses that count as success, and the fields that it reads.
"""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jlora.serve.engine.request import EngineStats
from jlora.serve.http.service import Keys
from tests.serve.client import ask, make_service
from tests.serve.fake_engine import BROKEN, FakeEngine

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEY = "secret"
GO = {"user_agent": "Go-http-client/1.1", "accept_encoding": "gzip", "authorization": f"Bearer {KEY}"}
PYTHON = {"user_agent": "python-requests/2.32", "accept": "*/*", "authorization": f"Bearer {KEY}"}


@pytest.fixture
def root(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    return tmp_path / "adapters"


@pytest.fixture
def engine():
    return FakeEngine([])


@pytest.fixture
def service(engine, root):
    """With the one key that a router sends for everything."""
    return make_service(engine, root=root, repos=("owner/*",), keys=Keys((KEY,)), names=("llama", "meta/Llama"))


def answers(service, name):
    body = json.dumps({"model": name, "prompt": "a"}).encode()
    return ask(service, "POST", "/v1/completions", body, authorization=f"Bearer {KEY}").status == 200


def models(service, headers=GO):
    answer = ask(service, "GET", "/v1/models", **headers)
    assert answer.status == 200, answer.text
    assert answer.json["object"] == "list"
    return {model["id"]: model for model in answer.json["data"]}


def test_aibrix(service, engine, root):
    """vllm-project/aibrix: pkg/controller/modeladapter/lora_client.go calls the engine (port 8000), and its runtime in
    the same pod (python/aibrix/aibrix/openapi/engine/vllm.py) retries statuses from 500 and handles 404."""

    def load(name, path):
        body = {"lora_name": name, "lora_path": path.removeprefix("huggingface://")}
        return ask(service, "POST", LOAD, body, **GO).status

    def unload(name):
        return ask(service, "POST", UNLOAD, {"lora_name": name, "lora_int_id": None}, **GO).status

    assert load("mine", str(root / "one")) == 200
    assert answers(service, "mine")
    assert "mine" in models(service)  # the next reconciliation finds it
    assert load("mine", str(root / "one")) == 400  # and does not retry
    assert load("hub", "huggingface://owner/adapter") == 200
    assert engine.loras["hub"].path == "owner/adapter"
    assert unload("mine") == 200
    assert not answers(service, "mine")
    assert unload("mine") == 404
    assert load("mine", str(root / "two")) == 200
    for url, status in (("s3://bucket/adapter", 404), (str(root / "none"), 404), ("/etc", 400)):
        assert load("other", url) == status
    engine.broken["two"] = BROKEN
    assert load("other", str(root / "two")) == 500


def test_production_stack(service, root):
    """vllm-project/production-stack, operator/internal/controller/loraadapter_controller.go and
    src/vllm_router/service_discovery.py."""

    def load(name, path):
        """A second, concurrent reconciliation takes "already loaded" for success."""
        answer = ask(service, "POST", LOAD, {"lora_name": name, "lora_path": path}, **GO)
        if answer.status == 400 and answer.json["type"] == "InvalidUserInput":
            return "has already been loaded" in answer.json["message"]
        return answer.status == 200

    def registrations(name):
        """Return (root, created) of the adapters of this name. Base models have no parent."""
        found = models(service)
        for model in found.values():
            assert isinstance(model["created"], int)  # an int64, and strings there
            assert all(isinstance(model[key], str) for key in ("id", "object", "owned_by", "root"))
            assert model["parent"] is None or isinstance(model["parent"], str)
        return [(one["root"], one["created"]) for one in found.values() if one["parent"] and one["id"] == name]

    assert registrations("mine") == registrations("llama") == []
    assert load("mine", str(root / "one"))
    (found,) = registrations("mine")
    assert found[0] == str(root / "one")
    assert load("mine", str(root / "one"))
    (root / "one").rmdir()
    assert load("mine", str(root / "one"))  # even if the folder is gone
    assert registrations("mine") == [found]
    assert [name for name, model in models(service).items() if model["parent"] is None] == ["llama", "meta/Llama"]
    assert ask(service, "POST", UNLOAD, {"lora_name": "mine"}, **GO).status == 200
    assert registrations("mine") == []
    assert not load("other", "/etc")
    assert not load("other", str(root / "none"))


def test_lora_syncer(service, engine):
    """kubernetes-sigs/gateway-api-inference-extension, tools/dynamic-lora-sidecar/sidecar/sidecar.py, which syncs a
    ConfigMap's adapters to the server in the same pod. It was archived in April 2026, and still runs."""

    def load(name, source, base_model):
        body = {"lora_name": name, "lora_path": source, "base_model_name": base_model}
        return ask(service, "POST", LOAD, body, **PYTHON)

    assert ask(service, "GET", "/health", **PYTHON).status == 200
    for i, base_model in enumerate(("", "llama", "meta/Llama", "models/base")):
        assert load(f"mine{i}", "one", base_model).status == 200
        assert models(service, PYTHON)[f"mine{i}"]["parent"] in ("llama", "meta/Llama", "models/base")
    answer = load("other", "one", "other")
    assert answer.status == 400
    assert "base_model_name must be the model that is served, 'llama'" in answer.error["message"]
    assert engine.calls["add"] == 4
    assert ask(service, "POST", UNLOAD, {"lora_name": "mine0"}, **PYTHON).status == 200
    assert not answers(service, "mine0")
    assert answers(service, "mine1")


class EndpointPicker:
    """llm-d/llm-d-router, pkg/epp/framework/plugins/datalayer/extractor/metrics/{factories,extractor,loraspec}.go, with
    the names that it has by default for the engine "vllm", and scheduling/scorer/loraaffinity/lora_affinity.go."""

    def __init__(self, service):
        answer = ask(service, "GET", "/metrics", user_agent="Go-http-client/1.1")
        assert answer.status == 200  # without a key
        families = {one.name: one for one in text_string_to_metric_families(answer.text)}
        names = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
        assert {families[name].type for name in names} == {"gauge"}
        self.waiting_queue, self.running, self.cache_usage = (families[name].samples[-1].value for name in names)
        # Of all series the one whose value, a time, is the latest.
        labels = max(families["vllm:lora_requests_info"].samples, key=lambda sample: sample.value).labels
        self.active = self.names_in(labels["running_lora_adapters"])
        self.waiting = self.names_in(labels["waiting_lora_adapters"])
        self.most = int(labels["max_lora"])

    @staticmethod
    def names_in(text):
        return {name.strip() for name in text.split(",")} - {""}

    def score(self, name):
        if name in self.active:
            return 1.0
        if len(self.active) + len(self.waiting) < self.most:
            return 0.8
        return 0.6 if name in self.waiting else 0.0


def test_endpoint_picker(service, engine):
    picker = EndpointPicker(service)
    assert (picker.active, picker.waiting, picker.score("a")) == (set(), set(), 0.8)
    engine.told = EngineStats(running=5, waiting=2, cache_usage=0.25, running_by_lora={"a": 3})
    picker = EndpointPicker(service)
    assert (picker.running, picker.waiting_queue, picker.cache_usage) == (5, 2, 0.25)
    assert picker.most == 4
    assert (picker.score("a"), picker.score("b")) == (1.0, 0.8)
    engine.told = EngineStats(running_by_lora={"a": 1, "b": 1, "c": 1}, waiting_by_lora={"d": 2})
    picker = EndpointPicker(service)
    assert [picker.score(name) for name in "abde"] == [1.0, 1.0, 0.6, 0.0]
    names = ["a,b", 'quote"', "back\\slash", "é", "team/mine", "x=1"]
    engine.told = EngineStats(running_by_lora=dict.fromkeys(names, 1))
    picker = EndpointPicker(service)
    assert {"é", "team/mine", 'quote"', "x=1", "back\\slash"} < picker.active
    assert len(picker.active) == len(names)  # the name with a comma stays one name
    assert picker.score("a") == 0.0


@pytest.mark.parametrize("condition", ["warming", "closing"])
def test_controllers_get_503_during_warm_up_and_shutdown(service, engine, condition):
    """The response has Retry-After, and no adapter changes. The pod is not ready then, so routers skip it."""
    service.state = condition
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("POST", LOAD, {"lora_name": "mine", "lora_path": "one"}),
        ("POST", UNLOAD, {"lora_name": "mine"}),
        ("GET", "/health", None),
    ):
        answer = ask(service, method, path, body, authorization=f"Bearer {KEY}")
        assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert engine.calls["add"] == engine.calls["remove"] == 0
    assert EndpointPicker(service).most == 4  # metrics stay available
