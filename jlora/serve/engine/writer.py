"""The thread that detokenizes and delivers completions, so that neither delays a step."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jlora.errors import LoRAError
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.request import FinishReason, Piece, TokenLogprob
from jlora.serve.engine.sequence import Sequence
from jlora.serve.engine.steps import Chosen

_log = logging.getLogger("jlora")


class TokenEvent(NamedTuple):
    """A new token of a sequence, its end, or both.

    Attributes:
      end: The finish reason, or the error that ends the sequence.
      embedding: float32 [E] of its prompt.
      prompt: Log probabilities of its prompt, read back; None if not requested, and after the first token.
    """

    sequence: Sequence
    token: int | None = None
    logprob: TokenLogprob | None = None
    end: FinishReason | LoRAError | None = None
    embedding: np.ndarray | None = None
    prompt: Seq[Chosen] | None = None


class TokenWriter:
    """Detokenizes the events of sequences and delivers them to their consumers in order.

    Args:
      metrics: Counters of the engine.
      ended: Called with each sequence after its last event.
    """

    def __init__(self, metrics: EngineMetrics, ended: Callable[[Sequence], None]):
        self._metrics = metrics
        self._ended = ended
        self._events: queue.SimpleQueue[Seq[TokenEvent] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="jlora-serve-text", daemon=True)

    def put(self, events: Seq[TokenEvent]) -> None:
        """Queue events for delivery."""
        self._events.put(events)

    def stop(self) -> None:
        """End the thread after all queued events are delivered."""
        self._events.put(None)

    def _work(self) -> None:
        while (events := self._events.get()) is not None:
            now = time.monotonic()
            for event in events:
                try:
                    self._write(event, now)
                except Exception as error:  # a tokenizer may raise anything; other sequences go on
                    _log.exception("the text of an answer could not be made")
                    self._end(event.sequence, LoRAError(f"the answer cannot be decoded: {error!r:.300}"))

    def _write(self, event: TokenEvent, now: float) -> None:
        sequence, end = event.sequence, event.end
        if sequence.ended:
            return
        text, detokenizer = "", sequence.detokenizer
        offset = detokenizer.length
        if event.token is not None:
            self._count_token(sequence, now)
            text = detokenizer.add(event.token)
        if isinstance(end, LoRAError):
            self._end(sequence, end)
            return
        if end is not None:
            text += detokenizer.finish()
        if detokenizer.stopped:
            end = "stop"
        tokens = () if event.token is None else (event.token,)
        logprobs = () if event.logprob is None else (replace(event.logprob, offset=offset),)
        prompt = () if event.prompt is None else _prompt_logprobs(sequence, event.prompt)
        piece = Piece(text, tokens, logprobs, end, event.embedding, prompt)
        if end is None:
            sequence.answer.put(piece)
        else:
            self._end(sequence, piece)

    def _count_token(self, sequence: Sequence, now: float) -> None:
        with self._metrics.lock:
            self._metrics.generated_tokens += 1
            if sequence.written:
                self._metrics.per_token.add(now - sequence.newest)
            else:
                self._metrics.first_token.add(now - sequence.arrived)
                sequence.first = now
        sequence.written += 1
        sequence.newest = now

    def _end(self, sequence: Sequence, event: Piece | LoRAError) -> None:
        if sequence.ended:
            return
        sequence.ended = True
        reason = "error" if isinstance(event, LoRAError) else str(event.finish_reason)
        with self._metrics.lock:
            self._metrics.finished[reason] += 1
            self._metrics.whole.add(time.monotonic() - sequence.arrived)
            if sequence.written > 1:
                self._metrics.mean_per_token.add((sequence.newest - sequence.first) / (sequence.written - 1))
        try:
            sequence.answer.put(event)
        finally:
            self._ended(sequence)


def _prompt_logprobs(sequence: Sequence, scored: Seq[Chosen]) -> tuple[TokenLogprob | None, ...]:
    asked, offsets = sequence.params.prompt_logprobs, sequence.detokenizer.offsets(sequence.prompt)
    found = [chosen.logprob(i, int(token), asked) for chosen in scored for i, token in enumerate(chosen.tokens)]
    pairs = zip(found, offsets[1:], strict=True)
    return (None, *(None if one is None else replace(one, offset=offset) for one, offset in pairs))
