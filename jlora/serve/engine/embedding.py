"""Embeddings in the engine: prompts of any adapters in one step, without a cache.

A step takes R prompts of at most L tokens. L is a power of two. R is 1, or as many as the tokens of a step allow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import numpy as np

import jlora
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
        self._normalize = bool(model.config.pooling.normalize)

        @manager.jit
        def embed(model: Any, batch: Any, tokens: Any, lengths: Any) -> Any:
            with jlora.use(batch):
                return model.pooled(tokens, lengths)

        self._embed = embed

    def shape(self, prompts: list[Sequence]) -> tuple[int, int] | None:
        """Return (R, L) of a step for these prompts; None if they do not fit one."""
        length = smallest(self._lengths, max(len(one.prompt) for one in prompts))
        most = self._most[length]
        return None if len(prompts) > most else (1 if len(prompts) == 1 else most, length)

    def embed(self, batch: jlora.LoRABatch, prompts: list[Any], shape: tuple[int, int]) -> jax.Array:
        """Return the embeddings [R, E] of at most R prompts, while they are computed."""
        tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        # Without an adapter in the batch, run the variant that computes the base model alone.
        found = self._embed(self._model, batch if batch.has_adapters else None, tokens, lengths)
        found.copy_to_host_async()
        return found

    def cut(self, embedding: np.ndarray, values: int) -> np.ndarray:
        """Return the first values of an embedding, normalized again if the model normalizes embeddings."""
        cut = embedding[:values]
        again = self._normalize and values < self.width
        return cut / max(float(np.linalg.norm(cut)), 1e-12) if again else cut

    def warm(self, progress: Callable[[int, int], None]) -> None:
        """Compile every variant, by running each with a free slot and without adapters; see `run_each`."""
        calls: list[tuple[str, Callable[[], None]]] = []
        for rows, length in [(rows, length) for length, most in self._most.items() for rows in sorted({1, most})]:
            run = partial(self.embed, prompts=[], shape=(rows, length))
            first = length if self._manager.config.activated else None
            warmup = partial(self._manager.warmup, run, num_sequences=rows, length=first)
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
            taken.append(one)
        if not taken:
            return False
        rows, length = shape = cast("tuple[int, int]", self._steps.shape(taken))
        first: dict[str, Any] = {}
        if self._manager.config.activated:
            first = {"active_from": [one.active_from for one in taken] + [0] * (rows - len(taken)), "length": length}
        try:
            names = [one.handle for one in taken] + [None] * (rows - len(taken))
            with self._manager.prepare(names, **first) as batch:
                embeddings = self._steps.embed(batch, [one.prompt for one in taken], shape)
        except Exception as error:  # a model's step may raise anything; other sequences go on
            self._failed(error, taken)
            return True
        self._drawn.append(Drawn(embeddings, tuple(enumerate(taken))))
        return True

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
                self._writer.put([TokenEvent(one, end="stop", embedding=self._steps.cut(embeddings[row], one.limit))])
            else:
                self._end(one, StepFailedError("the embedding has values that are not finite numbers"))
