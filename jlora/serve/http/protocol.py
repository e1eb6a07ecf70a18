"""Requests of completions, chats and embeddings: fields, their ranges, and those refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from jlora.serve.engine.request import MAX_LOGPROBS, SamplingParams
from jlora.serve.http.body import Json, Limits, RequestFields
from jlora.serve.http.errors import bad_request

Prompt = str | tuple[int, ...]

_INT32 = 2**31 - 1
_LONGEST_NAME = 1024  # characters of a model name; longer than any that can be loaded
_LONGEST_SECONDS = 86400
_ROLES = ("system", "developer", "user", "assistant", "tool")

# Fields without effect on the response.
_IGNORED = ("user", "safety_identifier", "metadata", "prompt_cache_key", "store", "service_tier")
# Fields that are not implemented -> accepted no-op values. The second group is vLLM's.
_UNSERVED: Mapping[str, tuple[Json, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "priority": (0,),
    "cache_salt": (),
    "response_format": ({"type": "text"},),
}
_UNSERVED_BY_COMPLETIONS: Mapping[str, tuple[Json, ...]] = {
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
_UNSERVED_BY_CHAT: Mapping[str, tuple[Json, ...]] = {
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": (),
    "include_reasoning": (True, False),
    "mm_processor_kwargs": (),
}
_UNSERVED_BY_EMBEDDINGS: Mapping[str, tuple[Json, ...]] = {
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "messages": (),
}
# Template variables that have request fields of their own, or are not supported.
_NOT_FOR_TEMPLATES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
# Empty fields of an earlier response that openai's client sends back.
_EMPTY_IN_MESSAGES = ("refusal", "audio", "function_call", "tool_calls", "annotations", "tool_call_id")


@dataclass(frozen=True)
class ApiRequest:
    """One parsed request.

    Attributes:
      model: Requested model name.
      prompts: Texts or token ids; each gets `n` completions. Empty for a chat.
      messages: Of a chat, {"role", "content", ...}.
      template: Of a chat, further variables of the template.
      params: Sampling parameters. The `n` completions of a prompt have consecutive seeds.
      n: Completions of each prompt.
      stream: Send events as they arrive.
      include_usage: End the stream with an event of token counts.
      continuous_usage: Give every event of the stream the token counts of its completion so far.
      token_ids: Return the token ids of prompts and completions.
      tokens_as_ids: Write tokens of log probabilities as "token_id:7" instead of their text.
      timeout: Seconds; None for the server's own.
      encoding: Of a request for embeddings of the prompts, "float" or "base64"; None for completions.
      dimensions: Of embeddings, the number of values; None for the model's.
      echo: Put each prompt before its completions.
    """

    model: str
    prompts: tuple[Prompt, ...]
    messages: tuple[dict[str, str], ...]
    template: Mapping[str, Any]
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool
    tokens_as_ids: bool
    timeout: float | None
    encoding: str | None = None
    dimensions: int | None = None
    echo: bool = False

    @property
    def chat(self) -> bool:
        """True for a chat, which has messages instead of prompts."""
        return bool(self.messages)


def read_completion(body: dict[str, Json], limits: Limits) -> ApiRequest:
    """Parse a request of `/v1/completions`. Raises `ApiError` (400)."""
    fields = RequestFields(body)
    model = fields.required("model", _LONGEST_NAME)
    prompts = _prompts(fields, "prompt", limits.sequences)
    logprobs, of_prompt = (fields.integer(name, 0, MAX_LOGPROBS) for name in ("logprobs", "prompt_logprobs"))
    echo = fields.flag("echo")
    of_prompt = logprobs if echo and of_prompt is None else of_prompt
    max_tokens = fields.integer("max_tokens", 1 if of_prompt is None else 0, _INT32)
    params = _sampling(fields, 16 if max_tokens is None else max_tokens, logprobs, of_prompt)
    common = _common(fields, limits, len(prompts))
    best_of = fields.integer("best_of", 1, limits.sequences)
    if best_of not in (None, 1, common["n"]):
        raise bad_request(f"best_of is not implemented; it may be left out, or be {common['n']} as n is", "best_of")
    for name, accepted in _UNSERVED_BY_COMPLETIONS.items():
        fields.only(name, *accepted)
    fields.finish()
    return ApiRequest(model, prompts, (), {}, params, **common, echo=echo)


def read_chat(body: dict[str, Json], limits: Limits) -> ApiRequest:
    """Parse a request of `/v1/chat/completions`. Raises `ApiError` (400)."""
    fields = RequestFields(body)
    model = fields.required("model", _LONGEST_NAME)
    messages = _messages(fields)
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    old, new = (fields.integer(name, 1, _INT32) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise bad_request(f"max_tokens is {old} and max_completion_tokens {new}; give one of them", "max_tokens")
    of_prompt = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    params = _sampling(fields, old if new is None else new, (top or 0) if wanted else None, of_prompt)
    template = _template(fields)
    common = _common(fields, limits, 1)
    for name, accepted in _UNSERVED_BY_CHAT.items():
        fields.only(name, *accepted)
    fields.finish()
    return ApiRequest(model, (), messages, template, params, **common)


def read_embeddings(body: dict[str, Json], limits: Limits) -> ApiRequest:
    """Parse a request of `/v1/embeddings`. Raises `ApiError` (400)."""
    fields = RequestFields(body)
    model = fields.required("model", _LONGEST_NAME)
    prompts = _prompts(fields, "input", limits.embeddings)
    encoding = fields.take("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise fields.fail("encoding_format", "'float' or 'base64'")
    dimensions = fields.integer("dimensions", 1, _INT32)
    timeout = fields.number("timeout", 0, _LONGEST_SECONDS, open_below=True)
    fields.ignore(_IGNORED)
    for name, accepted in _UNSERVED_BY_EMBEDDINGS.items():
        fields.only(name, *accepted)
    fields.finish()
    flags = dict.fromkeys(("stream", "include_usage", "continuous_usage", "token_ids", "tokens_as_ids"), False)
    params, encoding = SamplingParams(), encoding or "float"
    return ApiRequest(
        model, prompts, (), {}, params, 1, **flags, timeout=timeout, encoding=encoding, dimensions=dimensions
    )


def _template(fields: RequestFields) -> dict[str, Any]:
    """Return the variables of the chat template besides the messages."""
    generation, kwargs = fields.flag("add_generation_prompt", True), fields.take("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise fields.fail("chat_template_kwargs", "an object")
    given = cast("dict[str, Any]", kwargs or {})
    for name in _NOT_FOR_TEMPLATES:
        if name in given:
            where = f"chat_template_kwargs.{name}"
            raise bad_request(f"{where} is not taken; {name} is a field of the request", where)
    return {**given, "add_generation_prompt": generation}


def _common(fields: RequestFields, limits: Limits, prompts: int) -> dict[str, Any]:
    n = fields.integer("n", 1, limits.sequences) or 1
    if n * prompts > limits.sequences:
        message = f"{prompts} prompts with {n} answers each are more than the {limits.sequences} of one request"
        raise bad_request(message, "n" if n > 1 else "prompt")
    stream = fields.flag("stream")
    if stream and fields.take("prompt_logprobs") is not None:
        raise bad_request("prompt_logprobs are not sent in streams; set stream to false", "prompt_logprobs")
    usage, continuous = _stream_options(fields, stream)
    token_ids, tokens_as_ids = fields.flag("return_token_ids"), fields.flag("return_tokens_as_token_ids")
    timeout = fields.number("timeout", 0, _LONGEST_SECONDS, open_below=True)
    fields.ignore(_IGNORED)
    for name, accepted in _UNSERVED.items():
        fields.only(name, *accepted)
    return {
        "n": n,
        "stream": stream,
        "include_usage": usage,
        "continuous_usage": continuous,
        "token_ids": token_ids,
        "tokens_as_ids": tokens_as_ids,
        "timeout": timeout,
    }


def _stream_options(fields: RequestFields, stream: bool) -> tuple[bool, bool]:
    """Return whether the stream ends with token counts, and whether every event has them."""
    options = fields.take("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise fields.fail("stream_options", "an object")
    if not stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    inner = RequestFields(cast("dict[str, Json]", options))
    usage, continuous = inner.flag("include_usage"), inner.flag("continuous_usage_stats")
    inner.only("include_obfuscation", False)
    inner.finish()
    return usage, usage and continuous  # the second has no effect alone, as in vLLM


def _sampling(
    fields: RequestFields, max_tokens: int | None, logprobs: int | None, of_prompt: int | None
) -> SamplingParams:
    temperature, top_p = fields.number("temperature", 0), fields.number("top_p", 0, 1, open_below=True)
    top_k = fields.integer("top_k", -1, _INT32)  # -1 is vLLM's value for "all"
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, top_k or 0),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stop=fields.texts("stop", 32, 1000),
        stop_token_ids=fields.integers("stop_token_ids", 128, _INT32),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        prompt_logprobs=of_prompt,
    )


def _prompts(fields: RequestFields, name: str, most: int) -> tuple[Prompt, ...]:
    value = fields.take(name)
    if value is None:
        raise bad_request(f"{name} is missing", name)
    if isinstance(value, str) and value:
        return (value,)
    items = cast("list[Json]", value) if isinstance(value, list) else []
    if items and _are_tokens(items):
        return (tuple(cast("list[int]", items)),)
    if 0 < len(items) <= most:
        if all(isinstance(item, str) and item for item in items):
            return tuple(cast("list[str]", items))
        if all(isinstance(item, list) and item and _are_tokens(cast("list[Json]", item)) for item in items):
            return tuple(tuple(item) for item in cast("list[list[int]]", items))
    expected = f"a text, a list of token ids, or a list of 1 to {most} of one of the two, none of them empty"
    raise fields.fail(name, expected)


def _are_tokens(items: list[Json]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _INT32 for item in items)


def _messages(fields: RequestFields) -> tuple[dict[str, str], ...]:
    value = fields.take("messages")
    if not isinstance(value, list) or not value:
        raise fields.fail("messages", "a list of at least one message")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(cast("list[Json]", value)))


def _message(item: Json, where: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object with role and content", where)
    role = item.get("role")
    if role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.80}", f"{where}.role")
    message = {"role": str(role), "content": _content(item.get("content"), f"{where}.content")}
    for name, value in item.items():
        if name == "name" and isinstance(value, str):
            message["name"] = value
        elif name not in ("role", "content") and not (name in _EMPTY_IN_MESSAGES and not value) and value is not None:
            raise bad_request(f"{where}.{name[:80]} is not implemented; leave it out", f"{where}.{name[:80]}")
    return message


def _content(value: Json, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise bad_request(f"{where} must be a text, or a list of parts of type text, got {value!r:.80}", where)
    texts: list[str] = []
    for i, part in enumerate(cast("list[Json]", value)):
        # A prompt's beginning is found without marks, so `cache_control` has no effect.
        fields = part.keys() - {"cache_control"} if isinstance(part, dict) else ()
        if not isinstance(part, dict) or not isinstance(part.get("text"), str) or fields != {"type", "text"}:
            found = part.get("type") if isinstance(part, dict) else part
            raise bad_request(f"{where}[{i}] must be {{type: text, text: ...}}, got {found!r:.80}", f"{where}[{i}]")
        if part["type"] != "text":
            raise bad_request(f"{where}[{i}].type {part['type']!r:.80} is not implemented; only text is", where)
        texts.append(cast(str, part["text"]))
    return "\n".join(texts)
