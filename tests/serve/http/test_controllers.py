"""Requests of cluster controllers and routers: AIBrix, production-stack, llm-d and the Gateway API inference extension.

Each class sends the requests of one of them, after its source in August 2026, which it names: path, headers, body, the
statuses that count as success, and the fields that it reads.
"""

import json

import pytest

from jlora.serve.engine.request import EngineStats
from jlora.serve.http.service import Keys
from tests.serve.client import ask, make_service
from tests.serve.exposition import parse
from tests.serve.fake_engine import BROKEN, FakeEngine

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


@pytest.fixture(params=["open", "one key"])
def service(request, engine, root):
    """Without keys, and with the one key that a router sends for everything."""
    keys = Keys() if request.param == "open" else Keys((KEY,))
    return make_service(engine, root=root, repos=("owner/*",), keys=keys, names=("llama", "meta/Llama"))


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


class AibrixSidecar:
    """vllm-project/aibrix, python/aibrix/aibrix/openapi/engine/vllm.py, its runtime in the same pod.

    It downloads adapters itself, retries statuses from 500, and handles 404.
    """

    def __init__(self, service):
        self.service = service
        self.headers = {"authorization": f"Bearer {KEY}", "accept": "*/*", "user_agent": "python-httpx/0.28"}

    def post(self, path, body):
        answer = ask(self.service, "POST", path, body, **self.headers)
        return "retry" if answer.status >= 500 else {200: "success", 404: "NotFoundError"}.get(answer.status, "failed")

    def load(self, name, local_path):
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": local_path})

    def unload(self, name):
        return self.post("/v1/unload_lora_adapter", {"lora_name": name, "lora_int_id": None})


def test_aibrix_sidecar(service, engine, root):
    sidecar = AibrixSidecar(service)
    assert sidecar.load("mine", str(root / "one")) == "success"
    assert answers(service, "mine")
    assert sidecar.load("mine", str(root / "one")) == "failed"  # and not retried
    assert sidecar.load("other", str(root / "none")) == "NotFoundError"
    engine.broken["two"] = BROKEN
    assert sidecar.load("other", str(root / "two")) == "retry"
    assert sidecar.unload("mine") == "success"
    assert sidecar.unload("mine") == "NotFoundError"
    assert not answers(service, "mine")


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
    stack.load("mine", str(root / "one"))
    (found,) = stack.registrations("mine")
    assert found[0] == str(root / "one")
    assert stack.registrations("llama") == []  # the base has no parent
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


def test_router_of_production_stack(service, engine):
    """src/vllm_router/service_discovery.py and stats/engine_stats.py read the ids of models, and the queue."""
    engine.loras, engine.told = {}, EngineStats(running=3, waiting=2)
    models = ask(service, "GET", "/v1/models", authorization=f"Bearer {KEY}").json["data"]
    assert [model["id"] for model in models if model.get("parent") is None] == ["llama", "meta/Llama"]
    text = ask(service, "GET", "/metrics").text
    found = {name: value for family in parse(text).values() for name, _, value in family.samples}
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 2)


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


@pytest.mark.parametrize("base_model", ["", "llama", "meta/Llama", "models/base"])
def test_lora_syncer(service, base_model):
    syncer = Syncer(service, base_model)
    for _ in range(2):
        syncer.reconcile({"first": "one", "second": "owner/adapter"}, {})
        assert {"first", "second"} < syncer.registered()
    syncer.reconcile({"second": "owner/adapter"}, {"first": "one"})
    assert answers(service, "second")
    assert not answers(service, "first")


def test_syncer_cannot_load_an_adapter_of_another_model(service, engine):
    with pytest.raises(AssertionError, match=r"base_model_name must be the model that is served, 'llama'"):
        Syncer(service, "other").reconcile({"mine": "one"}, {})
    assert engine.calls["add"] == 0


class EndpointPicker:
    """llm-d/llm-d-router, pkg/epp/framework/plugins/datalayer/extractor/metrics/{factories,extractor,loraspec}.go, with
    the names that it has by default for the engine "vllm", and scheduling/scorer/loraaffinity/lora_affinity.go."""

    def __init__(self, service):
        answer = ask(service, "GET", "/metrics", **GO)
        assert answer.status == 200  # without a key
        families = parse(answer.text)
        for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            assert families[name].kind == "gauge"
            assert families[name].samples
        self.waiting_queue = int(families["vllm:num_requests_waiting"].samples[-1][2])
        self.running = int(families["vllm:num_requests_running"].samples[-1][2])
        self.cache_usage = families["vllm:kv_cache_usage_perc"].samples[-1][2]
        # Of all series the one whose value, a time, is the latest.
        labels = max(families["vllm:lora_requests_info"].samples, key=lambda sample: sample[2])[1]
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
    engine.told = EngineStats(running=5, waiting=2, cache_usage=0.25, running_by_lora={"a": 3})
    picker = EndpointPicker(service)
    assert (picker.running, picker.waiting_queue, picker.cache_usage) == (5, 2, 0.25)
    assert picker.most == service.manager.config.max_loras == 4
    assert (picker.score("a"), picker.score("b")) == (1.0, 0.8)
    engine.told = EngineStats(running_by_lora={"a": 1, "b": 1, "c": 1}, waiting_by_lora={"d": 2})
    picker = EndpointPicker(service)
    assert [picker.score(name) for name in "abde"] == [1.0, 1.0, 0.6, 0.0]


def test_endpoint_picker_before_any_request(service):
    picker = EndpointPicker(service)
    assert (picker.active, picker.waiting, picker.score("a")) == (set(), set(), 0.8)


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE a gauge\na 1",
        "a 1\n",
        "# TYPE a gauge\n# TYPE a gauge\na 1\n",
        "# TYPE a gauge\nb 1\n",
        "# TYPE a gauge\na 1\na 2\n",
        "# TYPE a gauge\na one\n",
        "# TYPE a gauge\na{b=c} 1\n",
        '# TYPE a gauge\na{b="\\x2c"} 1\n',
        '# TYPE a gauge\na{b:c="d"} 1\n',
        '# TYPE a histogram\na_bucket{le="+Inf"} 1\na_sum 1\na_count 2\n',
        '# TYPE a histogram\na_bucket{le="1.0"} 2\na_bucket{le="+Inf"} 1\na_sum 1\na_count 1\n',
    ],
)
def test_metrics_parser_is_strict(text):
    with pytest.raises((AssertionError, KeyError)):
        parse(text)


def test_special_characters_of_names_reach_the_picker(service, engine):
    names = ["a,b", 'quote"', "back\\slash", "é", "team/mine", "x=1"]
    engine.told = EngineStats(running_by_lora=dict.fromkeys(names, 1))
    picker = EndpointPicker(service)
    assert {"é", "team/mine", 'quote"', "x=1", "back\\slash"} < picker.active
    assert len(picker.active) == len(names)  # the name with a comma stays one name
    assert picker.score("a") == 0.0


def test_models_as_llm_d_reads_them(service, root):
    """pkg/epp/framework/plugins/datalayer/source/models/datasource.go reads these fields."""
    Aibrix(service).load("mine", str(root / "one"))
    body = ask(service, "GET", "/v1/models", authorization=f"Bearer {KEY}").json
    assert body["object"] == "list"
    found = [(model["id"], model["object"], model["parent"]) for model in body["data"]]
    assert found == [("llama", "model", None), ("meta/Llama", "model", None), ("mine", "model", "llama")]


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
    assert AibrixSidecar(service).load("mine", str(root / "one")) == "retry"
    assert EndpointPicker(service).most == 4  # metrics stay available


def test_replaced_adapter_stays_listed(service, engine, root):
    """vLLM's `load_inplace` keeps the name listed, with its new root."""
    stack = ProductionStack(service)
    stack.load("mine", "one")
    body = {"lora_name": "mine", "lora_path": "two", "load_inplace": True}
    answer = ask(service, "POST", "/v1/load_lora_adapter", body, **stack.headers)
    assert (answer.status, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert [path for path, _ in stack.registrations("mine")] == ["two"]
    assert engine.loras["mine"].path == str(root / "two")
