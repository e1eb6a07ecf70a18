"""Every field of config.json that changes the computation is read, in both spellings, or refused by name."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from jlora.models import DecoderConfig, ModelError, MoEConfig, RopeConfig, rope
from jlora.models.config import parse_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
MISTRAL = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}

MIXTRAL = {**QWEN2, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {**QWEN2, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
QWEN2_MOE = {**QWEN3_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 10}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4, "truncate": False}
LLAMA3 = {"type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}
GPT_OSS = {**MIXTRAL, "model_type": "gpt_oss", "rope_scaling": YARN}
GEMMA3 = {"model_type": "gemma3_text"}
# Of a checkpoint of 4 billion parameters, as it was published.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}


def test_llama_defaults():
    assert parse_config(LLAMA) == DecoderConfig(
        num_key_value_heads=4, head_dim=4, **{name: LLAMA[name] for name in LLAMA if name != "model_type"}
    )


def test_fields_that_are_set():
    config = parse_config(
        {
            **LLAMA,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "eos_token_id": [1, 2],
        }
    )
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (2, 8, 1e-5)
    assert config.rope == RopeConfig(theta=5e5)
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (True,) * 4
    assert config.eos_token_ids == (1, 2)


def test_mixtral():
    config = parse_config(MIXTRAL)
    assert config.moe == MoEConfig(
        num_experts=8, experts_per_token=2, intermediate_size=24, layers=(True,) * 3, renormalize=True
    )
    assert (config.rms_norm_eps, config.rope, config.sliding_windows) == (1e-5, RopeConfig(theta=1e6), None)
    assert parse_config({**MIXTRAL, "sliding_window": 8}).sliding_windows == (8,) * 3


@pytest.mark.parametrize("base", [QWEN2_MOE, QWEN3_MOE], ids=lambda base: base["model_type"])
@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (True, True, True)),
        ({"mlp_only_layers": [0, 2]}, (False, True, False)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (False, False, True)),
    ],
)
def test_qwen_mixes_layers(base, fields, layers):
    config = parse_config({**base, **fields})
    shared = 10 if base is QWEN2_MOE else 0
    assert config.moe == MoEConfig(
        num_experts=8, experts_per_token=2, intermediate_size=6, layers=layers, renormalize=False, shared_size=shared
    )
    assert config.intermediate_size == 24
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (base is QWEN2_MOE, False, base is QWEN3_MOE)
    assert parse_config({**base, "norm_topk_prob": True}).moe.renormalize


def test_experts_under_either_name():
    renamed = {name: value for name, value in QWEN3_MOE.items() if name != "num_experts"} | {"num_local_experts": 8}
    assert parse_config(renamed) == parse_config(QWEN3_MOE) == parse_config({**QWEN3_MOE, "num_local_experts": 8})


def test_gpt_oss():
    config = parse_config(GPT_OSS)
    assert config.moe == MoEConfig(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=24,
        layers=(True,) * 3,
        router="chosen_softmax",
        router_name="router",
        router_bias=True,
        expert_bias=True,
        interleaved=True,
        stored_in_first=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    )
    assert (config.qkv_bias, config.o_bias, config.sinks) == (True,) * 3
    assert (config.head_dim, config.rms_norm_eps) == (64, 1e-5)
    assert (config.rope.theta, config.rope.truncate, config.rope.factor) == (150000.0, False, 32.0)
    assert config.sliding_windows == (128, None, 128)
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    assert parse_config({**GPT_OSS, **quantized}) == config


def test_gemma3_takes_the_defaults_of_transformers():
    want = DecoderConfig(
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
        rope=RopeConfig(theta=1e6),
        local_rope=RopeConfig(theta=1e4),
        tie_word_embeddings=True,
        embedding_scale=48.0,
        query_pre_attn_scalar=256.0,
        activation="gelu_tanh",
        zero_centered_norms=True,
        post_norms=True,
        qk_norm=True,
        sliding_windows=(*((4096,) * 5 + (None,)) * 4, 4096, 4096),
        eos_token_ids=(1,),
    )
    assert parse_config(GEMMA3) == want
    assert parse_config(dict.fromkeys(("rope_parameters", "head_dim", "final_logit_softcapping")) | GEMMA3) == want


def test_gemma3_of_text_and_images():
    config = parse_config(GEMMA3_4B)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (2560, 34, 256)
    assert (config.vocab_size, config.eos_token_ids, config.tie_word_embeddings) == (262_208, (1, 106), True)
    assert config.rope == RopeConfig(rope_type="linear", theta=1e6, factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert config.sliding_windows == (*((1024,) * 5 + (None,)) * 5, *(1024,) * 4)
    assert config.num_labels is None
    assert parse_config(GEMMA3_4B | {"architectures": ["Gemma3Model"]}).num_labels == 0
    # As transformers 5 writes them.
    tables = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    newer = {**GEMMA3_4B["text_config"], "rope_scaling": None, "rope_parameters": tables}
    assert parse_config(GEMMA3_4B | {"text_config": newer}) == config
    quantized = GEMMA3_4B | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ModelError, match="quantization_config has quant_method 'awq'"):
        parse_config(quantized)


def test_kinds_of_layers_of_gemma3():
    """`layer_types` precedes `sliding_window_pattern`."""
    few = {**GEMMA3, "num_hidden_layers": 3, "sliding_window": 8}
    assert parse_config(few | {"sliding_window_pattern": 2}).sliding_windows == (8, None, 8)
    named = ["full_attention", "full_attention", "sliding_attention"]
    assert parse_config(few | {"sliding_window_pattern": 2, "layer_types": named}).sliding_windows == (None, None, 8)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (LLAMA | {"sliding_window": 8}, None),
        (MISTRAL, (4096,) * 3),
        (MISTRAL | {"sliding_window": None}, None),
        (QWEN2 | {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (None, 8, 8)),
        (QWEN3_MOE | {"sliding_window": 8, "max_window_layers": 2}, None),
        (QWEN3_MOE | {"sliding_window": 8, "use_sliding_window": True}, (8, 8, 8)),
        (GPT_OSS | {"sliding_window": 8}, (8, None, 8)),
    ],
)
def test_sliding_windows(fields, windows):
    assert parse_config(fields).sliding_windows == windows


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
def test_old_and_new_spelling_of_rope_scaling_agree(rope_type):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16}
    if rope_type == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    new = parse_config({**LLAMA, "rope_parameters": {**scaling, "rope_type": rope_type, "rope_theta": 777.0}})
    for key in ("type", "rope_type"):
        assert parse_config({**LLAMA, "rope_theta": 777.0, "rope_scaling": {**scaling, key: rope_type}}) == new
    assert new.rope.rope_type == rope_type
    assert new.rope.theta == 777.0


def test_older_spelling_replaces_the_newer():
    """As transformers reads it: a `rope_scaling` that is not empty precedes `rope_parameters`, and its base is lost."""
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
    older = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    linear = RopeConfig(rope_type="linear", factor=4.0)
    assert parse_config({**LLAMA, **newer, **older}).rope == linear
    assert parse_config({**LLAMA, **newer, **older, "rope_theta": 9.0}).rope == replace(linear, theta=9.0)
    assert parse_config({**MIXTRAL, **newer, **older}).rope == replace(linear, theta=1e6)
    for empty in ({}, None):
        assert parse_config({**LLAMA, **newer, "rope_scaling": empty}).rope == RopeConfig(theta=777.0)
    # Gemma's joins that of the layers without a window.
    gemma = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 777.0}}}
    older = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert parse_config({**GEMMA3, **gemma, **older}).rope == replace(linear, theta=777.0)
    assert parse_config({**GEMMA3, **gemma, **older}).local_rope == RopeConfig()


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"factor": 4.0}, 256),
        ({"factor": 4.0, "original_max_position_embeddings": 40}, 160),
        ({"factor": 4.0, "original_max_position_embeddings": 8}, 64),
        ({"factor": None, "original_max_position_embeddings": 8}, 64),
        ({"factor": 1e308, "original_max_position_embeddings": 8}, 2**31 - 1),
    ],
)
def test_positions_that_yarn_stretches(fields, positions):
    """`max_position_embeddings`, 64 here, is the stretched number in some files and the original one in others."""
    assert parse_config({**LLAMA, "rope_scaling": {"type": "yarn", **fields}}).max_position_embeddings == positions


def test_yarn_options_reach_the_frequencies():
    """`beta_*` move the blend, `truncate` its rounding, and the attention factor is theirs or the paper's."""

    def yarn(**options):
        params = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 50.0}
        return rope.frequencies(parse_config({**LLAMA, "rope_parameters": {**params, **options}}).rope, 32)

    frequencies, attention_factor = yarn()
    assert attention_factor == pytest.approx(0.1 * np.log(4.0) + 1.0)
    plain = 50.0 ** (-np.arange(16) / 16)
    assert frequencies[0] == pytest.approx(plain[0])  # fast pairs are kept
    assert frequencies[-1] == pytest.approx(plain[-1] / 4)  # slow pairs are interpolated
    assert not np.allclose(yarn(beta_fast=2.0)[0], frequencies)
    assert not np.allclose(yarn(beta_slow=0.5)[0], frequencies)
    assert not np.allclose(yarn(truncate=False)[0], frequencies)
    assert yarn(attention_factor=1.5)[1] == 1.5
    expected = (0.1 * 2.0 * np.log(4.0) + 1) / (0.1 * 0.5 * np.log(4.0) + 1)
    assert yarn(mscale=2.0, mscale_all_dim=0.5)[1] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (LLAMA | {"model_type": "gpt2"}, "model_type must be one of .* got 'gpt2'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        (LLAMA | {"vocab_size": "32"}, "vocab_size must be a positive integer, got '32'"),
        (LLAMA | {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA | {"num_attention_heads": True}, "num_attention_heads"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters: partial_rotary_factor"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: rope_type .* got 'dynamic'"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling: rope_type .* got 'dynamic'",
        ),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
            "rope_scaling: type must be absent or 'default', the rope_type, got 'linear'",
        ),
        (GEMMA3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type must be absent or 'default'"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is missing"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        (LLAMA | {"rope_scaling": LLAMA3}, "low_freq_factor is missing"),
        (LLAMA | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling must be an object"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 3}, "layer_types contradicts"),
        (LLAMA | {"layer_types": ["chunked_attention"] * 3}, r"layer_types\[0\]"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id"),
        (LLAMA | {"model_type": "mistral"}, "num_key_value_heads is missing"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts is missing"),
        (MIXTRAL | {"num_experts": 9}, "num_experts must equal num_local_experts, got 9"),
        (MIXTRAL | {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) must be at most .* \(8\)"),
        (MIXTRAL | {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config has quant_method"),
        (GPT_OSS | {"quantization_config": {"quant_method": "awq"}}, "quantization_config has quant_method"),
        (GPT_OSS | {"rope_scaling": None}, "rope_parameters is missing"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit must be a positive finite number"),
        (GPT_OSS | {"swiglu_alpha": "x"}, "swiglu_alpha must be a positive finite number"),
        (GPT_OSS | {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "layer_types contradicts"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (QWEN3_MOE | {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layer numbers, got 1"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (QWEN3_MOE | {"use_sliding_window": True, "max_window_layers": 2}, "max_window_layers must be 0 or absent"),
        (QWEN2_MOE | {"use_sliding_window": True}, "layer_types is missing"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        (GEMMA3 | {"model_type": "gemma3", "text_config": "4b"}, "text_config must be an object, got '4b'"),
        (GEMMA3 | {"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh', got 'silu'"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported, got 50.0"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported, got 30.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported, got True"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive finite number, got 0"),
        (GEMMA3 | {"sliding_window": None}, "sliding_window must be a positive integer, got None"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer, got 0"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: rope_theta must be one of"),
        (GEMMA3 | {"rope_parameters": {"full_attention": 3}}, "full_attention must be an object, got 3"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "x"}}}, "rope_type must be one of .*'x'"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields, message):
    with pytest.raises(ModelError, match=message):
        parse_config(fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 10**12}, "vocab_size must be at most 16777216, got 1000000000000"),
        ({"hidden_size": 10**4000}, "hidden_size must be at most 1048576, got 1000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"num_attention_heads": 32}, "head_dim must be a positive integer, got 0"),
        ({"head_dim": 3}, "head_dim must be even"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings must be at most"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive finite number"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"layer_types": ["x" * 10] * 10**5}, "layer_types must be a list of 3 names"),
    ],
)
def test_hostile_sizes_are_refused_in_few_words(fields, message):
    with pytest.raises(ModelError, match=message) as caught:
        parse_config({**LLAMA, **fields})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 5e-324},
        {"rope_type": "yarn", "factor": 5e-324},
        {"rope_type": "yarn", "factor": 2.0, "beta_slow": 1e308},
        {"rope_type": "linear", "factor": 5e-324},
        {"rope_type": "llama3", "factor": 5e-324, "low_freq_factor": 5e-324, "high_freq_factor": 1e308},
        {"rope_type": "yarn", "factor": 1e308, "mscale": 1e308, "mscale_all_dim": 5e-324},
        {"rope_type": "default", "rope_theta": 5e-324},
    ],
)
def test_extreme_rotations_are_finite_or_refused(settings):
    config = parse_config({**LLAMA, "rope_parameters": settings})
    with contextlib.suppress(ModelError):
        angles, factor = rope.frequencies(config.rope, config.head_dim)
        assert np.isfinite(angles).all()
        assert np.isfinite(factor)


def test_a_rotation_that_is_no_number_is_refused():
    config = parse_config({**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}})
    with pytest.raises(ModelError, match="the rotary embedding cannot be computed with RopeConfig"):
        rope.frequencies(config.rope, config.head_dim)
