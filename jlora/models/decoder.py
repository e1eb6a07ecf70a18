"""The reference decoder: Llama, Mistral, Mixtral, Qwen2, Qwen3, their MoE forms and gpt-oss as one Flax NNX module.

Module paths are those of the checkpoints (`model.layers.0.self_attn.o_proj`), except that query, key and value are one
projection, and so are gate and up; `Decoder.packed_modules` says so. The experts of a layer are one module, as
transformers 5 has them (`model.layers.0.mlp.experts`). Nothing here knows of adapters.
"""

from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jlora._typing import DType
from jlora.models.attention import Attention, LayerCache, Rotation
from jlora.models.config import DecoderConfig
from jlora.models.expert_parallel import spread_over
from jlora.models.json_file import ModelError
from jlora.models.moe import MoE
from jlora.models.partition import Dispatch, Partition, padded, width
from jlora.models.parts import MLP, RMSNorm, linear
from jlora.models.rope import rotations

Cache = tuple[LayerCache, ...]


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual; the MLP may be a block of experts."""

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
        self.self_attn = Attention(config, window, dtype=dtype, rngs=rngs, partition=partition)
        if config.moe is not None and config.moe.layers[index]:
            self.mlp = MoE(
                config.hidden_size, config.moe, dtype=dtype, rngs=rngs, partition=partition, dispatch=dispatch
            )
        else:
            self.mlp = MLP(
                config.hidden_size,
                config.intermediate_size,
                bias=config.mlp_bias,
                dtype=dtype,
                rngs=rngs,
                partition=partition,
            )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, partition)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, partition)

    def __call__(
        self,
        x: Float[Array, "B L E"],
        positions: Int[Array, "B L"],
        rotation: Rotation,
        cache: LayerCache | None,
        end: Int[Array, "B"] | None = None,
        extent: int | None = None,
    ) -> tuple[Float[Array, "B L E"], LayerCache | None]:
        attended, cache = self.self_attn(self.input_layernorm(x), positions, rotation, cache, end, extent)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Trunk(nnx.Module):
    """Everything below the logits; `model` in the names of a checkpoint."""

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
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, partition)
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
        rotation = rotations(self.config, positions)
        x = self.embed_tokens(self.partition.constrain(tokens, self.rows))
        filled = []
        for i, layer in enumerate(self.layers):
            x, layer_cache = layer(x, positions, rotation, None if cache is None else cache[i], end, extent)
            filled.append(layer_cache)
        return self.norm(x), None if cache is None else tuple(filled)


class Decoder(nnx.Module):
    """A causal language model.

    `Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))` draws small random weights; `jlora.models.from_pretrained`
    reads a checkpoint. Weights and activations are `dtype`; norms, rotations, softmax and logits are float32.

    On a `mesh` with Auto axes among "data", "tensor" and "expert" every parameter has a NamedSharding; what is
    computed follows from those (`jlora.models.partition`). The random weights are the same on any mesh. `dispatch`
    says how tokens reach experts on other devices, "all_gather" or "all_to_all" (`jlora.models.expert_parallel`).

    Raises:
      ModelError: the mesh has another axis, or sizes of the model that the shards of an axis cannot share evenly.
    """

    packed_modules = {  # noqa: RUF012 - a constant: which checkpoint modules a merged projection holds, in order
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    # What Mixtral's checkpoints, and adapters of Tinker's for gpt-oss, call a module -> here.
    module_aliases = {"block_sparse_moe": "mlp", "attn": "self_attn"}  # noqa: RUF012 - a constant

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
        if not config.tie_word_embeddings:
            self.lm_head = linear(
                config.hidden_size,
                config.vocab_size,
                bias=False,
                dtype=dtype,
                out_dtype=jnp.float32,
                rngs=rngs,
                partition=self.partition,
                axes=(None, "tensor"),
                blocks=padded(config.vocab_size, self.partition.size("tensor")),
            )
        self.config = config
        self.dtype = jnp.dtype(dtype)

    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        """Logits of every position, float32 [B, L, V]; each position sees itself and those before it."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = self.model(tokens, positions, None)
        return self.logits(hidden)

    def extend(
        self,
        tokens: Int[Array, "B L"],
        positions: Int[Array, "B L"],
        cache: Cache,
        last: Int[Array, "B"],
        *,
        extent: int | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Appends tokens to sequences whose earlier positions are in the cache.

        Args:
          tokens: [B, L]; a sequence shorter than L is padded on the right with any token.
          positions: [B, L] position of each token, counted up from the sequence's own length so far. Padding goes on
            counting: what it leaves in the cache is hidden until a later call overwrites it.
          cache: from `init_cache` or an earlier call; it must reach past the largest position. Beyond a sequence's
            last real token it may hold anything, NaN and infinity as well.
          last: [B] index in 0..L-1 of each sequence's last real token.
          extent: attention reads positions 0..extent-1 of the cache and no others: static, and past every real token's
            position. None: all of the cache.

        Returns:
          The float32 logits [B, V] after each sequence's last token, and the new cache.
        """
        of_last = jax.vmap(lambda rows, index: rows[index])  # each with its own sequence's device
        hidden, extended = self.model(tokens, positions, cache, of_last(positions, last) + 1, extent)
        assert extended is not None
        return self.logits(of_last(hidden, last)), extended

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for positions 0..capacity-1 of `batch` sequences; on a mesh sharded by sequences and heads."""
        groups = max(self.config.num_key_value_heads, self.partition.size("tensor"))
        shape = (batch, capacity, groups, self.config.head_dim)

        def empty() -> Float[Array, "B C G D"]:
            return self.partition.constrain(jnp.zeros(shape, self.dtype), self.model.rows, (), ("tensor",))

        return tuple(LayerCache(empty(), empty()) for _ in range(self.config.num_hidden_layers))

    @property
    def reads_what_is_live(self) -> bool:
        """Whether one token a sequence reads no more of a cache than is live, whatever the `extent`."""
        return self.model.layers[0].self_attn.kernels(self.dtype) is not None

    def logits(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Scores of every token, float32."""
        if self.config.tie_word_embeddings:
            scores = self.model.embed_tokens.attend(hidden).astype(jnp.float32)
        else:
            scores = self.lm_head(hidden)
        return scores[..., : self.config.vocab_size]


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
