"""Both APIs' answers, whole and streamed, against an engine whose answers are known."""

import pytest

from jlora.errors import AdapterMismatchError, AdapterNotFoundError, LoRAError, LoRAUsageError, NoFreeSlotError
from jlora.serve.engine.request import EngineClosedError, Piece, RequestTimeoutError, SamplingParams, TokenLogprob
from jlora.serve.http.template import ChatTemplate
from tests.serve.client import make_service, post
from tests.serve.fake_engine import BUSY, FakeEngine, letters

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def service(engine):
    return make_service(engine, chat=ChatTemplate(TEMPLATE, {"bos_token": "<s>"}))


def ids(text):
    return letters().encode(text, add_special_tokens=False).ids


def complete(service, **body):
    return post(service, "/v1/completions", {"model": "sort", "prompt": "ba=", **body})


def chat(service, **body):
    return post(
        service, "/v1/chat/completions", {"model": "sort", "messages": [{"role": "user", "content": "hi"}], **body}
    )


# --- whole answers ----------------------------------------------------------------------------------------------------


def test_a_completion(service, engine):
    answer = complete(service)
    body = answer.json
    assert answer.status == 200
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "sort",
        "choices": [{"index": 0, "text": "sort|ba=", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11},
    }
    (asked,) = engine.generations
    assert (asked.prompt, asked.lora, asked.timeout) == (ids("ba="), "sort", None)
    assert engine.encoded == [("ba=", True)]
    assert asked.params == SamplingParams(max_tokens=16)
    assert not asked.cancelled


def test_a_chat(service, engine):
    answer = chat(service, max_completion_tokens=4)
    body = answer.json
    assert answer.status == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    message = {"role": "assistant", "content": "sort", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "model": "sort",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15},
    }
    (asked,) = engine.generations
    # The template's own <s>, once: nothing is added to it.
    assert engine.encoded == [("<s>user:hi|a:", False)]
    assert asked.prompt == ids("<s>user:hi|a:")
    assert asked.prompt[0] == 0
    assert asked.params == SamplingParams(max_tokens=4)


def test_a_chat_may_be_as_long_as_there_is_room(service, engine):
    assert chat(service).status == 200
    assert engine.generations[0].params.max_tokens is None


@pytest.mark.parametrize(("model", "lora"), [("base", None), ("alias", None), ("sort", "sort"), ("reverse", "reverse")])
def test_the_model_is_the_adapter(service, engine, model, lora):
    assert complete(service, model=model).json["choices"][0]["text"] == f"{lora or 'base'}|ba="
    assert engine.generations[0].lora == lora


def test_every_field_of_sampling_reaches_the_engine(service, engine):
    given = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -3, "ignore_eos": True}
    more = {"stop": ["x", "yz"], "stop_token_ids": [4, 5], "logprobs": 2}
    assert complete(service, **given, **more, timeout=2.5).status == 200
    (asked,) = engine.generations
    lists = {"stop": ("x", "yz"), "stop_token_ids": (4, 5), "logprobs": 2}
    assert asked.params == SamplingParams(**{**given, **lists})
    assert asked.timeout == 2.5


def test_values_that_mean_the_default(service, engine):
    given = {"max_tokens": 5.0, "temperature": 0, "top_p": 1, "top_k": -1, "stop": "x", "n": None, "echo": False}
    more = {"frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": None, "user": "me", "store": True}
    assert complete(service, **given, **more).status == 200
    assert engine.generations[0].params == SamplingParams(max_tokens=5, temperature=0.0, stop=("x",))


PROMPTS = {
    "text": ("ba=", ["ba="]),
    "texts": (["ba=", "c="], ["ba=", "c="]),
    "tokens": ([4, 3], ["ba"]),
    "lists of tokens": ([[4, 3], [5]], ["ba", "c"]),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_four_kinds_of_prompts(service, engine, kind):
    given, prompts = PROMPTS[kind]
    body = complete(service, prompt=given, n=2).json
    assert [list(one.prompt) for one in engine.generations] == [ids(prompt) for prompt in prompts for _ in range(2)]
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(prompts)))
    assert [choice["text"] for choice in body["choices"]] == [f"sort|{one}" for one in prompts for _ in range(2)]
    # Each prompt is counted once, and each text tokenized once, however many answers it gets.
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["completion_tokens"] == 2 * sum(len(f"sort|{one}") for one in prompts)
    assert engine.encoded == ([(one, True) for one in prompts] if "text" in kind else [])


def test_answers_of_one_prompt_have_seeds_of_their_own(service, engine):
    assert complete(service, n=3, seed=2**63 - 2).status == 200
    assert [one.params.seed for one in engine.generations] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert complete(service, n=2).status == 200
    assert [one.params.seed for one in engine.generations[3:]] == [None, None]


# --- log probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_of_completions(service):
    told = complete(service, logprobs=2, max_tokens=2).json["choices"][0]["logprobs"]
    assert told == {
        "tokens": ["s", "o"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"a": -1.5, "b": -3.0, "s": -0.25}, {"a": -1.5, "b": -3.0, "o": -0.25}],
        "text_offset": [0, 1],
    }
    assert complete(service, logprobs=0, max_tokens=1).json["choices"][0]["logprobs"]["top_logprobs"] == [{"s": -0.25}]


def test_logprobs_of_chats(service, engine):
    told = chat(service, logprobs=True, top_logprobs=1, max_tokens=1).json["choices"][0]["logprobs"]
    top = [{"token": "a", "logprob": -1.5, "bytes": [97]}]
    assert told == {
        "content": [{"token": "s", "logprob": -0.25, "bytes": [115], "top_logprobs": top}],
        "refusal": None,
    }
    told = chat(service, logprobs=True, max_tokens=1).json["choices"][0]["logprobs"]
    assert told["content"][0]["top_logprobs"] == []
    assert [one.params.logprobs for one in engine.generations] == [1, 0]
    assert chat(service, logprobs=False).json["choices"][0]["logprobs"] is None


def test_text_offsets_are_those_of_the_engine(service, engine):
    """Which knows what becomes of a token among others: the first one here is half a character."""
    engine.script = [
        Piece("", (4,), (TokenLogprob(4, -1.0),)),
        Piece("é", (5,), (TokenLogprob(5, -1.0),)),
        Piece("the", (6,), (TokenLogprob(6, -1.0, (), 1),), "stop"),
    ]
    for stream in (False, True):
        answer = complete(service, logprobs=0, stream=stream)
        told = [event["choices"][0]["logprobs"] for event in (answer.events if stream else [answer.json])]
        assert [offset for one in told for offset in one["text_offset"]] == [0, 0, 1]


def test_logprobs_in_streams_go_on_where_they_were(service):
    events = complete(service, logprobs=1, max_tokens=3, stream=True).events
    told = [event["choices"][0]["logprobs"] for event in events]
    assert [offset for one in told for offset in one["text_offset"]] == [0, 1, 2]
    assert [token for one in told for token in one["tokens"]] == ["s", "o", "r"]


def test_what_has_no_number_has_one_in_json(service, engine):
    infinite = TokenLogprob(3, float("-inf"), ((4, float("nan")),))
    engine.script = [Piece("a", (3,), (infinite,), "stop")]
    told = complete(service, logprobs=1).json["choices"][0]["logprobs"]
    assert told["token_logprobs"] == [-9999.0]
    assert told["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_of_completions(service, n):
    answer = complete(service, stream=True, n=n)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.events
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)
    for index in range(n):
        of_one = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in of_one) == "sort|ba="
        assert [choice["finish_reason"] for choice in of_one] == [None] * (len(of_one) - 1) + ["stop"]


def test_a_stream_of_a_chat(service):
    events = chat(service, stream=True, max_tokens=6).events
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    first, *rest = [event["choices"][0] for event in events]
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    assert "".join(choice["delta"].get("content", "") for choice in rest) == "sort|<"
    assert rest[-1]["finish_reason"] == "length"


def test_usage_comes_last_if_it_is_asked_for(service):
    *events, last = complete(service, stream=True, n=2, stream_options={"include_usage": True}).events
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}


def test_pieces_without_text_say_nothing(service, engine):
    engine.script = [Piece("", (3,)), Piece("é", (4, 5)), Piece("", (1,), (), "stop")]
    body = complete(service).json
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("é", 4)
    events = chat(service, stream=True).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "é"


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS = [
    (BUSY, 429, "TooManyRequestsError", "3"),
    (EngineClosedError("closed"), 503, "ServiceUnavailableError", "1"),
    (RequestTimeoutError("too long"), 504, "TimeoutError", None),
    (AdapterNotFoundError("gone"), 404, "NotFoundError", None),
    (AdapterMismatchError("its rank is 64"), 400, "BadRequestError", None),
    (NoFreeSlotError("all are pinned"), 503, "ServiceUnavailableError", "1"),
    (LoRAUsageError("the prompt is too long: 200 of 128"), 400, "BadRequestError", None),
    (LoRAError("the step failed"), 500, "InternalServerError", None),
    (RuntimeError("a secret of the server's"), 500, "InternalServerError", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "retry"), ERRORS)
def test_a_request_that_cannot_begin(service, engine, error, status, kind, retry, stream):
    engine.refuse = error
    answer = complete(service, stream=stream)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (status, kind, status)
    assert answer.headers.get("retry-after") == retry
    assert "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "retry"), ERRORS[:-1])
def test_a_request_that_fails_before_its_first_piece(service, engine, error, status, kind, retry, stream):
    engine.script = [error]
    answer = complete(service, stream=stream)
    assert (answer.status, answer.error["type"]) == (status, kind)


def script_of_each(engine, *scripts):
    """Each answer of the next request is one of these, and all that is in it has come when it is looked at first."""
    submit, engine.hold = engine.submit, True

    def scripted(*args, **options):
        generation = submit(*args, **options)
        generation.events = list(scripts[len(engine.generations) - 1])
        return generation

    engine.submit = scripted


def test_a_request_that_fails_on_its_way(service, engine):
    failed = LoRAError("the step failed")
    script_of_each(engine, *[[Piece("ab", (3, 4)), failed]] * 2)
    answer = complete(service, n=2)
    assert (answer.status, answer.error["type"], answer.error["message"]) == (500, "InternalServerError", str(failed))
    assert all(generation.cancelled for generation in engine.generations)


def test_what_came_with_an_error_is_streamed_before_it(service, engine):
    failed = LoRAError("the step failed")
    script_of_each(engine, [Piece("a", (3,)), Piece("b", (4,)), failed], [Piece("c", (5,)), Piece("d", (6,))])
    answer = complete(service, n=2, stream=True)
    *events, last = answer.events
    choices = [event["choices"][0] for event in events]
    assert (answer.status, [(choice["index"], choice["text"]) for choice in choices]) == (200, [(0, "ab"), (1, "cd")])
    assert last["error"]["message"] == str(failed)
    assert all(generation.cancelled for generation in engine.generations)


def test_what_was_submitted_is_taken_back_where_the_rest_is_refused(service, engine):
    submit, engine.hold = engine.submit, True

    def refuse_the_third(*args, **options):
        if len(engine.generations) == 2:
            raise BUSY
        return submit(*args, **options)

    engine.submit = refuse_the_third
    assert complete(service, n=4).status == 429
    assert [generation.cancelled for generation in engine.generations] == [True, True]


def test_an_unknown_model(service, engine):
    answer = complete(service, model="nobody")
    assert answer.status == 404
    assert answer.error == {
        "message": "The model `nobody` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


@pytest.mark.parametrize("state", ["warming", "closing"])
def test_nothing_is_answered_before_and_after(engine, state):
    answer = complete(make_service(engine, state=state))
    assert (answer.status, answer.error["type"]) == (503, "ServiceUnavailableError")
    assert int(answer.headers["retry-after"]) >= 1
    assert engine.generations == []


def test_an_engine_that_has_failed(service, engine):
    engine.ready = False
    assert complete(service).status == 503


def test_a_chat_without_a_template_is_told_so(engine):
    answer = chat(make_service(engine))
    assert answer.status == 400
    assert "no chat template" in answer.error["message"]
    assert engine.generations == []


def test_a_text_that_cannot_fit_is_not_tokenized(service, engine):
    """128 positions, of tokens of four characters (</s>) at most."""
    long = "a" * (128 * 4 + 1)
    for answer in (complete(service, prompt=["a", long]), chat(service, messages=[{"role": "user", "content": long}])):
        assert (answer.status, "128 tokens" in answer.error["message"]) == (400, True)
    assert engine.encoded == [("a", True)]
    assert [one.cancelled for one in engine.generations] == [True]


def test_a_text_that_cannot_be_tokenized(service, engine, monkeypatch):
    def encode(text, *, special=True):
        raise LoRAUsageError("the prompt 'hi' cannot be tokenized: no token for h")

    monkeypatch.setattr(engine, "encode", encode)
    for answer in (complete(service), chat(service)):
        assert (answer.status, "cannot be tokenized" in answer.error["message"]) == (400, True)


def test_a_chat_that_the_template_refuses(engine):
    service = make_service(engine, chat=ChatTemplate("{{ raise_exception('only users may speak') }}"))
    answer = chat(service)
    assert answer.status == 400
    assert "only users may speak" in answer.error["message"]
