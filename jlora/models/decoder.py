"""The reference decoder: Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 3, gpt-oss and MoE forms as one Flax NNX module.

Module paths are those of the checkpoints (`model.layers.0.self_attn.o_proj`), with two exceptions. Query, key and value
are one projection, and so are gate and up (`Decoder.packed_modules`). The experts of a layer are one module, as in
transformers 5 (`model.layers.0.mlp.experts`). This module does not depend on adapters.
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from jlora._typing import DType
from jlora.models.attention import Attention, LayerCache, Rotation
from jlora.models.config import DecoderConfig
from jlora.models.expert_parallel import spread_over
from jlora.models.json_file import ModelError
from jlora.models.moe import MoE
from jlora.models.partition import Dispatch, Partition, padded, width
from jlora.models.parts import MLP, RMSNorm, linear
from jlora.models.pooling import pool, weighted_sum
from jlora.models.quantized import BLOCK
from jlora.models.rope import rotations

Cache = tuple[LayerCache, ...]


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual, with `post_norms` after another norm.

    The MLP may be a mixture of experts.
    """

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        *,
        dtype: DType,
        rngs: nnx.Rngs,
        partition: Partition,
        dispatch: Dispatch,
    ):
        window = None if config.sliding_windows is None else config.sliding_windows[index]
        rows = spread_over(dispatch)
        self.self_attn = Attention(config, window, dtype=dtype, rngs=rngs, partition=partition, rows=rows)
        if config.moe is not None and config.moe.layers[index]:
            self.mlp = MoE(
                config.hidden_size,
                config.moe,
                dtype=dtype,
                rngs=rngs,
                partition=partition,
                dispatch=dispatch,
                quantization=config.quantization,
            )
        else:
            self.mlp = MLP(
                config.hidden_size,
                config.intermediate_size,
                bias=config.mlp_bias,
                dtype=dtype,
                rngs=rngs,
                partition=partition,
                quantization=config.quantization,
                activation=config.activation,
            )
        norm = functools.partial(RMSNorm, config.hidden_size, config, dtype, partition)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.post_norms = config.post_norms
        if config.post_norms:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def __call__(
        self,
        x: Float[Array, "B L E"],
        positions: Int[Array, "B L"],
        rotation: Rotation,
        cache: LayerCache | None,
        end: Int[Array, "B"] | None = None,
        extent: int | None = None,
    ) -> tuple[Float[Array, "B L E"], LayerCache | None]:
        """Return the hidden states [B, L, E] and the updated cache; the arguments are those of `Attention`."""
        attended, cache = self.self_attn(self.input_layernorm(x), positions, rotation, cache, end, extent)
        if self.post_norms:
            x = x + self.post_attention_layernorm(attended)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), cache
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Trunk(nnx.Module):
    """All layers below the logits; `model` in the names of a checkpoint."""

    def __init__(
        self, config: DecoderConfig, *, dtype: DType, rngs: nnx.Rngs, partition: Partition, dispatch: Dispatch
    ):
        blocks = padded(config.vocab_size, partition.size("tensor"))
        self.embed_tokens = nnx.Embed(
            config.vocab_size if blocks is None else width(blocks),
            config.hidden_size,
            dtype=dtype,
            param_dtype=dtype,
            embedding_init=partition.draw(("tensor", None), blocks),
            embedding_metadata=partition.metadata("tensor", None),
            rngs=rngs,
        )
        if blocks is not None:
            self.embed_tokens.real_vocab = config.vocab_size  # pyright: ignore[reportAttributeAccessIssue]
        self.layers = nnx.List(
            [
                Layer(config, i, dtype=dtype, rngs=rngs, partition=partition, dispatch=dispatch)
                for i in range(config.num_hidden_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config, dtype, partition)
        self.config = config
        self.partition = partition
        self.rows = spread_over(dispatch)

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        cache: Cache | None,
        end: Int[Array, "B"] | None = None,
        extent: int | None = None,
    ) -> tuple[Float[Array, "B L E"], Cache | None]:
        """Return the final hidden states [B, L, E] and the updated cache; see `Decoder.extend` for the arguments."""
        config = self.config
        everywhere = local = rotations(config.rope, config.head_dim, positions)
        if config.local_rope is not None:
            local = rotations(config.local_rope, config.head_dim, positions)
        x = self.embed_tokens(self.partition.constrain(tokens, self.rows))
        if config.embedding_scale != 1:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        filled = []
        for i, layer in enumerate(self.layers):
            rotation = everywhere if layer.self_attn.window is None else local
            x, layer_cache = layer(x, positions, rotation, None if cache is None else cache[i], end, extent)
            filled.append(layer_cache)
        return self.norm(x), None if cache is None else tuple(filled)


class Decoder(nnx.Module):
    """A causal language model, or a classifier or the trunk of one (`DecoderConfig.num_labels`).

    `Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))` draws small random weights; `jlora.models.from_pretrained`
    loads a checkpoint. Weights and activations are `dtype`. Norms, rotations, softmax and logits are float32.

    On a `mesh` with Auto axes among "data", "tensor" and "expert", every parameter has a NamedSharding, and the
    compiler shards the computation accordingly (`jlora.models.partition`). The random weights are the same on any mesh.
    `dispatch`, "all_gather" or "all_to_all", selects how tokens reach experts on other devices
    (`jlora.models.expert_parallel`).

    Raises:
      ModelError: The mesh has an axis of another name or type, or a size of the model is not divisible by an axis.
    """

    packed_modules = {  # noqa: RUF012 - a constant: merged projection -> its checkpoint modules, in order
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    # Names of modules in Mixtral's checkpoints, in Tinker's adapters for gpt-oss, and in adapters for the text model of
    # a multimodal one -> names in this model; "" leaves a name out.
    module_aliases = {"block_sparse_moe": "mlp", "attn": "self_attn", "language_model": ""}  # noqa: RUF012 - a constant

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
        mesh: jax.sharding.Mesh | None = None,
        dispatch: Dispatch = "all_gather",
    ):
        self.partition = Partition(mesh)
        _check_sizes(config, self.partition, dispatch)
        self.model = Trunk(config, dtype=dtype, rngs=rngs, partition=self.partition, dispatch=dispatch)
        outputs = functools.partial(
            linear,
            config.hidden_size,
            bias=False,
            dtype=dtype,
            out_dtype=jnp.float32,
            rngs=rngs,
            partition=self.partition,
        )
        if config.num_labels:
            self.score = outputs(config.num_labels)
        if config.num_labels is None and not config.tie_word_embeddings:
            self.lm_head = outputs(
                config.vocab_size,
                axes=(None, "tensor"),
                blocks=padded(config.vocab_size, self.partition.size("tensor")),
                quantization=None if config.quantization == "fp8_blocks" else config.quantization,
            )
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L outputs"]:
        """Return the logits of every position, float32 [B, L, V]. Each position sees itself and those before it.

        A classifier returns its float32 scores [B, L, labels], a trunk its hidden states [B, L, E].
        """
        return self._outputs(self._hidden(tokens))

    def pooled(
        self, tokens: Int[Array, "B L"], lengths: Int[Array, "B"], weights: Float[Array, "B L"] | None = None
    ) -> Float[Array, "B outputs"]:
        """Return the output at the last token of each sequence, or its embedding.

        This is the float32 embedding [B, E] of a model with `DecoderConfig.pooling`, the float32 score [B, labels] of a
        classifier, the hidden state [B, E] of another trunk, and the float32 logits [B, V] of a language model.

        Args:
          tokens: [B, L] token ids. A sequence shorter than L is padded on the right with any token.
          lengths: [B] number of tokens of each sequence, from 1 to L.
          weights: [B, L] weights of the hidden states of each sequence, whose sum is returned, not normalized, in place
            of the embedding (`jlora.models.pooling.token_weights`). An embedding model alone takes them.
        """
        hidden = self._hidden(tokens)
        if self.config.pooling is not None:
            return pool(hidden, lengths, self.config.pooling) if weights is None else weighted_sum(hidden, weights)
        return self._outputs(_of_last(hidden, lengths - 1))

    def _hidden(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L E"]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.model(tokens, positions, None)[0]

    def _outputs(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows outputs"]:
        if self.config.num_labels is None:
            return self.logits(hidden)
        return self.score(hidden) if self.config.num_labels else hidden

    def extend(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        cache: Cache,
        last: Int[Array, "B"],
        *,
        extent: int | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Append tokens as `hidden_states` does.

        Returns:
          The float32 logits [B, V] after each sequence's last token, and the new cache.
        """
        hidden, extended = self.hidden_states(tokens, positions, cache, last, extent=extent)
        return self.logits(_of_last(hidden, last)), extended

    def hidden_states(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        cache: Cache,
        last: Int[Array, "B"],
        *,
        extent: int | None = None,
    ) -> tuple[Float[Array, "B L E"], Cache]:
        """Append tokens to sequences whose earlier positions are in the cache.

        Args:
          tokens: [B, L] token ids. A sequence shorter than L is padded on the right with any token.
          positions: [B, L] position of each token, counted from the sequence's current length. Padding continues the
            count; its cache entries are hidden until a later call overwrites them.
          cache: Cache from `init_cache` or an earlier call, with capacity above the largest position. Beyond a
            sequence's last real token it may hold any values, including NaN and infinity.
          last: [B] index in 0..L-1 of each sequence's last real token.
          extent: Static number of cache positions that attention reads, above every real token's position. None means
            all.

        Returns:
          The final hidden states [B, L, E], for `logits`, and the new cache.
        """
        hidden, extended = self.model(tokens, positions, cache, _of_last(positions, last) + 1, extent)
        assert extended is not None
        return hidden, extended

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for positions 0..capacity-1 of `batch` sequences.

        On a mesh it is sharded by sequences and heads.
        """
        groups = max(self.config.num_key_value_heads, self.partition.size("tensor"))
        shape = (batch, capacity, groups, self.config.head_dim)

        def empty() -> Float[Array, "B C G D"]:
            return self.partition.constrain(jnp.zeros(shape, self.dtype), self.model.rows, (), ("tensor",))

        return tuple(LayerCache(empty(), empty()) for _ in range(self.config.num_hidden_layers))

    @property
    def reads_what_is_live(self) -> bool:
        """True if a step of one token per sequence reads only the live part of a cache, whatever the `extent`."""
        return self.model.layers[0].self_attn.kernels(self.dtype) is not None

    def logits(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Compute the float32 scores of every token of the vocabulary.

        Raises:
          ModelError: The model is a classifier or a trunk, which has no logits.
        """
        if self.config.num_labels is not None:
            kind = f"a classifier of {self.config.num_labels} labels" if self.config.num_labels else "a trunk"
            kind = kind if self.config.pooling is None else "an embedding model"
            raise ModelError(f"this checkpoint is of {kind}, which has no logits and cannot generate; call `pooled`")
        if self.config.tie_word_embeddings:
            scores = self.model.embed_tokens.attend(hidden).astype(jnp.float32)
        else:
            scores = self.lm_head(hidden)
        return scores[..., : self.config.vocab_size]


def _of_last(rows: Shaped[Array, "B L *F"], last: Int[Array, "B"]) -> Shaped[Array, "B *F"]:
    return jax.vmap(lambda own, index: own[index])(rows, last)  # vmap keeps each row on its sequence's device


def _check_sizes(config: DecoderConfig, partition: Partition, dispatch: Dispatch) -> None:
    if dispatch not in get_args(Dispatch):
        raise ModelError(f"dispatch must be one of {get_args(Dispatch)}, got {dispatch!r:.80}")
    shards, groups, moe = partition.size("tensor"), config.num_key_value_heads, config.moe
    partition.check("tensor", num_attention_heads=config.num_attention_heads)
    if groups % shards and shards % groups:
        raise ModelError(
            f"num_key_value_heads ({groups}) must be a multiple or a divisor of mesh axis 'tensor', which has {shards} "
            "shards"
        )
    if moe is None or not all(moe.layers):
        partition.check("tensor", intermediate_size=config.intermediate_size)
    if moe is not None:
        partition.check("expert", **{"moe.num_experts": moe.num_experts})
        sizes = {"moe.intermediate_size": moe.intermediate_size, "moe.shared_size": moe.shared_size}
        partition.check("tensor", **sizes)
    if config.quantization == "fp8_blocks":
        _check_blocks(config, shards)


def _check_blocks(config: DecoderConfig, shards: int) -> None:
    """Check that no shard of the inputs of a product holds a part of a block."""
    sizes = {"num_attention_heads * head_dim": config.num_attention_heads * config.head_dim}
    if config.moe is None or not all(config.moe.layers):
        sizes["intermediate_size"] = config.intermediate_size
    if config.moe is not None:
        sizes |= {"moe.intermediate_size": config.moe.intermediate_size, "moe.shared_size": config.moe.shared_size}
    for name, value in sizes.items():
        if shards > 1 and value % (BLOCK * shards):
            raise ModelError(
                f"{name} ({value}) must be a multiple of {BLOCK} on each of the {shards} shards of mesh axis 'tensor', "
                "because each block of an fp8 checkpoint has one scale"
            )
