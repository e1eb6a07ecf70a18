"""Attention with grouped queries, rotary positions, windows and sinks, and the key-value cache of a layer."""

from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jlora._typing import DType
from jlora.models import prefill_attention
from jlora.models.config import DecoderConfig
from jlora.models.partition import Partition, merged
from jlora.models.parts import RMSNorm, linear
from jlora.models.rope import rotate
from jlora.pallas.gpus import own_backend, platform


class LayerCache(NamedTuple):
    """Keys and values of one layer. Row c of a sequence is its position c; no other index is stored."""

    keys: Float[Array, "B C G D"]
    values: Float[Array, "B C G D"]


_SCORES = 1 << 30  # bytes of the scores that `attend` computes at once

Rotation = tuple[Float[Array, "B L 1 half"], Float[Array, "B L 1 half"]]  # cos and sin of every position


def attend(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B C G D"],
    v: Float[Array, "B C G D"],
    visible: Bool[Array, "B L C"],
    sinks: Float[Array, "H"] | None = None,
) -> Float[Array, "B L H D"]:
    """Compute softmax attention (arXiv:1706.03762). H / G query heads share a key head.

    Scores and softmax are float32. Keys and values that no query of a sequence sees may hold any values, including NaN
    and infinity.

    `sinks` adds one logit per head that takes part in the softmax and has no value (arXiv:2309.17453).

    Scores of more than 1 GiB are computed in blocks of queries.
    """
    batch, length, heads, _ = q.shape
    seen = visible.any(axis=1)[..., None, None]  # a weight of 0 would not mask them, since 0 x NaN is NaN
    k, v = (jnp.where(seen, rows, jnp.zeros((), rows.dtype)) for rows in (k, v))
    block = max(1, _SCORES // (4 * batch * heads * k.shape[1]))
    if block >= length:
        return _attend(q, k, v, visible, sinks)

    def query(row: tuple[Float[Array, "B H D"], Bool[Array, "B C"]]) -> Float[Array, "B H D"]:
        return _attend(row[0][:, None], k, v, row[1][:, None], sinks)[:, 0]

    return jax.lax.map(query, (q.swapaxes(0, 1), visible.swapaxes(0, 1)), batch_size=block).swapaxes(0, 1)


def _attend(
    q: Float[Array, "B L H D"],
    k: Float[Array, "B C G D"],
    v: Float[Array, "B C G D"],
    visible: Bool[Array, "B L C"],
    sinks: Float[Array, "H"] | None,
) -> Float[Array, "B L H D"]:
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, width)
    scores = jnp.einsum("blghd,bcgd->bghlc", q, k, preferred_element_type=jnp.float32) * width**-0.5
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, groups, heads // groups, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    out = jnp.einsum("bghlc,bcgd->blghd", weights.astype(v.dtype), v)
    return out.reshape(batch, length, heads, width)


def _write(
    cache: Float[Array, "B C G D"], positions: Int[Array, "B L"], rows: Float[Array, "B L G D"]
) -> Float[Array, "B C G D"]:
    # vmap over sequences keeps the writes on each sequence's device; indexing by sequence would not.
    return jax.vmap(lambda cache, positions, rows: cache.at[positions].set(rows))(cache, positions, rows)


class Attention(nnx.Module):
    """Causal grouped-query attention with H query heads and G key-value heads of width D.

    On a mesh, each shard of "tensor" has H / shards query heads and the key-value heads that they need. If there are
    fewer key-value heads than shards, several shards hold a copy of one head, and G is the number of shards.
    """

    def __init__(
        self,
        config: DecoderConfig,
        window: int | None,
        *,
        dtype: DType,
        rngs: nnx.Rngs,
        partition: Partition,
        rows: tuple[str, ...],
    ):
        heads, groups, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.shards = partition.size("tensor")
        self.partition = partition
        self.rows = rows  # mesh axes over which sequences are sharded
        self.groups = max(groups, self.shards)
        self.qkv_proj = linear(
            config.hidden_size,
            heads * head_dim,
            groups * head_dim,
            groups * head_dim,
            bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
            partition=partition,
            axes=(None, "tensor"),
            blocks=merged([(heads, head_dim), (groups, head_dim), (groups, head_dim)], self.shards),
            quantization=config.quantization,
        )
        self.o_proj = linear(
            heads * head_dim,
            config.hidden_size,
            bias=config.o_bias,
            dtype=dtype,
            rngs=rngs,
            partition=partition,
            axes=("tensor", None),
            quantization=config.quantization,
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config, dtype, partition)
            self.k_norm = RMSNorm(head_dim, config, dtype, partition)
        if config.sinks:
            zeros = jnp.zeros((heads,), dtype, device=partition.sharding("tensor"))
            self.sinks = nnx.Param(zeros, **partition.metadata("tensor"))
        self.config = config
        self.window = window

    def __call__(
        self,
        x: Float[Array, "B L E"],
        positions: Int[Array, "B L"],
        rotation: Rotation,
        cache: LayerCache | None,
        end: Int[Array, "B"] | None = None,
        extent: int | None = None,
    ) -> tuple[Float[Array, "B L E"], LayerCache | None]:
        """Return the attention output [B, L, E] and the updated cache.

        Args:
          x: [B, L, E] normalized hidden states.
          positions: [B, L] position of each token, increasing by one from that of a sequence's first token.
          rotation: Cos and sin of these positions.
          cache: Keys and values of earlier positions, or None to attend to the keys of `x` only.
          end: [B] number of real positions of each sequence. None means no padding.
          extent: Static number of cache positions to read. None means all.
        """
        batch, length, _ = x.shape
        config = self.config
        queries, keys = config.num_attention_heads // self.shards, self.groups // self.shards
        heads = self.qkv_proj(x).reshape(batch, length, self.shards, -1, config.head_dim)
        q, k, v = (
            part.reshape(batch, length, -1, config.head_dim)
            for part in jnp.split(heads, (queries, queries + keys), axis=3)
        )
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = rotation
        # Attention divides by the square root of head_dim. The rotation is in float32, so no rounding is added.
        factor = (config.head_dim / (config.query_pre_attn_scalar or config.head_dim)) ** 0.5
        q, k = rotate(q, factor * cos, factor * sin), rotate(k, cos, sin)
        sinks = self.sinks[...] if config.sinks else None
        if cache is not None:
            cache = LayerCache(_write(cache.keys, positions, k), _write(cache.values, positions, v))
            kernels = self.kernels(q.dtype) if length == 1 else None
            if kernels is not None:
                here = positions[:, 0]
                begin = jnp.zeros_like(here) if self.window is None else jnp.maximum(here + 1 - self.window, 0)
                out = kernels.decode_attention(q[:, 0], cache.keys, cache.values, begin, here + 1, sinks)
                return self.o_proj(out.reshape(batch, 1, -1)), cache
        kept = None if cache is None else LayerCache(cache.keys[:, :extent], cache.values[:, :extent])
        # A forward without a cache may be differentiated, which the sums that sinks need cannot be.
        differentiable = cache is not None or sinks is None
        library = self.library(q.dtype) if length > 1 and differentiable else None
        if library is not None:
            start = jnp.asarray(positions[:, 0])
            count = None if end is None else end - start
            out = self._by_library(library, q, k, v, start, count, kept, sinks)
            return self.o_proj(out.reshape(batch, length, -1)), cache
        if kept is None:
            key_positions = positions
        else:
            k, v = kept
            key_positions = jnp.broadcast_to(jnp.arange(k.shape[1]), (batch, k.shape[1]))
        # Padding sees no further than the last real token. No query thus sees the keys of padding, nor stale keys that
        # an earlier sequence left in the cache.
        places = positions if end is None else jnp.minimum(positions, end[:, None] - 1)
        distance = places[:, :, None] - key_positions[:, None, :]
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        return self.o_proj(attend(q, k, v, visible, sinks).reshape(batch, length, -1)), cache

    def kernels(self, dtype: DType) -> ModuleType | None:
        """Return the decode kernel, or None if it cannot run.

        It serves one query per sequence, and reads only the live positions of the cache.
        """
        if self.partition.mesh is not None or own_backend() != "triton":
            return None
        from jlora.models import decode_attention  # slow import, needed on GPUs only

        return decode_attention if decode_attention.unsupported_reason(dtype, self.config.head_dim) is None else None

    def library(self, dtype: DType) -> prefill_attention.Kernel | None:
        """Return the library's kernel for many queries per sequence, or None if it has none."""
        mesh = self.partition.mesh
        where = platform() if mesh is None else mesh.devices.flat[0].platform
        return prefill_attention.kernel_of(where, dtype, self.config.head_dim)

    def _by_library(
        self,
        kernel: prefill_attention.Kernel,
        q: Float[Array, "B L H D"],
        k: Float[Array, "B L G D"],
        v: Float[Array, "B L G D"],
        start: Int[Array, "B"],
        count: Int[Array, "B"] | None,
        past: LayerCache | None,
        sinks: Float[Array, "H"] | None,
    ) -> Float[Array, "B L H D"]:
        """Run the kernel on each shard's sequences and heads, because the compiler cannot divide a library's kernel."""
        run = partial(prefill_attention.attend, window=self.window, kernel=kernel)
        if self.partition.mesh is not None:
            rows = self.partition.dividing(q.shape[0], self.rows) or None
            heads = self.partition.dividing(q.shape[2], ("tensor",)) or None
            by_head, by_row = P(rows, None, heads), P(rows)
            run = jax.shard_map(
                run,
                mesh=self.partition.mesh,
                in_specs=(by_head, by_head, by_head, by_row, by_row, by_head, P(heads)),
                out_specs=by_head,
                check_vma=False,
            )
        return run(q, k, v, start, count, past, sinks)
