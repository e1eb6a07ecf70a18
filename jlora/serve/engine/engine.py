"""`Engine`: concurrent requests on one model, each with its own adapter."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, cast, get_args

from jlora import Adapter, LoRAManager, LoRARequest
from jlora.errors import LoRAError, LoRAUsageError
from jlora.models import Pooling
from jlora.serve.engine.detokenizer import Detokenizer, silent_tokens
from jlora.serve.engine.dispatch import Dispatcher, Pause
from jlora.serve.engine.embedding import EmbeddingDispatcher, EmbeddingSteps
from jlora.serve.engine.generation import Generation
from jlora.serve.engine.loras import Loras
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.model import context_of
from jlora.serve.engine.options import EngineOptions, check_options
from jlora.serve.engine.request import (
    EngineBusyError,
    EngineClosedError,
    EngineStats,
    PauseMode,
    RegisteredLoRA,
    SamplingParams,
)
from jlora.serve.engine.resolvers import Resolve
from jlora.serve.engine.sequence import RequestVersion, Sequence, check_params, check_tokens, room_for, seed_of
from jlora.serve.engine.steps import Steps
from jlora.serve.engine.writer import TokenEvent, TokenWriter

_WAIT_FOR_NAMES = 0.25  # largest share of the queue for requests whose name is being resolved


class Engine:
    """Continuous batching: requests join and leave the decoding batch at each step, without recompilation.

    All methods may be called from any thread. `start` allocates and compiles. Until `close`, two threads of the engine
    then dispatch steps and deliver completions.

    A completion depends only on its prompt, its parameters, its seed and the version of its adapter. Rows of a step are
    independent, and their number is fixed. The longest sequence of the batch determines how much of the cache attention
    reads (512 positions, 1024, ...), and the compiler may sum in another order for another extent. Across extents,
    logits agree to rounding.

    Equal prompts of one version of an adapter that wait together are computed once. The row of the first is copied to
    the others, bit for bit, as each gets a row in its turn.

    The model must be on devices of this process. Ray Serve runs replicas (`examples/ray_serve`).

    Args:
      model: A `jlora.serve.ServableModel`, such as `jlora.models.Decoder`. If its `config.pooling` is set, the engine
        embeds prompts by its `pooled`, with weights, and generates nothing.
      manager: The model's manager, which compiles the steps (`manager.jit`). Adapters may also be added to it directly.
      tokenizer: A `tokenizers.Tokenizer`; None for prompts and completions of token ids only.
      options: Sizes and limits.
      resolve: Maps an unknown name to a `LoRARequest`, or to None if there is no such adapter. Called when a request
        names it, on separate threads, several names at once and each name once. The result is loaded, and is an adapter
        like any other from then on. It may block, since only requests for that name wait for it.

    Raises:
      LoRAUsageError: the model lacks a required member, is not the manager's, or an option is out of range.
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
        self._manager, self._model_name = manager, type(model).__name__
        self._tokenizer = tokenizer
        longest = context_of(model)
        self._longest = options.max_model_len or longest
        if self._longest > longest:
            raise LoRAUsageError(f"max_model_len={self._longest} is more than the model's context of {longest}")
        self._pooling: Pooling | None = getattr(model.config, "pooling", None)
        sizes = {"rows": options.max_num_seqs, "max_model_len": self._longest, "chunk": options.max_num_batched_tokens}
        caching = options.enable_prefix_caching
        if self._pooling is None:
            dispatcher = Dispatcher
            self._steps = Steps(model, manager, **sizes, logprobs_mode=options.logprobs_mode, caching=caching)
        else:
            dispatcher = EmbeddingDispatcher
            self._steps = EmbeddingSteps(model, manager, **sizes)
        self._vocab = int(model.config.vocab_size)
        self._eos = frozenset(int(token) for token in model.config.eos_token_ids)
        self._silent = silent_tokens(tokenizer, self._vocab)
        self._metrics = EngineMetrics(lambda name: bool(manager.list_adapters([name])))
        self._writer = TokenWriter(self._metrics, self._ended)
        most = math.ceil(options.max_waiting * _WAIT_FOR_NAMES)
        self._loras = Loras(manager, lambda: self._dispatcher.wake(), resolve, most, self._fail, self._pooling)
        self._dispatcher = dispatcher(
            manager, cast(Any, self._steps), self._loras, self._writer, self._metrics, options.max_wait_ratio, caching
        )
        self._changed = threading.Condition()
        self._open: set[Sequence] = set()  # requests that have not ended
        self._state = "new"  # then "starting", "ready", "closing", "closed"

    # --- life cycle ---------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Positions of a sequence, prompt and completion."""
        return self._longest

    @property
    def embeds(self) -> bool:
        """True if the engine takes `embed`, False if it takes `submit`."""
        return self._pooling is not None

    def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Allocate the cache, compile every shape, and start the threads. Returns once requests can be served.

        Args:
          progress: Called with (steps done, steps in all), first with 0 steps done.

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
        """True if requests are accepted."""
        return self._state == "ready" and self._dispatcher.failure is None

    def pause(self, mode: PauseMode) -> None:
        """Begin no request until `resume`. Returns once no step runs.

        New requests wait, and their timeouts run. Adapters may be loaded, replaced and removed. A request that has
        begun goes on with the version that it began with. A later call may change the mode.

        Args:
          mode: "abort" ends all requests, "wait" first finishes those that have begun, and "keep" freezes them.

        Raises:
          LoRAUsageError: the mode is unknown.
          LoRAError: `resume` or a call with another mode came before the pause was reached.
          EngineClosedError: the engine does not accept requests, or was closed meanwhile.
        """
        if mode not in get_args(PauseMode):
            raise LoRAUsageError(f"mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r:.80}")
        with self._changed:
            self._check_ready()
            pause = self._dispatcher.paused
            if pause is None or pause.mode != mode or mode == "abort":
                pause = Pause(mode)
                self._dispatcher.pause(pause)
        pause.done.wait()
        self._check_ready()
        if self._dispatcher.paused is not pause:
            raise LoRAError(f"the pause of mode {mode!r} was ended by resume or another pause")

    def resume(self) -> None:
        """End a pause. Has no effect without one."""
        with self._changed:
            self._dispatcher.pause(None)

    @property
    def paused(self) -> bool:
        """True from a call of `pause` until `resume`."""
        return self._dispatcher.paused is not None

    def close(self, timeout: float | None = None) -> bool:
        """Refuse new requests, end a pause, wait for requests under way, end the threads and free the cache.

        Args:
          timeout: Seconds to wait; remaining requests then end with EngineClosedError. None for no limit.

        Returns:
          Whether all requests ended in time.
        """
        with self._changed:
            running = self._state in ("ready", "closing")
            self._state = "closing" if running else "closed"
            self._dispatcher.pause(None)
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
        """Submit one request. Returns at once.

        Args:
          prompt: Text, or token ids.
          params: How its tokens are chosen.
          lora: As in `submit_all`.
          timeout: As in `submit_all`.

        Raises:
          LoRAError: An error of `submit_all`.
        """
        (generation,) = self.submit_all([prompt], [params], lora=lora, timeout=timeout)
        return generation

    def submit_all(
        self,
        prompts: Seq[str | Seq[int]],
        params: Seq[SamplingParams],
        *,
        lora: str | LoRARequest | None = None,
        timeout: float | None = None,
    ) -> list[Generation]:
        """Submit several prompts as one request. Returns at once.

        All have the same version of the adapter: that which is newest when the first of them begins. The limits of
        waiting requests apply to the first of them alone, so none is refused unless all are.

        Args:
          prompts: Texts, or token ids of each.
          params: How the tokens of each are chosen.
          lora: The adapter: a name that was added or that `resolve` can find, or a `LoRARequest`, which is loaded first
            if its name is unknown.
          timeout: Seconds until it ends with RequestTimeoutError; None for `EngineOptions.request_timeout`.

        Raises:
          AdapterNotFoundError: the name is unknown or was unloaded. With a resolver, the request ends with this error
            instead, except for a name that is being unloaded or is invalid.
          LoRAUsageError: a prompt or a parameter is wrong or too long.
          EngineBusyError: too many requests wait.
          EngineClosedError: the engine does not accept requests.
        """
        if isinstance(self._steps, EmbeddingSteps):
            raise LoRAUsageError("the model embeds texts (modules.json) and cannot generate; use embed")
        asked: list[tuple[list[int], SamplingParams, int]] = []
        for prompt, own in zip(prompts, params, strict=True):
            tokens = self._tokens(prompt, 0 if own.max_tokens == 0 else 1)
            asked.append((tokens, own, check_params(own, tokens, self._vocab, self._longest)))
            if own.prompt_logprobs is not None and not self._steps.scores:
                raise LoRAUsageError(
                    f"prompt_logprobs needs a model with hidden_states and logits (jlora.serve.ScoringModel), and "
                    f"{self._model_name} has only extend; leave prompt_logprobs out, or add the two methods"
                )
            if own.stop and self._tokenizer is None:
                raise LoRAUsageError("stop strings need an engine with a tokenizer; use stop_token_ids")
        return self._queue(asked, lora, timeout)

    def embed(
        self,
        prompts: Seq[str | Seq[int]],
        *,
        dimensions: int | None = None,
        lora: str | LoRARequest | None = None,
        timeout: float | None = None,
    ) -> list[Generation]:
        """Submit the prompts of one request to an embedding model. Returns at once.

        The result of each has an `embedding` and no text. They begin in the order of their lengths, with one version of
        the adapter, as in `submit_all`.

        Args:
          prompts: Texts, or token ids of each.
          dimensions: Number of values of an embedding, which is cut, and normalized again if the model normalizes it;
            None for all.
          lora: As in `submit_all`.
          timeout: As in `submit_all`.

        Raises:
          LoRAUsageError: the model has no embeddings; a prompt is wrong or too long; `dimensions` is out of range.
          AdapterNotFoundError, EngineBusyError, EngineClosedError: as in `submit_all`.
        """
        if not isinstance(self._steps, EmbeddingSteps):
            raise LoRAUsageError("the model generates text and has no embeddings (modules.json); use submit")
        width = self._steps.width
        if dimensions is not None and not 1 <= dimensions <= width:
            raise LoRAUsageError(f"dimensions must be from 1 to {width}, the model's width, got {dimensions}")
        tokens: list[list[int]] = []
        for i, prompt in enumerate(prompts):
            try:
                tokens.append(self._tokens(prompt, 0))
                room_for(tokens[i], self._longest, 0)
                check_tokens(tokens[i], self._vocab)
            except LoRAUsageError as error:
                raise LoRAUsageError(f"input {i}: {error}") from None
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        asked = [(tokens[i], SamplingParams(), dimensions or width) for i in order]
        found = dict(zip(order, self._queue(asked, lora, timeout), strict=True))
        return [found[i] for i in range(len(tokens))]

    def _queue(
        self,
        asked: Seq[tuple[list[int], SamplingParams, int]],
        lora: str | LoRARequest | None,
        timeout: float | None,
    ) -> list[Generation]:
        """Queue the sequences of a request: checked prompt, parameters and limit of new tokens of each."""
        if not asked:
            return []
        name, request = (lora.name, lora) if isinstance(lora, LoRARequest) else (lora, None)
        if request is not None and request.load_inplace:
            raise LoRAUsageError(f"adapter {name!r}: a request cannot replace it (load_inplace); add_lora can")
        with self._changed:
            self._check_ready()
            waiting = sum(one.row < 0 for one in self._open)
            if waiting >= self.options.max_waiting:
                raise EngineBusyError(
                    f"{waiting} requests wait already (max_waiting={self.options.max_waiting})",
                    self._metrics.retry_after(),
                )
            arrived = time.monotonic()
            seconds = self.options.request_timeout if timeout is None else timeout
            deadline = None if seconds is None else arrived + seconds
            absent = name is not None and not self._manager.list_adapters([name], level="slot")
            version = RequestVersion(len(asked))
            sequences = [
                Sequence(
                    prompt=tokens,
                    params=params,
                    seed=seed_of(params),
                    limit=limit,
                    stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
                    lora=name,
                    request=request,
                    absent=absent,
                    deadline=deadline,
                    answer=Generation(tokens, self._dispatcher.wake),
                    detokenizer=Detokenizer(self._tokenizer, params.stop, self._silent),
                    arrived=arrived,
                    of_request=version,
                    scored=None if params.prompt_logprobs is None else [],
                )
                for tokens, params, limit in asked
            ]
            self._loras.wanted(sequences)
            self._open.update(sequences)
            for sequence in sequences:
                self._dispatcher.submit(sequence)
        with self._metrics.lock:
            self._metrics.prompt_tokens += sum(len(tokens) for tokens, _, _ in asked)
        return [sequence.answer for sequence in sequences]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a prompt, as `submit` and `embed` compute them.

        Args:
          text: The prompt.
          special: Add the tokenizer's special tokens; False if the text contains them.

        Raises:
          LoRAUsageError: the engine has no tokenizer, or the text cannot be tokenized.
        """
        text = text if self._pooling is None else self._pooling.prompt + text
        if self._tokenizer is None:
            raise LoRAUsageError("a prompt of text needs an engine with a tokenizer; give token ids")
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception as error:
            raise LoRAUsageError(f"the prompt {text!r:.80} cannot be tokenized: {error!s:.200}") from error

    def _tokens(self, prompt: str | Seq[int], least: int) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        room_for(prompt, self._longest, least)  # check the length before iterating
        return [int(token) if hasattr(token, "dtype") else token for token in prompt]

    def _fail(self, sequence: Sequence, error: LoRAError) -> None:
        self._writer.put([TokenEvent(sequence, end=error)])

    def _ended(self, sequence: Sequence) -> None:
        if not sequence.left:  # ended by a stop string; its row runs until the dispatching thread sees it
            self._dispatcher.wake()
        with self._changed:
            self._open.discard(sequence)
            self._changed.notify_all()

    # --- adapters -----------------------------------------------------------------------------------------------

    def add_lora(
        self,
        adapter: LoRARequest | Adapter,
        *,
        load_inplace: bool = False,
        timeout: float | None = None,
        path: str | None = None,
        parent: str | None = None,
    ) -> None:
        """Load an adapter. With `load_inplace` it replaces one of its name; running sequences keep the old version.

        Args:
          adapter: A request for a folder or repository, or an adapter in memory.
          load_inplace: Replace an adapter of the same name, as the field of a request.
          timeout: Seconds to wait; None for no limit.
          path: Displayed as its source; None for the request's, and for none of an adapter in memory.
          parent: The base model name that it is listed under; None for the first.

        Raises:
          AdapterExistsError: the name is loaded, and `load_inplace` is not set.
          LoRAError: an error of `LoRAManager.add_adapter`.
          EngineClosedError: the engine is closed.
        """
        self._check_open()
        self._loras.add(adapter, load_inplace, timeout, path, parent)

    def remove_lora(self, name: str) -> None:
        """Unload an adapter. Returns at once, and the name is refused from now on.

        Earlier requests are served. The slot is free once the last of them has ended.

        Raises:
          AdapterNotFoundError: it is not loaded.
          EngineClosedError: the engine is closed.
        """
        self._check_open()
        self._loras.remove(name)

    def pin_lora(self, name: str) -> None:
        """Keep an adapter in a slot. Raises AdapterNotFoundError, or NoFreeSlotError if all slots are taken."""
        self._check_open()
        self._loras.pin(name)

    def unpin_lora(self, name: str) -> None:
        """Let an adapter be evicted again. Raises AdapterNotFoundError."""
        self._check_open()
        self._loras.unpin(name)

    def unloading_loras(self) -> frozenset[str]:
        """Return the removed adapters that waiting requests still need."""
        return self._loras.unloading()

    def list_loras(self) -> Mapping[str, RegisteredLoRA]:
        """Return the adapters that requests may name, including evicted ones."""
        return self._loras.list()

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise EngineClosedError(f"the engine takes no requests: it is {self._state}")
        if self._dispatcher.failure is not None:
            raise self._dispatcher.failure

    def _check_open(self) -> None:
        if self._state == "closed":
            raise EngineClosedError("the engine is closed")

    # --- statistics ---------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return counters since the start, and the requests under way."""
        with self._changed:
            under_way = tuple(self._open)
        return self._metrics.stats(under_way, self.options.max_num_seqs, self._longest)
