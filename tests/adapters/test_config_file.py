"""Every PEFT field: served, without effect, or refused by name."""

import pytest

from jlora.adapters.config_file import read_config
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError


def test_served_fields(read):
    defaults = read(drop=("r", "lora_alpha"))
    assert (defaults.r, defaults.lora_alpha, defaults.variants, defaults.invocation_tokens) == (8, 8.0, (), ())
    config = read(fan_in_fan_out=True, base_model_name_or_path="org/base", task_type="CAUSAL_LM")
    assert (config.fan_in_fan_out, config.base_model_name, config.task_type) == (True, "org/base", "CAUSAL_LM")
    assert [read(use_dora=value).variants for value in (True, False, None)] == [("dora",), (), ()]
    assert read(alora_invocation_tokens=[49152, 0, 5, 5]).invocation_tokens == (49152, 0, 5, 5)
    assert read(alora_invocation_tokens=None).invocation_tokens == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("lora_dropout", 0.1), ("inference_mode", False), ("peft_version", "0.21.2"), ("revision", "main")),
        *(("auto_mapping", {"base_model_class": "Net"}), ("runtime_config", {"ephemeral_gpu_offload": True})),
        *(("megatron_core", "megatron.core"), ("qalora_group_size", 16), ("eva_config", {"rho": 2.0})),
        *(("corda_config", {"corda_method": "ipm"}), ("lora_ga_config", {"direction": "ArB2r"})),
        ("loftq_config", {"loftq_bits": 4}),
        *(("init_lora_weights", init) for init in (True, False, None, "gaussian", "eva", "orthogonal", "mica", "MiCA")),
        *(("use_newlora", off) for off in (None, False, "", [], {})),
    ],
)
def test_without_effect(read, field, value):
    assert read(**{field: value}) == read()


@pytest.mark.parametrize(
    ("name", "value"),
    [("lorap_lr_ratio", 16.0), ("lorap_emb_lr", 1e-6), ("lora_dtype", "bf16"), ("merge_weights", True)],
)
def test_fields_of_trainers_are_passed_over(read, name, value):
    assert read(**{name: value}).peft_fields[name] == value


# Field -> values, and words of the message. To Python 0 == False, and no value is taken for an off of another type.
REFUSED = {
    "lora_bias": ([True, 0, 0.0, ""], "bias"),
    "bias": (["all", False, 0, "", "NONE"], "trained biases"),
    "layer_replication": ([[[0, 4], [2, 5]], 0, 0.0, ""], "replicated layers"),
    "target_parameters": ([["mlp.experts.gate_up_proj", "q_proj.weight"]], "bare parameters"),
    "trainable_token_indices": ([[0, 1]], "token embeddings"),
    "use_qalora": ([True], "QALoRA"),
    "kasa_config": ([{"beta": 1e-4}, {}, 0, 0.0, "", []], "KaSA"),
    "velora_config": ([{"num_groups": 64}, {}], "VeLoRA"),
    "monteclora_config": ([{"num_samples": 8}, {}], "MonteCLoRA"),
    "arrow_config": ([{"top_k": 3}, {}], "Arrow"),
    "use_bdlora": ([{"nblocks": 2}, {}], "BD-LoRA"),
    "megatron_config": ([{"hidden_size": 8}], "Megatron"),
    "init_lora_weights": (
        ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"],
        "path_initial_model_for_weight_conversion",
    ),
    "peft_type": (["ADALORA", "IA3", "LOHA", "PREFIX_TUNING", "lora"], "LORA"),
    "use_newlora": ([True, 1, 0, 0.0, "on", [0], {"a": 1}], "does not know"),
    "target_modules": ([None], "is missing or null"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_refused_by_name(read, field):
    values, words = REFUSED[field]
    for value in values:
        with pytest.raises(AdapterMismatchError) as raised:
            read(**{field: value})
        for part in ("adapter 'sql'", "adapter_config.json", f"'{field}'", words):
            assert part in str(raised.value)


def test_target_modules_missing(read):
    with pytest.raises(AdapterMismatchError, match="'target_modules' is missing or null"):
        read(drop=("target_modules",))


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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"r": ' + "1" * 5000 + "}", "is not JSON"),
        ("[]", "must hold a JSON object, found a list"),
        ("3", "must hold a JSON object, found a number"),
        ('{"peft_type": "LORA", "r": 4, "r": 8}', "'r' is given twice"),
        ('{"peft_type": "LORA", "lora_alpha": NaN}', "NaN"),
        ('{"peft_type": "LORA", "target_modules": ["q"], "lora_alpha": 1e999}', "'lora_alpha' must be a finite number"),
        ('{"peft_type": "LORA", "target_modules": ["q"], "lora_dropout": -1e999}', "'lora_dropout' must hold finite"),
        ("{}", "'peft_type' must be the string"),
        ('{"peft_type": 3}', "'peft_type' must be the string"),
        (r'{"peft_type": "LORA", "revision": "\ud800"}', "is not JSON: a string holds '\\ud800'"),
        (r'{"peft_type": "LORA", "auto_mapping": [{"x": ["\uDC00\uD800"]}]}', "is not JSON: a string holds"),
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


MALFORMED = {
    "use_dora": [0, 1, 0.0, "", "true", [], {}],
    "use_rslora": [1, "true"],
    "fan_in_fan_out": ["no"],
    "ensure_weight_tying": [1],
    "alora_invocation_tokens": [*([], False, 3, "abc", {"0": 1}, [-1], [1.0], [True], ["1"], [None], [[1]], [2**31])],
    "modules_to_save": [0, 0.0, "", True, "score", ["score", 1], [""], {"score": 1}],
    "r": (ranks := ["4", 0, -1, 4.0, True, None, [4], {}, 2**31, 10**4200]),
    "lora_alpha": (alphas := ["8", True, None, [8], 10**400]),
    "rank_pattern": [[4], {"(": 4}, *({"q_proj": rank} for rank in ranks)],
    "alpha_pattern": ["x", *({"q_proj": alpha} for alpha in alphas)],
    "target_modules": [3, ["q_proj", 3], "("],
    "exclude_modules": [{"a": 1}],
    "layers_to_transform": ["1", [True], [-1], 10**4200],
    "init_lora_weights": [3],
    "base_model_name_or_path": [3],
    "task_type": [["CAUSAL_LM"]],
    "layers_pattern": ["layers"],  # without layers_to_transform
}


@pytest.mark.parametrize("field", MALFORMED)
def test_malformed_values(read, field):
    for value in MALFORMED[field]:
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


ODD = "\x1b[31m\n" + "x" * 999


@pytest.mark.parametrize(
    "fields",
    [
        *({"peft_type": ODD}, {"init_lora_weights": f"pissa{ODD}"}, {"init_lora_weights": ODD}, {f"new{ODD}": ODD}),
        *({"use_dora": ODD}, {"alora_invocation_tokens": [ODD]}, {"target_modules": f"({ODD}"}, {"task_type": [ODD]}),
        *({"rank_pattern": {f"({ODD}": 3}}, {"rank_pattern": {ODD: ODD}}, {"alpha_pattern": {"\x1b[31m\n": 10**4000}}),
        *({"layers_to_transform": [ODD]}, {"layers_to_transform": [1], "layers_pattern": ODD}),
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
