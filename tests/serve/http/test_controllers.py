"""Requests of cluster controllers and routers: AIBrix, production-stack, llm-d and the Gateway API inference extension.

Each test sends the requests of one of them, after its source in August 2026, which it names: path, headers, body, the
statuses that count as success, and the fields that it reads.
"""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jlora.config import LoRARequest
from jlora.serve.engine.request import EngineStats
from jlora.serve.http.service import Keys
from tests.serve.client import ask, make_service
from tests.serve.fake_engine import BROKEN, FakeEngine

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEY = "secret"
GO = {"user_agent": "Go-http-client/1.1", "accept_encoding": "gzip", "authorization": f"Bearer {KEY}"}
PYTHON = {"user_agent": "python-requests/2.32", "accept": "*/*", "authorization": f"Bearer {KEY}"}


@pytest.fixture
def engine():
    return FakeEngine([])


@pytest.fixture
def service(engine, root):
    """With the one key that a router sends for everything."""
    return make_service(engine, root=root, repos=("owner/*",), keys=Keys((KEY,)), names=("llama", "meta/Llama"))


def models(service, headers=GO):
    answer = ask(service, "GET", "/v1/models", **headers)
    assert (answer.status, answer.json["object"]) == (200, "list")
    return {model["id"]: model for model in answer.json["data"]}


def load(service, name, path, headers=GO, **more):
    return ask(service, "POST", LOAD, {"lora_name": name, "lora_path": path, **more}, **headers)


def unload(service, name, headers=GO, **more):
    return ask(service, "POST", UNLOAD, {"lora_name": name, **more}, **headers).status


def test_aibrix(service, engine, root):
    """vllm-project/aibrix: pkg/controller/modeladapter/lora_client.go calls the engine (port 8000), and its runtime in
    the same pod (python/aibrix/aibrix/openapi/engine/vllm.py) retries statuses from 500 and handles 404."""
    one, two = str(root / "one"), str(root / "two")
    assert load(service, "mine", one).status == 200
    assert "mine" in models(service)  # the next reconciliation finds it
    assert load(service, "mine", one).status == 400  # and does not retry
    assert load(service, "hub", "owner/adapter").status == 200
    assert engine.loras["hub"].path == "owner/adapter"
    assert [unload(service, "mine", lora_int_id=None) for _ in range(2)] == [200, 404]
    for url, status in (("s3://bucket/adapter", 404), (str(root / "none"), 404), ("/etc", 400), (two, 200)):
        assert load(service, "other", url).status == status
    engine.broken["two"] = BROKEN
    assert load(service, "broken", two).status == 500


def test_production_stack(service, root):
    """vllm-project/production-stack, operator/internal/controller/loraadapter_controller.go and
    src/vllm_router/service_discovery.py."""

    def registrations(name):
        """Return (root, created) of the adapters of this name. Base models have no parent."""
        found = models(service)
        for model in found.values():
            assert isinstance(model["created"], int)  # an int64, and strings there
            assert all(isinstance(model[key], str) for key in ("id", "object", "owned_by", "root"))
            assert model["parent"] is None or isinstance(model["parent"], str)
        return [(one["root"], one["created"]) for one in found.values() if one["parent"] and one["id"] == name]

    assert registrations("mine") == registrations("llama") == []
    assert load(service, "mine", str(root / "one")).status == 200
    (found,) = registrations("mine")
    assert found[0] == str(root / "one")
    (root / "one").rename(root / "gone")
    answer = load(service, "mine", str(root / "one"))  # by a second reconciliation; even if the folder is gone
    assert (answer.status, answer.json["type"]) == (400, "InvalidUserInput")
    assert "has already been loaded" in answer.json["message"]  # which it takes for success
    assert registrations("mine") == [found]
    assert unload(service, "mine") == 200
    assert registrations("mine") == []


def test_lora_syncer(service, engine):
    """kubernetes-sigs/gateway-api-inference-extension, tools/dynamic-lora-sidecar/sidecar/sidecar.py, which syncs a
    ConfigMap's adapters to the server in the same pod. It was archived in April 2026, and still runs."""
    assert ask(service, "GET", "/health", **PYTHON).status == 200
    for i, base_model in enumerate(("", "llama", "models/base", "meta/Llama")):
        assert load(service, f"mine{i}", "one", PYTHON, base_model_name=base_model).status == 200
        assert models(service, PYTHON)[f"mine{i}"]["parent"] == ("meta/Llama" if i == 3 else "llama")
    answer = load(service, "other", "one", PYTHON, base_model_name="other")
    assert answer.status == 400
    assert "base_model_name must be the model that is served, 'llama'" in answer.error["message"]
    assert unload(service, "mine0", PYTHON) == 200
    assert [f"mine{i}" in models(service, PYTHON) for i in range(4)] == [False, True, True, True]


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
    assert (picker.running, picker.waiting_queue, picker.cache_usage, picker.most) == (5, 2, 0.25, 4)
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


def test_load_state_scorer(engine):
    """llm-d/llm-d-router, docs/plugin-metric-protocol.md (LoRA Adapter Residency), and of pkg/epp/framework/plugins
    scheduling/scorer/loraloadstate and datalayer/extractor/metrics: levels, ranks, slots, and means of transitions."""
    engine.loras = {name: LoRARequest(name, "x") for name in "abc"}
    engine.pinned = {"b"}
    service = make_service(engine)
    families = {one.name: one.samples for one in text_string_to_metric_families(ask(service, "GET", "/metrics").text)}
    loaded = {one.labels["adapter_name"]: one for one in families["vllm:lora_adapter_loaded"] if one.value > 0}
    assert {name: one.labels["level"] for name, one in loaded.items()} == {"a": "gpu", "b": "gpu", "c": "cpu"}
    assert [name for name, one in loaded.items() if one.labels["pinned"] == "true"] == ["b"]
    assert {int(one.labels["rank"]) for one in loaded.values()} == {8}
    for name, count in (("vllm:num_gpu_loaded_lora_adapters", 2), ("vllm:max_gpu_lora_adapters", 4)):
        assert [(one.labels["model_name"], one.value) for one in families[name]] == [("base", count)]
    sums = {
        (one.name.rpartition("_")[2], one.labels["transition"]): one.value
        for one in families["vllm:lora_adapter_load_seconds"]
        if not one.name.endswith("_bucket")
    }
    means = {kind: sums["sum", kind] / sums["count", kind] for kind in ("load", "activate")}
    assert means == pytest.approx({"load": 0.7, "activate": 0.0005})


@pytest.mark.parametrize("condition", ["warming", "closing"])
def test_controllers_get_503_during_warm_up_and_shutdown(service, engine, condition):
    """The response has Retry-After, and no adapter changes. The pod is not ready then, so routers skip it."""
    service.state = condition
    for method, path in (("GET", "/v1/models"), ("POST", LOAD), ("POST", UNLOAD), ("GET", "/health")):
        body = {"lora_name": "mine", "lora_path": "one"} if method == "POST" else None
        answer = ask(service, method, path, body, **GO)
        assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert engine.calls["add"] == engine.calls["remove"] == 0
    assert EndpointPicker(service).most == 4  # metrics stay available
