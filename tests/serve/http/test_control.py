"""Pauses, and the configuration that trainers read, at the paths and with the fields of vLLM's server."""

import re

import pytest

from jlora.errors import LoRAError
from jlora.serve import EngineClosedError, Piece
from tests.serve.client import ask, make_service, post


@pytest.mark.parametrize("query", ["", "?mode=keep", "?mode=wait&clear_cache=false"])
def test_pause_and_resume(engine, root, query):
    service = make_service(engine, root=root)
    for _ in range(2):
        answer = ask(service, "POST", f"/pause{query}")
        assert (answer.status, answer.json) == (200, {"status": "paused"})
    assert engine.calls[query[6:10] or "abort"] == 2
    assert ask(service, "GET", "/is_paused").json == {"is_paused": True}
    health = ask(service, "GET", "/health")
    assert (health.status, health.json) == (200, {"status": "paused"})  # a probe must not end a paused server
    assert ask(service, "GET", "/status.json").json["state"] == "paused"
    assert post(service, "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "one"}).status == 200
    assert post(service, "/v1/completions", {"model": "new", "prompt": "a"}).status == 200
    assert post(service, "/v1/unload_lora_adapter", {"lora_name": "new"}).status == 200
    for _ in range(2):
        answer = ask(service, "POST", "/resume")
        assert (answer.status, answer.json) == (200, {"status": "resumed"})
    assert ask(service, "GET", "/is_paused").json == {"is_paused": False}
    assert ask(service, "GET", "/health").json == {"status": "serving"}


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [
        ("POST", "/pause?mode=stop", 400, "mode must be one of abort, wait, keep, got 'stop'"),
        ("POST", "/pause?wait_for_inflight_requests=true", 400, "wait_for_inflight_requests"),
        ("POST", "/resume?mode=keep", 400, "mode"),
        (
            "GET",
            "/server_info?config_format=text",
            400,
            "config_format is not implemented; it may be left out, or be 'json'",
        ),
        ("GET", "/pause", 405, "Method Not Allowed"),
    ],
)
def test_wrong_requests_are_refused_by_name(engine, method, path, status, word):
    answer = ask(make_service(engine), method, path)
    assert (answer.status, engine.paused) == (status, False)
    assert re.search(word, answer.error["message"])


def test_mode_in_the_body_is_refused(engine):
    """In vLLM it would be ignored, and all requests aborted."""
    answer = post(make_service(engine), "/pause", {"mode": "keep"})
    assert (answer.status, engine.paused) == (400, False)
    assert "/pause?mode=keep" in answer.error["message"]
    assert post(make_service(engine), "/pause", {}).status == 200


@pytest.mark.parametrize(("error", "status"), [(LoRAError("it was ended"), 500), (EngineClosedError("closed"), 503)])
def test_pause_that_is_not_reached_is_no_200(engine, error, status):
    engine.failing["pause"] = error
    answer = ask(make_service(engine), "POST", "/pause")
    assert (answer.status, answer.error["message"]) == (status, str(error))


def test_only_a_server_that_serves_is_paused(engine):
    service = make_service(engine, state="warming")
    for path in ("/pause", "/resume"):
        assert ask(service, "POST", path).status == 503
    engine.paused, service.state = True, "closing"
    assert ask(service, "GET", "/health").json["status"] == "closing"
    assert not engine.calls


def test_aborted_embeddings_are_an_error(engine):
    engine.embeds = True

    def aborted(prompts, **options):
        engine.script = [Piece("", (), finish_reason="abort")]
        return [engine.submit([3], None) for _ in prompts]

    engine.embed = aborted
    answer = post(make_service(engine), "/v1/embeddings", {"model": "base", "input": "a"})
    assert (answer.status, answer.error["message"]) == (503, "a pause has aborted the request; send it again")


def test_server_info_has_the_fields_that_trainers_read(engine):
    service = make_service(engine, dtype="bfloat16")
    for query in ("", "?config_format=json"):
        assert ask(service, "GET", f"/server_info{query}").json == {
            "vllm_config": {
                "model_config": {"dtype": "torch.bfloat16", "max_model_len": 128},
                "lora_config": {"max_lora_rank": 16, "max_loras": 4},
                "parallel_config": {"data_parallel_size": 1},
            }
        }
