"""Refused fields and bodies: each error names its field, and no JSON makes the server fail."""

import asyncio
import gzip
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.serve.http.app import build_app
from jlora.serve.http.body import Limits
from jlora.serve.http.template import ChatTemplate
from tests.serve.client import ask, make_service, post
from tests.serve.fake_engine import FakeEngine

COMPLETION = {"model": "sort", "prompt": "ba="}
CHAT = {"model": "sort", "messages": [{"role": "user", "content": "hi"}]}
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def service():
    return make_service(FakeEngine(), chat=TEMPLATE, root=None)


WRONG = [
    ("model", None),
    ("n", 0),
    ("n", 129),
    ("max_tokens", 0),
    ("temperature", -0.1),
    ("temperature", 1e999),
    ("top_p", 0),
    ("top_k", -2),
    ("seed", 2**63),
    ("stop", ""),
    ("stop", ["x"] * 33),
    ("stop_token_ids", [-1]),
    ("ignore_eos", 1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),  # without stream
    ("timeout", 0),
    ("prompt_logprobs", 21),
    # not implemented
    ("frequency_penalty", 0.5),
    ("response_format", {"type": "json_object"}),
    # unknown
    ("temprature", 0),
    ("lora", "sort"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_error_names_the_wrong_field(service, path):
    before = len(service.engine.generations)
    for name, value in WRONG:
        body = {**(COMPLETION if path == "/v1/completions" else CHAT), name: value}
        answer = post(service, path, json.dumps(body).replace("Infinity", "1e999").encode())
        assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "BadRequestError", name)
        assert name in answer.error["message"]
    assert len(service.engine.generations) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt", value) for value in (None, "", [], [""], ["a", 3], [3, "a"], [[]], [3, [4]], [-1], [1.0], {}, [True])]
    + [
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", 1),
        ("suffix", "x"),
        ("best_of", 3),
        ("messages", []),
        ("tools", []),
    ],
)
def test_wrong_field_of_completions_is_refused(service, name, value):
    answer = post(service, "/v1/completions", {**COMPLETION, name: value})
    assert (answer.status, answer.error["param"]) == (400, name)


def message(**fields):
    return [{"role": "user", "content": "hi", **fields}]


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        *[("messages", value, "messages") for value in (None, [], "hi", {})],
        ("messages", ["hi"], "messages[0]"),
        ("messages", message(role="robot"), "messages[0].role"),
        *[("messages", message(content=value), "messages[0].content") for value in (None, 3, [], {"text": "hi"})],
        ("messages", message(content=[{"type": "image_url", "image_url": "x"}]), "messages[0].content[0]"),
        ("messages", message(content=[{"type": "image", "text": "x"}]), "messages[0].content"),
        ("messages", message(tool_calls=[{"id": "x"}]), "messages[0].tool_calls"),
        ("logprobs", 3, "logprobs"),
        ("top_logprobs", 3, "top_logprobs"),
        ("tools", [{"type": "function"}], "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("chat_template", "{{ 7 * 7 }}", "chat_template"),
        ("chat_template_kwargs", [], "chat_template_kwargs"),
        ("chat_template_kwargs", {"thinking": True, "messages": []}, "chat_template_kwargs.messages"),
        ("chat_template_kwargs", {"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
        ("chat_template_kwargs", {"continue_final_message": 1}, "chat_template_kwargs.continue_final_message"),
        ("prompt", "x", "prompt"),
    ],
)
def test_wrong_field_of_chats_is_refused(service, name, value, param):
    answer = post(service, "/v1/chat/completions", {**CHAT, name: value})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_fields_that_exclude_each_other_are_refused(service):
    chat, stream = "/v1/chat/completions", {"stream": True}
    for path, body, param in (
        (chat, {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ("/v1/completions", {**COMPLETION, "prompt": ["a"] * 65, "n": 2}, "n"),
        ("/v1/completions", {**COMPLETION, "prompt": ["a"] * 129}, "prompt"),
        ("/v1/completions", {**COMPLETION, **stream, "stream_options": {"include_usage": 1}}, "include_usage"),
        ("/v1/completions", {**COMPLETION, **stream, "stream_options": {"x": 1}}, "x"),
    ):
        answer = post(service, path, body)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert post(service, chat, {**CHAT, "max_tokens": 3, "max_completion_tokens": 3}).status == 200
    assert post(service, "/v1/completions", {**COMPLETION, "prompt": ["a"] * 64, "n": 2}).status == 200


def test_messages_that_the_openai_client_sends_back_are_accepted(service):
    message_back = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [*message(name="me"), message_back, {"role": "user", "content": parts}]
    answer = post(service, "/v1/chat/completions", {**CHAT, "messages": messages, "max_tokens": 100})
    assert answer.json["choices"][0]["message"]["content"] == "sort|hiyesone\ntwo"


def test_malformed_body_is_refused(service):
    for body in (
        *(b"", b"{", b'{"model": "\xff"}', b"[]", b'{"model": "sort", "model": "base", "prompt": "a"}'),
        *(b'{"model": "sort", "prompt": "a", "temperature": NaN}', b'{"model": "sort", "prompt": "\\ud800"}'),
        *(b'{"model":' + b"[" * 100_000, b'{"model": "sort", "prompt": "a", "n": ' + b"1" * 10_000 + b"}"),
    ):
        answer = post(service, "/v1/completions", body)
        assert (answer.status, answer.error["type"]) == (400, "BadRequestError"), body[:60]


def test_an_encoded_body_is_refused_by_name(service):
    body = gzip.compress(json.dumps(COMPLETION).encode())
    answer = post(service, "/v1/completions", body, content_encoding="gzip")
    assert (answer.status, "the content encoding 'gzip' is not implemented" in answer.error["message"]) == (400, True)
    assert post(service, "/v1/completions", COMPLETION, content_encoding="identity").status == 200


def test_content_type_must_be_json(service):
    """Browsers send forms and plain text to other origins without a preflight request, but not JSON."""
    for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = post(service, "/v1/completions", COMPLETION, content_type=media)
        assert answer.status == 400
        assert "application/json" in answer.error["message"]
    assert post(service, "/v1/completions", COMPLETION, content_type="Application/JSON; charset=utf-8").status == 200


def test_body_over_the_limit_is_refused():
    service = make_service(limits=Limits(body_bytes=1000))
    padded = {**COMPLETION, "user": "x" * 1000}
    answer = post(service, "/v1/completions", padded)
    assert (answer.status, answer.error["type"]) == (413, "RequestTooLargeError")
    assert answer.headers["connection"] == "close"
    assert service.engine.generations == []
    # A body without its length, and bodies with a wrong one.
    assert post(service, "/v1/completions", padded, transfer_encoding="chunked", content_length="0").status == 413
    assert post(service, "/v1/completions", COMPLETION, content_length="1" * 5000).status == 413
    assert post(service, "/v1/completions", COMPLETION, content_length="-5").status == 413
    assert post(service, "/v1/completions", COMPLETION).status == 200


class CountedBody(httpx.AsyncByteStream):
    """A body of 1 GiB, in parts of 1 MiB that are counted when they are read."""

    def __init__(self):
        self.parts = 0

    async def __aiter__(self):
        while self.parts < 1024:
            self.parts += 1
            yield b" " * 2**20


@pytest.mark.parametrize(
    ("header", "parts"), [({"content-length": str(2**30)}, 1), ({"transfer-encoding": "chunked"}, 9)]
)
def test_oversized_body_is_read_no_further_than_its_limit(header, parts):
    """A chunked body is read until it exceeds the limit of 8 MiB; one with its length at most to its first part."""
    body, app = CountedBody(), build_app(make_service())

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers = {"content-type": "application/json", **header}
            return await client.post("/v1/completions", content=body, headers=headers)

    assert asyncio.run(send()).status_code == 413
    assert body.parts <= parts


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
FIELDS = sorted({name for name, _ in WRONG} | {"prompt", "messages", "logprobs", "tools", "chat_template_kwargs"})


@given(
    path=st.sampled_from(
        [f"/v1/{path}" for path in ("completions", "chat/completions", "load_lora_adapter", "unload_lora_adapter")]
    ),
    start=st.sampled_from([{}, COMPLETION, CHAT, {"lora_name": "x", "lora_path": "y"}]),
    changed=st.dictionaries(st.sampled_from([*FIELDS, "lora_name", "lora_path", "load_inplace"]) | st.text(), JSON)
    | JSON,
)
def test_any_json_gets_a_response(tmp_path_factory, path, start, changed):
    service = make_service(FakeEngine(), chat=TEMPLATE, root=tmp_path_factory.getbasetemp())
    try:
        body = json.dumps({**start, **changed} if isinstance(changed, dict) else changed).encode()
        answer = post(service, path, body)
        assert answer.status in (200, 400, 404)
        if answer.status != 200:
            assert answer.error.keys() == {"message", "type", "param", "code"}
    finally:
        service.close()


def test_unknown_paths_and_methods_are_refused(service):
    answer = ask(service, "GET", "/v1/nothing")
    assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    answer = ask(service, "GET", "/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert ask(service, "POST", "/v1/completions//", COMPLETION).status == 404
