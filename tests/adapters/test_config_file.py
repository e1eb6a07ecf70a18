"""Every PEFT field: served, without effect, or refused by name."""

import re

import pytest

from jlora.adapters.config_file import read_config
from jlora.adapters.extras import MAGNITUDE
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError

# ---- served


def test_defaults_are_pefts(read):
    config = read(drop=("r", "lora_alpha"))
    assert (config.r, config.lora_alpha) == (8, 8.0)


def test_descriptive_fields(read):
    config = read(fan_in_fan_out=True, base_model_name_or_path="org/base", task_type="CAUSAL_LM")
    assert (config.fan_in_fan_out, config.base_model_name, config.task_type) == (True, "org/base", "CAUSAL_LM")


@pytest.mark.parametrize(("value", "expected"), [(True, True), (False, False), (None, False)])
def test_dora(read, value, expected):
    assert read(use_dora=value).extras == ((MAGNITUDE,) if expected else ())
    assert read().extras == ()


@pytest.mark.parametrize("value", [0, 1, 0.0, "", "true", [], {}])
def test_dora_is_a_boolean(read, value):
    with pytest.raises(AdapterFormatError, match=f"'use_dora' must be bool, found {re.escape(repr(value))}"):
        read(use_dora=value)


def test_invocation_tokens(read):
    assert read(alora_invocation_tokens=[49152, 0, 5, 5]).invocation_tokens == (49152, 0, 5, 5)
    assert read(alora_invocation_tokens=None).invocation_tokens == read().invocation_tokens == ()


@pytest.mark.parametrize("value", [[], False, 3, "abc", {"0": 1}, [-1], [1.0], [True], ["1"], [None], [[1]], [2**31]])
def test_invocation_tokens_are_token_ids(read, value):
    with pytest.raises(AdapterFormatError, match="field 'alora_invocation_tokens'"):
        read(alora_invocation_tokens=value)


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
    "lora_bias": (True, "bias"),
    "bias": ("all", "trained biases"),
    "layer_replication": ([[0, 4], [2, 5]], "replicated layers"),
    "target_parameters": (["mlp.experts.gate_up_proj", "q_proj.weight"], "bare parameters"),
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


@pytest.mark.parametrize("field", ["kasa_config", "velora_config", "arrow_config", "use_bdlora", "monteclora_config"])
def test_an_empty_object_switches_a_variant_on(read, field):
    with pytest.raises(AdapterMismatchError, match=field):
        read(**{field: {}})


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"])
def test_inits_that_change_the_base(read, init):
    with pytest.raises(AdapterMismatchError, match="path_initial_model_for_weight_conversion"):
        read(init_lora_weights=init)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("lora_bias", value) for value in (0, 0.0, "")),
        *(("bias", value) for value in (False, 0, "", "NONE")),
        *(("layer_replication", value) for value in (0, 0.0, "")),
        *(("kasa_config", value) for value in (0, 0.0, "", [])),
    ],
)
def test_a_value_equal_to_off_but_of_another_type_is_refused(read, field, value):
    """To Python 0 == False; to PEFT some of these switch a feature on, so none is taken for off."""
    with pytest.raises(AdapterMismatchError, match=f"'{field}' is {re.escape(repr(value))}"):
        read(**{field: value})


@pytest.mark.parametrize("value", [0, 0.0, "", True, "score", ["score", 1], [""], {"score": 1}])
def test_modules_to_save_must_be_names(read, value):
    with pytest.raises(AdapterFormatError, match="'modules_to_save' must be a list of names"):
        read(modules_to_save=value)


# ---- not checked

LOOKING = [
    "^(?!.*vision)",
    r"^(?!.*vision).*\.(q|v)_proj$",
    "(?i).*Q_PROJ",
    "(a|b){1001}",
    "a" * 9000,
    r"(a)\1",
    "[[:x:]]",
]


@pytest.mark.parametrize("pattern", LOOKING)
def test_targets_that_cannot_be_checked(read, pattern):
    """The tensors define the targets. The expression is not evaluated, and this is reported."""
    config = read(target_modules=pattern)
    assert config.targets("model.vision.q_proj", "linear")
    (line,) = config.unchecked
    assert line.startswith("field 'target_modules': ")
    assert line.isprintable()
    assert len(line) < 700
    excluded = read(exclude_modules=pattern)
    assert excluded.targets("model.q_proj", "linear")
    assert not excluded.targets("model.v_proj", "linear")
    assert excluded.unchecked[0].startswith("field 'exclude_modules': ")
    assert len(read(target_modules=pattern, exclude_modules=pattern).unchecked) == 2


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", [p for p in LOOKING if p != "a" * 9000])
def test_ranks_that_cannot_be_looked_up(read, field, pattern):
    with pytest.raises(AdapterMismatchError) as raised:
        read(**{field: {"q_proj": 4, pattern: 2}})
    assert f"field '{field}', key '{pattern[:100]}".replace("\\", "\\\\") in str(raised.value)
    assert len(str(raised.value)) < 1000


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
        ('{"peft_type": "LORA", "target_modules": ["q"], "lora_dropout": -1e999}', "'lora_dropout' must hold finite"),
        ("{}", "'peft_type' must be the string"),
        ('{"peft_type": 3}', "'peft_type' must be the string"),
        (r'{"peft_type": "LORA", "revision": "\ud800"}', "is not JSON: a string holds '\\ud800'"),
        (r'{"peft_type": "LORA", "\udfff": null}', "is not JSON: a string holds '\\udfff'"),
        (r'{"peft_type": "LORA", "auto_mapping": [{"x": ["\uDC00\uD800"]}]}', "is not JSON: a string holds"),
        ('{"a": ' * 100_000, "is not JSON"),
        (
            '{"peft_type": "LORA", "target_modules": ["q"], "r": ' + "[" * 900 + "]" * 900 + "}",
            "'r' must be a positive integer",
        ),
        (r'{"a\u001b[31m\nb": 1, "a\u001b[31m\nb": 1}', r"'a\x1b[31m\nb' is given twice"),
    ],
)
def test_malformed_file(read, text, cause):
    with pytest.raises(AdapterFormatError) as raised:
        read(text)
    assert "adapter 'sql'" in str(raised.value)
    assert cause in str(raised.value)


@pytest.mark.parametrize(
    "value", ["4", 0, -1, 4.0, True, None, [4], {}, 2**31, pytest.param(10**4200, id="4200 digits")]
)
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
        pytest.param("layers_to_transform", 10**4200, id="layers_to_transform of 4200 digits"),
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


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "\x1b[31mLORA\n" * 99},
        {"init_lora_weights": "pissa\x1b[31m\n" + "x" * 999},
        {"init_lora_weights": "\x1b[31m\n" + "x" * 999},
        {"new\x1b[31m\n" + "x" * 999: "\x1b[31m\n" + "x" * 999},
        {"use_dora": "\x1b[31m\n" + "x" * 999},
        {"alora_invocation_tokens": ["\x1b[31m\n" + "x" * 999]},
        {"target_modules": "(\x1b[31m\n" + "x" * 999},
        {"rank_pattern": {"(\x1b[31m\n" + "x" * 999: 3}},
        {"rank_pattern": {"\x1b[31m\n" + "x" * 999: "\x1b[31m\n" + "x" * 999}},
        {"alpha_pattern": {"\x1b[31m\n": 10**4000}},
        {"layers_to_transform": ["\x1b[31m\n" * 999]},
        {"layers_to_transform": [1], "layers_pattern": "\x1b[31m\n" * 999},
        {"task_type": ["\x1b[31m\n" * 999]},
    ],
)
def test_messages_are_escaped_and_cut(read, fields):
    with pytest.raises(LoRAError) as raised:
        read(**fields)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1200


def test_missing_file(tmp_path):
    with pytest.raises(AdapterFormatError, match="cannot be read"):
        read_config(tmp_path / "adapter_config.json", "sql")


@pytest.mark.parametrize(
    ("name", "value"),
    [("lorap_lr_ratio", 16.0), ("lorap_emb_lr", 1e-6), ("lora_dtype", "bf16"), ("merge_weights", True)],
)
def test_fields_of_trainers_are_passed_over(read, name, value):
    assert read(**{name: value}).peft_fields[name] == value
