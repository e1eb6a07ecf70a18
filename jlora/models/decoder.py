"""The reference decoder: Llama, Mistral, Qwen2 and Qwen3 as one Flax NNX module.

Module paths are those of the checkpoints (`model.layers.0.self_attn.o_proj`), except that query, key and value are one
projection, and so are gate and up; `Decoder.packed_modules` says so. Nothing here knows of adapters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jlora._typing import DType
from jlora.models.config import DecoderConfig
from jlora.models.rope import rotate, rotations


class LayerCache(NamedTuple):
    """Keys and values of one layer. Row c of a sequence holds its position c: no other index is kept."""

    keys: Float[Array, "B C G D"]
    values: Float[Array, "B C G D"]


Cache = tuple[LayerCache, ...]
Rotation = tuple[Float[Array, "B L 1 half"], Float[Array, "B L 1 half"]]  # cos and sin of every position


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the last axis, in float32."""

    def __init__(self, features: int, epsilon: float, dtype: DType):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "B L *F"]) -> Float[Array, "B L *F"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def _linear(
    in_features: int, *output_sizes: int, bias: bool, dtype: DType, rngs: nnx.Rngs, out_dtype: DType | None = None
) -> nnx.Linear:
    """A projection; with several output sizes a merged one, its outputs side by side."""
    layer = nnx.Linear(
        in_features,
        sum(output_sizes),
        use_bias=bias,
        dtype=dtype,
        param_dtype=dtype,
        kernel_init=nnx.initializers.normal(0.02),
        preferred_element_type=out_dtype,
        rngs=rngs,
    )
    if len(output_sizes) > 1:
        layer.output_sizes = output_sizes  # pyright: ignore[reportAttributeAccessIssue]
    return layer


def _attend(
    q: Float[Array, "B L H D"], k: Float[Array, "B C G D"], v: Float[Array, "B C G D"], visible: Bool[Array, "B L C"]
) -> Float[Array, "B L H D"]:
    """Softmax attention (arXiv:1706.03762); H / G query heads share a key head. Scores and softmax are float32."""
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, width)
    scores = jnp.einsum("blghd,bcgd->bghlc", q, k, preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bghlc,bcgd->blghd", weights.astype(v.dtype), v)
    return out.reshape(batch, length, heads, width)


class Attention(nnx.Module):
    """Causal grouped-query attention; H query heads and G key-value heads of width D."""

    def __init__(self, config: DecoderConfig, window: int | None, *, dtype: DType, rngs: nnx.Rngs):
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.qkv_proj = _linear(config.hidden_size, queries, keys, keys, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o_proj = _linear(queries, config.hidden_size, bias=config.o_bias, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.config = config
        self.window = window

    def __call__(
        self,
        x: Float[Array, "B L E"],
        positions: Int[Array, "B L"],
        rotation: Rotation,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B L E"], LayerCache | None]:
        batch, length, _ = x.shape
        config = self.config
        split = (config.num_attention_heads, config.num_attention_heads + config.num_key_value_heads)
        heads = self.qkv_proj(x).reshape(batch, length, -1, config.head_dim)
        q, k, v = jnp.split(heads, split, axis=2)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        if cache is None:
            key_positions = positions
        else:
            row = jnp.arange(batch)[:, None]
            cache = LayerCache(cache.keys.at[row, positions].set(k), cache.values.at[row, positions].set(v))
            k, v = cache
            key_positions = jnp.broadcast_to(jnp.arange(k.shape[1]), (batch, k.shape[1]))
        # Cache rows that were never written lie at later positions than any query, so causality hides them as well.
        distance = positions[:, :, None] - key_positions[:, None, :]
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        return self.o_proj(_attend(q, k, v, visible).reshape(batch, length, -1)), cache


class MLP(nnx.Module):
    """Gated SiLU (arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, *, dtype: DType, rngs: nnx.Rngs):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = _linear(hidden, inner, inner, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = _linear(inner, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B L E"]) -> Float[Array, "B L E"]:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, window: int | None, *, dtype: DType, rngs: nnx.Rngs):
        self.self_attn = Attention(config, window, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def __call__(
        self, x: Float[Array, "B L E"], positions: Int[Array, "B L"], rotation: Rotation, cache: LayerCache | None
    ) -> tuple[Float[Array, "B L E"], LayerCache | None]:
        attended, cache = self.self_attn(self.input_layernorm(x), positions, rotation, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Trunk(nnx.Module):
    """Everything below the logits; `model` in the names of a checkpoint."""

    def __init__(self, config: DecoderConfig, *, dtype: DType, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            param_dtype=dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        windows = config.sliding_windows or (None,) * config.num_hidden_layers
        self.layers = nnx.List([Layer(config, window, dtype=dtype, rngs=rngs) for window in windows])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.config = config

    def __call__(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], cache: Cache | None
    ) -> tuple[Float[Array, "B L E"], Cache | None]:
        rotation = rotations(self.config, positions)
        x = self.embed_tokens(tokens)
        filled = []
        for i, layer in enumerate(self.layers):
            x, layer_cache = layer(x, positions, rotation, None if cache is None else cache[i])
            filled.append(layer_cache)
        return self.norm(x), None if cache is None else tuple(filled)


class Decoder(nnx.Module):
    """A causal language model.

    `Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))` draws small random weights; `jlora.models.from_pretrained`
    reads a checkpoint. Weights and activations are `dtype`; norms, rotations, softmax and logits are float32.
    """

    packed_modules = {  # noqa: RUF012 - a constant: which checkpoint modules a merged projection holds, in order
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: DecoderConfig, *, dtype: DType = jnp.float32, rngs: nnx.Rngs):
        self.model = Trunk(config, dtype=dtype, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(
                config.hidden_size, config.vocab_size, bias=False, dtype=dtype, out_dtype=jnp.float32, rngs=rngs
            )
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        """Logits of every position, float32 [B, L, V]; each position sees itself and those before it."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = self.model(tokens, positions, None)
        return self.logits(hidden)

    def extend(
        self, tokens: Int[Array, "B L"], positions: Int[Array, "B L"], cache: Cache, last: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Appends tokens to sequences whose earlier positions are in the cache.

        Args:
          tokens: [B, L]; a sequence shorter than L is padded on the right with any token.
          positions: [B, L] position of each token, counted up from the sequence's own length so far. Padding goes on
            counting: what it leaves in the cache is hidden until a later call overwrites it.
          cache: from `init_cache` or an earlier call; it must reach past the largest position.
          last: [B] index in 0..L-1 of each sequence's last real token.

        Returns:
          The float32 logits [B, V] after each sequence's last token, and the new cache.
        """
        hidden, extended = self.model(tokens, positions, cache)
        assert extended is not None
        return self.logits(hidden[jnp.arange(tokens.shape[0]), last]), extended

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for positions 0..capacity-1 of `batch` sequences."""
        shape = (batch, capacity, self.config.num_key_value_heads, self.config.head_dim)
        return tuple(
            LayerCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))
            for _ in range(self.config.num_hidden_layers)
        )

    def logits(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Scores of every token, float32."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.attend(hidden).astype(jnp.float32)
        return self.lm_head(hidden)
