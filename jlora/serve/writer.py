"""The thread that makes text of tokens and hands answers out, so that steps are not kept waiting for either."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from jlora.errors import LoRAError
from jlora.serve.counts import Counts
from jlora.serve.request import FinishReason, Piece, TokenLogprob
from jlora.serve.sequence import Sequence

_log = logging.getLogger("jlora")


class News(NamedTuple):
    """What became of a sequence: a new token, or its end, or both.

    Attributes:
      end: the finish reason, or the error that it ends with.
    """

    sequence: Sequence
    token: int | None = None
    logprob: TokenLogprob | None = None
    end: FinishReason | LoRAError | None = None


class Writer:
    """Takes news of sequences and gives pieces to their consumers, in order.

    Args:
      counts: of the engine.
      ended: called with every sequence after its last event.
    """

    def __init__(self, counts: Counts, ended: Callable[[Sequence], None]):
        self._counts = counts
        self._ended = ended
        self._news: queue.SimpleQueue[Seq[News] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="jlora-serve-text", daemon=True)

    def put(self, news: Seq[News]) -> None:
        self._news.put(news)

    def stop(self) -> None:
        """End the thread once all news are out."""
        self._news.put(None)

    def _work(self) -> None:
        while (news := self._news.get()) is not None:
            now = time.monotonic()
            for one in news:
                try:
                    self._write(one, now)
                except Exception as error:  # a tokenizer may raise anything; others must not suffer
                    _log.exception("the text of an answer could not be made")
                    self._end(one.sequence, LoRAError(f"the answer cannot be decoded: {error!r:.300}"))

    def _write(self, news: News, now: float) -> None:
        sequence, end = news.sequence, news.end
        if sequence.ended:
            return
        text, decoding = "", sequence.decoding
        offset = decoding.length
        if news.token is not None:
            self._count_token(sequence, now)
            text = decoding.add(news.token)
        if isinstance(end, LoRAError):
            self._end(sequence, end)
            return
        if end is not None:
            text += decoding.finish()
        if decoding.stopped:
            end = "stop"
        tokens = () if news.token is None else (news.token,)
        logprobs = () if news.logprob is None else (replace(news.logprob, offset=offset),)
        piece = Piece(text, tokens, logprobs, end)
        if end is None:
            sequence.answer.put(piece)
        else:
            self._end(sequence, piece)

    def _count_token(self, sequence: Sequence, now: float) -> None:
        with self._counts.lock:
            self._counts.generated_tokens += 1
            if sequence.newest:
                self._counts.per_token.add(now - sequence.newest)
            else:
                self._counts.first_token.add(now - sequence.arrived)
        sequence.newest = now

    def _end(self, sequence: Sequence, event: Piece | LoRAError) -> None:
        if sequence.ended:
            return
        sequence.ended = True
        reason = "error" if isinstance(event, LoRAError) else str(event.finish_reason)
        with self._counts.lock:
            self._counts.finished[reason] += 1
            self._counts.whole.add(time.monotonic() - sequence.arrived)
        try:
            sequence.answer.put(event)
        finally:
            self._ended(sequence)
