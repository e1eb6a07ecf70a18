"""Embeddings in the engine: prompts of any adapters in one step, without a cache.

A step takes R prompts of at most L tokens. L is a power of two. R is 1, or as many as the tokens of a step allow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import numpy as np

import jlora
from jlora.errors import LoRAError, LoRAUsageError
from jlora.models import Pooling, token_weights
from jlora.serve.engine.dispatch import Dispatcher, Drawn
from jlora.serve.engine.model import check_place
from jlora.serve.engine.request import StepFailedError
from jlora.serve.engine.sequence import Sequence
from jlora.serve.engine.steps import doubled, run_each, smallest
from jlora.serve.engine.writer import TokenEvent

_SHORTEST = 32  # tokens


class EmbeddingSteps:
    """Compiled steps of an embedding model. All methods must be called from one thread at a time.

    Args:
      model: An embedding model, as `jlora.models.Decoder` with `config.pooling`, that `manager` serves.
      manager: The model's manager.
      rows: The most prompts of one step.
      max_model_len: The most tokens of a prompt.
      chunk: The most tokens of a step of several prompts.

    Attributes:
      rows: The most prompts under way, of a running step and the next one.
      width: Values of an embedding.
      lost: False, since a step changes no state.
    """

    lost = False

    def __init__(self, model: Any, manager: jlora.LoRAManager, *, rows: int, max_model_len: int, chunk: int):
        check_place(model, manager)
        self._model, self._manager = model, manager
        self._lengths = doubled(_SHORTEST, max_model_len)
        self._most = {length: max(1, min(rows, chunk // length)) for length in self._lengths}
        self.rows = 2 * self._most[self._lengths[0]]
        self.width = int(model.config.hidden_size)

        @manager.jit
        def embed(model: Any, batch: Any, tokens: Any, lengths: Any, weights: Any) -> Any:
            with jlora.use(batch):
                return model.pooled(tokens, lengths, weights)

        self._embed = embed

    def shape(self, prompts: list[Sequence]) -> tuple[int, int] | None:
        """Return (R, L) of a step for these prompts; None if they do not fit one."""
        length = smallest(self._lengths, max(len(one.prompt) for one in prompts))
        most = self._most[length]
        return None if len(prompts) > most else (1 if len(prompts) == 1 else most, length)

    def embed(self, batch: jlora.LoRABatch, prompts: list[tuple[Any, Pooling]], shape: tuple[int, int]) -> jax.Array:
        """Return the embeddings [R, E] of at most R prompts with their poolings, not normalized, while computed."""
        tokens, lengths, weights = np.zeros(shape, np.int32), np.ones(shape[0], np.int32), np.zeros(shape, np.float32)
        for row, (prompt, pooling) in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            weights[row] = token_weights(pooling.mode, lengths[row : row + 1], shape[1], np)[0]
        # Without an adapter in the batch, run the variant that computes the base model alone.
        found = self._embed(self._model, batch if batch.has_adapters else None, tokens, lengths, weights)
        found.copy_to_host_async()
        return found

    def cut(self, embedding: np.ndarray, values: int, normalize: bool) -> np.ndarray:
        """Return the first values of an embedding, normalized if its pooling says so."""
        cut = embedding[:values]
        return cut / max(float(np.linalg.norm(cut)), 1e-12) if normalize else cut

    def warm(self, progress: Callable[[int, int], None]) -> None:
        """Compile every variant, by running each with a free slot and without adapters; see `run_each`."""
        calls: list[tuple[str, Callable[[], None]]] = []
        for rows, length in [(rows, length) for length, most in self._most.items() for rows in sorted({1, most})]:
            run = partial(self.embed, prompts=[], shape=(rows, length))
            first = length if self._manager.config.activated else None
            warmup = partial(self._manager.warmup, run, jlora.BatchShape(rows, length=first))
            calls.append((f"{rows} embeddings of {length} tokens", warmup))
        run_each(calls, progress, lambda: None)

    def reset(self) -> None:
        """Do nothing, since there is no state."""

    close = reset

    def compiled(self) -> int:
        """Return the number of compiled variants of the step."""
        return cast(Any, self._embed)._cache_size()


class EmbeddingDispatcher(Dispatcher):
    """Embeds sequences on its own thread, several in a step. Arguments are those of `Dispatcher`."""

    _steps: EmbeddingSteps  # pyright: ignore[reportIncompatibleVariableOverride]

    def _step(self) -> bool:
        """Embed the next requests that fit one step. Returns False if none can begin."""
        taken: list[Sequence] = []
        while (one := self._begin(lambda one: self._steps.shape([*taken, one]) is not None)) is not None:
            self._filling = None
            self._rows[one.row] = one
            try:
                self._set_pooling(one)
                taken.append(one)
            except LoRAError as error:
                self._end(one, error)
        if not taken:
            return False
        rows, length = shape = cast("tuple[int, int]", self._steps.shape(taken))
        first: dict[str, Any] = {}
        if self._manager.config.activated:
            first = {"active_from": [one.active_from for one in taken] + [0] * (rows - len(taken)), "length": length}
        try:
            names = [one.handle for one in taken] + [None] * (rows - len(taken))
            with self._manager.prepare(names, **first) as batch:
                prompts = [(one.prompt, cast("Pooling", one.of_request.pooling)) for one in taken]
                embeddings = self._steps.embed(batch, prompts, shape)
        except Exception as error:  # a model's step may raise anything; other sequences go on
            self._failed(error, taken)
            return True
        self._drawn.append(Drawn(embeddings, tuple(enumerate(taken))))
        return True

    def _set_pooling(self, one: Sequence) -> None:
        """Find the pooling of a sequence. Raises LoRAError if it does not serve its prompt."""
        assert self._loras.poolings is not None
        pooling = one.of_request.pooling or self._loras.poolings.of(one.handle)
        if len(one.prompt) > (pooling.max_length or len(one.prompt)):
            raise LoRAUsageError(
                f"the prompt has {len(one.prompt)} tokens; it must fit max_seq_length={pooling.max_length} of adapter "
                f"{one.lora!r}"
            )
        one.of_request.pooling = pooling

    def _compose(self) -> None:
        self._stale = False  # no batch outlives its step

    def _read(self, drawn: Drawn) -> None:
        try:
            embeddings = np.asarray(drawn.chosen)
        except Exception as error:  # as above
            self._failed(error, [one for _, one in drawn.sequences])
            return
        for row, one in drawn.sequences:
            if one.left:
                continue
            if np.isfinite(embeddings[row]).all():
                self._leave(one)
                normalize = cast("Pooling", one.of_request.pooling).normalize
                embedding = self._steps.cut(embeddings[row], one.limit, normalize)
                self._writer.put([TokenEvent(one, end="stop", embedding=embedding)])
            else:
                self._end(one, StepFailedError("the embedding has values that are not finite numbers"))
