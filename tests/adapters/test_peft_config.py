"""Ranks, alphas and targets: what PEFT makes of its configuration."""

import json

import pytest

from tests.adapters.conftest import BASE


def rank(config, module):
    return config.ranks([module])[module]


def alpha(config, module):
    return config.alphas([module])[module]


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
        ({"layers_to_transform": [1]}, f"model.layers.{'1' * 5000}.q_proj", False),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, "layers.1.q_proj", True),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, "model.layers.1.q_proj", True),
        ({"layers_to_transform": [1], "layers_pattern": "h"}, "model.layers.1.q_proj", False),
        ({"layers_to_transform": [2], "layers_pattern": ["experts", "h"]}, "m.h.1.experts.2.q_proj", True),
        ({"layers_to_transform": [1]}, "model.layers.01.experts.1.q_proj", False),
        ({"layers_to_transform": [1]}, "model.layers.\u0661.experts.1.q_proj", False),
    ],
)
def test_targets(read, fields, module, expected):
    assert read(**fields).targets(module, "linear") is expected


def test_all_linear_leaves_embeddings_out(read):
    assert read(target_modules="all-linear").targets("model.embed_tokens", "embedding") is False


@pytest.mark.parametrize(
    "index", ["01", "00", "001", "\u0661", "\uff11", "1\u0661", "\u0967", "\u00b9", "+1", "1_0", " 1"]
)
@pytest.mark.parametrize("fields", [{}, {"layers_pattern": "layers"}])
def test_layers_are_numbered_in_plain_digits(read, index, fields):
    config = read(layers_to_transform=[0, 1, 10, 11], **fields)
    assert config.targets("model.layers.1.q_proj", "linear")
    assert config.targets("model.layers.10.q_proj", "linear")
    assert not config.targets(f"model.layers.{index}.q_proj", "linear")


@pytest.mark.timeout(60)
def test_many_names(read):
    """A scan of all names for each module would exceed the time limit."""
    names = [f"model.layers.{i}.q_proj" for i in range(50_000)]
    config = read(target_modules=names, exclude_modules=[f"{name}.x" for name in names], layers_to_transform=[0])
    assert all(config.targets(name, "linear") for name in names[:15_000])


def test_thousands_of_ranks(read):
    """A search of every name for every module would take minutes, and `ranks` raises after 20 s."""
    names = {f"model.layers.{i}.self_attn.q_proj": 2 + i % 7 for i in range(20_000)}
    text = json.dumps(BASE | {"rank_pattern": names})
    found = read(text).ranks(list(names)[:2240])
    assert list(found.values()) == list(names.values())[:2240]
