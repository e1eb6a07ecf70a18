"""The thread that dispatches every step of an engine.

Each iteration takes new, cancelled and expired requests, prefills one chunk of a prompt, decodes all running rows, and
only then reads the tokens of the previous step, so the device never waits for the host. The end of a sequence is
therefore seen one step late, and the extra token drawn for it is dropped.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jlora
from jlora.errors import LoadTimeoutError, LoRAError, NoFreeSlotError
from jlora.serve.engine.loras import Loras
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.prefixes import Prefixes
from jlora.serve.engine.request import EngineClosedError, FinishReason, PauseMode, RequestTimeoutError, StepFailedError
from jlora.serve.engine.scheduler import Queue
from jlora.serve.engine.sequence import Sequence, Version
from jlora.serve.engine.steps import Chosen, Chunk, How, Steps
from jlora.serve.engine.writer import TokenEvent, TokenWriter

_log = logging.getLogger("jlora")
_POLL = 0.02  # seconds between polls for deadlines and for slots released outside the engine
_OFTEN = 0.002  # shortest interval in seconds between scans of the queue after wake-ups
_IDLE = 1.0
_ROWS_A_PROMPT = 8  # one more prompt is prefilled between two decode steps for each so many free rows


@dataclass(frozen=True)
class Drawn:
    """A dispatched step whose results have not been read; pairs of (index among its results, sequence)."""

    chosen: Any  # `Chosen`, or the embeddings [B, E]
    sequences: tuple[tuple[int, Sequence], ...]
    prompt: Seq[Chosen] | None = None  # of the first token of a sequence, log probabilities of its prompt


@dataclass(frozen=True, eq=False)
class Pause:
    """A pause of the engine. `done` is set once it is reached, or was ended before."""

    mode: PauseMode
    done: threading.Event = field(default_factory=threading.Event)


class Dispatcher:
    """Runs sequences on its own thread. `submit`, `wake` and `stop` may be called from other threads.

    Args:
      manager: The model's manager.
      steps: The compiled steps.
      loras: The adapters.
      writer: Receives tokens and ends of sequences.
      metrics: Counters of the engine.
      max_wait_ratio: See `EngineOptions`.
      caching: `EngineOptions.enable_prefix_caching`.
    """

    def __init__(
        self,
        manager: Any,
        steps: Steps,
        loras: Loras,
        writer: TokenWriter,
        metrics: EngineMetrics,
        max_wait_ratio: int,
        caching: bool = False,
    ):
        self._manager = manager
        self._steps = steps
        self._loras = loras
        self._writer = writer
        self._metrics = metrics
        self._arrived: deque[Sequence] = deque()
        self._signal = threading.Event()
        self._stop = False
        self._queue = Queue(max_wait_ratio)
        self._prefixes = Prefixes(steps.rows, caching, lambda start, length: steps.padded(start, length))
        self._filling: Sequence | None = None  # the sequence whose prompt is being prefilled
        self._filled = 0  # tokens of the last prefill step, with padding
        self._rows: list[Sequence | None] = [None] * steps.rows  # sequences that decode, by row
        self._batch: Any = None  # batch of the rows that ran when it was prepared
        self._stale = False  # True if the running rows have changed since
        self._occupied = jnp.zeros(steps.rows, bool)
        self._how = How()
        self._drawn: deque[Drawn] = deque()
        self._looked, self._told = 0.0, False
        self.paused: Pause | None = None  # replaced by `pause` only
        self.failure: LoRAError | None = None
        self.thread = threading.Thread(target=self._work, name="jlora-serve-steps", daemon=True)

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._arrived.append(sequence)
        self._signal.set()
        if self.failure is not None:  # the thread may have drained the queue for the last time already
            self._refuse(self.failure)

    def wake(self) -> None:
        """Wake the thread, for example after a load or a cancellation."""
        self._signal.set()

    def pause(self, pause: Pause | None) -> None:
        """Replace the pause in effect, or end it with None. One call at a time."""
        before, self.paused = self.paused, pause
        if before is not None:
            before.done.set()
        self._signal.set()
        if pause is not None and self.failure is not None:  # the thread may have ended already
            pause.done.set()

    def stop(self) -> None:
        """Stop the thread. Running and waiting sequences end with EngineClosedError."""
        self._stop = True
        self._signal.set()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with jax.transfer_guard("allow"):  # all transfers of this thread are intended
                while self._turn():
                    pass
        except BaseException as error:
            _log.exception("the engine ends")
            self.failure = EngineClosedError(f"the engine failed: {type(error).__name__}: {str(error)[:500]}")
        finally:
            self._end_all(self.failure or EngineClosedError("the engine was closed before the request ended"))

    def _turn(self) -> bool:
        """Run one iteration. Returns False once `stop` was called."""
        self._told |= self._signal.is_set()
        self._signal.clear()
        if self._stop:
            return False
        now = time.monotonic()
        looked = now - self._looked >= (_OFTEN if self._told else _POLL)
        while self._arrived:
            self._queue.add(self._arrived.popleft())
        pause = self.paused
        pausing = None if pause is None or pause.done.is_set() else pause
        for one in (*self._queue, *self._begun()) if looked or pausing is not None else self._begun():
            self._end_if_over(one, now)
            if pausing is not None and pausing.mode == "abort":
                self._end(one, "abort")
        if looked:
            self._looked, self._told = now, False
            self._look()
        busy = (pause is None or pause.mode != "keep") and self._step()
        while len(self._drawn) > busy:
            self._read(self._drawn.popleft())
        if busy:
            return True
        if self._stale:  # release the batch of rows that ended, without waiting for the next step
            self._compose()
            return True
        if pausing is not None and (pausing.mode == "keep" or not self._begun()):
            pausing.done.set()
        waiting = len(self._queue) or self._begun()
        self._signal.wait(_OFTEN if self._told else _POLL if waiting else _IDLE)
        return True

    def _step(self) -> bool:
        """Dispatch the steps of one iteration. Returns False if there are none."""
        busy = self._fill_some()
        return self._decode() or busy

    def _begun(self) -> list[Sequence]:
        """Return the sequences that have a row."""
        return [one for one in (self._filling, *self._rows) if one is not None]

    def _running(self) -> frozenset[Version]:
        """Return the versions that they run with."""
        return frozenset(one.version for one in self._begun() if one.version is not None)

    def _end_if_over(self, sequence: Sequence, now: float) -> None:
        if sequence.ended:  # a stop string was found by the writer
            self._leave(sequence)
        elif sequence.answer.cancelled:
            self._end(sequence, "abort")
        elif sequence.deadline is not None and now >= sequence.deadline:
            seconds = sequence.deadline - sequence.arrived
            self._end(sequence, RequestTimeoutError(f"the request took longer than {seconds:.3g} s"))

    def _look(self) -> None:
        """Start loads for waiting requests, and end those whose adapter cannot be served."""
        waiting = {one: one.lora for one in self._queue if one.lora is not None}
        loads = {one: name for one, name in waiting.items() if one.handle is None}  # the others have their version
        failed = self._loras.look(loads, self._running())
        pinned = self._loras.all_pinned()
        if not failed and pinned is None:
            return
        for one, name in waiting.items():
            if name in failed and one.handle is None:
                self._end(one, failed[name])
            elif pinned is not None and name not in pinned:
                error = f"adapter {name!r} needs a slot, and each is pinned; raise max_loras"
                self._end(one, NoFreeSlotError(error))

    # --- prompts ------------------------------------------------------------------------------------------------

    def _fill_some(self) -> bool:
        """Prefill one chunk, or several short prompts while many rows are free.

        The prompt tokens of one iteration fit one step, which bounds the delay of running sequences. Copies of prompts
        are not counted.
        """
        room, tokens = 1 + self._rows.count(None) // _ROWS_A_PROMPT, self._steps.chunk
        busy = False
        while room > 0 and tokens > 0 and self._fill():
            room, busy = room - (self._filled > 0), True
            tokens -= self._filled
        return busy

    def _fill(self) -> bool:
        """Copy a prompt, or prefill one chunk. Returns False if no prompt can be prefilled."""
        sequence = self._filling or self._begin()
        if sequence is None:
            return False
        self._filled, logits, source, prompt = 0, None, sequence.source, sequence.prompt
        try:
            if source is not None and not sequence.filled:
                self._steps.copy(source.row, sequence.row, source.tokens)
                sequence.filled = sequence.answer.cached_tokens = source.tokens
                logits = source.logits
            if logits is None:
                chunk = self._steps.chunk_of(sequence.filled, len(prompt))
                self._filled = chunk.padded
                logits, hidden = self._steps.prefill(self._active(sequence, chunk), sequence.row, prompt, chunk)
                if sequence.scored is not None:
                    batch = self._active(sequence, chunk._replace(padded=self._steps.chunk))
                    sequence.scored += self._steps.score(batch, hidden, prompt, chunk)
                sequence.filled = chunk.start + chunk.tokens
                sequence.answer.cached_tokens = min(sequence.answer.cached_tokens, chunk.start)
                self._metrics.filled(chunk.tokens)
                if sequence.filled < len(prompt):
                    return True
            self._metrics.filled(0, sequence.answer.cached_tokens)
            chosen = self._steps.begin(logits, sequence.row, sequence.params, sequence.seed)
        except Exception as error:  # a model's step may raise anything; other sequences go on
            self._failed(error, [sequence])
            return True
        self._filling = None
        self._prefixes.hold(sequence, logits)
        sequence.drawn = 1
        self._rows[sequence.row] = sequence
        self._stale = True
        self._drawn.append(Drawn(chosen, ((0, sequence),), sequence.scored))
        return True

    def _active(self, sequence: Sequence, chunk: Chunk) -> jlora.LoRABatch:
        """Return the batch of a chunk of a prompt, with its first active token."""
        if not sequence.batch.can_activate:  # True also for plain adapters, to run the same compiled step
            return sequence.batch
        return sequence.batch.activate([max(0, sequence.active_from - chunk.start)], length=chunk.padded)

    def _begin(self, fits: Callable[[Sequence], bool] = lambda one: True) -> Sequence | None:
        """Take the next request that can begin, if it `fits`, and give it a row and its adapter a slot."""
        while self.paused is None and len(self._queue) and None in self._rows:
            sequence = self._queue.next(self._loras.slots(self._running()), self._loras.loaded)
            if sequence is None or not fits(sequence):
                return None
            try:
                sequence.batch = self._manager.prepare([sequence.handle or sequence.lora], timeout=0)
                if sequence.handle is None:
                    (sequence.of_request.handle,) = self._manager.handles(sequence.batch)
            except LoadTimeoutError:  # evicted meanwhile, and being loaded again
                return None
            except NoFreeSlotError as error:
                if self._stale:
                    self._compose()  # release the slots of sequences that ended
                elif self._running():
                    return None
                else:  # no sequence of this engine holds a slot that could become free
                    self._end(sequence, error)
                continue
            except Exception as error:  # the device may fail while a slot is written
                if not isinstance(error, LoRAError):
                    error = LoRAError(f"adapter {sequence.lora!r}: {type(error).__name__}: {error!s:.500}")
                self._end(sequence, error)
                continue
            if sequence.batch.needs_activation:
                sequence.active_from = jlora.active_from(sequence.prompt, sequence.batch.invocation_tokens[0])
            sequence.answer.handle = sequence.handle
            alone = sequence.batch.lease.cache_keys(len(sequence.prompt), [sequence.active_from])
            # A prompt whose log probabilities are requested is computed whole.
            sequence.key = (sequence.version, *alone) if sequence.scored is None else object()
            free = [row for row, one in enumerate(self._rows) if one is None]
            sequence.row, sequence.source = self._prefixes.place(sequence, free)
            self._filling = sequence
            self._queue.take(sequence)
            self._loras.not_wanted(sequence)
            self._metrics.begun(sequence)
            return sequence
        return None

    # --- decoding --------------------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        """Dispatch one decode step for all running rows. Returns False if none needs a token."""
        if self._stale:
            self._compose()
        running = [(row, one) for row, one in enumerate(self._rows) if one is not None]
        if not any(one.drawn < one.limit for _, one in running):
            return False
        try:
            live = min(max(one.live for _, one in running), self._steps.capacity)
            chosen = self._steps.decode(self._batch, self._occupied, live, self._how)
        except Exception as error:  # as above
            self._failed(error, [one for _, one in running])
            return True
        for _, one in running:
            one.drawn += 1
        self._drawn.append(Drawn(chosen, tuple(running)))
        return True

    def _compose(self) -> None:
        """Prepare the batch of the running rows. Takes no new slot, since open batches hold all of its adapters."""
        before = self._batch
        if not any(self._rows):
            self._batch = None
        else:
            names = [None if one is None else one.handle for one in self._rows]
            first: dict[str, Any] = {}
            if self._manager.config.activated:
                rows = [int(one is not None and one.active_from >= len(one.prompt)) for one in self._rows]
                first = {"active_from": rows, "length": 1}
            try:
                self._batch = self._manager.prepare(names, **first)
                self._occupied = jax.device_put(np.array([one is not None for one in self._rows]))
            except Exception as error:  # as above
                self._failed(error, [one for one in self._rows if one is not None])
                self._batch = None
        self._how = How.of([one.params for one in self._rows if one is not None])
        for one in self._rows:
            if one is not None and one.batch is not None:
                one.batch.close()
                one.batch = None
        if before is not None:
            before.close()
        self._stale = False

    # --- results ------------------------------------------------------------------------------------------------

    def _read(self, drawn: Drawn) -> None:
        try:
            chosen: Chosen = drawn.chosen.read()
            prompt = None if drawn.prompt is None else [each.read() for each in drawn.prompt]
        except Exception as error:  # later steps depend on this one, so their tokens are lost too
            self._failed(error, [one for _, one in drawn.sequences], lost=True)
            return
        events: list[TokenEvent] = []
        for i, sequence in drawn.sequences:
            if sequence.left:
                continue
            token = int(chosen.tokens[i])
            if token < 0:
                error = StepFailedError("the model's logits are not numbers (NaN); the answer is cut off here")
                self._end(sequence, error)
                self._prefixes.forget(sequence.row)
                continue
            sequence.tokens.append(token)
            end: FinishReason | None = None
            if not sequence.limit:  # the prompt alone was requested
                self._leave(sequence)
                events.append(TokenEvent(sequence, end="length", prompt=prompt))
                continue
            if token in sequence.stops:
                end = "stop"
            elif len(sequence.tokens) >= sequence.limit:
                end = "length"
            logprob = chosen.logprob(i, token, sequence.params.logprobs)
            events.append(TokenEvent(sequence, token, logprob, end, prompt=prompt))
            if end is not None:
                self._leave(sequence)
        self._writer.put(events)

    def _end(self, sequence: Sequence, end: FinishReason | LoRAError) -> None:
        self._leave(sequence)
        self._writer.put([TokenEvent(sequence, end=end)])

    def _leave(self, sequence: Sequence) -> None:
        """Release the row, batch and adapter of a sequence."""
        if sequence.left:
            return
        sequence.left = True
        if sequence.row < 0:
            self._queue.remove(sequence)
            self._loras.not_wanted(sequence)
        if self._filling is sequence:
            self._filling = None
        if sequence.batch is not None:
            sequence.batch.close()
            sequence.batch = None
        if sequence.row >= 0 and self._rows[sequence.row] is sequence:
            self._rows[sequence.row] = None
            self._prefixes.ended(sequence)
            self._stale = True
        sequence.of_request.release()

    # --- failures -----------------------------------------------------------------------------------------------

    def _failed(self, error: Exception, sequences: Seq[Sequence], *, lost: bool = False) -> None:
        """End the sequences of a failed step. If the donated state is lost, end all sequences and reset the state."""
        _log.error("a step failed", exc_info=error)
        with self._metrics.lock:
            self._metrics.failed_steps += 1
        message = f"the step that served this request failed: {type(error).__name__}: {str(error)[:500]}"
        lost = lost or self._steps.lost
        if lost:
            sequences = self._begun()
            self._drawn.clear()
        for sequence in sequences:
            self._end(sequence, StepFailedError(message))
        if lost:
            self._steps.reset()
            for row in range(self._steps.rows):
                self._prefixes.forget(row)

    def _end_all(self, error: LoRAError) -> None:
        for sequence in (*self._queue, *self._begun()):
            self._end(sequence, error)
        self._refuse(error)
        self._compose()
        self._drawn.clear()
        self._steps.close()
        if self.paused is not None:
            self.paused.done.set()

    def _refuse(self, error: LoRAError) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._end(self._arrived.popleft(), error)
