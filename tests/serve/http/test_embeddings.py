"""Requests of `/v1/embeddings` and their responses, over an engine with known answers."""

import base64
import struct

import openai
import pytest

from tests.serve.client import make_service, on_socket, post
from tests.serve.fake_engine import FakeEngine, letters


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.embeds = True
    return engine


@pytest.fixture
def service(engine):
    return make_service(engine)


def embed(service, **body):
    return post(service, "/v1/embeddings", {"model": "sort", "input": "ba", **body})


def ids(text):
    return letters().encode(text, add_special_tokens=False).ids


def values(*numbers):
    return [struct.unpack("<f", struct.pack("<f", number))[0] for number in numbers]


def test_embedding(service, engine):
    answer = embed(service)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == {
        "object": "list",
        "model": "sort",
        "data": [{"object": "embedding", "index": 0, "embedding": values(2, 0, 0.1)}],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    assert engine.asked == [([ids("ba")], None, "sort", None)]
    (one,) = embed(service, encoding_format="base64").json["data"]
    assert list(struct.unpack("<3f", base64.b64decode(one["embedding"]))) == values(2, 0, 0.1)


@pytest.mark.parametrize(
    ("given", "prompts"), [("ba", ["ba"]), (["ba", "c"], ["ba", "c"]), ([4, 3], ["ba"]), ([[4, 3], [5]], ["ba", "c"])]
)
def test_forms_of_inputs(service, engine, given, prompts):
    answer = embed(service, model="base", input=given, dimensions=2, timeout=9, user="me")
    assert [list(prompt) for prompt in engine.asked[0][0]] == [ids(prompt) for prompt in prompts]
    assert engine.asked[0][1:] == (2, None, 9)
    assert [one["index"] for one in answer.json["data"]] == list(range(len(prompts)))
    assert answer.json["usage"]["total_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *(({"input": wrong}, "input") for wrong in ("", [], ["a", ""], [True], [-1], {})),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimension": 3}, "dimension"),
        ({"stream": True}, "stream"),
    ],
)
def test_refused_fields(service, engine, body, field):
    answer = embed(service, **body)
    assert (answer.status, answer.error["param"]) == (400, field)
    assert field in answer.error["message"]
    assert not engine.asked


def test_a_model_that_cannot(service, engine):
    message = {"model": "sort", "messages": [{"role": "user", "content": "a"}]}
    for path, body in (("completions", {"model": "sort", "prompt": "a"}), ("chat/completions", message)):
        answer = post(service, f"/v1/{path}", body)
        assert answer.status == 400
        assert answer.error["message"] == "model 'base' embeds texts (/v1/embeddings) and cannot generate"
    engine.embeds = False
    answer = embed(service)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "'base' generates text and cannot embed: its folder has no modules.json" in answer.error["message"]


def test_openai_client(service, engine):
    with on_socket(service) as (host, port):
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0)
        with client:
            for options in ({}, {"encoding_format": "float"}, {"dimensions": 3}):
                answer = client.embeddings.create(model="sort", input=["ba", "c"], **options)
                assert [one.embedding for one in answer.data] == [values(2, 0, 0.1), values(1, 1, 0.1)]
