"""Requests of cluster controllers and routers: AIBrix, production-stack, llm-d and the Gateway API inference extension.

Each class sends the requests of one of them, after its source in August 2026, which it names: path, headers, body, the
statuses that count as success, and the fields that it reads.
"""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jlora.serve.engine.request import EngineStats
from jlora.serve.http.service import Keys
from tests.serve.client import ask, make_service
from tests.serve.fake_engine import FakeEngine

KEY = "secret"
GO = {"user_agent": "Go-http-client/1.1", "accept_encoding": "gzip"}


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


# --- AIBrix -----------------------------------------------------------------------------------------------------------


class Aibrix:
    """vllm-project/aibrix, pkg/controller/modeladapter/lora_client.go, sent to the engine (port 8000)."""

    headers = {**GO, "authorization": f"Bearer {KEY}"}  # AdditionalConfig["api-key"]

    def __init__(self, service):
        self.service = service

    def load(self, name, artifact_url):
        """Return (loaded, exists). Raises AssertionError where its reconciler would retry."""
        answer = ask(self.service, "GET", "/v1/models", **self.headers)
        assert answer.status == 200, answer.text
        if name in [model["id"] for model in answer.json["data"]]:
            return False, True
        body = {"lora_name": name, "lora_path": artifact_url.removeprefix("huggingface://")}
        answer = ask(self.service, "POST", "/v1/load_lora_adapter", body, **self.headers)
        assert answer.status in (200, 201), answer.text
        return True, False

    def unload(self, name):
        return ask(self.service, "POST", "/v1/unload_lora_adapter", {"lora_name": name}, **self.headers).status


def test_aibrix(service, engine, root):
    aibrix = Aibrix(service)
    assert aibrix.load("mine", str(root / "one")) == (True, False)
    assert answers(service, "mine")
    assert aibrix.load("mine", str(root / "one")) == (False, True)  # the next reconciliation
    assert aibrix.load("hub", "huggingface://owner/adapter") == (True, False)
    assert engine.loras["hub"].path == "owner/adapter"
    assert aibrix.unload("mine") == 200
    assert not answers(service, "mine")
    assert aibrix.unload("mine") not in (200, 201)  # only logged by AIBrix
    assert aibrix.load("mine", str(root / "two")) == (True, False)
    for url in ("s3://bucket/adapter", str(root / "none"), "/etc"):
        with pytest.raises(AssertionError, match="error"):
            aibrix.load("other", url)


# --- production-stack -------------------------------------------------------------------------------------------------


class ProductionStack:
    """vllm-project/production-stack, operator/internal/controller/loraadapter_controller.go."""

    headers = {**GO, "content_type": "application/json", "authorization": f"Bearer {KEY}"}  # on GET as well

    def __init__(self, service):
        self.service = service

    def send(self, method, path, payload=None):
        answer = ask(self.service, method, path, payload, **self.headers)
        if answer.status == 400:
            body = answer.json
            assert isinstance(body.get("message", ""), str)  # the type that Go's decoder expects
            if body.get("type") == "InvalidUserInput" and "has already been loaded" in body.get("message", ""):
                return answer
        assert answer.status == 200, answer.text
        return answer

    def registrations(self, name):
        """Return (root, created) of the adapters of this name. Base models have no parent."""
        models = self.send("GET", "/v1/models").json["data"]
        for model in models:
            assert isinstance(model["created"], int)  # an int64, and strings there
            assert all(isinstance(model[key], str) for key in ("id", "object", "owned_by", "root"))
            assert model["parent"] is None or isinstance(model["parent"], str)
        return [(model["root"], model["created"]) for model in models if model["parent"] and model["id"] == name]

    def load(self, name, path):
        self.send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload(self, name):
        self.send("POST", "/v1/unload_lora_adapter", {"lora_name": name})


def test_production_stack(service, root):
    stack = ProductionStack(service)
    assert stack.registrations("mine") == []
    assert stack.registrations("llama") == []  # the base has no parent
    stack.load("mine", str(root / "one"))
    (found,) = stack.registrations("mine")
    assert found[0] == str(root / "one")
    # A second, concurrent reconciliation takes "already loaded" for success, even if the folder is gone.
    stack.load("mine", str(root / "one"))
    (root / "one").rmdir()
    stack.load("mine", str(root / "one"))
    assert stack.registrations("mine") == [found]
    stack.unload("mine")
    assert stack.registrations("mine") == []
    for path in ("/etc", str(root / "none")):
        with pytest.raises(AssertionError, match="error"):
            stack.load("other", path)
    with pytest.raises(AssertionError, match="NotFoundError"):
        stack.unload("mine")


# --- the Gateway API inference extension, and llm-d -------------------------------------------------------------------


class Syncer:
    """kubernetes-sigs/gateway-api-inference-extension, tools/dynamic-lora-sidecar/sidecar/sidecar.py, which
    syncs a ConfigMap's adapters to the server in the same pod. It was archived in April 2026, and still runs."""

    headers = {"user_agent": "python-requests/2.32", "accept": "*/*", "authorization": f"Bearer {KEY}"}

    def __init__(self, service, default_base_model=""):
        self.service, self.base_model = service, default_base_model

    def registered(self):
        assert ask(self.service, "GET", "/health", **self.headers).status == 200
        return {model.get("id", "") for model in ask(self.service, "GET", "/v1/models", **self.headers).json["data"]}

    def post(self, path, payload):
        answer = ask(self.service, "POST", path, payload, **self.headers)
        assert answer.status < 400, answer.text  # raise_for_status

    def reconcile(self, exist, absent):
        """Load adapters that should exist, and unload those that should not. Both are {id: source}."""
        for name, source in exist.items():
            if name not in self.registered():
                payload = {"lora_name": name, "lora_path": source, "base_model_name": self.base_model}
                self.post("/v1/load_lora_adapter", payload)
        for name in absent:
            if name in self.registered():
                self.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_lora_syncer(service, engine):
    syncer = Syncer(service, "meta/Llama")
    for _ in range(2):
        syncer.reconcile({"first": "one", "second": "owner/adapter"}, {})
        assert {"first", "second"} < syncer.registered()
    syncer.reconcile({"second": "owner/adapter"}, {"first": "one"})
    assert answers(service, "second")
    assert not answers(service, "first")
    for base_model in ("", "llama", "models/base"):
        Syncer(service, base_model).reconcile({f"of {base_model}": "one"}, {})
    count = engine.calls["add"]
    with pytest.raises(AssertionError, match=r"base_model_name must be the model that is served, 'llama'"):
        Syncer(service, "other").reconcile({"mine": "one"}, {})
    assert engine.calls["add"] == count


class EndpointPicker:
    """llm-d/llm-d-router, pkg/epp/framework/plugins/datalayer/extractor/metrics/{factories,extractor,loraspec}.go, with
    the names that it has by default for the engine "vllm", and scheduling/scorer/loraaffinity/lora_affinity.go."""

    def __init__(self, service):
        answer = ask(service, "GET", "/metrics", **GO)
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


def test_special_characters_of_names_reach_the_picker(service, engine):
    names = ["a,b", 'quote"', "back\\slash", "é", "team/mine", "x=1"]
    engine.told = EngineStats(running_by_lora=dict.fromkeys(names, 1))
    picker = EndpointPicker(service)
    assert {"é", "team/mine", 'quote"', "x=1", "back\\slash"} < picker.active
    assert len(picker.active) == len(names)  # the name with a comma stays one name
    assert picker.score("a") == 0.0


# --- all controllers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", ["warming", "closing"])
def test_controllers_get_503_during_warm_up_and_shutdown(service, engine, root, condition):
    """The response has Retry-After, and no adapter changes. The pod is not ready then, so routers skip it."""
    service.state = condition
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "one"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "mine"}),
        ("GET", "/health", None),
    ):
        answer = ask(service, method, path, body, authorization=f"Bearer {KEY}")
        assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
    assert engine.calls["add"] == engine.calls["remove"] == 0
    assert EndpointPicker(service).most == 4  # metrics stay available
