"""What is asked of an engine, and what it answers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from jlora import AdapterInfo, HistogramCounts
from jlora.errors import LoRAError

FinishReason = Literal["stop", "length", "abort"]

MAX_LOGPROBS = 20  # the most that OpenAI's API asks for; the compiled step has room for as many


class EngineBusyError(LoRAError):
    """The queue is full. `retry_after` says in how many seconds it is likely not to be."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(LoRAError):
    """The engine has been closed, or is closing, or failed for good."""


class RequestTimeoutError(LoRAError):
    """A request took longer than it was given."""


class StepFailedError(LoRAError):
    """The step that a request was part of raised; the message names the error. Other requests go on."""


class AdapterExistsError(LoRAError):
    """An adapter of this name is loaded already, and the request does not say to replace it."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. Changing them compiles nothing.

    Attributes:
      max_tokens: the most new tokens; None for as many as the engine's `max_model_len` leaves.
      temperature: 0 takes the likeliest token; above 0 samples from softmax(logits / temperature).
      top_p: sample among the fewest likeliest tokens whose probabilities sum to at least this, after `top_k`.
      top_k: sample among the k likeliest tokens only; 0 for all.
      seed: with the number of the token all that a draw depends on; None for one drawn by the engine.
      stop: the answer ends before the first of these strings.
      stop_token_ids: it ends with the first of these tokens, beside the model's own ends of sequence.
      ignore_eos: do not end at the model's own ends of sequence.
      logprobs: log probabilities of the chosen token and of this many likeliest, at most `MAX_LOGPROBS`; None for none.
        They are those of the model's own distribution, before temperature, top_k and top_p.
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


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability (natural) of a token that was chosen, and of the likeliest ones, the likeliest first.

    `offset` is where its text begins in that of the answer: how long the latter was before it, without what was no
    whole character yet.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Piece:
    """The next part of an answer.

    Attributes:
      text: what no stop string can take back any more; "" where the engine has no tokenizer.
      tokens: the new tokens; a token's text may come with a later piece.
      logprobs: of each of them, where they were asked for.
      finish_reason: on the last piece, and only there: "stop", "length", or "abort" after `cancel`.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. See `Piece`."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    prompt_tokens: int


class Generation(Protocol):
    """One request under way. Its events come to one consumer: `listen`, iteration or `result`."""

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        ...

    def listen(self, callback: Callable[[Piece | LoRAError], None]) -> None:
        """Call this with every event from the first on, in order, on a thread of the engine; it must not block."""
        ...

    def __iter__(self) -> Iterator[Piece]:
        """The pieces as they come. Raises the error that the request ended with."""
        ...

    def result(self, timeout: float | None = None) -> Completion:
        """The whole answer, once it is there. Raises the error it ended with, or RequestTimeoutError."""
        ...

    def cancel(self) -> None:
        """End it soon; its row and its adapter are given back. Does nothing once it has ended."""
        ...


@dataclass(frozen=True)
class RegisteredLoRA:
    """An adapter that requests may name.

    Attributes:
      path: shown as where it came from.
      created: when it was added, or seen first; Unix seconds.
      parent: the name of the base model that it is shown under; None for the first.
      info: as the manager has it; None where it was evicted, and is loaded again when a request asks for it.
    """

    path: str
    created: int
    parent: str | None = None
    info: AdapterInfo | None = None


@dataclass(frozen=True)
class EngineStats:
    """EngineMetrics since the start, and what is under way now.

    Attributes:
      running, waiting: requests.
      running_by_lora, waiting_by_lora: of those with an adapter, by its name; names that are looked up are left out.
      cache_usage: share of the cache's positions in use, 0 to 1.
      prompt_tokens, generated_tokens: in all.
      finished: requests by finish reason, "error" among them.
      failed_steps: steps that raised.
      by_lora: requests that have begun, of each adapter that is registered ("" for the base model).
      by_unloaded: requests that have begun, of adapters that are not registered any more.
      time_to_first_token, time_per_output_token, request_seconds: (upper bounds, counts, sum) of histograms, seconds;
        the last count is of those above all bounds.
      queue_seconds: from the arrival of a request until it had a row and its adapter a slot; the same.
      adapter_wait_seconds: that of requests alone whose adapter was in no slot when they came.
    """

    running: int = 0
    waiting: int = 0
    running_by_lora: Mapping[str, int] = field(default_factory=dict)
    waiting_by_lora: Mapping[str, int] = field(default_factory=dict)
    cache_usage: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    failed_steps: int = 0
    by_lora: Mapping[str, int] = field(default_factory=dict)
    by_unloaded: int = 0
    time_to_first_token: HistogramCounts = ((), (), 0.0)
    time_per_output_token: HistogramCounts = ((), (), 0.0)
    request_seconds: HistogramCounts = ((), (), 0.0)
    queue_seconds: HistogramCounts = ((), (), 0.0)
    adapter_wait_seconds: HistogramCounts = ((), (), 0.0)
