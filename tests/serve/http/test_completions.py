"""Responses of completions and chats, whole and streamed, over an engine with known answers."""

from types import SimpleNamespace

import pytest

from jlora.errors import (
    AdapterAccessError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoRAError,
    LoRAUsageError,
    NoFreeSlotError,
)
from jlora.serve.engine.request import EngineClosedError, Piece, RequestTimeoutError, SamplingParams, TokenLogprob
from jlora.serve.http.body import Limits
from jlora.serve.http.protocol import read_completion
from jlora.serve.http.responses import Choice, ResponseWriter
from jlora.serve.http.template import ChatTemplate
from tests.serve.client import make_service, post
from tests.serve.fake_engine import BUSY, letters

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def service(engine):
    return make_service(engine, chat=ChatTemplate(TEMPLATE, {"bos_token": "<s>"}))


def ids(text):
    return letters().encode(text, add_special_tokens=False).ids


def complete(service, **body):
    return post(service, "/v1/completions", {"model": "sort", "prompt": "ba=", **body})


def usage(prompt, completion, cached=0):
    """Return the token counts of a response in OpenAI's form."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def chat(service, **body):
    return post(
        service, "/v1/chat/completions", {"model": "sort", "messages": [{"role": "user", "content": "hi"}], **body}
    )


def test_completion(service, engine):
    answer = complete(service)
    body = answer.json
    assert answer.status == 200
    assert (body.pop("id")[:5], type(body.pop("created"))) == ("cmpl-", int)
    assert body == {
        "object": "text_completion",
        "model": "sort",
        "system_fingerprint": "model=base&adapter=sort",
        "choices": [{"index": 0, "text": "sort|ba=", "logprobs": None, "finish_reason": "stop"}],
        "usage": usage(3, 8),
    }
    (request,) = engine.generations
    assert (request.prompt, request.lora, request.timeout) == (ids("ba="), "sort", None)
    assert engine.encoded == [("ba=", True)]
    assert request.params == SamplingParams(max_tokens=16)
    assert not request.cancelled


def test_chat(service, engine):
    answer = chat(service, max_completion_tokens=4)
    body = answer.json
    assert answer.status == 200
    assert (body.pop("id")[:9], type(body.pop("created"))) == ("chatcmpl-", int)
    message = {"role": "assistant", "content": "sort", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": "sort",
        "system_fingerprint": "model=base&adapter=sort",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": usage(11, 4),
    }
    (request,) = engine.generations
    # The template writes <s>, and the tokenizer adds no second one.
    assert engine.encoded == [("<s>user:hi|a:", False)]
    assert request.prompt == ids("<s>user:hi|a:")
    assert request.prompt[0] == 0
    assert request.params == SamplingParams(max_tokens=4)


def test_sampling_fields_reach_the_engine(service, engine):
    given = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -3, "ignore_eos": True}
    more = {"stop": ["x", "yz"], "stop_token_ids": [4, 5], "logprobs": 2}
    assert complete(service, **given, **more, timeout=2.5).status == 200
    (request,) = engine.generations
    lists = {"stop": ("x", "yz"), "stop_token_ids": (4, 5), "logprobs": 2}
    assert request.params == SamplingParams(**{**given, **lists})
    assert request.timeout == 2.5
    # Values that clients send by default, and an integer written as a number with a point.
    given = {"max_tokens": 5.0, "temperature": 0, "top_p": 1, "top_k": -1, "stop": "x", "n": None, "echo": False}
    more = {"frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": None, "user": "me", "store": True}
    assert complete(service, **given, **more, model="alias").status == 200
    assert engine.generations[1].params == SamplingParams(max_tokens=5, temperature=0.0, stop=("x",))
    assert engine.generations[1].lora is None
    assert chat(service).status == 200
    assert engine.generations[2].params.max_tokens is None


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("ba=", ["ba="]), (["ba=", "c="], ["ba=", "c="]), ([4, 3], ["ba"]), ([[4, 3], [5]], ["ba", "c"])],
)
def test_prompts_may_be_texts_or_tokens(service, engine, given, prompts):
    body = complete(service, prompt=given, n=2).json
    assert [list(one.prompt) for one in engine.generations] == [ids(prompt) for prompt in prompts for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(prompts)))
    assert [choice["text"] for choice in body["choices"]] == [f"sort|{one}" for one in prompts for _ in range(2)]
    # A prompt is counted and tokenized once, independent of n.
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == 2 * sum(len(f"sort|{one}") for one in prompts)
    assert engine.encoded == ([(one, True) for one in prompts] if prompts[0] == "ba=" else [])


def test_each_answer_of_a_prompt_has_its_own_seed(service, engine):
    complete(service, n=3, seed=2**63 - 2)
    complete(service, n=2)
    assert [one.params.seed for one in engine.generations] == [2**63 - 2, 2**63 - 1, -(2**63), None, None]


def test_token_ids(service, engine):
    (first, second) = complete(service, prompt=["ba", "c"], return_token_ids=True).json["choices"]
    assert (first["prompt_token_ids"], first["token_ids"]) == (ids("ba"), ids("sort|ba"))
    assert (second["prompt_token_ids"], second["token_ids"]) == (ids("c"), ids("sort|c"))
    body = chat(service, n=2, return_token_ids=True).json
    assert body["prompt_token_ids"] == list(engine.generations[-1].prompt)
    answers = [[token for event in one.events for token in event.tokens] for one in engine.generations[-2:]]
    assert [choice["token_ids"] for choice in body["choices"]] == answers
    assert not {"prompt_token_ids", "token_ids"} & complete(service).json["choices"][0].keys()


def test_token_ids_of_streams(service, engine):
    events = complete(service, prompt="ba", stream=True, return_token_ids=True).events
    choices = [event["choices"][0] for event in events]
    assert [choice.get("prompt_token_ids") for choice in choices] == [ids("ba"), *[None] * (len(choices) - 1)]
    assert [token for choice in choices for token in choice["token_ids"]] == ids("sort|ba")
    events = chat(service, stream=True, return_token_ids=True).events
    prompt = list(engine.generations[-1].prompt)
    assert [event.get("prompt_token_ids") for event in events] == [prompt, *[None] * (len(events) - 1)]
    answer = [token for event in engine.generations[-1].events for token in event.tokens]
    assert [token for event in events for token in event["choices"][0].get("token_ids", ())] == answer


@pytest.mark.parametrize("token_ids", [True, False])
def test_a_token_without_text_is_an_event_if_ids_are_requested(service, token_ids):
    body = {"model": "sort", "prompt": "a", "return_token_ids": token_ids}
    writer = ResponseWriter(read_completion(body, Limits()), service.texts, "")
    assert bool(writer.events(0, Choice([3]), Piece("", (4,)))) == token_ids


def test_tokens_as_token_ids(service):
    found = complete(service, logprobs=1, max_tokens=1, return_tokens_as_token_ids=True).json["choices"][0]["logprobs"]
    own = f"token_id:{ids('s')[0]}"
    assert (found["tokens"], found["top_logprobs"]) == ([own], [{"token_id:3": -1.5, own: -0.25}])
    asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    one = chat(service, max_tokens=1, **asked).json["choices"][0]["logprobs"]["content"][0]
    assert one["token"].startswith("token_id:")
    assert one["top_logprobs"][0]["token"] == "token_id:3"


def test_logprobs_of_completions(service):
    found = complete(service, logprobs=2, max_tokens=2).json["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["s", "o"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"a": -1.5, "b": -3.0, "s": -0.25}, {"a": -1.5, "b": -3.0, "o": -0.25}],
        "text_offset": [0, 1],
    }
    assert complete(service, logprobs=0, max_tokens=1).json["choices"][0]["logprobs"]["top_logprobs"] == [{"s": -0.25}]


def test_logprobs_of_chats(service, engine):
    found = chat(service, logprobs=True, top_logprobs=1, max_tokens=1).json["choices"][0]["logprobs"]
    top = [{"token": "a", "logprob": -1.5, "bytes": [97]}]
    assert found == {
        "content": [{"token": "s", "logprob": -0.25, "bytes": [115], "top_logprobs": top}],
        "refusal": None,
    }
    found = chat(service, logprobs=True, max_tokens=1).json["choices"][0]["logprobs"]
    assert found["content"][0]["top_logprobs"] == []
    assert [one.params.logprobs for one in engine.generations] == [1, 0]
    assert chat(service, logprobs=False).json["choices"][0]["logprobs"] is None


def test_text_offsets_come_from_the_engine(service, engine):
    """The first token here is half a character, so offsets do not follow from single tokens."""
    engine.script = [
        Piece("", (4,), (TokenLogprob(4, -1.0),)),
        Piece("é", (5,), (TokenLogprob(5, -1.0),)),
        Piece("the", (6,), (TokenLogprob(6, -1.0, (), 1),), "stop"),
    ]
    for stream in (False, True):
        answer = complete(service, logprobs=0, stream=stream)
        found = [event["choices"][0]["logprobs"] for event in (answer.events if stream else [answer.json])]
        assert [offset for one in found for offset in one["text_offset"]] == [0, 0, 1]


@pytest.mark.parametrize("given", ["ba", ids("ba")])
def test_echo(service, given):
    found = complete(service, prompt=given, echo=True, logprobs=1, max_tokens=1).json["choices"][0]
    assert found["text"] == "bas"
    assert found["logprobs"] == {
        "tokens": ["b", "a", "s"],
        "token_logprobs": [None, -0.5, -0.25],
        "top_logprobs": [None, {"a": -0.5}, {"a": -1.5, "s": -0.25}],
        "text_offset": [0, 1, 2],
    }
    assert complete(service, prompt=given, echo=True, n=2, max_tokens=1).json["choices"][1]["text"] == "bas"


def test_echo_without_a_completion(service):
    body = complete(service, prompt="ba", echo=True, logprobs=0, max_tokens=0).json
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("ba", 0)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5]
    for fields in ({"echo": True}, {"logprobs": 1}):  # no log probabilities of the prompt
        assert complete(service, max_tokens=0, **fields).error["param"] == "max_tokens"


def test_echo_in_streams(service):
    events = complete(service, prompt=["ba", "c"], echo=True, logprobs=1, stream=True).events
    for index, prompt in enumerate(["ba", "c"]):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == f"{prompt}sort|{prompt}"
        reports = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [token for one in reports for token in one["tokens"]] == [*prompt, *f"sort|{prompt}"]
        offsets = [offset for one in reports for offset in one["text_offset"]]
        assert offsets == list(range(len(f"{prompt}sort|{prompt}")))


def test_echo_with_token_ids_has_those_of_the_prompt_in_place_of_its_text(service):
    found = complete(service, prompt="ba", echo=True, logprobs=0, max_tokens=1, return_token_ids=True).json["choices"][
        0
    ]
    assert (found["text"], found["token_ids"], found["prompt_token_ids"]) == ("s", ids("s"), ids("ba"))
    assert found["logprobs"]["tokens"] == ["b", "a", "s"]


def test_prompt_logprobs(service, engine):
    want = [None, {str(ids("a")[0]): {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
    body = complete(service, prompt="ba", prompt_logprobs=1).json
    assert body["choices"][0]["prompt_logprobs"] == want
    assert body["choices"][0]["logprobs"] is None
    assert engine.generations[-1].params.prompt_logprobs == 1
    found = chat(service, prompt_logprobs=0).json
    assert len(found["prompt_logprobs"]) == len(engine.generations[-1].prompt)
    for one in (complete(service), chat(service)):
        assert "prompt_logprobs" not in {**one.json, **one.json["choices"][0]}
    for ask in (complete, chat):
        assert ask(service, prompt_logprobs=1, stream=True).error["param"] == "prompt_logprobs"
    assert chat(service, echo=True).error["param"] == "echo"


def test_infinite_and_nan_logprobs_are_finite_in_json(service, engine):
    infinite = TokenLogprob(3, float("-inf"), ((4, float("nan")),))
    engine.script = [Piece("a", (3,), (infinite,), "stop")]
    found = complete(service, logprobs=1).json["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-9999.0]
    assert found["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]


def test_stream_of_completions(service):
    answer = complete(service, stream=True, n=2, stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    *events, last = answer.events
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert all(len(event["choices"]) == 1 and event["usage"] is None for event in events)
    for index in range(2):
        of_one = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in of_one) == "sort|ba="
        assert [choice["finish_reason"] for choice in of_one] == [None] * (len(of_one) - 1) + ["stop"]
    assert last["choices"] == []
    assert last["usage"] == usage(3, 16)
    assert all("usage" not in event for event in complete(service, stream=True).events)


def test_each_event_has_the_counts_so_far(service, engine):
    """As in vLLM: those of its own completion, and only beside include_usage. The last has each prompt once."""
    engine.cached = 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = complete(service, stream=True, prompt=["ba=", "c"], n=2, stream_options=options).events
    tokens = dict.fromkeys(range(4), 0)
    for event in events:
        (choice,) = event["choices"]
        index = choice["index"]
        tokens[index] += len(choice["text"])  # a token is a letter
        prompt = 3 if index < 2 else 1
        assert event["usage"] == usage(prompt, tokens[index], 1)
    assert tokens == {0: 8, 1: 8, 2: 6, 3: 6}
    assert last["usage"] == usage(4, 28, 2)
    events = chat(service, stream=True, max_tokens=6, stream_options=options).events
    assert {event["usage"]["prompt_tokens"] for event in events} == {11}
    events = complete(service, stream=True, stream_options={"continuous_usage_stats": True}).events
    assert all("usage" not in event for event in events)


def test_parts_with_cache_control(service, engine):
    """Clients mark prefixes to keep. Here they are found without marks."""
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert chat(service, messages=[{"role": "user", "content": parts}]).status == 200
    assert engine.encoded == [("<s>user:a\nb|a:", False)]
    parts[0]["cached"] = True
    answer = chat(service, messages=[{"role": "user", "content": parts}])
    assert (answer.status, answer.error["param"]) == (400, "messages[0].content[0]")


def test_stream_of_a_chat(service):
    events = chat(service, stream=True, max_tokens=6).events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    first, *rest = [event["choices"][0] for event in events]
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    assert "".join(choice["delta"].get("content", "") for choice in rest) == "sort|<"
    assert rest[-1]["finish_reason"] == "length"


ERRORS = [
    (BUSY, 429, "TooManyRequestsError", "3"),
    (EngineClosedError("closed"), 503, "ServiceUnavailableError", "1"),
    (RequestTimeoutError("too long"), 504, "TimeoutError", None),
    (AdapterUnavailableError("its folder is gone"), 503, "ServiceUnavailableError", "1"),
    (AdapterNotFoundError("gone"), 404, "NotFoundError", None),
    (AdapterAccessError("its repository is gated"), 403, "PermissionDeniedError", None),
    (AdapterMismatchError("its rank is 64"), 400, "BadRequestError", None),
    (NoFreeSlotError("all are pinned"), 503, "ServiceUnavailableError", "1"),
    (LoRAUsageError("the prompt is too long: 200 of 128"), 400, "BadRequestError", None),
    (LoRAError("the step failed"), 500, "InternalServerError", None),
    (RuntimeError("a secret of the server's"), 500, "InternalServerError", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "retry"), ERRORS)
def test_failed_request_gets_the_status_of_its_error(service, engine, error, status, kind, retry):
    for stream in (False, True):
        engine.refuse, engine.script = error, None
        answer = complete(service, stream=stream)
        assert (answer.status, answer.error["type"], answer.error["code"]) == (status, kind, status)
        assert answer.headers.get("retry-after") == retry
        assert "secret" not in answer.text
        engine.refuse, engine.script = None, [error]
        answer = complete(service, stream=stream)
        assert (answer.status, answer.error["type"]) == (status, kind)
        assert "secret" not in answer.text


def script_of_each(engine, *scripts):
    """Give each answer of the next request one of these event lists, complete from the start."""
    submit, engine.hold = engine.submit, True

    def scripted(*args, **options):
        generation = submit(*args, **options)
        generation.events = list(scripts[len(engine.generations) - 1])
        return generation

    engine.submit = scripted


def test_pieces_before_an_error_are_streamed(service, engine):
    failed = LoRAError("the step failed")
    script_of_each(engine, [Piece("a", (3,)), Piece("b", (4,)), failed], [Piece("c", (5,)), Piece("d", (6,))])
    answer = complete(service, n=2, stream=True)
    *events, last = answer.events
    choices = [event["choices"][0] for event in events]
    assert (answer.status, [(choice["index"], choice["text"]) for choice in choices]) == (200, [(0, "ab"), (1, "cd")])
    assert last["error"]["message"] == str(failed)
    assert all(generation.cancelled for generation in engine.generations)


def test_chats_that_cannot_be_tokenized_are_refused(engine):
    refusing = ChatTemplate("{{ raise_exception('only users may speak') }}")
    for template, words in ((None, "no chat template"), (refusing, "only users may speak")):
        answer = chat(make_service(engine, chat=template))
        assert (answer.status, words in answer.error["message"]) == (400, True)
    assert engine.generations == []


def test_text_too_long_for_the_context_is_not_tokenized(service, engine):
    """The context has 128 positions, and the longest token four characters (</s>)."""
    long = "a" * (128 * 4 + 1)
    for answer in (complete(service, prompt=["a", long]), chat(service, messages=[{"role": "user", "content": long}])):
        assert (answer.status, "128 tokens" in answer.error["message"]) == (400, True)
    assert engine.encoded == [("a", True)]
    assert engine.generations == []


def test_fingerprint_names_model_adapter_version_and_digest(engine):
    service = make_service(engine, names=("mödel/8b", "alias"), chat=ChatTemplate(TEMPLATE, {"bos_token": "<s>"}))
    served = SimpleNamespace(name="sort", version=7, fingerprint="0123456789abcdef" * 4)
    submit = engine.submit

    def begun(*args, **options):
        generation = submit(*args, **options)
        generation.handle = served if options["lora"] else None
        return generation

    engine.submit = begun
    of_sort = "model=m%C3%B6del/8b&adapter=sort&version=7&digest=0123456789abcdef"
    for name, expected in (("sort", of_sort), ("alias", "model=m%C3%B6del/8b")):
        for ask_for in (complete, chat):
            whole, stream = ask_for(service, model=name), ask_for(service, model=name, stream=True)
            assert [one.headers["x-system-fingerprint"] for one in (whole, stream)] == [expected] * 2
            assert {one["system_fingerprint"] for one in (whole.json, *stream.events)} == {expected}
    served.fingerprint = None
    assert complete(service).json["system_fingerprint"] == "model=m%C3%B6del/8b&adapter=sort&version=7&digest="
