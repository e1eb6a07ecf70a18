"""`DecoderConfig`, and how a checkpoint's `config.json` becomes one."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jlora.errors import LoRAError

RopeType = Literal["default", "linear", "llama3", "yarn"]
ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]
RouterType = Literal["softmax", "chosen_softmax"]


# An index of 100,000 tensors has about 10 MB.
_MAX_JSON_BYTES = 100 * 2**20
_MAX_DEPTH = 64
# Above any model there is, and small enough that products of three stay below 2**63.
_LARGEST = 2**20
_LARGEST_OF = {
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window"), 2**31 - 1),
    "vocab_size": 2**24,
    "num_hidden_layers": 10_000,
}


class ModelError(LoRAError, ValueError):
    """A checkpoint or a request that the reference decoder cannot serve exactly. Names the file and the field."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; the formulas are in `jlora.models.rope`.

    `attention_factor=None` means the factor that YaRN derives from `factor`, `mscale` and `mscale_all_dim`.
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
      num_experts, experts_per_token: E, and how many of them each token goes to.
      intermediate_size: width of one expert.
      layers: one entry a layer, whether it has experts; the others have an MLP.
      router: "softmax" of all logits and then the largest, or the largest and then their softmax, "chosen_softmax".
      renormalize: whether the weights of a "softmax" router are divided by their sum.
      router_name: what checkpoints call the router.
      router_bias, expert_bias: whether the router has a bias, and whether both products of an expert do.
      interleaved: columns of gate and up alternate in the stored weights.
      swiglu_limit, swiglu_alpha: of gpt-oss's activation; a limit of None means the plain gated SiLU.
      shared_size: width of the expert that every token goes to; 0 for none.
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
    """Shape of a decoder, independent of the family it came from. Hashable, so it is static under `jax.jit`.

    Attributes:
      head_dim: width of one attention head; need not be `hidden_size / num_attention_heads`.
      qkv_bias, o_bias, mlp_bias: which projections carry a bias.
      qk_norm: normalise every query and key head before the rotation (Qwen3).
      sliding_windows: one entry a layer, the number of positions a token sees including its own; None for a layer
        that sees everything. None instead of a tuple means that no layer has a window.
      eos_token_ids: what ends a sequence according to the checkpoint; the decoder itself does not use it.
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
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] | None = None
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


class _Fields:
    """Typed look-ups in one JSON object; every error names the file, the field and the value."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    def fail(self, field: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {field} {problem}")

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"must be a positive integer, got {value!r:.80}"
            raise self.fail(field, found)
        largest = _LARGEST_OF.get(field, _LARGEST)
        if value > largest:
            raise self.fail(field, f"must be at most {largest}, got {value!r:.40}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.values.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            found = "is missing" if value is None else f"must be a positive finite number, got {value!r:.80}"
            raise self.fail(field, found)
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            raise self.fail(field, f"must be true or false, got {value!r:.80}")
        return value


def read_config(path: Path) -> DecoderConfig:
    """Reads `config.json`.

    Raises:
      ModelError: the file is missing or no JSON object, or a field asks for what the decoder does not do.
    """
    if not path.is_file():
        raise ModelError(f"{path} does not exist; expected the folder of a Hugging Face checkpoint")
    return parse_config(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ModelError: it is no JSON object, names a field twice, nests too deep, or is larger than any checkpoint's.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"the name {name!r:.80} is given twice")
            found[name] = value
        return found

    length = path.stat().st_size
    if length > _MAX_JSON_BYTES:
        raise ModelError(f"{path} has {length} bytes; expected at most {_MAX_JSON_BYTES}")
    try:
        raw = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=once)
        if _nests_deeper(raw, _MAX_DEPTH):
            raise RecursionError
    except RecursionError:
        raise ModelError(f"{path} is not valid JSON for a model: it nests more than {_MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return raw


def _nests_deeper(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
    return bool(level)


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """The same for a parsed `config.json`; fields that are absent take the family's defaults."""
    fields = _Fields(raw, where)
    family: Any = raw.get("model_type")
    if family not in get_args(ModelType):
        raise fields.fail("model_type", f"must be one of {get_args(ModelType)}, got {family!r:.80}")
    if raw.get("quantization_config") is not None:
        raise fields.fail("quantization_config", "is set, but quantized weights are not supported; use the original")
    if raw.get("hidden_act", "silu") != "silu":
        raise fields.fail("hidden_act", f"must be 'silu', got {raw['hidden_act']!r:.80}")

    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    # Old Llama files leave the number of key-value heads out; in the other families only null means "no grouping".
    kv_default = heads if family == "llama" or "num_key_value_heads" in raw else None
    attention_bias = fields.flag("attention_bias", False) if family in ("llama", "qwen3") else False
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", kv_default),
        head_dim=fields.integer("head_dim", 128 if family == "qwen3" else hidden // heads),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_parse_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family == "llama" else False,
        qk_norm=family == "qwen3",
        sliding_windows=_parse_windows(fields, family, layers),
        eos_token_ids=_parse_eos(fields),
    )


def _parse_rope(fields: _Fields) -> RopeConfig:
    """Both spellings: `rope_parameters` with the base inside, and the older `rope_theta` beside `rope_scaling`."""
    raw = fields.values
    field = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    params = raw.get(field)
    params = {} if params is None else params
    if not isinstance(params, dict):
        raise fields.fail(field, f"must be an object, got {params!r:.80}")
    inner = _Fields(params, f"{fields.where}: {field}")
    rope_type = params.get("rope_type", params.get("type", "default"))
    if rope_type not in get_args(RopeType):
        raise inner.fail("rope_type", f"must be one of {get_args(RopeType)}, got {rope_type!r:.80}")
    # Anything else in there (per-layer tables, sections of a multimodal rope) would change the rotation.
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
    # Some files keep the original length beside the rope object; there it takes precedence.
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


def _parse_windows(fields: _Fields, family: ModelType, layers: int) -> tuple[int | None, ...] | None:
    """Which layers see only a window. Llama never does, Mistral in every layer, Qwen from `max_window_layers` on."""
    raw = fields.values
    if family == "mistral":
        windowed = "sliding_window" not in raw or raw["sliding_window"] is not None
        kinds = [windowed] * layers
    elif family in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False):
        windowed = "sliding_window" not in raw or raw["sliding_window"] is not None
        first = raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.fail("max_window_layers", f"must be an integer of at least 0, got {first!r:.80}")
        kinds = [windowed and i >= first for i in range(layers)]
    else:
        windowed, kinds = False, [False] * layers

    named = raw.get("layer_types")
    if named is not None:
        if not isinstance(named, list) or len(named) != layers:
            raise fields.fail("layer_types", f"must be a list of {layers} names, got {named!r:.80}")
        for i, name in enumerate(named):
            if name not in ("full_attention", "sliding_attention"):
                raise fields.fail(f"layer_types[{i}]", f"must be full_attention or sliding_attention, got {name!r:.80}")
        asked = [name == "sliding_attention" for name in named]
        # Only Qwen with use_sliding_window mixes layers; elsewhere the list may only repeat what the rest says.
        if asked != kinds and not (windowed and family in ("qwen2", "qwen3")):
            raise fields.fail("layer_types", f"contradicts the sliding window settings of model_type {family!r:.80}")
        kinds = asked
    if not any(kinds):
        return None
    window = fields.integer("sliding_window", 4096)
    return tuple(window if kind else None for kind in kinds)


def _parse_eos(fields: _Fields) -> tuple[int, ...]:
    value = fields.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise fields.fail("eos_token_id", f"must be an integer or a list of integers, got {value!r:.80}")
    return tuple(ids)
