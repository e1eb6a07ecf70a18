"""Every PEFT field: served, without effect, or refused by name."""

import json
import math
import re
import time

import pytest

from jlora.adapters.peft_config import read_config, scaling_of
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError

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
    "target_parameters": (["mlp.experts.gate_up_proj", "q_proj.weight"], "bare parameters"),
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("use_dora", value) for value in (0, 0.0, "", [], {})),
        *(("lora_bias", value) for value in (0, 0.0, "")),
        *(("bias", value) for value in (False, 0, "", "NONE")),
        *(("modules_to_save", value) for value in (0, 0.0, "", True)),
        *(("layer_replication", value) for value in (0, 0.0, "")),
        *(("kasa_config", value) for value in (0, 0.0, "", [])),
    ],
)
def test_what_equals_off_but_is_another_type_is_not_off(read, field, value):
    """To Python 0 == False; to PEFT some of these switch a feature on, so none is taken for off."""
    with pytest.raises(AdapterMismatchError, match=f"'{field}' is {re.escape(repr(value))}"):
        read(**{field: value})


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
    """The tensors say what is targeted: the expression is not asked, and that is reported."""
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


def test_what_can_be_checked_is(read):
    assert read(target_modules=r".*\.(q|v)_proj", exclude_modules=".*vision.*").unchecked == ()
    assert read().unchecked == ()


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", [p for p in LOOKING if p != "a" * 9000])
def test_ranks_that_cannot_be_looked_up(read, field, pattern):
    with pytest.raises(AdapterMismatchError) as raised:
        read(**{field: {"q_proj": 4, pattern: 2}})
    assert f"field '{field}', key '{pattern[:100]}".replace("\\", "\\\\") in str(raised.value)
    assert len(str(raised.value)) < 1000


# ---- layers


@pytest.mark.parametrize(
    "index", ["01", "00", "001", "\u0661", "\uff11", "1\u0661", "\u0967", "\u00b9", "+1", "1_0", " 1"]
)
@pytest.mark.parametrize("fields", [{}, {"layers_pattern": "layers"}])
def test_layers_are_numbered_in_plain_digits(read, index, fields):
    config = read(layers_to_transform=[0, 1, 10, 11], **fields)
    assert config.targets("model.layers.1.q_proj", "linear")
    assert config.targets("model.layers.10.q_proj", "linear")
    assert not config.targets(f"model.layers.{index}.q_proj", "linear")


@pytest.mark.parametrize("index", ["01", "\u0661"])
def test_a_layer_that_is_none_does_not_pass_for_a_later_number(read, index):
    assert not read(layers_to_transform=[1]).targets(f"model.layers.{index}.experts.1.q_proj", "linear")


def test_many_names(read):
    names = [f"model.layers.{i}.q_proj" for i in range(100_000)]
    config = read(target_modules=names, exclude_modules=[f"{name}.x" for name in names], layers_to_transform=[0])
    start = time.process_time()
    assert all(config.targets(name, "linear") for name in names[:10_000])
    assert time.process_time() - start < 1


def test_a_hundred_thousand_ranks(read):
    """Takes about as long again as the JSON parser does; trying every name on every module took 49 s."""
    names = {f"model.layers.{i}.self_attn.q_proj": 2 + i % 7 for i in range(100_000)}
    text = json.dumps(BASE | {"rank_pattern": names})
    taken, parsing = [], []
    for _ in range(5):
        start = time.process_time()
        found = read(text).ranks(list(names)[:224])
        taken.append(time.process_time() - start)
        start = time.process_time()
        json.loads(text)
        parsing.append(time.process_time() - start)
    assert min(taken) < 5 * min(parsing)
    assert list(found.values()) == list(names.values())[:224]


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


def test_whole_surrogate_pairs_are_text(read):
    assert read(rb'{"peft_type": "LORA", "target_modules": ["q"], "base_model_name_or_path": "\ud83d\ude00"}'.decode())


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "\x1b[31mLORA\n" * 99},
        {"init_lora_weights": "pissa\x1b[31m\n" + "x" * 999},
        {"init_lora_weights": "\x1b[31m\n" + "x" * 999},
        {"new\x1b[31m\n" + "x" * 999: "\x1b[31m\n" + "x" * 999},
        {"use_dora": "\x1b[31m\n" + "x" * 999},
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
