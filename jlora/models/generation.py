"""Token generation: one compiled function runs the prompts and then the decode loop.

    tokens [B, L] --extend--> logits [B, V] --choose--> token [B] --extend--> logits [B, V] --choose--> ...
           prompt, padded on the right           one lax.while_loop until every sequence has stopped

Prompt length and `max_new_tokens` are rounded up to powers of two, so few combinations are compiled.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jlora._compat import explicit_transfers, side_by_side
from jlora.models.config import DecoderConfig
from jlora.models.decoder import Cache, Decoder
from jlora.models.json_file import ModelError
from jlora.models.partition import ONE_DEVICE, Partition
from jlora.models.sampling import COLDEST, HOTTEST, Sampling, choose, likeliest
from jlora.pallas.gpus import platform


@explicit_transfers()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    batch: Any = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
    sequence_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue every prompt.

    Args:
      model: Any object with the attributes `extend`, `init_cache`, `config.vocab_size` and
        `config.max_position_embeddings` of `Decoder`.
      prompts: Token ids, one list per sequence, of any length above 0.
      batch: Adapters of the sequences, `manager.prepare([...])` with one entry per prompt. None for a model that is not
        wrapped. Activated LoRA (aLoRA) adapters are active from the last occurrence of their invocation tokens in the
        prompt on, and nowhere without one, unless the batch was prepared with `active_from`, counted in each prompt.
      max_new_tokens: Most new tokens of a sequence. Together with the longest prompt it must fit the model's context.
      temperature: 0 takes the likeliest token; above 0, tokens are drawn from softmax(logits / temperature).
      top_k: Draw among the k likeliest tokens only.
      top_p: Draw among the fewest likeliest tokens whose probabilities sum to at least `top_p`, after `top_k`
        (arXiv:1904.09751).
      stop_tokens: A sequence ends with the first of these tokens, which is part of the result.
      seed: Seed of the random draws. A draw depends on the seed, the sequence's id and the number of the token, and not
        on the other sequences of the call.
      sequence_ids: One number per prompt, at least 0. By default its index in `prompts`.

    Returns:
      The new token ids of each sequence.

    Raises:
      ModelError: An argument is out of range. The message has its name and value.
    """
    tokens, lengths = _pad(prompts, model.config.vocab_size)
    limit = _integer("max_new_tokens", max_new_tokens, 1)
    check_context(model.config, lengths, limit)
    if not 0 <= temperature < math.inf:
        raise ModelError(f"temperature must be a finite number of at least 0, got {temperature!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ModelError(f"top_p must be above 0 and at most 1, got {top_p!r}")
    ids = range(len(prompts)) if sequence_ids is None else sequence_ids
    if len(ids) != len(prompts):
        raise ModelError(f"sequence_ids has {len(ids)} entries for {len(prompts)} prompts")
    ids = np.asarray([_integer(f"sequence_ids[{i}]", value, 0) for i, value in enumerate(ids)], np.uint32)
    stops = [_integer(f"stop_tokens[{i}]", value, 0) for i, value in enumerate(stop_tokens)]
    sampling = None
    if temperature > 0:
        most = model.config.vocab_size if top_k is None else _integer("top_k", top_k, 1)
        rows = len(prompts)
        sampling = Sampling(
            temperature=jnp.full(rows, min(max(temperature, COLDEST), HOTTEST), jnp.float32),
            top_k=jnp.full(rows, most, jnp.int32),
            top_p=jnp.full(
                rows, math.inf if top_p in (None, 1) else top_p, jnp.float32
            ),  # 1 could cut the tail off by rounding
            keys=jax.vmap(partial(jax.random.fold_in, jax.random.key(_integer("seed", seed, 0))))(ids),
        )
    elif top_k is not None or top_p is not None:
        raise ModelError("top_k and top_p only mean something when sampling; give a temperature above 0 as well")
    if batch is not None and batch.can_activate:
        if batch.active_from is None:
            batch = batch.activate_in(prompts, length=tokens.shape[1])
        else:  # a first row past the prompt may be one of its padding
            first = jax.device_get(batch.active_from)
            batch = batch.activate(np.where(first < lengths, first, tokens.shape[1]), length=tokens.shape[1])
    out, counts = _compiled()(
        model,
        batch,
        tokens,
        lengths,
        sampling,
        _bucket_stops(stops),
        np.int32(limit),
        capacity=_bucket(limit),
        ranked=top_k is not None or top_p is not None,
    )
    rows, counts = jax.device_get((out, counts))
    return [row[:count].tolist() for row, count in zip(rows, counts, strict=True)]


def check_context(config: DecoderConfig, lengths: Sequence[int] | np.ndarray, max_new_tokens: int) -> None:
    """Raise `ModelError` if prompts of these lengths and `max_new_tokens` do not fit the model's context."""
    longest = int(max(lengths))
    if longest + max_new_tokens > config.max_position_embeddings:
        raise ModelError(
            f"max_new_tokens={max_new_tokens} and a prompt of {longest} tokens do not fit the model's context: "
            f"expected together at most max_position_embeddings={config.max_position_embeddings}"
        )


def cache_size(lengths: Sequence[int], max_new_tokens: int) -> tuple[int, int]:
    """Return the number of sequences and positions of `generate`'s cache for prompts of these lengths."""
    return len(lengths), _bucket(max(lengths)) + _bucket(max_new_tokens)


def compiled_variants() -> int:
    """Return the number of compiled variants of the generation step, one per combination of static sizes."""
    return _compiled()._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


class _State(NamedTuple):
    """State of the decode loop.

    `out[b, :counts[b]]` are the new tokens so far. The last of them is not yet in the cache.
    """

    step: Int[Array, ""]
    out: Int[Array, "B N"]
    counts: Int[Array, "B"]
    running: Bool[Array, "B"]
    last: Int[Array, "B"]
    cache: Cache


@functools.cache
def _compiled() -> Any:
    """Return `_run` under `jax.jit`. One call runs a whole generation, so the time to flatten the model is small."""
    return jax.jit(_run, static_argnames=("capacity", "ranked"), compiler_options=side_by_side(platform()))


def _run(
    model: Decoder,
    batch: Any,
    tokens: Int[Array, "B L"],
    lengths: Int[Array, "B"],
    sampling: Sampling | None,
    stops: Int[Array, "s"],
    limit: Int[Array, ""],
    *,
    capacity: int,
    ranked: bool,
) -> tuple[Int[Array, "B N"], Int[Array, "B"]]:
    """Run the prompts and the decode loop.

    N = `capacity` is the room for new tokens of a sequence, of which at most `limit` are used.
    """
    sequences, padded = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32), tokens.shape)
    cache = model.init_cache(sequences, padded + capacity)

    def append(state: _State, logits: Float[Array, "B V"]) -> _State:
        if sampling is None:
            chosen = likeliest(logits)
        else:
            chosen = choose(logits, jnp.broadcast_to(state.step, sequences), sampling, ranked=ranked)
        # A stopped sequence is still computed, but its tokens are dropped.
        column = jnp.where(state.running, state.step, capacity)
        out = jax.vmap(lambda row, i, token: row.at[i].set(token, mode="drop"))(state.out, column, chosen)
        stopped = jnp.any(chosen[:, None] == stops[None, :], axis=1)
        return state._replace(
            step=state.step + 1,
            out=out,
            counts=state.counts + state.running.astype(jnp.int32),
            running=state.running & ~stopped,
            last=chosen,
        )

    # A generated token is active if any row of its prompt is.
    decoding = batch
    if batch is not None and batch.active_from is not None:
        decoding = batch.activate((batch.active_from >= lengths).astype(jnp.int32), length=1)

    def body(state: _State) -> _State:
        # Token number `step` of a sequence has position `length + step - 1`.
        here = (lengths + state.step - 1)[:, None]
        with _scope(decoding):
            logits, cache = model.extend(state.last[:, None], here, state.cache, jnp.zeros_like(lengths))
        return append(state._replace(cache=cache), logits)

    with _scope(batch):
        logits, cache = model.extend(tokens, positions, cache, lengths - 1)
    empty = _State(
        step=jnp.int32(0),
        out=jnp.zeros((sequences, capacity), jnp.int32),
        counts=jnp.zeros((sequences,), jnp.int32),
        running=jnp.ones((sequences,), bool),
        last=jnp.zeros((sequences,), jnp.int32),
        cache=cache,
    )
    state = jax.lax.while_loop(lambda state: (state.step < limit) & jnp.any(state.running), body, append(empty, logits))
    partition: Partition = getattr(model, "partition", ONE_DEVICE)
    return partition.constrain(state.out), partition.constrain(state.counts)  # replicated on every device


def _scope(batch: Any) -> AbstractContextManager[object]:
    """Return the scope that applies the adapters of `batch`. Imported late, since a model may have no adapters."""
    if batch is None:
        return contextlib.nullcontext()
    from jlora.layers.forward.scope import use

    return use(batch)


def _pad(prompts: Sequence[Sequence[int]], vocab_size: int) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, "B"]]:
    if not len(prompts):
        raise ModelError("prompts is empty; expected at least one list of token ids")
    rows = []
    for i, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if isinstance(prompt, str) or row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise ModelError(f"prompts[{i}] must be a non-empty list of token ids, got {prompt!r:.80}")
        if row.min() < 0 or row.max() >= vocab_size:
            raise ModelError(f"prompts[{i}] must hold ids from 0 to {vocab_size - 1}, got {row.min()} to {row.max()}")
        rows.append(row)
    lengths = np.array([row.size for row in rows], np.int32)
    tokens = np.zeros((len(rows), _bucket(lengths.max())), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: row.size] = row
    return tokens, lengths


def _bucket(size: int) -> int:
    """Return the next power of two, at least 8."""
    return max(8, 1 << (int(size) - 1).bit_length())


def _bucket_stops(stops: list[int]) -> Int[np.ndarray, "s"]:
    return np.array(stops + [-1] * (_bucket(len(stops) or 1) - len(stops)), np.int32)


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or not least <= number < 2**31:
        raise ModelError(f"{name} must be an integer from {least} to 2**31 - 1, got {value!r}")
    return number
