"""MaxText's NNX decoder in structure: module names, attributes, shapes, and what its scan does with the state."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

VOCAB, WIDTH, HEADS, SIZE, INNER = 24, 8, 4, 4, 12
# Mesh axes of the logical axes of parameters. MaxText has twelve mesh axes; the others have one device.
RULES = {"embed": "fsdp", "q_heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


@dataclasses.dataclass(frozen=True)
class Config:
    decoder_block: str
    layers: int
    block: int = 1  # layers of a scanned block
    kv_heads: int = 4
    use_qk_norm: bool = False
    scalar: float | None = None
    rotary: str = "RotaryEmbedding"
    tied: bool = False
    scan: bool = True


LLAMA = Config("llama2", 3, rotary="LLaMARotaryEmbedding")
GEMMA = Config("gemma3", 5, block=2, use_qk_norm=True, scalar=SIZE**-0.5, tied=True)  # two blocks, and a layer
QWEN = Config("qwen3", 4, use_qk_norm=True, scalar=SIZE**-0.5)  # as many layers as heads


class DenseGeneral(nnx.Module):
    def __init__(self, ins, outs, names, rngs, axis=(-1,)):
        self.in_features_shape, self.out_features_shape, self.axis = ins, outs, axis
        self.dtype = jnp.float32
        kernel = jax.random.normal(rngs.params(), ins + outs) / math.prod(ins) ** 0.5
        self.kernel = nnx.Param(kernel, out_sharding=names, eager_sharding=False)
        self.bias = None

    def __call__(self, x, out_sharding=None):
        axes = [axis % x.ndim for axis in self.axis]
        return jnp.tensordot(x, self.kernel[...], (axes, list(range(len(axes)))))


class Embed(nnx.Module):
    def __init__(self, config, rngs):
        self.num_embeddings, self.num_features, self.config = VOCAB, WIDTH, config
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (VOCAB, WIDTH)), out_sharding=("vocab", None), eager_sharding=False
        )

    def __call__(self, tokens):
        return self.embedding[...][tokens]


class RMSNorm(nnx.Module):
    def __init__(self, size, rngs):
        self.scale = nnx.Param(
            1 + 0.1 * jax.random.normal(rngs.params(), (size,)), out_sharding=(None,), eager_sharding=False
        )

    def __call__(self, x):
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


class RotaryEmbedding(nnx.Module):
    def __call__(self, x):  # the halves of a head
        angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), 100.0 ** -jnp.linspace(0, 1, SIZE // 2))[
            None, :, None
        ]
        first, second = jnp.split(x, 2, axis=-1)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class LLaMARotaryEmbedding(RotaryEmbedding):
    def __call__(self, x):  # pairs of features
        halves = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        first, second = jnp.split(super().__call__(halves), 2, axis=-1)
        return jnp.stack([first, second], axis=-1).reshape(x.shape)


class Attention(nnx.Module):
    def __init__(self, config, rngs):
        self.config, self.head_dim, self.query_pre_attn_scalar = config, SIZE, config.scalar
        self.rotary_embedding = {c.__name__: c for c in (RotaryEmbedding, LLaMARotaryEmbedding)}[config.rotary]()
        self.query = DenseGeneral((WIDTH,), (HEADS, SIZE), ("embed", "q_heads", None), rngs)
        self.key = DenseGeneral((WIDTH,), (config.kv_heads, SIZE), ("embed", "kv_heads", None), rngs)
        self.value = DenseGeneral((WIDTH,), (config.kv_heads, SIZE), ("embed", "kv_heads", None), rngs)
        self.out = DenseGeneral((HEADS, SIZE), (WIDTH,), ("q_heads", None, "embed"), rngs, axis=(-2, -1))
        if config.use_qk_norm:
            self.query_norm, self.key_norm = RMSNorm(SIZE, rngs), RMSNorm(SIZE, rngs)

    def __call__(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.config.use_qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = self.rotary_embedding(q), self.rotary_embedding(k)
        scores = jnp.einsum("btnh,bsnh->bnts", q * (self.query_pre_attn_scalar or 1), k)
        scores = jnp.where(jnp.tril(jnp.ones((1, 1, *scores.shape[-2:]), bool)), scores, -1e9)
        return self.out(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v))


class MlpBlock(nnx.Module):
    def __init__(self, rngs):
        self.wi_0 = DenseGeneral((WIDTH,), (INNER,), ("embed", "mlp"), rngs)
        self.wi_1 = DenseGeneral((WIDTH,), (INNER,), ("embed", "mlp"), rngs)
        self.wo = DenseGeneral((INNER,), (WIDTH,), ("mlp", "embed"), rngs)

    def __call__(self, x):
        return self.wo(jax.nn.silu(self.wi_0(x)) * self.wi_1(x))


class Layer(nnx.Module):
    def __init__(self, config, rngs):
        self.pre_norm, self.post_norm = RMSNorm(WIDTH, rngs), RMSNorm(WIDTH, rngs)
        self.self_attention, self.mlp = Attention(config, rngs), MlpBlock(rngs)
        self.calls = nnx.Intermediate(jnp.zeros(()))  # a state that is no parameter, and that the call changes

    def __call__(self, x):
        self.calls[...] += 1
        x = x + self.self_attention(self.pre_norm(x))
        return x + self.mlp(self.post_norm(x))


class Block(nnx.Module):
    def __init__(self, config, layers, rngs):
        self.layers = layers
        for i in range(layers):
            setattr(self, f"layers_{i}", Layer(config, rngs))

    def __call__(self, x):
        for i in range(self.layers):
            x = getattr(self, f"layers_{i}")(x)
        return x


def stacked(make, count, rngs):
    """Return `count` layers in one module, with parameters stacked on axis 1 and all else on axis 0."""
    graph, params, rest = nnx.split(make(rngs), nnx.Param, ...)
    rows = [nnx.split(make(rngs), nnx.Param, ...)[1:] for _ in range(count)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *(row[0] for row in rows))
    rest = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(row[1] for row in rows))

    def named(axis):
        def of(leaf):
            own = {nnx.PARTITION_NAME: "layers", "param_scan_axis": axis}
            if (names := leaf.get_metadata().get("out_sharding")) is not None:
                own["out_sharding"] = (*names[:axis], "layers", *names[axis:])
            return leaf.replace(**own)

        return lambda state: jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, nnx.Variable))

    return nnx.merge(graph, named(1)(params), named(0)(rest))


def scan(layers, x):
    graph, params, rest = nnx.split(layers, nnx.Param, ...)
    params = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0) if leaf.ndim > 1 else leaf, params)

    def sliced(leaf):
        """Return the variable of one layer. As in MaxText, names of axes that it keeps must not exceed its rank."""
        updates = {}
        for key in ("sharding", "out_sharding"):
            if names := leaf.get_metadata().get(key):
                kept = tuple(name for name in names if name != leaf.get_metadata().get(nnx.PARTITION_NAME, "layers"))
                if len(kept) > leaf.get_value().ndim:
                    raise ValueError(f"the partition metadata {names} is inconsistent")
                updates[key] = kept
        return leaf.replace(**updates)

    def body(x, state):
        state = jax.tree.map(sliced, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        layer = nnx.merge(graph, *state)
        y = layer(x)
        return y, nnx.split(layer, nnx.Param, ...)[2]

    x, rest = jax.lax.scan(jax.checkpoint(body), x, (params, rest))
    nnx.update(layers, rest)
    return x


class Decoder(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        if not config.scan:
            for i in range(config.layers):
                setattr(self, f"layers_{i}", Layer(config, rngs))
        elif config.block == 1:
            self.layers = stacked(lambda rngs: Layer(config, rngs), config.layers, rngs)
        else:
            count, rest = divmod(config.layers, config.block)
            self.layers = stacked(lambda rngs: Block(config, config.block, rngs), count, rngs)
            self.layers_remainder = Block(config, rest, rngs)
        self.decoder_norm = RMSNorm(WIDTH, rngs)
        if not config.tied:
            self.logits_dense = DenseGeneral((WIDTH,), (VOCAB,), ("embed", "vocab"), rngs)

    def __call__(self, x, table):
        if self.config.scan:
            x = scan(self.layers, x)
            x = self.layers_remainder(x) if self.config.block > 1 else x
        else:
            for i in range(self.config.layers):
                x = getattr(self, f"layers_{i}")(x)
        x = self.decoder_norm(x)
        return x @ table.T if self.config.tied else self.logits_dense(x)


class Transformer(nnx.Module):
    def __init__(self, config):
        rngs = nnx.Rngs(0)
        self.token_embedder, self.decoder = Embed(config, rngs), Decoder(config, rngs)

    def __call__(self, tokens):
        return self.decoder(self.token_embedder(tokens), self.token_embedder.embedding[...])


def sharded(model, mesh):
    """Return the model with its parameters placed by their logical axes."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            names = node.get_metadata().get("out_sharding") or ()
            spec = PartitionSpec(*(RULES.get(name) if name else None for name in names))
            node.set_value(jax.device_put(node.get_value(), NamedSharding(mesh, spec)))
    return model


# --- Checkpoints of transformers -------------------------------------------------------------------------------------

_OWN = {
    "self_attn.q_proj": ("self_attention", "query"),
    "self_attn.k_proj": ("self_attention", "key"),
    "self_attn.v_proj": ("self_attention", "value"),
    "self_attn.o_proj": ("self_attention", "out"),
    "mlp.gate_proj": ("mlp", "wi_0"),
    "mlp.up_proj": ("mlp", "wi_1"),
    "mlp.down_proj": ("mlp", "wo"),
}


def weights(model):
    """Return name in transformers -> (a function of a delta [N, K] that adds it to the model, N, K)."""
    config, found = model.decoder.config, {}
    for number in range(config.layers):
        layer, index = _layer(model.decoder, number)
        for name, (part, own) in _OWN.items():
            dense = getattr(getattr(layer, part), own)
            n, k = math.prod(dense.out_features_shape), math.prod(dense.in_features_shape)
            found[f"model.layers.{number}.{name}"] = _adder(config, dense, index, name), n, k
    table = model.token_embedder.embedding
    if not config.tied:
        found["lm_head"] = _adder(config, model.decoder.logits_dense, (), "lm_head"), VOCAB, WIDTH
        found["model.embed_tokens"] = lambda delta: table.set_value(table[...] + delta), VOCAB, WIDTH
    return found


def _layer(decoder, number):
    """Return the module of a layer, and the index of its values in parameters."""
    config = decoder.config
    if not config.scan:
        return getattr(decoder, f"layers_{number}"), ()
    if config.block == 1:
        return decoder.layers, (slice(None), number)
    block, at = divmod(number, config.block)
    if block < config.layers // config.block:
        return getattr(decoder.layers, f"layers_{at}"), (slice(None), block)
    return getattr(decoder.layers_remainder, f"layers_{at}"), ()


def _adder(config, dense, index, name):
    def add(delta):
        kernel = delta.T.reshape(dense.in_features_shape + dense.out_features_shape)
        if config.rotary.startswith("LLaMA") and name in ("self_attn.q_proj", "self_attn.k_proj"):
            first, second = np.split(kernel, 2, axis=-1)
            kernel = np.stack([first, second], axis=-1).reshape(kernel.shape)
        if config.scalar is None and name == "self_attn.q_proj":
            kernel = kernel / np.sqrt(SIZE)
        whole = np.array(dense.kernel[...], np.float64)
        whole[index] += kernel
        dense.kernel.set_value(jax.device_put(whole.astype(np.float32), dense.kernel[...].sharding))

    return add
