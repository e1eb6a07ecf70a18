"""Attention of many queries per sequence by a library: cuDNN on NVIDIA GPUs, JAX's splash attention on TPUs.

Neither library has sequences that start at different positions of a cache. The keys are thus read in two parts, whose
results are added up with the weights of one softmax (arXiv:2205.14135, section 3.1):

    own    keys of the new tokens, causal: query i sees keys 0..i, or those in the window
    past   rows 0..start-1 of the cache, all seen by every query: a length for each sequence

With a window, the past is the last window - 1 rows, latest first. Query i sees rows 0..window-2-i of them, which is
causal if the queries too are read backwards.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jlora._compat import cudnn_attention
from jlora._typing import DType
from jlora.pallas.gpus import MIN_CAPABILITY, current_gpu

_LANES = 128  # of a TPU: sizes of blocks are multiples
_BLOCKS = (512, 256, _LANES)  # numbers of queries or keys in a block of splash attention, best first

# (q, k, v, causal, window, lengths, alone) -> out [B, L, H, D] and the logarithms [B, H, L] of the sums of exp(score).
# Causal query i sees keys 0..i, and no key but the latest `window`. `lengths` [B] is the number of keys of a sequence.
# With `alone` the logarithms are None, and out has a gradient.
Kernel = Callable[[jax.Array, jax.Array, jax.Array, bool, int | None, jax.Array | None, bool], tuple[jax.Array, Any]]


def kernel_of(platform: str, dtype: DType, width: int) -> Kernel | None:
    """Return the library's kernel for "gpu" or "tpu", or None if it has none for this dtype and head width."""
    if platform == "tpu":
        return splash if jnp.dtype(dtype) == jnp.bfloat16 and width % 8 == 0 else None
    if platform != "gpu" or jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return None
    capability = current_gpu().capability or 0
    most = 256 if capability >= 90 else 128
    return cudnn if capability >= MIN_CAPABILITY and width % 8 == 0 and width <= most else None


def attend(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B L G D"],
    v: Float[Array, "B L G D"],
    start: Int[Array, "B"],
    count: Int[Array, "B"] | None,
    past: tuple[Float[Array, "B C G D"], Float[Array, "B C G D"]] | None,
    sinks: Float[Array, "H"] | None,
    *,
    window: int | None,
    kernel: Kernel,
) -> Float[Array, "B L H D"]:
    """Compute causal softmax attention of new tokens to themselves and to the rows of a cache before them.

    Scores and softmax are float32. H / G query heads share a key head. The results of padding are finite where its
    queries are.

    Args:
      q: [B, L, H, D] queries of the tokens at positions start..start+L-1, bfloat16 or float16.
      k: [B, L, G, D] keys of these tokens.
      v: [B, L, G, D] values of these tokens.
      start: [B] int32 number of earlier positions of each sequence.
      count: [B] int32 number of tokens before the padding; None means L. Padding may hold any values, including NaN.
      past: Keys and values of positions 0..C-1. Those from `start` on may hold any values, including NaN.
      sinks: [H] one more logit per head, without a value (arXiv:2309.17453).
      window: Number of latest positions that a token sees, itself included; None means all.
      kernel: The result of `kernel_of`.

    Raises:
      NotImplementedError: The result is differentiated, and there are `past` or `sinks`.
    """
    length = q.shape[1]
    if count is not None:
        k, v = (_first(rows, count) for rows in (k, v))
    within = None if window is None or window >= length else window
    alone = sinks is None and (past is None or window == 1)
    out, sums = kernel(q, k, v, True, within, None, alone)
    if sums is None:
        return out
    parts = [(out, sums)]
    if past is not None and window != 1:
        parts.append(_of_past(q, past, start, window, kernel))
    logits = [sums for _, sums in parts]
    if sinks is not None:
        logits.append(jnp.broadcast_to(sinks.astype(jnp.float32)[None, :, None], logits[0].shape))
    total = _no_gradient(reduce(jnp.logaddexp, logits))
    added = jnp.zeros(q.shape, jnp.float32)
    for out, sums in parts:
        weight = jnp.exp(sums - total).swapaxes(1, 2)[..., None]
        added += jnp.where(weight == 0, 0, weight * out.astype(jnp.float32))
    return added.astype(q.dtype)


def _of_past(
    q: Float[Array, "B L H D"],
    past: tuple[Float[Array, "B C G D"], Float[Array, "B C G D"]],
    start: Int[Array, "B"],
    window: int | None,
    kernel: Kernel,
) -> tuple[Float[Array, "B L H D"], Float[Array, "B H L"]]:
    """Return attention to the rows before `start`, and the logarithms of its sums."""
    if window is None or window >= past[0].shape[1]:
        keys, values = (_first(rows, start) for rows in past)
        return kernel(q, keys, values, False, None, start, False)
    length, size = q.shape[1], window - 1
    latest = jnp.maximum(start[:, None] - 1 - jnp.arange(size, dtype=start.dtype)[None], 0)
    count = jnp.minimum(start, size)
    keys, values = (_first(jax.vmap(lambda own, places: own[places])(rows, latest), count) for rows in past)
    out, sums = kernel(_resized(q, 1, size)[:, ::-1], keys, values, True, None, count, False)
    return _resized(out[:, ::-1], 1, length), _resized(sums[:, :, ::-1], 2, length, -jnp.inf)


def _resized(x: jax.Array, axis: int, size: int, fill: float = 0.0) -> jax.Array:
    """Return the first `size` entries of an axis, with `fill` after its end."""
    missing = [(0, max(0, size - x.shape[axis]) if i == axis else 0) for i in range(x.ndim)]
    return jax.lax.slice_in_dim(jnp.pad(x, missing, constant_values=fill), 0, size, axis=axis)


def _first(rows: Float[Array, "B C G D"], count: Int[Array, "B"]) -> Float[Array, "B C G D"]:
    """Return the rows with zeros from `count` on, since a weight of 0 would not mask them: 0 x NaN is NaN."""
    live = jnp.arange(rows.shape[1])[None] < count[:, None]
    return jnp.where(live[..., None, None], rows, jnp.zeros((), rows.dtype))


@jax.custom_jvp
def _no_gradient(x: jax.Array) -> jax.Array:
    return x


@_no_gradient.defjvp
def _(*_: object) -> tuple[jax.Array, jax.Array]:
    raise NotImplementedError("attention with a cache or with sinks has no gradient on this platform")


def cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, window: int | None, lengths: jax.Array | None, alone: bool
) -> tuple[jax.Array, Any]:
    """Run cuDNN's attention, a `Kernel`."""
    if lengths is None:
        out, sums = cudnn_attention(q, k, v, causal=causal, window=window)
        return out, None if alone else sums
    # cuDNN does not document a length of 0. Row 0 takes its place, and a weight of 0 hides the result.
    out, sums = cudnn_attention(q, k, v, causal=causal, window=window, lengths=jnp.maximum(lengths, 1))
    return out, jnp.where(lengths[:, None, None] > 0, sums, -jnp.inf)


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    causal: bool,
    window: int | None,
    lengths: jax.Array | None,
    alone: bool,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Any]:
    """Run JAX's splash attention, a `Kernel`. `interpret` runs it in the Pallas interpreter, for tests.

    The library has a gradient only where it does not return the sums.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as library  # slow import, needed on TPUs only

    batch, length, heads, width = q.shape
    scaled = q * jnp.asarray(width**-0.5, q.dtype)
    q, k, v = (_resized(x.swapaxes(1, 2), 2, x.shape[1] + -x.shape[1] % _LANES) for x in (scaled, k, v))
    shape = queries, keys = q.shape[2], k.shape[2]
    if window is not None:
        mask = library.LocalMask(shape, (window - 1, 0), 0)
    else:
        mask = library.CausalMask(shape) if causal else library.FullMask(shape)
    block_q, block_kv = (next(block for block in _BLOCKS if size % block == 0) for size in shape)
    kernel = library.make_splash_mha_single_device(
        library.MultiHeadMask([mask] * heads),
        block_sizes=library.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_kv_dkv_compute=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        save_residuals=not alone,
        interpret=interpret,
    )

    def run() -> tuple[jax.Array, Any]:
        segments = None
        if lengths is not None:
            beyond = jnp.arange(keys)[None] >= lengths[:, None]
            segments = library.SegmentIds(jnp.zeros((batch, queries), jnp.int32), beyond.astype(jnp.int32))
        found: Any = jax.vmap(kernel)(q, k, v, segments)
        out, sums = (found, None) if alone else (found[0], found[1][0][:, :, :length])
        return out[:, :, :length].swapaxes(1, 2), sums

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((batch, length, heads, width), q.dtype), jnp.full((batch, heads, length), -jnp.inf)

    return run() if lengths is None else jax.lax.cond(jnp.any(lengths > 0), run, nothing)
