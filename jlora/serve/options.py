"""Sizes and limits of an engine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and limits of an engine. Every compiled shape follows from them.

    Attributes:
      max_num_seqs: sequences that decode together: rows of the cache and of the decode step.
      max_model_len: positions of a sequence, prompt and answer; None for the model's own.
      max_num_batched_tokens: the most prompt tokens of one prefill step; longer prompts come in chunks.
      max_waiting: requests that may wait; the next is refused.
      max_wait_ratio: how many later requests may be served before the one that waits longest, in favour of those whose
        adapter is in a slot already.
      request_timeout: seconds that a request may take in all, where it says nothing itself; None for no limit.
    """

    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_waiting: int = 1024
    max_wait_ratio: int = 64
    request_timeout: float | None = None
