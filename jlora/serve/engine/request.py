"""Public data types of the engine: requests, completions, statistics and errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jlora import AdapterInfo, HistogramCounts
from jlora.errors import LoRAError

FinishReason = Literal["stop", "length", "abort"]
"""The end of a completion: a stop token or text, a limit of its length, or `Generation.cancel`."""

PauseMode = Literal["abort", "wait", "keep"]
"""A pause ends all requests as "abort", finishes those that have begun ("wait"), or freezes them ("keep")."""

MAX_LOGPROBS = 20
"""The largest `logprobs` and `prompt_logprobs`. It is the limit of OpenAI's API, and a size of the compiled step."""


class EngineBusyError(LoRAError):
    """The queue is full. `retry_after` is the estimated number of seconds until it has room."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(LoRAError):
    """The engine is closed or closing, or has failed permanently."""


class RequestTimeoutError(LoRAError):
    """A request exceeded its timeout."""


class StepFailedError(LoRAError):
    """The step that served a request raised. The message names the error. Other requests go on."""


class AdapterExistsError(LoRAError):
    """An adapter of this name is loaded, and the request has no `load_inplace`."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Changing them never recompiles.

    Attributes:
      max_tokens: The most new tokens; None for as many as the engine's `max_model_len` allows.
      temperature: 0 takes the likeliest token; above 0 samples from softmax(logits / temperature).
      top_p: Sample among the fewest likeliest tokens whose probabilities sum to at least this, after `top_k`.
      top_k: Sample among the k likeliest tokens only; 0 for all.
      seed: With the index of the token, the only input of the random draw; None for a seed chosen by the engine.
      stop: The completion ends before the first of these strings.
      stop_token_ids: Tokens that end the completion, in addition to the model's end-of-sequence tokens.
      ignore_eos: Do not end at the model's end-of-sequence tokens.
      logprobs: Number of likeliest tokens to report beside the chosen one, at most `MAX_LOGPROBS`; None for no log
        probabilities. `EngineOptions.logprobs_mode` chooses their distribution.
      prompt_logprobs: As `logprobs`, for each token of the prompt but the first; always of the model's own
        distribution. The model must be a `jlora.serve.ScoringModel`. `max_tokens` may then be 0.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probability of a token, and of the likeliest tokens in descending order.

    `offset` is the length of the text of the completion, or the prompt, before this token, in characters. Incomplete
    characters are not counted. `rank` is the number of tokens that are at least as likely, itself included.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Piece:
    """The next part of a completion.

    Attributes:
      text: Text that has become final; "" if the engine has no tokenizer.
      tokens: The new tokens; a token's text may come with a later piece.
      logprobs: One for each token, if requested.
      finish_reason: Set on the last piece only; "stop", "length", or "abort" after `cancel`.
      embedding: float32 [E] on the last piece of `Engine.embed`.
      prompt_logprobs: One for each token of the prompt, None for the first, on the first piece with a token (or the
        only one) if requested; else empty.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    embedding: np.ndarray | None = field(default=None, compare=False)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole completion. Fields as in `Piece`."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    embedding: np.ndarray | None = field(default=None, compare=False)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True)
class RegisteredLoRA:
    """An adapter that requests may name.

    Attributes:
      path: Displayed as its source.
      created: When it was added or first seen, in Unix seconds.
      parent: The base model name that it is listed under; None for the first.
      info: The manager's record; of an evicted adapter, the next request for it loads it again.
    """

    path: str
    created: int
    parent: str | None = None
    info: AdapterInfo | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters since the start, and the requests under way.

    Attributes:
      running: Requests that have a row.
      waiting: Requests that have none yet.
      running_by_lora: Running requests by adapter name.
      waiting_by_lora: Waiting requests by adapter name, without names that are still being resolved.
      cache_usage: Share of the cache's positions in use, 0 to 1.
      prompt_tokens: Total tokens of prompts.
      prefilled_tokens: Total tokens of prompts that were computed.
      cached_tokens: Total tokens of prompts that were copied from another sequence's row instead.
      generated_tokens: Total tokens generated.
      finished: Requests by finish reason, including "error".
      failed_steps: Steps that raised.
      by_lora: Requests that have begun, by registered adapter ("" for the base model).
      by_unloaded: Requests that have begun, of adapters that are no longer registered.
      time_to_first_token: Histogram (upper bounds, counts, sum) in seconds; the last count is of values above all
        bounds.
      inter_token_latency: Histogram of the time between two tokens of a request, in seconds.
      request_time_per_output_token: Histogram of the mean of these times of each request, in seconds.
      request_seconds: Histogram of whole requests, in seconds.
      queue_seconds: Histogram of the time from arrival until a request has a row and its adapter a slot, in seconds.
      adapter_wait_seconds: As `queue_seconds`, only for requests whose adapter was in no slot on arrival.
    """

    running: int = 0
    waiting: int = 0
    running_by_lora: Mapping[str, int] = field(default_factory=dict)
    waiting_by_lora: Mapping[str, int] = field(default_factory=dict)
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    failed_steps: int = 0
    by_lora: Mapping[str, int] = field(default_factory=dict)
    by_unloaded: int = 0
    time_to_first_token: HistogramCounts = ((), (), 0.0)
    inter_token_latency: HistogramCounts = ((), (), 0.0)
    request_time_per_output_token: HistogramCounts = ((), (), 0.0)
    request_seconds: HistogramCounts = ((), (), 0.0)
    queue_seconds: HistogramCounts = ((), (), 0.0)
    adapter_wait_seconds: HistogramCounts = ((), (), 0.0)
