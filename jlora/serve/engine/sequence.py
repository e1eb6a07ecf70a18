"""The engine's state of one request, and checks of its parameters."""

import secrets
import time
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jlora import AdapterHandle, LoRARequest
from jlora.errors import LoRAUsageError
from jlora.models import Pooling
from jlora.serve.engine.detokenizer import Detokenizer
from jlora.serve.engine.generation import Generation
from jlora.serve.engine.request import MAX_LOGPROBS, SamplingParams

Version = tuple[str, int]
"""A version of an adapter: name and version number."""


class Source(NamedTuple):
    """A row of the cache that holds the beginning of a prompt.

    Attributes:
      row: The row.
      tokens: Number of tokens of the prompt that it holds.
      logits: Logits [1, V] after the prompt if it holds all of it, else None.
    """

    row: int
    tokens: int
    logits: Any


@dataclass
class RequestVersion:
    """The version of an adapter, and its pooling, that all sequences of one request have.

    Attributes:
      open: Number of these sequences that have not ended.
      handle: Keeps the version, from the beginning of the first of them to the end of the last; None for no adapter.
      pooling: Of embeddings, from then on.
    """

    open: int = 1
    handle: AdapterHandle | None = None
    pooling: Pooling | None = None

    def release(self) -> None:
        """Count the end of a sequence."""
        self.open -= 1
        if not self.open and self.handle is not None:
            self.handle.close()


@dataclass(eq=False)
class Sequence:
    """A prompt and its completion: a request, or one of several of a request.

    Attributes:
      prompt: Token ids.
      params: Sampling parameters.
      seed: Seed of the request, else a random one; 64 bits.
      limit: The most new tokens; of an embedding, its number of values.
      stops: Token ids that end it.
      lora: Adapter name; None for the base model.
      request: Source of the adapter, used if the name is unknown. The resolver may set it.
      deadline: `time.monotonic()` at which it ends with RequestTimeoutError.
      answer: Receives its pieces.
      detokenizer: Text of its tokens.
      absent: True if its adapter was in no slot on arrival.
      passed: Number of later requests that began before it.
      of_request: The version of its adapter, chosen when the first sequence of its request begins.
      active_from: Index of the first prompt token on which its adapter is active; past the prompt for none.
      key: Once it has begun, equal for sequences whose equal tokens have equal results.
      row: Row of the cache, once it has begun; -1 before.
      source: The row that the beginning of its prompt is copied from, if any.
      filled: Number of prompt tokens in the cache.
      drawn: Number of tokens that steps were dispatched for.
      tokens: Tokens read back.
      written: Number of tokens passed on to its consumer.
      first, newest: `time.monotonic()` of the first and the last of them.
      scored: Log probabilities of its prompt so far, blocks of `Chosen`; None if not requested.
      left: True if it has left its row or can never get one; later tokens are dropped.
      ended: True if its consumer has the last event.
    """

    prompt: Seq[int]
    params: SamplingParams
    seed: int
    limit: int
    stops: frozenset[int]
    lora: str | None
    request: LoRARequest | None
    deadline: float | None
    answer: Generation
    detokenizer: Detokenizer
    absent: bool = False
    arrived: float = field(default_factory=time.monotonic)
    passed: int = 0
    of_request: RequestVersion = field(default_factory=RequestVersion)
    batch: Any = None
    active_from: int = 0
    key: Hashable = None
    row: int = -1
    source: Source | None = None
    filled: int = 0
    drawn: int = 0
    tokens: list[int] = field(default_factory=list[int])
    written: int = 0
    first: float = 0.0
    newest: float = 0.0
    scored: list[Any] | None = None
    left: bool = False
    ended: bool = False

    @property
    def handle(self) -> AdapterHandle | None:
        """The handle of `of_request`."""
        return self.of_request.handle

    @property
    def version(self) -> Version | None:
        """The version of its adapter, once a sequence of its request has begun."""
        return None if self.handle is None else (self.handle.name, self.handle.version)

    @property
    def live(self) -> int:
        """Number of cache positions that its next step reads."""
        return len(self.prompt) + self.drawn


def room_for(prompt: Seq[int], longest: int, least: int = 1) -> int:
    """Return the most tokens that a completion may have. Reads only the prompt's length, which may be in the millions.

    Raises:
      LoRAUsageError: the prompt is empty or leaves no room for `least` tokens within `longest`, the engine's
        `max_model_len`.
    """
    if not len(prompt):
        raise LoRAUsageError("the prompt has no tokens")
    room = longest - len(prompt)
    if room < least:
        more = ", and with at least one new one it" if least else "; it"
        raise LoRAUsageError(f"the prompt has {len(prompt)} tokens{more} must fit max_model_len={longest}")
    return room


def check_tokens(prompt: Seq[int], vocab: int) -> None:
    """Check that a prompt holds token ids. Raises LoRAUsageError."""
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab for token in prompt):
        raise LoRAUsageError(f"the prompt must hold token ids from 0 to {vocab - 1}")


def check_params(params: SamplingParams, prompt: Seq[int], vocab: int, longest: int) -> int:
    """Check a prompt and its parameters. Returns the most new tokens that the request may get.

    Raises:
      LoRAUsageError: the prompt or a parameter is wrong, or they do not fit `longest`, the engine's `max_model_len`.
    """
    room = room_for(prompt, longest, 0 if params.max_tokens == 0 else 1)
    check_tokens(prompt, vocab)
    least = 1 if params.prompt_logprobs is None else 0
    limit = room if params.max_tokens is None else _integer("max_tokens", params.max_tokens, least)
    if limit > room:
        raise LoRAUsageError(
            f"max_tokens={limit} and a prompt of {len(prompt)} tokens do not fit max_model_len={longest}"
        )
    if not _number(params.temperature) or not 0 <= params.temperature < float("inf"):
        raise LoRAUsageError(f"temperature must be a finite number of at least 0, got {params.temperature!r}")
    if not _number(params.top_p) or not 0 < params.top_p <= 1:
        raise LoRAUsageError(f"top_p must be above 0 and at most 1, got {params.top_p!r}")
    _integer("top_k", params.top_k, 0)
    if params.seed is not None:
        _integer("seed", params.seed, -(2**63), 2**64)
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None:
            _integer(name, value, 0, MAX_LOGPROBS + 1)
    stop: object = params.stop
    if not isinstance(stop, tuple) or not all(isinstance(one, str) and one for one in params.stop):
        raise LoRAUsageError(f"stop must be a tuple of non-empty strings, got {params.stop!r:.200}")
    for token in params.stop_token_ids:
        _integer("stop_token_ids", token, 0)
    return limit


def seed_of(params: SamplingParams) -> int:
    """Return the request's seed modulo 2**64, or a random one."""
    return secrets.randbits(63) if params.seed is None else params.seed % 2**64


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(name: str, value: object, least: int, beyond: int = 2**31) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < beyond:
        raise LoRAUsageError(f"{name} must be an integer from {least} to {beyond - 1}, got {value!r:.100}")
    return value
