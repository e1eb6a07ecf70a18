"""Specs of the layers of tpu-inference: padded and repeated heads, merged kernels, quantized kernels, heads."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jlora

PACKED_MODULES = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
_HEADS = {"N": "num_attention_heads", "K": "num_key_value_heads"}  # axis of an equation -> name in a configuration
_NO_HEAD = "with speculative decoding, logits are computed for rows of drafts, which no request of a batch describes"


class FlaxEinsum(nnx.Einsum):
    """An `nnx.Einsum` in a model of tpu-inference, with its own spec since its heads can be padded."""


def describe_layers(model: nnx.Module, vllm_config: Any, mesh: Any) -> None:
    """Register the layer classes of a model of tpu-inference, with the sizes of its checkpoint.

    Args:
      model: The model. Its `nnx.Einsum` layers become `FlaxEinsum`, and a table that is also its head is marked.
      vllm_config: vLLM's configuration.
      mesh: The mesh of the model.
    """
    from tpu_inference.layers.jax.embed import JaxEmbed  # type: ignore[import-not-found]
    from tpu_inference.layers.jax.linear import (  # type: ignore[import-not-found]
        JaxEinsum,
        JaxLmHead,
        JaxQKVParallelLinear,
    )

    hf_config = vllm_config.model_config.hf_config
    sizes = _Sizes(
        config=getattr(hf_config, "text_config", hf_config),
        vocab=vllm_config.model_config.get_vocab_size(),
        shards=mesh.shape["model"],
        dtype=vllm_config.model_config.dtype,
        drafts=vllm_config.speculative_config is not None,
        head_dims={},
    )
    for path, module in nnx.iter_modules(model):
        if type(module) is nnx.Einsum:
            object.__setattr__(module, "__class__", FlaxEinsum)
        if isinstance(module, JaxEmbed) and path[-1] == "embed_tokens" and hf_config.tie_word_embeddings:
            setattr(module, "tie_word_embeddings", True)  # noqa: B010  # known to jlora alone
        if (head_dim := vars(module).get("head_dim_original")) is not None:
            sizes.head_dims.update({id(child): head_dim for child in vars(module).values()})
    for cls in (JaxEinsum, JaxQKVParallelLinear, FlaxEinsum):
        jlora.register_layer(cls, functools.partial(_linear, sizes))
    jlora.register_layer(JaxLmHead, functools.partial(_lm_head, sizes))
    jlora.register_layer(JaxEmbed, functools.partial(_embed, sizes))


def language_model(model: nnx.Module) -> tuple[str, list[str]]:
    """Return the path of the language model's table, and the paths of the towers and connectors beside that model."""
    paths = [path for path, _ in nnx.iter_modules(model)]
    tables = (path for path in sorted(paths, key=len) if path and path[-1] in ("embed_tokens", "embed"))
    table = next(tables, ("embed_tokens",))
    above = [table[:depth] for depth in range(len(table))]
    beside = [path for path in paths if path[:-1] in above[:-1] and path not in (*above, ("lm_head",))]
    return ".".join(map(str, table)), [".".join(map(str, path)) for path in beside]


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model and of its checkpoint.

    Attributes:
      config: The configuration of the language model.
      vocab: Number of tokens of the checkpoint.
      shards: Size of the mesh axis that splits heads.
      dtype: dtype of the model, which the slots of quantized layers take.
      drafts: True with speculative decoding.
      head_dims: Id of an attention projection -> its head size in the checkpoint.
    """

    config: Any
    vocab: int
    shards: int
    dtype: Any
    drafts: bool
    head_dims: dict[int, int]

    def real_vocab(self, vocab: int) -> int | None:
        """Return the checkpoint's vocabulary if a table of `vocab` rows is that one, padded to the shards."""
        return self.vocab if 0 < vocab - self.vocab < self.shards else None

    def copies(self, axis: str, heads: int) -> int:
        """Return how often each head of the checkpoint is repeated, so that every shard has one."""
        try:
            real = getattr(self.config, _HEADS[axis])
            same = getattr(self.config, "num_global_key_value_heads", None) is None
        except RuntimeError:  # transformers raises where the layers of a model differ; such models repeat none
            return 1
        return heads // real if same and real < heads == self.shards else 1


def _linear(sizes: _Sizes, layer: Any) -> jlora.LinearSpec | str:
    """Return the spec of a linear or einsum layer; sizes are those of `kernel_shape`, as kernels may be packed."""
    from tpu_inference.layers.jax.quantization.unquantized import (  # type: ignore[import-not-found]
        UnquantizedLinearMethod,
        UnquantizedMergedLinearMethod,
    )

    method = vars(layer).get("quant_method")
    equation, shape = str(layer.einsum_str).replace(" ", ""), tuple(layer.kernel_shape)
    index = _heads(sizes, layer, equation, shape)
    if isinstance(index, str):
        return index
    param = "weight" if "weight" in vars(layer) else "kernel"
    if method is None or type(method) is UnquantizedLinearMethod:
        product = functools.partial(jnp.einsum, equation) if param == "weight" else None  # Flax's own need none
        return jlora.einsum_spec(equation, shape, param, product=product, **index)
    plain = jlora.einsum_spec(equation, shape, param, **index)
    options: dict[str, Any] = {"param": param, "rows": plain.rows, **index}
    if (parts := getattr(layer, "output_sizes", None)) is not None:
        merged = MergedRows(tuple(parts), method.linear_config.n_shards)
        options = {"param": param, "rows": merged, "out_blocks": merged.blocks()}
    if not isinstance(method, UnquantizedMergedLinearMethod):
        options |= {"dequantize": _dequantize, "dtype": sizes.dtype}
        if vars(layer)["weight"].shape != (plain.in_features, plain.out_features):
            options["param"] = None  # of another layout: on a mesh its slots are replicated
    return jlora.LinearSpec(plain.in_features, plain.out_features, **options)


def _heads(sizes: _Sizes, layer: Any, equation: str, shape: Sequence[int]) -> Mapping[str, Any] | str:
    """Return the options of `einsum_spec` for padded and repeated heads, or why the layer cannot be served."""
    kernel, out = equation.split(",")[1].split("->")
    if (real := sizes.head_dims.get(id(layer))) is None or "H" not in kernel:
        return {}
    axis = "N" if "N" in kernel else "K"
    heads, head_dim = shape[kernel.index(axis)], shape[kernel.index("H")]
    copies = sizes.copies(axis, heads)
    if "H" not in out and copies > 1:
        return f"its {heads // copies} heads are repeated {copies} times over the shards, and so are its inputs"
    if "H" not in out:
        return {"in_index": [head * head_dim + i for head in range(heads) for i in range(real)]}
    blocks = [((head // copies) * real, real) for head in range(heads)]
    padding = [(-1, head_dim - real)] if head_dim > real else []
    return {"out_blocks": [block for each in blocks for block in (each, *padding)]}


@dataclass(frozen=True)
class MergedRows:
    """The `rows` of a merged layer, whose kernel has the parts of each shard side by side and whose output does not.

    Attributes:
      parts: The sizes of the merged projections.
      shards: N, the number of shards of the kernel.
    """

    parts: tuple[int, ...]
    shards: int

    def blocks(self) -> list[tuple[int, int]]:
        """Return the kernel's columns as runs of those of the checkpoint."""
        begins = [0, *itertools.accumulate(self.parts)]
        sizes = [part // self.shards for part in self.parts]
        return [(begin + shard * n, n) for shard in range(self.shards) for begin, n in zip(begins, sizes, strict=False)]

    def __call__(self, layer: Any, x: jax.Array, y: Any, *_: Any, **__: Any) -> tuple[jax.Array, jax.Array, Any]:
        """Return x, the output in the order of the kernel, and the way back to the output's own form."""
        given = [each.reshape(*x.shape[:-1], -1) for each in (y if isinstance(y, tuple) else (y,))]
        ends = list(itertools.accumulate(self.parts))[:-1]
        parts = given if len(given) > 1 else jnp.split(given[0], ends, axis=-1)
        lead = x.shape[:-1]
        flat = jnp.concatenate([each.reshape(*lead, self.shards, -1) for each in parts], axis=-1)

        def restore(rows: jax.Array) -> Any:
            split = rows.reshape(flat.shape)
            ends = list(itertools.accumulate(part // self.shards for part in self.parts))[:-1]
            found = [each.reshape(*lead, -1) for each in jnp.split(split, ends, axis=-1)]
            if isinstance(y, tuple):
                return tuple(each.reshape(like.shape) for each, like in zip(found, y, strict=True))
            return jnp.concatenate(found, axis=-1)

        return x, flat.reshape(*lead, -1), restore


def _dequantize(layer: Any) -> jax.Array:
    """Return the weight [K, N] of a quantized layer, from scales of columns or of blocks."""
    weight = vars(layer)["weight"][...].astype(jnp.float32)
    scale = next((vars(layer)[name][...] for name in ("weight_scale", "weight_scale_inv") if name in vars(layer)), None)
    if scale is None:
        raise jlora.LoRAError(f"{layer.prefix}: a quantized layer without a scale of columns or blocks")
    if scale.ndim == 2:
        for axis, (size, blocks) in enumerate(zip(weight.shape, scale.shape, strict=True)):
            scale = jnp.repeat(scale, -(-size // blocks), axis=axis, total_repeat_length=size)
    return weight * scale.astype(jnp.float32)


def _lm_head(sizes: _Sizes, layer: Any) -> jlora.LinearSpec | str:
    if sizes.drafts:
        return _NO_HEAD
    features, vocab = layer.kernel_shape
    return jlora.LinearSpec(features, vocab, "weight", real_vocab=sizes.real_vocab(vocab))


def _embed(sizes: _Sizes, layer: Any) -> jlora.EmbedSpec | str:
    if layer.quant_method is not None:
        return "it is quantized"
    vocab, features = layer.weight.shape
    attend = None if sizes.drafts else "decode"
    return jlora.EmbedSpec(vocab, features, "weight", attend=attend, real_vocab=sizes.real_vocab(vocab))
