"""Sizes and limits of an engine."""

from dataclasses import dataclass
from typing import Literal, get_args

from jlora.errors import LoRAUsageError

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and limits of an engine. Every compiled shape follows from them.

    Attributes:
      max_num_seqs: Sequences that decode together; rows of the cache and of the decode step.
      max_model_len: Positions of a sequence, prompt and completion; None for the model's own.
      max_num_batched_tokens: The most prompt tokens of one prefill step; longer prompts are split into chunks.
      max_waiting: Requests that may wait; further ones are refused.
      max_wait_ratio: Number of later requests that may overtake a waiting one because their adapter is in a slot.
      request_timeout: Seconds that a request may take in all, unless it sets its own; None for no limit.
      logprobs_mode: "raw_logprobs" for log probabilities of the model's own distribution; "processed_logprobs" for
        those of the distribution that tokens are drawn from, after temperature, `top_k` and `top_p`. The names are
        vLLM's.
      enable_prefix_caching: Copy the longest beginning of a prompt that a row holds of the same version of its adapter,
        also of a sequence that has ended, and compute the rest. Completions then agree to rounding.
    """

    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_waiting: int = 1024
    max_wait_ratio: int = 64
    request_timeout: float | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    enable_prefix_caching: bool = False


def check_options(options: EngineOptions) -> None:
    """Check the options.

    Raises:
      LoRAUsageError: an option is out of range.
    """
    for name, least in (
        ("max_num_seqs", 1),
        ("max_model_len", 2),
        ("max_num_batched_tokens", 1),
        ("max_waiting", 1),
        ("max_wait_ratio", 1),
    ):
        value = getattr(options, name)
        if name == "max_model_len" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise LoRAUsageError(f"EngineOptions.{name} must be an integer of at least {least}, got {value!r}")
    if options.logprobs_mode not in get_args(LogprobsMode):
        expected = " or ".join(map(repr, get_args(LogprobsMode)))
        raise LoRAUsageError(f"EngineOptions.logprobs_mode must be {expected}, got {options.logprobs_mode!r:.100}")
    caching: object = options.enable_prefix_caching
    if not isinstance(caching, bool):
        raise LoRAUsageError(f"EngineOptions.enable_prefix_caching must be True or False, got {caching!r:.100}")
    timeout: object = options.request_timeout
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
        raise LoRAUsageError(f"EngineOptions.request_timeout must be seconds above 0 or None, got {timeout!r}")
