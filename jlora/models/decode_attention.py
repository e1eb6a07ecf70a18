"""Decode attention for GPUs: one query per sequence, which reads the live part of the cache once and in place."""

# Kernels are written over references and tracers, for which Pallas has no types.
# pyright: reportMissingParameterType=false

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jlora._typing import DType
from jlora.pallas.gpus import MIN_CAPABILITY, current_gpu
from jlora.pallas.tiles import matrix_rows
from jlora.pallas.triton.parts import compiler_params, dot, load, store

_BLOCK = 64  # positions that a program reads in one step
_PROGRAMS = 512  # least number for few sequences and heads: several for each multiprocessor of any GPU
_LEAST = -1e30  # below every score, and finite, so that the difference of two is a number


def unsupported_reason(dtype: DType, width: int) -> str | None:
    """Return why the kernel cannot run on `current_gpu()` for this dtype and head width, or None if it can."""
    gpu = current_gpu()
    if gpu.capability is not None and gpu.capability < MIN_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability 8.0 or newer, which {gpu.kind} is not"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 or float16, got {jnp.dtype(dtype)}"
    if width < 16 or width & (width - 1):
        return f"takes heads whose width is a power of two from 16 on, got {width}"
    return None


@partial(jax.jit, static_argnames="interpret")
def decode_attention(
    q: Float[Array, "B H D"],
    keys: Float[Array, "B C G D"],
    values: Float[Array, "B C G D"],
    begin: Int[Array, "B"],
    end: Int[Array, "B"],
    sinks: Float[Array, "H"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B H D"]:
    """Compute softmax attention of each sequence's query over its positions begin..end-1, in blocks (arXiv:2205.14135).

    H / G query heads share a key head. A row's result depends on its own operands, and on the number of rows, which
    decides the order in which its blocks are summed. It does not depend on the other rows, to the bit.

    Args:
      q: [B, H, D] queries, bfloat16 or float16.
      keys: [B, C, G, D] keys of every position, in the dtype of q. Positions outside begin..end-1 are not read.
      values: [B, C, G, D] values, as for keys.
      begin: [B] int32 first position of each sequence.
      end: [B] int32 end of the positions, 0 <= begin < end <= C.
      sinks: [H] one more logit per head, without a value (arXiv:2309.17453).
      interpret: Run in the Pallas interpreter, for tests.

    Returns:
      [B, H, D] in the dtype of q.
    """
    batch, heads, width = q.shape
    capacity, groups = keys.shape[1:3]
    parts = max(1, min(_PROGRAMS // (batch * groups), pl.cdiv(capacity, 2 * _BLOCK)))
    kinds = [jax.ShapeDtypeStruct((batch, parts, heads, *last), jnp.float32) for last in ((width,), (), ())]
    sums, most, weight = pl.pallas_call(
        partial(_kernel, shared=heads // groups),
        grid=(batch, groups, parts),
        out_shape=kinds,
        compiler_params=compiler_params(4, 3),
        interpret=interpret,
        name="decode_attention",
    )(q, keys, values, begin, end)
    top = jnp.max(most, axis=1, keepdims=True)
    if sinks is None:
        scale = jnp.exp(most - top)
        total = jnp.sum(weight * scale, axis=1)
    else:
        logits = sinks.astype(jnp.float32)[None, None]
        top = jnp.maximum(top, logits)
        scale = jnp.exp(most - top)
        total = jnp.sum(weight * scale, axis=1) + jnp.exp(logits - top)[:, 0]
    return (jnp.sum(sums * scale[..., None], axis=1) / total[..., None]).astype(q.dtype)


def _kernel(q_ref, k_ref, v_ref, begin_ref, end_ref, sums_ref, most_ref, weight_ref, *, shared: int):
    """Compute sums[row, part, heads of a group] = exp(q . k - most) @ v over a part of the row's positions.

        positions   0 ......... begin ..................... end ......... C
        blocks                | p0 | p1 | p2 | p0 | p1 | p2 |             p1: program of part 1
                               masked ^                    ^ masked

    A part is every num_parts-th block. The first and the last block of the row are masked, and masked positions are not
    read. `most_ref` is the largest score of the part, and `weight_ref` the sum of exp(score - most).
    """
    row, group, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    width = q_ref.shape[-1]
    place = jnp.arange(matrix_rows(shared), dtype=jnp.int32)
    head, present = group * shared + place, place < shared
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    q = load(q_ref, (row, head[:, None], column), present[:, None])
    begin, end = begin_ref[row], end_ref[row]
    first = begin // _BLOCK
    count = pl.cdiv(pl.cdiv(end, _BLOCK) - first - part, pl.num_programs(2))

    def step(i, carry):
        sums, most, weight = carry
        position = (first + part + i * pl.num_programs(2)) * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
        live = (position >= begin) & (position < end)
        k = load(k_ref, (row, position[:, None], group, column), live[:, None])
        scores = jnp.where(live[None, :], dot(q, k, k.dtype, 1) * width**-0.5, _LEAST)
        top = jnp.maximum(most, jnp.max(scores, axis=1))
        chances = jnp.where(live[None, :], jnp.exp(scores - top[:, None]), 0.0)
        v = load(v_ref, (row, position[:, None], group, column), live[:, None])
        scale = jnp.exp(most - top)
        sums = sums * scale[:, None] + dot(chances.astype(v.dtype), v, v.dtype, 0)
        return sums, top, weight * scale + jnp.sum(chances, axis=1)

    size = place.shape[0]
    empty = jnp.zeros((size, width), jnp.float32), jnp.full(size, _LEAST, jnp.float32), jnp.zeros(size, jnp.float32)
    sums, most, weight = jax.lax.fori_loop(0, jnp.maximum(count, 0), step, empty)
    store(sums_ref, (row, part, head[:, None], column), sums, present[:, None])
    store(most_ref, (row, part, head), most, present)
    store(weight_ref, (row, part, head), weight, present)
