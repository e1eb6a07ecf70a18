"""Embeddings in the engine: prompts of any adapters in one step, without a cache.

A step takes R prompts of at most L tokens. R is 1, or as many as the tokens of a step allow, and L is a power of two.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import numpy as np

import jlora
from jlora.serve.engine.dispatch import Dispatcher, Drawn
from jlora.serve.engine.loras import Loras
from jlora.serve.engine.metrics import EngineMetrics
from jlora.serve.engine.model import check_place
from jlora.serve.engine.request import StepFailedError
from jlora.serve.engine.sequence import Sequence
from jlora.serve.engine.steps import doubled, run_each, smallest
from jlora.serve.engine.writer import TokenEvent, TokenWriter

_SHORTEST = 32  # tokens


class EmbeddingSteps:
    """Compiled steps of an embedding model. All methods must be called from one thread at a time.

    Args:
      model: a model with `pooled`, as `jlora.models.Decoder`, that `manager` serves.
      manager: the model's manager.
      rows: the most prompts of one step.
      max_model_len: the most tokens of a prompt.
      tokens: the most tokens of a step of several prompts.

    Attributes:
      rows: prompts under way, of a running step and the next one.
      lost: False, since a step changes no state.
    """

    lost = False

    def __init__(self, model: Any, manager: jlora.LoRAManager, *, rows: int, max_model_len: int, tokens: int):
        check_place(model, manager)
        self._model, self._manager = model, manager
        self._lengths = doubled(_SHORTEST, max_model_len)
        self._most = {length: max(1, min(rows, tokens // length)) for length in self._lengths}
        self.rows = 2 * self._most[self._lengths[0]]

        @manager.jit
        def embed(model: Any, batch: Any, tokens: Any, lengths: Any) -> Any:
            with jlora.use(batch):
                return model.pooled(tokens, lengths)

        self._embed = embed

    def shape(self, count: int, longest: int) -> tuple[int, int] | None:
        """Return (R, L) of a step for `count` prompts of at most `longest` tokens; None if they do not fit."""
        length = smallest(self._lengths, longest)
        most = self._most[length]
        return None if count > most else (1 if count == 1 else most, length)

    def embed(self, batch: jlora.LoRABatch, prompts: list[Any], shape: tuple[int, int]) -> jax.Array:
        """Return the embeddings [R, E] of at most R prompts, while they are computed."""
        tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        # Without an adapter in the batch, run the variant that computes the base model alone.
        found = self._embed(self._model, batch if batch.has_adapters else None, tokens, lengths)
        found.copy_to_host_async()
        return found

    def warm(self, progress: Callable[[int, int], None]) -> None:
        """Compile every variant, by running each with a free slot and without adapters; see `run_each`."""
        activated = self._manager.config.activated
        calls: list[tuple[str, Any]] = []
        for length, most in self._most.items():
            for rows in sorted({1, most}):
                run = partial(self.embed, prompts=[], shape=(rows, length))
                warmup = partial(self._manager.warmup, run, num_sequences=rows, length=length if activated else None)
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

    def __init__(
        self,
        manager: Any,
        steps: EmbeddingSteps,
        loras: Loras,
        writer: TokenWriter,
        metrics: EngineMetrics,
        max_wait_ratio: int,
        normalize: bool,
    ):
        super().__init__(manager, cast(Any, steps), loras, writer, metrics, max_wait_ratio)
        self._embedding = steps
        self._normalize = normalize

    def _step(self) -> bool:
        """Embed the next requests that fit one step. Returns False if none can begin."""
        taken: list[Sequence] = []

        def shape(*more: Sequence) -> tuple[int, int] | None:
            lengths = [len(one.prompt) for one in (*taken, *more)]
            return self._embedding.shape(len(lengths), max(lengths))

        while (one := self._begin(lambda one: shape(one) is not None)) is not None:
            self._filling = None
            self._rows[one.row] = one
            taken.append(one)
        if not taken:
            return False
        found = shape()
        assert found is not None
        free = found[0] - len(taken)
        first: dict[str, Any] = {}
        if self._manager.config.activated:
            first = {"active_from": [one.active_from for one in taken] + [0] * free, "length": found[1]}
        try:
            with self._manager.prepare([one.handle for one in taken] + [None] * free, **first) as batch:
                embeddings = self._embedding.embed(batch, [one.prompt for one in taken], found)
        except Exception as error:  # a model's step may raise anything; other sequences go on
            self._failed(error, taken)
        else:
            self._drawn.append(Drawn(embeddings, tuple(enumerate(taken))))
        return True

    def _compose(self) -> None:
        self._stale = False  # rows share no batch

    def _read(self, drawn: Drawn) -> None:
        try:
            embeddings = np.asarray(drawn.chosen)
        except Exception as error:
            self._failed(error, [one for _, one in drawn.sequences])
            return
        for row, one in drawn.sequences:
            if one.left:
                continue
            if not np.isfinite(embeddings[row]).all():
                self._end(one, StepFailedError("the embedding has values that are not numbers (NaN)"))
                continue
            embedding = embeddings[row, : one.limit]
            if self._normalize and one.limit < embeddings.shape[1]:
                embedding = embedding / max(float(np.linalg.norm(embedding)), 1e-12)
            self._leave(one)
            self._writer.put([TokenEvent(one, end="stop", embedding=embedding)])
