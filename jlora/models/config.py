"""`DecoderConfig`, and the conversion of a checkpoint's `config.json` into it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from jlora.models.json_file import MOST_POSITIONS, Fields, ModelError, read_json
from jlora.models.pooling import Pooling, read_pooling

RopeType = Literal["default", "linear", "llama3", "yarn"]
ModelType = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "gemma3_text"]
Activation = Literal["silu", "gelu_tanh"]
RouterType = Literal["softmax", "chosen_softmax"]
Quantize = Literal["int8", "fp8"]
Quantization = Literal["int8", "fp8", "fp8_blocks"]
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Values of absent and null fields, as in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "gpt_oss": {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "head_dim": 64},
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
}
# Multimodal model_type -> that of its text model. Its `text_config` has the fields, but for these beside it.
_TEXT_MODELS = {"gemma3": "gemma3_text"}
_BESIDE_TEXT = ("architectures", "id2label", "num_labels", "eos_token_id", "tie_word_embeddings", "quantization_config")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. The formulas are in `jlora.models.rope`.

    With `attention_factor=None`, YaRN derives the factor from `factor`, `mscale` and `mscale_all_dim`.
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The expert layers of a decoder.

    Attributes:
      num_experts: Number of experts E.
      experts_per_token: Number of experts k that each token is routed to.
      intermediate_size: Width of one expert.
      layers: One entry per layer, True if it has experts and False if it has an MLP.
      router: "softmax" applies the softmax to all logits and then chooses the largest. "chosen_softmax" chooses the
        largest logits and then applies the softmax to them.
      renormalize: True if the weights of a "softmax" router are divided by their sum.
      router_name: Name of the router in checkpoints.
      router_bias: True if the router has a bias.
      expert_bias: True if both products of an expert have a bias.
      interleaved: True if columns of gate and up alternate in tensors that hold all experts of a layer.
      stored_in_first: True if tensors that hold all experts of a layer are [E, in, out], as in the model; False if they
        are [E, out, in].
      swiglu_limit, swiglu_alpha: Constants of gpt-oss's activation. A limit of None means the plain gated SiLU.
      shared_size: Width of the expert that every token is routed to, 0 for none.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    router: RouterType = "softmax"
    renormalize: bool = True
    router_name: Literal["gate", "router"] = "gate"
    router_bias: bool = False
    expert_bias: bool = False
    interleaved: bool = False
    stored_in_first: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    shared_size: int = 0

    def __post_init__(self):
        if self.experts_per_token > self.num_experts:
            raise ModelError(
                f"num_experts_per_tok ({self.experts_per_token}) must be at most the number of experts "
                f"({self.num_experts})"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Architecture of a decoder, independent of its family. Hashable, so it is static under `jax.jit`.

    Attributes:
      head_dim: Width of one attention head; may differ from `hidden_size / num_attention_heads`.
      max_position_embeddings: The most positions of a sequence. With YaRN it is at least the original number times the
        factor.
      qkv_bias, o_bias, mlp_bias: True if these projections have a bias.
      embedding_scale: Factor of the embeddings of tokens, rounded to their dtype (Gemma).
      query_pre_attn_scalar: Scores are divided by its square root; None stands for `head_dim`.
      activation: Activation of the gates of MLPs.
      zero_centered_norms: True if norms multiply by 1 + w (Gemma).
      post_norms: True if the outputs of attention and MLP are normalized too, before they are added (Gemma).
      qk_norm: True if every query and key head is normalized before the rotation (Qwen3).
      sinks: True if the softmax of attention has one more logit per head, for no position (gpt-oss).
      sliding_windows: One entry per layer, the number of positions that a token sees including its own; None for a
        layer without a window. None instead of a tuple means that no layer has a window.
      local_rope: Rotation of the layers with a window, None if it is that of the others.
      moe: The layers with experts, None for a dense model.
      num_labels: None for a language model, with logits over the vocabulary. Otherwise the number of outputs of the
        classifier `score` in its place, 0 for the hidden states alone.
      pooling: Of an embedding model, the pooling of its hidden states; None for another model.
      quantization: How the kernels of projections are stored, None for the dtype of the model. "int8" and "fp8" have a
        scale for each output column, and include the lm_head. "fp8_blocks" has one for 128 x 128 values, as Qwen3's
        fp8 checkpoints, and leaves out the lm_head.
      eos_token_ids: Tokens that end a sequence according to the checkpoint. The decoder itself does not use them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    activation: Activation = "silu"
    zero_centered_norms: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    sinks: bool = False
    sliding_windows: tuple[int | None, ...] | None = None
    moe: MoEConfig | None = None
    num_labels: int | None = None
    pooling: Pooling | None = None
    quantization: Quantization | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.num_hidden_layers:
            raise ModelError(
                f"sliding_windows has {len(self.sliding_windows)} entries for {self.num_hidden_layers} layers"
            )
        if self.num_labels is not None and self.tie_word_embeddings:
            raise ModelError(f"num_labels ({self.num_labels}) is for a model without logits, and they are tied")
        if self.moe is not None and self.activation != "silu":
            raise ModelError(f"activation must be 'silu' in a model with experts, got {self.activation!r}")
        if self.moe is not None and len(self.moe.layers) != self.num_hidden_layers:
            raise ModelError(f"moe.layers has {len(self.moe.layers)} entries for {self.num_hidden_layers} layers")


def read_config(path: Path) -> DecoderConfig:
    """Read `config.json` and the files beside it.

    These are the `eos_token_id` of `generation_config.json`, which precedes its own, and the files of
    sentence-transformers. With a pooling, the checkpoint is read as a trunk, without logits.

    Raises:
      ModelError: The file is missing or not a JSON object, or a field has a value that the decoder does not support.
    """
    if not path.is_file():
        raise ModelError(f"{path} does not exist; expected the folder of a Hugging Face checkpoint")
    config, generation = parse_config(read_json(path), str(path)), path.with_name("generation_config.json")
    if generation.is_file():
        found = _parse_eos(Fields(read_json(generation), str(generation)))
        config = replace(config, eos_token_ids=found or config.eos_token_ids)
    if not config.num_labels and (pooling := read_pooling(path.parent)) is not None:
        longest = min(config.max_position_embeddings, pooling.max_length or config.max_position_embeddings)
        config = replace(
            config, pooling=pooling, num_labels=0, tie_word_embeddings=False, max_position_embeddings=longest
        )
    return config


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """Convert a parsed `config.json`, as `read_config` does. Absent fields take the defaults of the family."""
    family: Any = raw.get("model_type")
    if family in tuple(_TEXT_MODELS):
        family, text = _TEXT_MODELS[family], Fields(raw, where).nested("text_config").values
        raw = {**text, **{name: raw[name] for name in _BESIDE_TEXT if raw.get(name) is not None}, "model_type": family}
    if family not in get_args(ModelType):
        known = (*get_args(ModelType), *_TEXT_MODELS)
        raise Fields(raw, where).fail("model_type", f"must be one of {known}, got {family!r:.80}")
    raw = {**raw, **{name: value for name, value in _DEFAULTS.get(family, {}).items() if raw.get(name) is None}}
    fields, gemma = Fields(raw, where), family == "gemma3_text"
    quantization = _parse_quantization(fields, family)
    activation, known = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    if raw.get(activation, known) != known:
        raise fields.fail(activation, f"must be {known!r}, got {raw[activation]!r:.80}")
    if raw.get("is_causal") is False:
        raise fields.fail("is_causal", "must be true: each token sees only itself and those before it")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention") if gemma else ():
        if raw.get(name):
            raise fields.fail(name, f"is not supported, got {raw[name]!r:.80}")

    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    # Old Llama files omit the number of key-value heads. In the other families only null means "no grouping".
    kv_default = heads if family == "llama" or "num_key_value_heads" in raw else None
    qkv_bias = o_bias = False
    num_labels = _parse_labels(fields)
    if family in ("llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text"):
        qkv_bias = o_bias = fields.flag("attention_bias", family == "gpt_oss")
    elif family in ("qwen2", "qwen2_moe"):
        qkv_bias = fields.flag("qkv_bias", True) if family == "qwen2_moe" else True
    rope, local_rope = _parse_ropes(fields, family)
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", kv_default),
        head_dim=fields.integer("head_dim", hidden // heads),
        max_position_embeddings=_positions(fields, rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False) and num_labels is None,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family == "llama" else False,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar") if gemma else None,
        activation="gelu_tanh" if gemma else "silu",
        zero_centered_norms=gemma,
        post_norms=gemma,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        sinks=family == "gpt_oss",
        sliding_windows=_parse_windows(fields, family, layers),
        moe=_parse_moe(fields, family, layers),
        num_labels=num_labels,
        quantization=quantization,
        eos_token_ids=_parse_eos(fields, 1 if gemma else None),
    )


def quantized_config(config: DecoderConfig, quantize: Quantize | None) -> DecoderConfig:
    """Return the configuration with projections quantized to "int8" or "fp8" while reading; None changes nothing.

    Raises:
      ModelError: `quantize` is another value, or the checkpoint is in fp8 and `quantize` is "int8".
    """
    if quantize is not None and quantize not in get_args(Quantize):
        raise ModelError(f"quantize must be 'int8', 'fp8' or None, got {quantize!r:.80}")
    if config.quantization is None:
        return replace(config, quantization=quantize)
    if quantize not in (None, "fp8"):
        raise ModelError(f"the checkpoint is in fp8 already; expected quantize=None or 'fp8', got {quantize!r}")
    return config


def _parse_quantization(fields: Fields, family: ModelType) -> Quantization | None:
    """Accept Qwen3's fp8 with scales of 128 x 128 values, and gpt-oss's mxfp4, which is read as floating point."""
    found = fields.values.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if family == "gpt_oss" and method == "mxfp4":
        return None
    if not isinstance(found, dict) or method != "fp8" or family == "gpt_oss":
        raise fields.fail(
            "quantization_config",
            f"has quant_method {method!r:.80}; expected 'fp8' with scales of blocks, or 'mxfp4' of gpt-oss; use the "
            "original checkpoint, with quantize='int8' or 'fp8' to quantize it while reading",
        )
    inner = Fields(found, f"{fields.where}: quantization_config")
    for name, known in (("weight_block_size", [128, 128]), ("activation_scheme", "dynamic"), ("fmt", "e4m3")):
        if found.get(name, known if name == "fmt" else None) != known:
            raise inner.fail(name, f"must be {known!r}, got {found.get(name)!r:.80}")
    skipped = found.get("modules_to_not_convert")
    skipped = [] if skipped is None else skipped
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise inner.fail("modules_to_not_convert", f"must be a list of modules, got {skipped!r:.80}")
    if kept := [name for name in skipped if name.rpartition(".")[2] in _PROJECTIONS]:
        raise inner.fail("modules_to_not_convert", f"must not hold projections of the decoder, got {kept[0]!r:.80}")
    return "fp8_blocks"


def _parse_moe(fields: Fields, family: ModelType, layers: int) -> MoEConfig | None:
    raw = fields.values
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"):
        return None
    # transformers 5 writes Qwen3-MoE's number of experts under the other families' name.
    names = [name for name in ("num_local_experts", "num_experts") if raw.get(name) is not None]
    counts = {fields.integer(name) for name in names or ["num_local_experts"]}
    if len(counts) > 1:
        raise fields.fail("num_experts", f"must equal num_local_experts, got {raw['num_experts']!r:.80}")
    common = MoEConfig(
        num_experts=counts.pop(),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        layers=(True,) * layers,
    )
    if family == "mixtral":
        return common
    if family == "gpt_oss":
        return replace(
            common,
            router="chosen_softmax",
            router_name="router",
            router_bias=True,
            expert_bias=True,
            interleaved=True,
            stored_in_first=True,
            swiglu_limit=fields.number("swiglu_limit", 7.0),
            swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        )
    dense, step = raw.get("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise fields.fail("mlp_only_layers", f"must be a list of layer numbers, got {dense!r:.80}")
    return replace(
        common,
        intermediate_size=fields.integer("moe_intermediate_size"),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        renormalize=fields.flag("norm_topk_prob", False),
        shared_size=fields.integer("shared_expert_intermediate_size") if family == "qwen2_moe" else 0,
    )


def _parse_ropes(fields: Fields, family: ModelType) -> tuple[RopeConfig, RopeConfig | None]:
    """Parse the rotation of all layers, or that of layers without a window and that of layers with one.

    Gemma has `rope_parameters` for each kind of layer, or the older `rope_theta`, `rope_scaling` and, for layers with a
    window, `rope_local_base_freq`.
    """
    if family != "gemma3_text":
        return _parse_rope(fields), None
    kinds = fields.nested("rope_parameters")
    for name in kinds.values:
        if name not in _LAYER_TYPES:
            raise kinds.fail(name, f"must be one of {_LAYER_TYPES}")
    scaling = fields.nested("rope_scaling").values
    everywhere = {"rope_type": "default", **kinds.nested("full_attention").values, **scaling}
    local = {"rope_theta": fields.number("rope_local_base_freq"), **kinds.nested("sliding_attention").values}
    plain = {**fields.values, "rope_scaling": None}
    ropes = [Fields({**plain, "rope_parameters": one}, fields.where) for one in (everywhere, local)]
    return _parse_rope(ropes[0]), _parse_rope(ropes[1])


def _parse_rope(fields: Fields) -> RopeConfig:
    """Parse both spellings: `rope_parameters` with the base in it, and the older `rope_theta` beside `rope_scaling`.

    As in transformers, a `rope_scaling` that is not empty replaces `rope_parameters`, also the base in it.
    """
    raw = fields.values
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    if raw.get(field) is None and raw["model_type"] == "gpt_oss":  # its default is not the plain rotation
        raise fields.fail("rope_parameters", "is missing")
    inner = fields.nested(field)
    params = inner.values
    rope_type = params.get("rope_type", params.get("type", "default"))
    if rope_type not in get_args(RopeType):
        raise inner.fail("rope_type", f"must be one of {get_args(RopeType)}, got {rope_type!r:.80}")
    if params.get("type", rope_type) != rope_type:  # transformers leaves `type` out, older releases did not
        raise inner.fail("type", f"must be absent or {rope_type!r}, the rope_type, got {params['type']!r:.80}")
    # Any other field (per-layer tables, sections of a multimodal rope) would change the rotation.
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
    known |= {"low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"}
    known |= {"mscale", "mscale_all_dim", "truncate"}
    for name, value in params.items():
        if name not in known and value is not None:
            raise inner.fail(name, f"is not supported, got {value!r:.80}")
    for owner in (fields, inner):
        if owner.values.get("partial_rotary_factor") not in (None, 1):
            found = owner.values["partial_rotary_factor"]
            raise owner.fail("partial_rotary_factor", f"must be 1 (the whole head is rotated), got {found!r:.80}")

    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type=rope_type, theta=theta, factor=inner.number("factor"))
    longest = fields.integer("max_position_embeddings")
    # Some files have the original length beside the rope object, where it takes precedence.
    original = fields.integer(
        "original_max_position_embeddings", inner.integer("original_max_position_embeddings", longest)
    )
    if rope_type == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if not 0 < low < high:
            raise inner.fail("low_freq_factor", f"must be positive and below high_freq_factor, got {low} and {high}")
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            factor=inner.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    optional = {
        name: inner.number(name)
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if params.get(name)  # null and 0 mean "not given" here
    }
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=inner.number("factor", longest / original),
        original_max_position_embeddings=original,
        truncate=inner.flag("truncate", True),
        **optional,
    )


def _positions(fields: Fields, rope: RopeConfig) -> int:
    """Return the positions of a sequence. YaRN stretches the original ones; many files keep the number from before."""
    found = fields.integer("max_position_embeddings")
    if rope.rope_type != "yarn":
        return found
    return max(found, int(min(rope.original_max_position_embeddings * rope.factor, MOST_POSITIONS)))


def _parse_windows(fields: Fields, family: ModelType, layers: int) -> tuple[int | None, ...] | None:
    """Return each layer's window, or None if no layer has one.

    Llama has no windows. Mistral and Mixtral have one in every layer, Qwen from layer `max_window_layers` on, and
    gpt-oss in every other layer, and Gemma in all but each `sliding_window_pattern`-th.
    """
    raw = fields.values
    mixes = family in ("gpt_oss", "gemma3_text")
    kinds = [False] * layers
    windowed = raw.get("sliding_window") is not None or ("sliding_window" not in raw and family != "mixtral")
    if family in ("mistral", "mixtral"):
        kinds = [windowed] * layers
    elif family == "gpt_oss":
        kinds = [windowed and i % 2 == 0 for i in range(layers)]
    elif family == "gemma3_text":
        if not windowed:
            raise fields.fail("sliding_window", "must be a positive integer, got None")
        pattern = fields.integer("sliding_window_pattern", 6)
        kinds = [(i + 1) % pattern != 0 for i in range(layers)]
    elif family != "llama" and fields.flag("use_sliding_window", False):
        mixes = family != "qwen3_moe"
        first = raw.get("max_window_layers", 0 if family == "qwen3_moe" else 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.fail("max_window_layers", f"must be an integer of at least 0, got {first!r:.80}")
        # Releases of transformers disagree on these two settings.
        if family == "qwen3_moe" and first > 0:
            raise fields.fail("max_window_layers", f"must be 0 or absent with use_sliding_window, got {first}")
        if family == "qwen2_moe" and raw.get("layer_types") is None:
            raise fields.fail("layer_types", "is missing, and use_sliding_window is true")
        kinds = [windowed and i >= first for i in range(layers)]

    named = raw.get("layer_types")
    if named is not None:
        if not isinstance(named, list) or len(named) != layers:
            raise fields.fail("layer_types", f"must be a list of {layers} names, got {named!r:.80}")
        for i, name in enumerate(named):
            if name not in _LAYER_TYPES:
                raise fields.fail(f"layer_types[{i}]", f"must be full_attention or sliding_attention, got {name!r:.80}")
        asked = [name == "sliding_attention" for name in named]
        # Qwen with use_sliding_window, gpt-oss and Gemma mix both kinds of layers. For other families the list must
        # agree with the other settings.
        if asked != kinds and not (windowed and mixes):
            raise fields.fail("layer_types", f"contradicts the sliding window settings of model_type {family!r:.80}")
        kinds = asked
    if not any(kinds):
        return None
    window = fields.integer("sliding_window", 128 if family == "gpt_oss" else 4096)
    return tuple(window if kind else None for kind in kinds)


def _parse_labels(fields: Fields) -> int | None:
    """Return the number of labels of a classifier, 0 for the trunk alone, None for a language model.

    `architectures` names the class of transformers that wrote the files.
    """
    found = fields.values.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fields.fail("architectures", f"must be a list of names, got {found!r:.80}")
    if reward := next((name for name in found if name.endswith("RewardModel")), None):
        raise fields.fail(
            "architectures",
            f"names {reward!r:.80}, a reward model with a head of its own, which differs between families; served are "
            "reward models that are sequence classifiers of one label (...ForSequenceClassification with num_labels 1)",
        )
    if any(name.endswith("ForSequenceClassification") for name in found):
        names = fields.values.get("id2label")
        return len(names) if isinstance(names, dict) and names else fields.integer("num_labels", 2)
    return 0 if any(name.endswith("Model") for name in found) else None


def _parse_eos(fields: Fields, default: int | None = None) -> tuple[int, ...]:
    value = fields.values.get("eos_token_id", default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise fields.fail("eos_token_id", f"must be an integer or a list of integers, got {value!r:.80}")
    return tuple(ids)
