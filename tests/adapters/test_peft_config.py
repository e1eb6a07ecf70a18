"""Every PEFT field: served, without effect, or refused by name."""

import json
import math

import pytest

from jlora.adapters.peft_config import read_config, scaling_of
from jlora.errors import AdapterFormatError, AdapterMismatchError

BASE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture
def read(tmp_path):
    def parse(text=None, *, drop=(), **fields):
        file = tmp_path / "adapter_config.json"
        config = {key: value for key, value in (BASE | fields).items() if key not in drop}
        file.write_bytes(text if isinstance(text, bytes) else (json.dumps(config) if text is None else text).encode())
        return read_config(file, "sql")

    return parse


def rank(config, module):
    return config.ranks([module])[module]


def alpha(config, module):
    return config.alphas([module])[module]


# ---- served


def test_rank_and_alpha(read):
    config = read(r=16, lora_alpha=32)
    assert (rank(config, "q_proj"), alpha(config, "q_proj"), config.use_rslora) == (16, 32.0, False)


def test_defaults_are_pefts(read):
    config = read(drop=("r", "lora_alpha"))
    assert (config.r, config.lora_alpha) == (8, 8.0)


def test_scaling():
    assert scaling_of(8.0, 4, False) == 2.0
    assert scaling_of(8.0, 2, True) == 8 / math.sqrt(2)


def test_float_alpha_as_a_conversion_writes_it(read):
    assert read(lora_alpha=8 * 2**0.5).lora_alpha == 8 * 2**0.5


PATTERN = {
    "model.layers.0.self_attn.q_proj": 1,
    "layers.0.self_attn.q_proj": 2,
    "q_proj": 3,
    r"layers\.\d+\.mlp\.up": 5,
}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", 1),
        ("other.layers.0.self_attn.q_proj", 2),
        ("model.layers.1.self_attn.q_proj", 3),
        ("q_proj", 3),
        ("my_q_proj", 4),  # a suffix begins at a dot
        ("q_proj.inner", 4),  # and ends the name
        ("model.layers.7.mlp.up", 5),
        ("layers.7.mlp.up", 5),
        ("model.layers.x.mlp.up", 4),
    ],
)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_patterns_match_a_suffix_at_a_dot(read, field, module, expected):
    config = read(lora_alpha=4, **{field: PATTERN})
    assert (rank(config, module) if field == "rank_pattern" else alpha(config, module)) == expected


def test_first_pattern_wins_and_a_caret_is_exact(read):
    config = read(rank_pattern={"q_proj": 2, "self_attn.q_proj": 3}, alpha_pattern={r"^attn\.q_proj": 3})
    assert rank(config, "self_attn.q_proj") == 2
    assert (alpha(config, "attn.q_proj"), alpha(config, "x.attn.q_proj")) == (3, 8)


@pytest.mark.parametrize(
    ("fields", "module", "expected"),
    [
        ({"target_modules": ["q_proj"]}, "a.q_proj", True),
        ({"target_modules": ["q_proj"]}, "a.my_q_proj", False),
        ({"target_modules": ["q_proj"]}, "a.q_proj.b", False),
        ({"target_modules": ["attn.q_proj"]}, "x.attn.q_proj", True),
        ({"target_modules": ["attn.q_proj"]}, "x.battn.q_proj", False),
        ({"target_modules": r".*\.(q|v)_proj"}, "a.v_proj", True),
        ({"target_modules": r".*\.(q|v)_proj"}, "a.v_proj.b", False),  # the whole name
        ({"target_modules": r".*\.(q|v)_proj"}, "q_proj", False),
        ({"target_modules": "all-linear"}, "a.anything", True),
        ({"target_modules": "All-Linear"}, "a.anything", True),
        ({"target_modules": "all-linear"}, "lm_head", False),
        ({"target_modules": "all-linear"}, "score", True),
        ({"target_modules": "all-linear", "task_type": "SEQ_CLS"}, "score", False),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, "lm_head", True),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, "model.q_proj", False),
        ({"target_modules": ["embed_tokens"]}, "lm_head", False),
        ({"exclude_modules": ["layers.0.q_proj"]}, "model.layers.0.q_proj", False),
        ({"exclude_modules": ["layers.0.q_proj"]}, "model.layers.1.q_proj", True),
        ({"exclude_modules": r".*\.0\..*"}, "model.layers.0.q_proj", False),
        ({"exclude_modules": r".*\.0\..*"}, "model.layers.1.q_proj", True),
        ({"exclude_modules": []}, "model.layers.1.q_proj", True),
        ({"layers_to_transform": [1, 3]}, "model.layers.3.q_proj", True),
        ({"layers_to_transform": [1, 3]}, "model.layers.0.q_proj", False),
        ({"layers_to_transform": 1}, "model.layers.1.q_proj", True),
        ({"layers_to_transform": 1}, "model.layers.11.q_proj", False),
        ({"layers_to_transform": [1]}, "layers.1.q_proj", False),  # PEFT wants a dot before the list's name
        ({"layers_to_transform": [1]}, "model.layers.0.experts.1.q_proj", False),  # the first number is the layer
        ({"layers_to_transform": [1]}, "q_proj", True),  # an exact name is not limited
        ({"layers_to_transform": []}, "model.layers.5.q_proj", True),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, "layers.1.q_proj", True),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, "model.layers.1.q_proj", True),
        ({"layers_to_transform": [1], "layers_pattern": "h"}, "model.layers.1.q_proj", False),
        ({"layers_to_transform": [2], "layers_pattern": ["experts", "h"]}, "m.h.1.experts.2.q_proj", True),
    ],
)
def test_targets(read, fields, module, expected):
    assert read(**fields).targets(module, "linear") is expected


def test_all_linear_leaves_embeddings_out(read):
    assert read(target_modules="all-linear").targets("model.embed_tokens", "embedding") is False


def test_descriptive_fields(read):
    config = read(fan_in_fan_out=True, base_model_name_or_path="org/base", task_type="CAUSAL_LM")
    assert (config.fan_in_fan_out, config.base_model_name, config.task_type) == (True, "org/base", "CAUSAL_LM")


# ---- without effect

WITHOUT_EFFECT = {
    "lora_dropout": 0.1,
    "inference_mode": False,
    "peft_version": "0.21.2",
    "auto_mapping": {"base_model_class": "Net"},
    "revision": "main",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "loftq_config": {"loftq_bits": 4},
}


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_without_effect(read, field):
    assert read(**{field: WITHOUT_EFFECT[field]}) == read()


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica", "MiCA"])
def test_inits_that_keep_the_base(read, init):
    assert read(init_lora_weights=init) == read()


# ---- refused

REFUSED = {
    "use_dora": (True, "DoRA"),
    "lora_bias": (True, "bias"),
    "bias": ("all", "trained biases"),
    "modules_to_save": (["embed_tokens"], "fully trained modules"),
    "layer_replication": ([[0, 4], [2, 5]], "replicated layers"),
    "target_parameters": (["mlp.experts.gate_up_proj"], "bare parameters"),
    "alora_invocation_tokens": ([1, 2], "aLoRA"),
    "trainable_token_indices": ([0, 1], "token embeddings"),
    "use_qalora": (True, "QALoRA"),
    "kasa_config": ({"beta": 1e-4}, "KaSA"),
    "velora_config": ({"num_groups": 64}, "VeLoRA"),
    "monteclora_config": ({"num_samples": 8}, "MonteCLoRA"),
    "arrow_config": ({"top_k": 3}, "Arrow"),
    "use_bdlora": ({"nblocks": 2}, "BD-LoRA"),
    "megatron_config": ({"hidden_size": 8}, "Megatron"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_refused_by_name(read, field):
    value, feature = REFUSED[field]
    with pytest.raises(AdapterMismatchError) as raised:
        read(**{field: value})
    message = str(raised.value)
    assert "adapter 'sql'" in message
    assert "adapter_config.json" in message
    assert f"'{field}'" in message
    assert feature in message


@pytest.mark.parametrize("field", REFUSED)
def test_refused_fields_are_fine_when_off(read, field):
    assert read(**{field: None}) == read()


@pytest.mark.parametrize("field", ["kasa_config", "velora_config", "arrow_config", "use_bdlora", "monteclora_config"])
def test_an_empty_object_switches_a_variant_on(read, field):
    with pytest.raises(AdapterMismatchError, match=field):
        read(**{field: {}})


@pytest.mark.parametrize("value", ["lora_only", "ALL", 1, True])
def test_bias_other_than_none(read, value):
    with pytest.raises(AdapterMismatchError, match="'bias'"):
        read(bias=value)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"])
def test_inits_that_change_the_base(read, init):
    with pytest.raises(AdapterMismatchError, match="path_initial_model_for_weight_conversion"):
        read(init_lora_weights=init)


def test_unknown_init(read):
    with pytest.raises(AdapterMismatchError, match="'init_lora_weights' is 'magic'"):
        read(init_lora_weights="magic")


@pytest.mark.parametrize("peft_type", ["ADALORA", "IA3", "LOHA", "PREFIX_TUNING", "lora"])
def test_other_peft_types(read, peft_type):
    with pytest.raises(AdapterMismatchError, match=f"'peft_type' is '{peft_type}'"):
        read(peft_type=peft_type)


@pytest.mark.parametrize("value", [True, 1, 0, 0.0, "on", [0], {"a": 1}])
def test_unknown_field_that_is_on(read, value):
    with pytest.raises(AdapterMismatchError, match="'use_newlora'"):
        read(use_newlora=value)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_field_that_is_off(read, value):
    assert read(use_newlora=value) == read()


@pytest.mark.parametrize("drop", [("target_modules",), ()])
def test_target_modules_missing(read, drop):
    with pytest.raises(AdapterMismatchError, match="'target_modules' is missing or null"):
        read(drop=drop, target_modules=None)


# ---- malformed


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"r": ' + "1" * 5000 + "}", "is not JSON"),
        ("[]", "must hold a JSON object, found a list"),
        ('"LORA"', "must hold a JSON object, found a string"),
        ("null", "must hold a JSON object"),
        ("3", "must hold a JSON object, found a number"),
        ('{"peft_type": "LORA", "r": 4, "r": 8}', "'r' is given twice"),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', "NaN"),
        ('{"peft_type": "LORA", "lora_alpha": -Infinity}', "-Infinity"),
        ('{"peft_type": "LORA", "target_modules": ["q"], "lora_alpha": 1e999}', "'lora_alpha' must be a finite number"),
        ("{}", "'peft_type' must be the string"),
        ('{"peft_type": 3}', "'peft_type' must be the string"),
    ],
)
def test_malformed_file(read, text, cause):
    with pytest.raises(AdapterFormatError) as raised:
        read(text)
    assert "adapter 'sql'" in str(raised.value)
    assert cause in str(raised.value)


@pytest.mark.parametrize("value", ["4", 0, -1, 4.0, True, None, [4], {}])
def test_bad_rank(read, value):
    with pytest.raises(AdapterFormatError, match="'r' must be a positive integer"):
        read(r=value)
    with pytest.raises(AdapterFormatError, match="field 'rank_pattern', key 'q_proj' must be a positive integer"):
        read(rank_pattern={"q_proj": value})


@pytest.mark.parametrize("value", ["8", True, None, [8], 10**400])
def test_bad_alpha(read, value):
    with pytest.raises(AdapterFormatError, match="'lora_alpha' must be a finite number"):
        read(lora_alpha=value)
    with pytest.raises(AdapterFormatError, match="'alpha_pattern', key 'q_proj' must be a finite number"):
        read(alpha_pattern={"q_proj": value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_rslora", 1),
        ("use_rslora", "true"),
        ("fan_in_fan_out", "no"),
        ("ensure_weight_tying", 1),
        ("rank_pattern", [4]),
        ("rank_pattern", {"(": 4}),
        ("alpha_pattern", "x"),
        ("target_modules", 3),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", "("),
        ("exclude_modules", {"a": 1}),
        ("layers_to_transform", "1"),
        ("layers_to_transform", [True]),
        ("layers_to_transform", [-1]),
        ("init_lora_weights", 3),
        ("base_model_name_or_path", 3),
        ("task_type", ["CAUSAL_LM"]),
        ("layers_pattern", "layers"),  # without layers_to_transform
    ],
)
def test_bad_value(read, field, value):
    with pytest.raises(AdapterFormatError, match=f"'{field}'"):
        read(**{field: value})


@pytest.mark.parametrize("field", [{"layers_to_transform": [1]}, {"layers_pattern": "h"}])
def test_regular_expression_with_layers(read, field):
    with pytest.raises(AdapterFormatError, match="cannot be used when 'target_modules' is a string"):
        read(target_modules=".*q_proj", **field)


def test_layers_pattern_is_a_plain_name(read):
    with pytest.raises(AdapterMismatchError, match="only plain names"):
        read(layers_to_transform=[1], layers_pattern="lay.*")
    with pytest.raises(AdapterFormatError, match="'layers_pattern'"):
        read(layers_to_transform=[1], layers_pattern=[3])


def test_missing_file(tmp_path):
    with pytest.raises(AdapterFormatError, match="cannot be read"):
        read_config(tmp_path / "adapter_config.json", "sql")
