"""`Engine`: many requests at once on one model, each with its own adapter."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jlora import LoRAManager, LoRARequest
from jlora.errors import LoRAError, LoRAUsageError
from jlora.serve.engine.detokenizer import Detokenizer, silent_tokens
from jlora.serve.engine.dispatch import Dispatcher
from jlora.serve.engine.generation import Answer
from jlora.serve.engine.loras import Loras
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.model import context_of
from jlora.serve.engine.options import EngineOptions, check_options
from jlora.serve.engine.request import (
    EngineBusyError,
    EngineClosedError,
    EngineStats,
    Generation,
    RegisteredLoRA,
    SamplingParams,
)
from jlora.serve.engine.resolver_pool import Resolve, ResolverPool
from jlora.serve.engine.sequence import Sequence, check_params, room_for, seed_of
from jlora.serve.engine.steps import Steps
from jlora.serve.engine.writer import TokenEvent, TokenWriter

_WAIT_FOR_NAMES = 0.25  # the most of the queue that requests take whose adapter is looked up


class Engine:
    """Continuous batching: requests join and leave the batch that decodes, step by step, and nothing recompiles.

    Every method may be called from any thread. `start` allocates and compiles; then two threads of the engine's own
    dispatch steps and hand out answers, until `close`.

    What an answer depends on: its prompt, its parameters, its seed and the version of its adapter. Rows of a step do
    not see each other, and there is one number of rows. Attention reads the cache up to an extent that the longest
    sequence of the batch decides, and the compiler may add up in another order where that differs (512, 1024, ...): so
    across extents, logits agree to rounding.

    The model lies on devices of this process. Replicas of it run under Ray Serve (`examples/ray_serve`).

    Args:
      model: a `jlora.serve.ServableModel`; `jlora.models.Decoder`, or your own.
      manager: of the model. The engine steps through `manager.run`; adapters may be added to it directly as well.
      tokenizer: a `tokenizers.Tokenizer`; None for token ids in and out.
      options: sizes and limits.
      resolve: name -> what to load, for names that nobody added; None where there is no such adapter. Called on
        threads of its own, some names at once and each once, when a request asks for one; what it finds is loaded, and
        is an adapter like any other from then on. It may take its time: requests wait for it as for a load.

    Raises:
      LoRAUsageError: the model lacks what is needed, is not the manager's, or an option is out of range.
    """

    def __init__(
        self,
        model: Any,
        manager: LoRAManager,
        *,
        tokenizer: Any | None = None,
        options: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
        resolve: Resolve | None = None,
    ):
        check_options(options)
        self.options = options
        self._manager = manager
        self._tokenizer = tokenizer
        longest = context_of(model)
        self._longest = options.max_model_len or longest
        if self._longest > longest:
            raise LoRAUsageError(f"max_model_len={self._longest} is more than the model's context of {longest}")
        self._steps = Steps(
            model, manager, rows=options.max_num_seqs, max_model_len=self._longest, chunk=options.max_num_batched_tokens
        )
        self._vocab = int(model.config.vocab_size)
        self._eos = frozenset(int(token) for token in model.config.eos_token_ids)
        self._silent = silent_tokens(tokenizer, self._vocab)
        self._metrics = EngineMetrics(lambda name: manager.level(name) is not None)
        self._writer = TokenWriter(self._metrics, self._ended)
        self._resolver_pool: ResolverPool | None = None
        if resolve is not None:
            most = math.ceil(options.max_waiting * _WAIT_FOR_NAMES)
            self._resolver_pool = ResolverPool(resolve, most, lambda: self._dispatcher.wake(), self._not_found)
        self._loras = Loras(manager, lambda: self._dispatcher.wake(), self._resolver_pool)
        self._dispatcher = Dispatcher(
            manager, self._steps, self._loras, self._writer, self._metrics, options.max_wait_ratio
        )
        self._changed = threading.Condition()
        self._open: set[Sequence] = set()  # requests that have not ended
        self._state = "new"  # then "starting", "ready", "closing", "closed"

    # --- life ---------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Positions of a sequence, prompt and answer."""
        return self._longest

    def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Allocate the cache, compile every shape, start the threads. Returns when the first request can be served.

        Args:
          progress: called with (shapes compiled, shapes in all).

        Raises:
          LoRAUsageError: it was started before.
        """
        with self._changed:
            if self._state != "new":
                raise LoRAUsageError(f"the engine cannot be started: it is {self._state}")
            self._state = "starting"
        try:
            self._steps.warm(progress or (lambda done, total: None))
            with self._changed:
                if self._state != "starting":
                    raise EngineClosedError("the engine was closed while it started")
                self._writer.thread.start()
                self._dispatcher.thread.start()
                self._state = "ready"
        except BaseException:
            self._state = "closed"
            self._steps.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._state == "ready" and self._dispatcher.failure is None

    def close(self, timeout: float | None = None) -> bool:
        """Take no more requests, wait for those under way, end the threads and free the cache.

        Args:
          timeout: seconds to wait; what has not ended then ends with EngineClosedError. None: as long as it takes.

        Returns:
          Whether all had ended.
        """
        with self._changed:
            running = self._state in ("ready", "closing")
            self._state = "closing" if running else "closed"
            done = self._changed.wait_for(lambda: not self._open, timeout) if running else True
        if running:
            for part in (self._dispatcher, self._writer):
                part.stop()
                if part.thread is not threading.current_thread():
                    part.thread.join()
            self._state = "closed"
        return done

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Seq[int],
        params: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        *,
        lora: str | LoRARequest | None = None,
        timeout: float | None = None,
    ) -> Generation:
        """Ask for one answer. Returns at once.

        Args:
          prompt: text, or token ids.
          params: how its tokens are chosen.
          lora: the adapter: a name that was added, or that the engine's `resolve` knows, or a request that is loaded
            first if its name is unknown. It answers with the version that is the newest when it begins.
          timeout: seconds after which it ends with RequestTimeoutError; None for `EngineOptions.request_timeout`.

        Raises:
          AdapterNotFoundError: the name is unknown, or was unloaded. Where there is a resolver, the answer ends with
            that; the name of an adapter that is being unloaded, and one that could not be a name, are refused at once.
          LoRAUsageError: the prompt or a parameter is wrong or too long.
          EngineBusyError: too many requests wait.
          EngineClosedError: the engine takes none.
        """
        tokens = self._tokens(prompt)
        limit = check_params(params, tokens, self._vocab, self._longest)
        if params.stop and self._tokenizer is None:
            raise LoRAUsageError("stop strings need an engine with a tokenizer; use stop_token_ids")
        seconds = self.options.request_timeout if timeout is None else timeout
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        detokenizer = Detokenizer(self._tokenizer, params.stop, self._silent)
        with self._changed:
            if self._state != "ready":
                raise EngineClosedError(f"the engine takes no requests: it is {self._state}")
            if self._dispatcher.failure is not None:
                raise self._dispatcher.failure
            waiting = sum(one.row < 0 for one in self._open)
            if waiting >= self.options.max_waiting:
                raise EngineBusyError(
                    f"{waiting} requests wait already (max_waiting={self.options.max_waiting})",
                    self._metrics.retry_after(),
                )
            name, request, unknown = (None, None, False) if lora is None else self._loras.wanted(lora)
            answer = Answer(len(tokens), lambda: self._cancel(sequence))
            arrived = time.monotonic()
            sequence = Sequence(
                prompt=tokens,
                params=params,
                seed=seed_of(params),
                limit=limit,
                stops=stops,
                lora=name,
                request=request,
                absent=name is not None and self._manager.level(name) != "slot",
                deadline=None if seconds is None else arrived + seconds,
                answer=answer,
                detokenizer=detokenizer,
                arrived=arrived,
            )
            if unknown:
                self._look_up(sequence)
            self._open.add(sequence)
            self._dispatcher.submit(sequence)
        with self._metrics.lock:
            self._metrics.prompt_tokens += len(tokens)
        return answer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a prompt, as `submit` makes them.

        Args:
          text: the prompt.
          special: whether the tokenizer puts its special tokens around it; not where the text has them already.

        Raises:
          LoRAUsageError: the engine has no tokenizer, or the text cannot be tokenized.
        """
        if self._tokenizer is None:
            raise LoRAUsageError("a prompt of text needs an engine with a tokenizer; give token ids")
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception as error:
            raise LoRAUsageError(f"the prompt {text!r:.80} cannot be tokenized: {error!s:.200}") from error

    def _tokens(self, prompt: str | Seq[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        room_for(prompt, self._longest)  # before it is gone through
        return [int(token) if hasattr(token, "dtype") else token for token in prompt]

    def _look_up(self, sequence: Sequence) -> None:
        """Before the dispatching thread sees it, which takes what nobody knows for gone."""
        assert self._resolver_pool is not None
        assert sequence.lora is not None
        try:
            self._resolver_pool.add(sequence)
        except BaseException:
            self._loras.not_wanted(sequence.lora)
            raise

    def _not_found(self, sequence: Sequence, error: LoRAError) -> None:
        self._writer.put([TokenEvent(sequence, end=error)])

    def _cancel(self, sequence: Sequence) -> None:
        sequence.cancelled = True
        self._dispatcher.wake()

    def _ended(self, sequence: Sequence) -> None:
        if not sequence.left:  # a stop string: its row goes on until the dispatching thread hears of it
            self._dispatcher.wake()
        with self._changed:
            self._open.discard(sequence)
            self._changed.notify_all()

    # --- adapters -----------------------------------------------------------------------------------------------

    def add_lora(
        self, request: LoRARequest, *, timeout: float | None = None, path: str | None = None, parent: str | None = None
    ) -> None:
        """Load an adapter. With `load_inplace` it replaces one of its name; sequences that run go on with theirs.

        Args:
          request: what to load.
          timeout: seconds to wait; None for as long as it takes.
          path: shown as where it came from; None for that of the request.
          parent: the name of the base model that it is shown under; None for the first.

        Raises:
          AdapterExistsError: the name is loaded, and the request does not say `load_inplace`.
          LoRAError: what `LoRAManager.add_adapter` raises.
          EngineClosedError: the engine is closed.
        """
        self._check_open()
        self._loras.add(request, timeout, path, parent)

    def remove_lora(self, name: str) -> None:
        """Unload an adapter. Returns at once, and the name is refused from now on.

        Requests that came before are served; its slot is free once the last of them has ended.

        Raises:
          AdapterNotFoundError: it is not loaded.
          EngineClosedError: the engine is closed.
        """
        self._check_open()
        self._loras.remove(name)

    def pin_lora(self, name: str) -> None:
        """Keep an adapter in a slot. Raises AdapterNotFoundError, and NoFreeSlotError where each is taken."""
        self._check_open()
        self._loras.pin(name)

    def unpin_lora(self, name: str) -> None:
        """Let an adapter be evicted again. Raises AdapterNotFoundError."""
        self._check_open()
        self._loras.unpin(name)

    def unloading_loras(self) -> frozenset[str]:
        """The adapters that were removed, and that requests which wait still need."""
        return self._loras.unloading()

    def list_loras(self) -> Mapping[str, RegisteredLoRA]:
        """The adapters that requests may name, those that were evicted among them."""
        return self._loras.list()

    def _check_open(self) -> None:
        if self._state == "closed":
            raise EngineClosedError("the engine is closed")

    # --- what it tells ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """EngineMetrics since the start, and what is under way now."""
        with self._changed:
            under_way = tuple(self._open)
        return self._metrics.stats(under_way, self.options.max_num_seqs, self._longest)
