"""The compiled steps of an engine, and their donated state on the device.

    copy     the first positions of a row of the cache to another row
    prefill  one chunk of one sequence's prompt into its row of the cache    -> logits [1, V], hidden states [1, L, E]
    score    log probabilities of a block of the prompt, if requested        -> [block], and of the likeliest
    begin    its first token, and the row's settings                         -> token [1]
    decode   the last token of every row into the cache                      -> logits [R, V]
    pick     the next token of every row                                     -> tokens [R]
    report   log probabilities of tokens and of the likeliest                where a row requests them

All shapes are fixed: R rows, a few chunk lengths, and a few extents of the cache that attention reads. An inactive row
computes like the others. Its write goes to the position of its next token, which later overwrites it.
"""

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

import jlora
from jlora._threads import elapsed
from jlora.errors import LoRAUsageError
from jlora.models import HOTTEST, Sampling, choose, likeliest, processed_logits
from jlora.serve.engine.model import ScoringModel, ServableModel, cache_axes, check_place, row_of, with_row
from jlora.serve.engine.options import LogprobsMode
from jlora.serve.engine.request import MAX_LOGPROBS, SamplingParams, TokenLogprob

_log = logging.getLogger("jlora.serve")
_LEAST_EXTENT = 512  # below this, reading the weights dominates a decode step
_LEAST_CHUNK = 32
_SCORED = 128  # positions whose logits are computed at a time


class RowState(NamedTuple):
    """State of each row on the device.

    Attributes:
      last: [R] int32 newest token, not in the cache yet.
      length: [R] int32 number of positions in the cache.
      drawn: [R] int32 number of tokens chosen so far.
      sampling: Sampling settings, arrays [R].
    """

    last: Int[Array, "R"]
    length: Int[Array, "R"]
    drawn: Int[Array, "R"]
    sampling: Sampling


class Chosen(NamedTuple):
    """Chosen tokens, while they are copied to the host.

    Attributes:
      tokens: [B] int32, -1 where the logits are NaN.
      report: Log probability [B] and rank [B] of each token, and values [B, N] and ids [B, N] of the likeliest ones;
        None if no row requests them.
    """

    tokens: Int[Array | np.ndarray, "B"]
    report: tuple[Float[Array, "B"], Int[Array, "B"], Float[Array, "B N"], Int[Array, "B N"]] | None

    def read(self) -> "Chosen":
        """Wait for the arrays and return them as NumPy arrays."""
        return jax.tree.map(np.asarray, self)

    def logprob(self, i: int, token: int, asked: int | None) -> TokenLogprob | None:
        """Return the log probability of token `i`, with as many of the likeliest as requested. Call after `read`."""
        if asked is None or self.report is None:
            return None
        own, ranks, values, ids = self.report
        top = tuple((int(ids[i, n]), float(values[i, n])) for n in range(min(asked, ids.shape[1])))
        return TokenLogprob(token, float(own[i]), top, rank=int(ranks[i]))


class How(NamedTuple):
    """Static variant of a token choice. Each flag that is False makes the step cheaper.

    Attributes:
      sampled: Some row samples.
      ranked: Some row that samples has top_k or top_p.
      reported: Some row requests log probabilities.
    """

    sampled: bool = False
    ranked: bool = False
    reported: bool = False

    def __str__(self) -> str:
        choice = ("drawn" + (", of the likeliest" if self.ranked else "")) if self.sampled else "greedy"
        return choice + (", with log probabilities" if self.reported else "")

    @classmethod
    def of(cls, many: Sequence[SamplingParams]) -> "How":
        """Return the variant that serves all of these parameters."""
        drawn = [one for one in many if one.temperature > 0]
        limited = any(one.top_k > 0 or one.top_p < 1 for one in drawn)
        return cls(bool(drawn), limited, any(one.logprobs is not None for one in many))


class Chunk(NamedTuple):
    """A step that prefills a part of a prompt.

    Attributes:
      start: Position of its first token.
      tokens: Number of its tokens.
      padded: Number of its tokens with padding.
      extent: Number of positions of the row that it reads.
    """

    start: int
    tokens: int
    padded: int
    extent: int


class Steps:
    """Compiled steps of one model. All methods must be called from one thread at a time.

    Args:
      model: A `ServableModel` that `manager` serves.
      manager: The model's manager.
      rows: Sequences that decode together.
      max_model_len: Positions of a sequence.
      chunk: The most prompt tokens of one prefill step.
      logprobs_mode: As in `EngineOptions`.
      caching: Chunks after the first may also be of a smaller size, since they often follow a copied prefix.

    Attributes:
      capacity: Positions of a row of the cache.
      scores: True if the model is a `ScoringModel`.
      extents: Cache extents that decode steps are compiled for.
    """

    def __init__(
        self,
        model: Any,
        manager: jlora.LoRAManager,
        *,
        rows: int,
        max_model_len: int,
        chunk: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        caching: bool = False,
    ):
        if not isinstance(model, ServableModel) or not isinstance(model, nnx.Module):
            raise LoRAUsageError(
                f"an engine takes an nnx.Module with config, init_cache and extend (jlora.serve.ServableModel), got "
                f"{type(model).__name__}"
            )
        check_place(model, manager)
        self.rows = rows
        self.chunk = min(chunk, max_model_len)
        self.capacity = math.ceil(max_model_len / self.chunk) * self.chunk
        self.scores, self._block = isinstance(model, ScoringModel), min(_SCORED, self.chunk)
        live = getattr(model, "reads_what_is_live", False)
        self.extents = [self.capacity] if live else doubled(_LEAST_EXTENT, self.capacity)
        self._reads = doubled(self.chunk, self.capacity)  # positions that chunks after the first, and copies, read
        self._sizes = [self.chunk]  # of first chunks
        while self._sizes[0] // 4 >= _LEAST_CHUNK:
            self._sizes.insert(0, self._sizes[0] // 4)
        self._later_sizes = self._sizes[-2 if caching else -1 :]  # few, since each has several extents
        self._model, self._manager = model, manager
        self._axes = cache_axes(model)
        self._knows_extent = "extent" in inspect.signature(model.extend).parameters
        self._vocab = int(model.config.vocab_size)
        self._state: tuple[Any, RowState] | None = None
        self._shardings: list[Any] = []  # sharding of each array of the cache
        choice: dict[str, Any] = {"static_argnames": ("sampled", "ranked"), "donate_argnames": "rows"}
        self._fresh = jax.jit(self._fresh_program)
        self._settle = jax.jit(self._settle_program, donate_argnums=(0, 1))
        self._copy = jax.jit(self._copy_program, static_argnames="extent", donate_argnums=(0, 1))
        self._decode = manager.jit(self._decode_program, static_argnames="extent", donate_argnames="cache")
        self._prefill = manager.jit(self._prefill_program, static_argnames="extent", donate_argnames=("cache", "rows"))
        self._score = manager.jit(self._score_program)
        self._begin, self._pick = jax.jit(self._begin_program, **choice), jax.jit(self._pick_program, **choice)
        self._report = jax.jit(partial(self._report_program, processed=logprobs_mode == "processed_logprobs"))

    # --- programs -----------------------------------------------------------------------------------------------

    def _extra(self, extent: int) -> dict[str, int]:
        return {"extent": extent} if self._knows_extent else {}

    def _fresh_program(self) -> tuple[Any, RowState]:
        sampling = Sampling(
            temperature=jnp.zeros(self.rows),
            top_k=jnp.full(self.rows, self._vocab, jnp.int32),
            top_p=jnp.full(self.rows, jnp.inf),
            keys=jax.random.split(jax.random.key(0), self.rows),
        )
        last, length, drawn = (jnp.zeros(self.rows, jnp.int32) for _ in range(3))
        return self._model.init_cache(self.rows, self.capacity), RowState(last, length, drawn, sampling)

    def _settle_program(self, cache: Any, rows: RowState) -> tuple[Any, RowState]:
        return self._laid(cache), self._whole(rows)  # sharded like the output of every step

    def _copy_program(self, cache: Any, rows: RowState, where: Any, *, extent: int) -> tuple[Any, RowState]:
        source, row, count = where
        own = self._mapped(partial(row_of, row=source, extent=extent), cache)
        cache = self._mapped(partial(with_row, row=row), cache, own)
        return self._laid(cache), self._whole(rows._replace(length=rows.length.at[row].set(count)))

    def _decode_program(self, model: Any, batch: Any, cache: Any, rows: RowState, *, extent: int) -> Any:
        here = jnp.minimum(rows.length, self.capacity - 1)[:, None]
        with jlora.use(batch):
            zeros = jnp.zeros_like(rows.last)
            logits, cache = model.extend(rows.last[:, None], here, cache, zeros, **self._extra(extent))
        return self._whole(logits.astype(jnp.float32)), self._laid(cache)

    def _prefill_program(
        self, model: Any, batch: Any, cache: Any, rows: RowState, tokens: Any, where: Any, *, extent: int
    ) -> Any:
        row, start, count = where
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        own = self._mapped(partial(row_of, row=row, extent=extent), cache)
        last, hidden = (count - 1)[None], None
        with jlora.use(batch):
            if self.scores:
                hidden, own = model.hidden_states(tokens, positions, own, last, **self._extra(extent))
                logits = model.logits(hidden[:, count - 1])
                # One size for all chunks, so that one program scores them.
                rest = self._block * math.ceil(self.chunk / self._block) - tokens.shape[1]
                hidden = self._whole(jnp.pad(hidden, ((0, 0), (0, rest), (0, 0))))
            else:
                logits, own = model.extend(tokens, positions, own, last, **self._extra(extent))
        logits = self._whole(logits.astype(jnp.float32))
        cache = self._mapped(partial(with_row, row=row), cache, own)
        rows = rows._replace(length=rows.length.at[row].set(start + count))
        return logits, hidden, self._laid(cache), self._whole(rows)

    def _score_program(self, model: Any, batch: Any, hidden: Any, begin: Any, tokens: Any) -> Any:
        here = begin + jnp.arange(self._block, dtype=jnp.int32)
        hidden = jax.lax.dynamic_slice_in_dim(hidden, begin, self._block, axis=1)
        # Only the head runs, as in `prefill`. The number of its rows does not show which of the chunk they are.
        with jlora.use(batch, without=["*"]), jlora.rows(jlora.RowMap(here, of="tokens", length=self.chunk)):
            logits = model.logits(hidden)[0]
        return self._whole(_reported(logits.astype(jnp.float32), tokens))

    def _begin_program(
        self, logits: Any, rows: RowState, ints: Any, floats: Any, seed: Any, *, sampled: bool, ranked: bool
    ) -> Any:
        (row, top_k), (temperature, top_p) = ints, floats
        key = jax.random.fold_in(jax.random.key(seed[0]), seed[1])
        own = Sampling(temperature[None], top_k[None], top_p[None], key[None])
        token = _chosen(logits, jnp.zeros(1, jnp.int32), own, sampled, ranked)
        sampling = Sampling(*(old.at[row].set(new[0]) for old, new in zip(rows.sampling, own, strict=True)))
        last = rows.last.at[row].set(jnp.maximum(token[0], 0))
        return self._whole((token, rows._replace(last=last, drawn=rows.drawn.at[row].set(1), sampling=sampling)))

    def _pick_program(
        self, logits: Any, rows: RowState, occupied: Bool[Array, "R"], *, sampled: bool, ranked: bool
    ) -> Any:
        tokens = _chosen(logits, rows.drawn, rows.sampling, sampled, ranked)
        step = occupied.astype(jnp.int32)
        last = jnp.where(occupied, jnp.maximum(tokens, 0), rows.last)
        return self._whole((tokens, rows._replace(last=last, length=rows.length + step, drawn=rows.drawn + step)))

    def _report_program(self, logits: Any, tokens: Any, sampling: Sampling, row: Any, *, processed: bool) -> Any:
        if processed:
            own = sampling if row is None else Sampling(*(each[row][None] for each in sampling))
            logits = processed_logits(logits, own)
        return _reported(logits, tokens)

    # --- state --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Replace the state by an empty one."""
        self._state = None  # free the old state first, since memory may not hold two
        cache, rows = self._fresh()
        self._shardings = [leaf.sharding for leaf in jax.tree.leaves(cache)]
        self._state = (cache, rows) if self._everywhere() is None else self._settle(cache, rows)

    def _everywhere(self) -> NamedSharding | None:
        """Return the replicated sharding of the cache's mesh; None if the cache is on no mesh."""
        meshes = [sharding.mesh for sharding in self._shardings if isinstance(sharding, NamedSharding)]
        return NamedSharding(meshes[0], P()) if meshes else None

    def _whole(self, tree: Any) -> Any:
        """Constrain small arrays of a step to be replicated over the mesh. Every step then finds the same sharding."""
        where = self._everywhere()
        return tree if where is None else jax.lax.with_sharding_constraint(tree, where)

    def _laid(self, cache: Any) -> Any:
        """Constrain a cache in a step to its original sharding."""
        if self._everywhere() is None:
            return cache
        leaves, tree = jax.tree.flatten(cache)
        return jax.tree.unflatten(tree, map(jax.lax.with_sharding_constraint, leaves, self._shardings))

    @property
    def lost(self) -> bool:
        """True if the state was donated to a step that raised."""
        return self._state is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))

    def close(self) -> None:
        """Free the cache."""
        self._state = None

    def compiled(self) -> int:
        """Return the number of compiled variants of the steps."""
        of_prompts: tuple[Any, ...] = (self._copy, self._prefill, self._score, self._begin)
        steps: tuple[Any, ...] = (self._fresh, self._decode, self._pick, self._report)
        return sum(step._cache_size() for step in (*of_prompts, *steps))

    # --- steps --------------------------------------------------------------------------------------------------

    def chunk_of(self, start: int, length: int) -> Chunk:
        """Return the next step that prefills a prompt of `length`, whose first `start` tokens are in the cache.

        After the copy of a prefix, `start` may be any position. A chunk whose padding would exceed the capacity then
        begins earlier, and computes some tokens again.
        """
        padded = smallest(self._later_sizes if start else self._sizes, min(self.chunk, length - start))
        start = min(start, self.capacity - padded)
        extent = smallest(self._reads, start + padded) if start else padded
        return Chunk(start, min(self.chunk, length - start), padded, extent)

    def padded(self, start: int, length: int) -> int:
        """Return the number of tokens, with padding, of all steps that prefill a prompt of `length` from `start`."""
        total = 0
        while start < length:
            chunk = self.chunk_of(start, length)
            start, total = chunk.start + chunk.tokens, total + chunk.padded
        return total

    def copy(self, source: int, row: int, count: int) -> None:
        """Copy the first `count` positions of a row to another one, or only set the row's length if both are one."""
        where = np.array([source, row, count], np.int32)
        self._state = self._copy(*self._held(), where, extent=smallest(self._reads, count))

    def prefill(
        self, batch: jlora.LoRABatch, row: int, prompt: Sequence[int], chunk: Chunk
    ) -> tuple[jax.Array, jax.Array | None]:
        """Prefill one chunk of a prompt.

        Returns the logits [1, V] after it, and its hidden states for `score` if the model `scores`.
        """
        start, count, padded, extent = chunk
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, :count] = prompt[start : start + count]
        where = np.array([row, start, count], np.int32)
        logits, hidden, *state = self._run(self._prefill, batch, tokens, where, extent=extent)
        self._state = (state[0], state[1])
        return logits, hidden

    def score(self, batch: jlora.LoRABatch, hidden: Any, prompt: Sequence[int], chunk: Chunk) -> list[Chosen]:
        """Compute log probabilities of the prompt tokens after those of a chunk, from its hidden states.

        Args:
          batch: As for `prefill`; if its rows are activated, for `chunk` rows.
          hidden: From `prefill` of this chunk.
          prompt: Token ids.
          chunk: The chunk.
        """
        found: list[Chosen] = []
        served, end = batch if batch.has_adapters else None, min(chunk.start + chunk.tokens, len(prompt) - 1)
        for begin in range(chunk.start, end, self._block):
            own = prompt[begin + 1 : min(begin + self._block, end) + 1]
            tokens = np.zeros(self._block, np.int32)
            tokens[: len(own)] = own
            report = self._score(self._model, served, hidden, np.int32(begin - chunk.start), tokens)
            found.append(_copied(Chosen(tokens[: len(own)], report)))
        return found

    def begin(self, logits: jax.Array, row: int, params: SamplingParams, seed: int) -> Chosen:
        """Choose the first token of a sequence from the logits [1, V] after its prompt."""
        how = How.of([params])
        ints = np.array([row, params.top_k or self._vocab], np.int32)
        temperature, top_p = min(params.temperature, HOTTEST), params.top_p if params.top_p < 1 else np.inf
        floats = np.array([temperature, top_p], np.float32)
        halves = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
        cache, rows = self._held()
        tokens, rows = self._begin(logits, rows, ints, floats, halves, sampled=how.sampled, ranked=how.ranked)
        self._state = (cache, rows)
        return self._told(logits, tokens, how, np.int32(row))

    def decode(self, batch: jlora.LoRABatch, occupied: jax.Array, live: int, how: How) -> Chosen:
        """Choose the next token of every row.

        Args:
          batch: The adapters of the rows.
          occupied: [R] bool, rows that hold a sequence, which advance.
          live: Number of positions of the longest occupied row, including its last token.
          how: Variant of the choice.
        """
        logits, cache = self._run(self._decode, batch, extent=smallest(self.extents, live))
        rows = self._held()[1]
        self._state = (cache, rows)  # the rows are not donated yet, so the state survives if `pick` raises
        tokens, rows = self._pick(logits, rows, occupied, sampled=how.sampled, ranked=how.ranked)
        self._state = (cache, rows)
        return self._told(logits, tokens, how)

    def _told(self, logits: jax.Array, tokens: jax.Array, how: How, row: np.int32 | None = None) -> Chosen:
        """Return the tokens of all rows, or of one, and log probabilities if `how` reports them."""
        sampling = self._held()[1].sampling
        return _copied(Chosen(tokens, self._report(logits, tokens, sampling, row) if how.reported else None))

    def _held(self) -> tuple[Any, RowState]:
        assert self._state is not None
        return self._state

    def _run(self, step: Callable[..., Any], batch: jlora.LoRABatch, *args: Any, **static: Any) -> Any:
        """Run a step. Without an adapter in the batch, run its variant that computes the base model alone."""
        served = batch if batch.has_adapters else None
        return step(self._model, served, *self._held(), *args, **static)

    def _mapped(self, act: Callable[..., Any], *trees: Any) -> Any:
        """Apply `act(batch axis, capacity axis, *leaves)` to every array of the caches."""
        leaves, tree = zip(*map(jax.tree.flatten, trees), strict=True)
        acted = [act(*axes, *arrays) for axes, *arrays in zip(self._axes, *leaves, strict=True)]
        return jax.tree.unflatten(tree[0], acted)

    # --- warm-up ------------------------------------------------------------------------------------------------

    def warm(self, progress: Callable[[int, int], None]) -> None:
        """Allocate the state and compile every variant, by running each with a free slot and without adapters."""
        chunks = [Chunk(0, size, size, size) for size in self._sizes]
        chunks += [Chunk(end - n, n, n, end) for n in self._later_sizes for end in self._reads if end > n]
        variants = [How(), How(True), How(True, True), How(reported=True)]
        occupied = jnp.zeros(self.rows, bool)
        filled: list[Any] = []

        def fill(batch: jlora.LoRABatch, chunk: Chunk) -> None:
            filled[:] = self.prefill(batch, 0, [0] * chunk.extent, chunk)

        def score(batch: jlora.LoRABatch) -> None:
            self.score(batch, filled[1], [0, 0], chunks[0])

        def begin(how: How) -> None:
            limit, logprobs = 0.5 if how.ranked else 1.0, 0 if how.reported else None
            self.begin(filled[0], 0, SamplingParams(None, float(how.sampled), limit, logprobs=logprobs), 0)

        def warmed(rows: int, tokens: int, step: Callable[..., Any], *args: Any) -> Callable[[], None]:
            length = tokens if self._manager.config.activated else None
            shape = jlora.BatchShape(rows, length=length)
            return lambda: self._manager.warmup(lambda batch: step(batch, *args), shape)

        calls = [
            *(
                (f"prefill of {one.padded} tokens over {one.extent} positions", warmed(1, one.padded, fill, one))
                for one in chunks
            ),
            *((f"copy of {extent} positions", partial(self.copy, 0, 0, extent)) for extent in self._reads),
            *([("log probabilities of a prompt", warmed(1, self.chunk, score))] if self.scores else []),
            *((f"the first token, {how}", partial(begin, how)) for how in variants),
            *(
                (
                    f"decode of {self.rows} rows over {extent} positions",
                    warmed(self.rows, 1, self.decode, occupied, extent, How()),
                )
                for extent in self.extents
            ),
            *((f"the next tokens, {how}", warmed(self.rows, 1, self.decode, occupied, 1, how)) for how in variants),
        ]
        # On a mesh they run twice, since equal shardings may have different representations after another step.
        calls = [("the state on the device", self.reset), *calls * (1 if self._everywhere() is None else 2)]
        run_each(calls, progress, lambda: self._state)
        self.reset()


def run_each(
    calls: Sequence[tuple[str, Callable[[], Any]]], progress: Callable[[int, int], None], state: Callable[[], Any]
) -> None:
    """Run the described calls of a warm-up, waiting for the arrays of `state()` after each.

    The log names each call as it begins, and its seconds so far every 10 seconds. `progress` is called with (calls
    done, calls in all), first with 0 calls done.
    """
    progress(0, len(calls))
    for done, (step, call) in enumerate(calls, 1):
        about = f"warm-up {done} of {len(calls)}: {step}"
        _log.info("%s", about)
        with elapsed(partial(_log.info, "%s: %.0f s so far", about)):
            call()
            jax.block_until_ready(state())
        progress(done, len(calls))


def doubled(least: int, most: int) -> list[int]:
    """Return `most`, preceded by the powers of two times `least` that are below it."""
    sizes: list[int] = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]


def smallest(sizes: Sequence[int], enough: int) -> int:
    """Return the first of ascending sizes that is at least `enough`."""
    return next(size for size in sizes if size >= enough)


def _chosen(
    logits: Float[Array, "B V"], steps: Int[Array, "B"], sampling: Sampling, sampled: bool, ranked: bool
) -> Int[Array, "B"]:
    tokens = choose(logits, steps, sampling, ranked=ranked) if sampled else likeliest(logits)
    return jnp.where(jnp.isnan(jnp.max(logits, axis=-1)), -1, tokens)


def _reported(logits: Float[Array, "B V"], tokens: Int[Array, "B"]) -> Any:
    """Return `Chosen.report` of tokens."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    values, ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    own = jnp.take_along_axis(logprobs, jnp.maximum(tokens, 0)[:, None], axis=-1)
    return own[:, 0], jnp.sum(logprobs >= own, axis=-1, dtype=jnp.int32), values, ids


def _copied(chosen: Chosen) -> Chosen:
    """Begin to copy the arrays to the host."""
    for array in jax.tree.leaves(chosen):
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    return chosen
