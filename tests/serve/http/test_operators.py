"""Health, metrics (read by Prometheus' own parser), the status page and the log."""

import json
import re
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jlora.config import LoRARequest
from jlora.serve.engine.request import EngineStats
from tests.serve.client import ask, load_into, make_service, post
from tests.serve.fake_engine import FakeEngine

STATS = EngineStats(
    running=3, waiting=2, running_by_lora={"sort": 2}, waiting_by_lora={"reverse": 1, "a,b": 1}, cache_usage=0.25,
    prompt_tokens=70, prefilled_tokens=40, cached_tokens=20, generated_tokens=90,
    finished={"stop": 4, "length": 1, "error": 2}, failed_steps=1,
    by_lora={"sort": 5, "reverse": 2, "": 9}, by_unloaded=6, time_to_first_token=((0.1, 1.0), (3, 2, 1), 4.5),
    inter_token_latency=((0.01,), (0, 0), 0.0), request_time_per_output_token=((0.02,), (3, 1), 0.08),
    request_seconds=((1.0,), (1, 0), 0.5),
    queue_seconds=((0.1,), (7, 1), 0.75), adapter_wait_seconds=((0.1,), (2, 1), 0.7),
)  # fmt: skip


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.told = STATS
    return engine


def scrape(service):
    answer = ask(service, "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_health_reports_the_state():
    service = make_service(state="warming")
    service.progress, service.step_started = (3, 11), time.monotonic() - 40
    answer = ask(service, "GET", "/health")
    assert (answer.status, answer.json["status"], answer.json["done"], answer.json["total"]) == (503, "warming", 3, 11)
    assert 40 <= answer.json["step_seconds"] <= 60
    assert int(answer.headers["retry-after"]) >= 1
    service.state = "serving"
    assert ask(service, "GET", "/health").status == 200
    service.engine.ready = False
    assert ask(service, "GET", "/health").json["status"] == "failed"
    service.state = "closing"
    assert ask(service, "GET", "/health").json["status"] == "closing"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", ask(service, "GET", "/version").json["version"])


CACHE = ("block_size", "enable_prefix_caching", "num_gpu_blocks")


def test_metrics_show_the_statistics(engine):
    engine.pinned = {"reverse"}
    before = time.time()
    found = scrape(make_service(engine))
    base = ("model_name", "base")
    expected = {
        ("vllm:num_requests_running", base): 3,
        ("vllm:num_requests_waiting", base): 2,
        ("vllm:kv_cache_usage_perc", base): 0.25,
        ("vllm:prompt_tokens_total", base): 70,
        ("vllm:request_success_total", ("finished_reason", "stop"), base): 4,
        # Buckets are cumulative.
        ("vllm:time_to_first_token_seconds_bucket", ("le", "0.1"), base): 3,
        ("vllm:time_to_first_token_seconds_bucket", ("le", "1.0"), base): 5,
        ("vllm:time_to_first_token_seconds_bucket", ("le", "+Inf"), base): 6,
        ("vllm:time_to_first_token_seconds_sum", base): 4.5,
        ("vllm:num_gpu_loaded_lora_adapters", base): 2,
        ("vllm:max_gpu_lora_adapters", base): 4,
        ("vllm:inter_token_latency_seconds_count", base): 0,
        ("vllm:request_time_per_output_token_seconds_bucket", ("le", "0.02"), base): 3,
        ("vllm:lora_adapter_load_seconds_bucket", ("le", "0.5"), base, ("transition", "load")): 4,
        ("vllm:lora_adapter_load_seconds_sum", base, ("transition", "activate")): 0.002,
        ("vllm:request_queue_time_seconds_bucket", ("le", "+Inf"), base): 8,
        ("jlora:adapter_wait_seconds_bucket", ("le", "0.1"), base): 2,
        ("vllm:prefix_cache_queries_total", base): 60,
        ("vllm:prefix_cache_hits_total", base): 20,
        # For routers: one block per sequence.
        ("vllm:cache_config_info", *zip(CACHE, ("128", "False", "4"), strict=True)): 1,
        ("jlora:unloaded_adapter_requests_total",): 6,
        ("jlora:open_leases",): 3,
        ("jlora:adapter_requests_total", ("adapter_name", "sort")): 5,
        **{(f"jlora:{name}_total",): n for name, n in (("slot_hits", 30), ("slot_loads", 4), ("slot_evictions", 2))},
        ("jlora:host_loads_total",): 5,
        ("jlora:failed_steps_total",): 1,
        ("jlora:leased",): 1,
        ("jlora:adapters_registered",): 2,
    }
    assert {key: found.get(key) for key in expected} == expected
    (info,) = [(dict(key[1:]), value) for key, value in found.items() if key[0] == "vllm:lora_requests_info"]
    labels = {"max_lora": "4", "running_lora_adapters": "sort", "waiting_lora_adapters": r"a\x2cb,reverse"}
    assert info[0] == labels
    assert before <= info[1] <= time.time()  # routers use the newest series


def resident(found):
    keys = [dict(key[1:]) for key in found if key[0] == "vllm:lora_adapter_loaded"]
    return {key["adapter_name"]: (key["level"], key["pinned"], key["rank"]) for key in keys}


def test_number_of_series_is_bounded():
    engine = FakeEngine([])
    service = make_service(engine)
    for i in range(3000):
        load_into(service, f"tenant-{i}", "x")
    some = FakeEngine.resident(FakeEngine(["x"]))["x"]
    slots = {f"tenant-{i}": replace(some, name=f"tenant-{i}", level="slot", slot=i) for i in range(4)}
    host = {f"tenant-{i}": replace(some, name=f"tenant-{i}", level="host", slot=None) for i in range(4, 2500)}
    cache = {**slots, **host}
    service.manager.list_adapters = lambda: cache
    engine.told = replace(STATS, by_lora={name: 1 for name in cache})
    found = scrape(service)
    assert len(found) < 1200
    assert {resident(found)[name][0] for name in slots} == {"gpu"}
    # Adapters in slots come first, although these were used least recently.
    assert {f"tenant-{i}" for i in range(4)} < resident(found).keys()
    assert len(resident(found)) == 1000
    assert found["jlora:adapters_registered",] == 3000
    answer = ask(service, "GET", "/status.json").json
    assert (len(answer["adapters"]), answer["registered"]) == (200, 3000)


HOSTILE = ['quote"} 1', "back\\slash", "line\nvllm:forged 1", "\x1b[31m<script>\u202eevil"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_escaped(engine, name, caplog):
    """Names of adapters that were added in Python, and of unknown models."""
    engine.loras = {name: LoRARequest(name, "x")}
    engine.told = replace(STATS, running_by_lora={name: 1}, by_lora={name: 1})
    service = make_service(engine)
    found = scrape(service)
    assert not any(key[0] == "vllm:forged" for key in found)
    (shown,) = resident(found)
    assert shown.isprintable()
    # Go's parser, which routers use, knows these escapes alone.
    assert not re.search(r'\\[^\\"n]', ask(service, "GET", "/metrics").text.replace("\\\\", ""))
    listed = ask(service, "GET", "/status.json")
    assert [adapter["name"] for adapter in listed.json["adapters"]] == [name]  # the page inserts it as text
    with caplog.at_level("INFO", "jlora.serve"):
        assert post(service, "/v1/completions", {"model": name, "prompt": "a"}).status == 200
        assert post(service, "/v1/completions", {"model": name + "?", "prompt": "a"}).status == 404
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert all(message.isprintable() and message.isascii() for message in messages)
    assert [json.loads(message.removeprefix("request "))["model"] for message in messages] == [name, name + "?"]


def test_each_request_writes_one_log_line(caplog):
    service = make_service()
    with caplog.at_level("INFO", "jlora.serve"):
        post(service, "/v1/completions", {"model": "sort", "prompt": "ab", "n": 2, "max_tokens": 3})
        post(service, "/v1/completions", {"model": "sort", "prompt": "ab", "stream": True})
        post(service, "/v1/completions", {"model": "sort"})
        for path in ("/health", "/metrics", "/status.json"):
            ask(service, "GET", path)
        ask(service, "X" * 50_000, "/" + "y" * 50_000)
    *lines, long = (json.loads(record.getMessage().removeprefix("request ")) for record in caplog.records)
    assert (long["method"], long["path"], long["status"]) == ("X" * 300, "/" + "y" * 299, 404)
    assert [line["status"] for line in lines] == [200, 200, 400]
    first, second, third = lines
    assert (first["model"], first["prompt_tokens"], first["tokens"]) == ("sort", 2, 6)
    assert (first["finish"], first["stream"]) == (["length", "length"], False)
    assert (second["stream"], second["tokens"]) == (True, 7)
    assert "prompt" in third["error"]
    assert all(line["method"] == "POST" and line["seconds"] >= 0 for line in lines)


def test_page_is_self_contained_under_a_strict_policy(engine):
    service = make_service(engine)
    for path in ("/", "/status"):
        answer = ask(service, "GET", path)
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    # The page loads no other resource, and its policy permits only its own script and style.
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", answer.text)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")
    assert "unsafe" not in policy
    # Names are inserted as text only.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", answer.text)


def test_status_json_has_the_fields_of_the_page(engine):
    body = ask(make_service(engine), "GET", "/status.json").json
    assert (body["model"], body["state"], body["running"], body["waiting"]) == ("base", "serving", 3, 2)
    assert body["slots"] == ["sort", "reverse", None, None]
    sort = next(adapter for adapter in body["adapters"] if adapter["name"] == "sort")
    expected = {"level": "slot", "slot": 0, "rank": 8, "requests": 5, "running": 2, "waiting": 0}
    assert sort.items() >= expected.items()
    assert body["manager"]["slot_hits"] == 30
    latency = {"first token": {"p50": 0.1, "p99": None}, "each further token": {"p50": None, "p99": None},
               "whole request": {"p50": 1.0, "p99": 1.0}, "queue": {"p50": 0.1, "p99": None},
               "queue, of adapters in no slot": {"p50": 0.1, "p99": None}, "load": {"p50": 0.5, "p99": None},
               "slot write": {"p50": 0.001, "p99": 0.001}}  # fmt: skip
    assert body["latency"] == latency
