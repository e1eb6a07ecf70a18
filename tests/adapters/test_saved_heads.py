"""Fully trained modules in adapter files: PEFT's spellings, the round trip, and refusals by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlora.adapters import Adapter, ModuleLoRA, SavedHead
from jlora.errors import AdapterFormatError, AdapterMismatchError
from tests.adapters.reading import contents, load_all_ways

LORA = {
    "base_model.model.model.layers.0.q_proj.lora_A.weight": np.ones((2, 6), np.float32),
    "base_model.model.model.layers.0.q_proj.lora_B.weight": np.ones((5, 2), np.float32),
}
WEIGHT, BIAS = np.arange(18, dtype=np.float32).reshape(3, 6), np.arange(3, dtype=np.float32)
CONFIG = {
    "peft_type": "LORA",
    "task_type": "SEQ_CLS",
    "r": 2,
    "target_modules": ["q_proj"],
    "modules_to_save": ["classifier", "score"],
}


@pytest.fixture
def load(tmp_path):
    def of(tensors, **fields):
        (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | fields))
        save_file({**LORA, **tensors}, tmp_path / "adapter_model.safetensors")
        return load_all_ways(tmp_path, name="sql")

    return of


@pytest.mark.parametrize("key", ["score.", "score.modules_to_save.", "score.modules_to_save.default."])
@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_spellings(load, prefix, key):
    adapter = load({f"{prefix}{key}weight": WEIGHT, f"{prefix}{key}bias": BIAS})
    assert adapter.saved_outputs == {"score": 3}
    assert np.array_equal(adapter.heads["score"].weight, WEIGHT)
    assert np.array_equal(adapter.heads["score"].bias, BIAS)
    assert list(adapter.modules) == ["model.layers.0.q_proj"]
    assert adapter.nbytes == 4 * (2 * 6 + 5 * 2 + 3 * 6 + 3)


@pytest.mark.parametrize(
    ("saved", "key", "name"),
    [
        ("classifier", "classifier.out.weight", "classifier.out"),
        ("head", "lm_head.weight", "lm_head"),
        ("model.score", "model.score.weight", "model.score"),
        ("fier", "classifier.out.weight", "classifier.out"),
        ("head", "lm_head.modules_to_save.default.weight", "lm_head"),
    ],
)
def test_modules_to_save_are_ends_of_names(load, saved, key, name):
    """PEFT: `key.endswith(target_key)`, without regard to dots."""
    adapter = load({f"base_model.model.{key}": WEIGHT}, modules_to_save=[saved])
    assert adapter.saved_outputs == {name: 3}
    assert adapter.heads[name].bias is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_round_trip(tmp_path, dtype):
    heads = {"score": SavedHead(WEIGHT.astype(dtype), BIAS.astype(dtype)), "a.qa_outputs": SavedHead(WEIGHT[:2])}
    arrays = {"q": (np.ones((2, 6), dtype), np.ones((5, 2), dtype))}
    adapter = Adapter.from_arrays("sql", arrays, alpha=4, heads=heads, task_type="SEQ_CLS")
    adapter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["score", "a.qa_outputs"]
    assert "base_model.model.score.bias" in load_file(tmp_path / "adapter_model.safetensors")
    seen = []
    again = Adapter.from_pretrained(tmp_path, check=seen.append)
    assert contents(again) == contents(adapter)
    assert again.saved_outputs == seen[0].saved_outputs == {"score": 3, "a.qa_outputs": 2}
    assert (seen[0].nbytes, seen[0].task_type) == (adapter.nbytes, "SEQ_CLS")
    unread = seen[0].heads["score"]
    assert (unread.outputs, unread.in_features, unread.biased, unread.weight.dtype) == (3, 6, True, dtype)
    wide = Adapter.from_pretrained(tmp_path, dtype=np.float32)
    assert wide.heads["score"].weight.dtype == np.float32


SCORE = "base_model.model.score."


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"holds no tensor of modules_to_save.*\['classifier', 'score'\]"),
        ({SCORE + "bias": BIAS}, "'score' is of modules_to_save and has a bias without a weight"),
        ({SCORE + "weight": WEIGHT, SCORE + "bias": BIAS[:2]}, r"score.bias.*shape \(2,\); expected \(3,\)"),
        ({SCORE + "weight": WEIGHT[:0]}, "score.weight.*expected a matrix"),
        ({SCORE + "weight": WEIGHT.astype(np.int32)}, "score.weight.*dtype I32"),
        ({SCORE + "weight": WEIGHT * np.float32(np.nan)}, "score.weight"),
        ({SCORE + "weight": WEIGHT, SCORE + "modules_to_save.weight": WEIGHT}, "mean the same array"),
    ],
)
def test_malformed_heads(load, tensors, message):
    with pytest.raises(AdapterFormatError, match=message):
        load(tensors)


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        ({SCORE + "weight": WEIGHT, "base_model.model.other.weight": WEIGHT}, {}, "other.weight' is a weight or bias"),
        ({SCORE + "weight": WEIGHT, "base_model.model.x.modules_to_save.weight": WEIGHT}, {}, "does not name"),
        ({SCORE + "weight": BIAS}, {}, r"score.weight.*\(3,\): it is of a fully trained module.*such as a norm"),
        ({SCORE + "weight": WEIGHT[None]}, {}, "score.weight.*is no linear layer.*a convolution"),
        ({SCORE + "original_module.weight": WEIGHT}, {}, "original_module.weight' is a weight or bias"),
        (
            {SCORE + "weight": WEIGHT, SCORE + "lora_A.weight": WEIGHT[:2], SCORE + "lora_B.weight": WEIGHT[:, :2]},
            {},
            r"'score' is fully trained \(modules_to_save\) and has lora_A, lora_B too",
        ),
        (
            {SCORE + "weight": WEIGHT},
            {"modules_to_save": None},
            r"score\.weight' is a weight or bias",
        ),
        ({SCORE + "weight": WEIGHT}, {"modules_to_save": ["scor"]}, r"score\.weight"),  # a beginning is no end
        (
            {SCORE + "weight": WEIGHT * np.float32(np.nan)},  # which is not read
            {"alora_invocation_tokens": [1]},
            r"'score' is a saved head.*activated LoRA",
        ),
    ],
)
def test_unserved_heads(load, tensors, fields, message):
    with pytest.raises(AdapterMismatchError, match=message):
        load(tensors, **fields)


def test_in_memory():
    with pytest.raises(AdapterFormatError, match=r"SavedHead.weight must be.*\(3,\)"):
        SavedHead(BIAS)
    with pytest.raises(AdapterFormatError, match=r"bias \(3,\).*weight \(2, 6\)"):
        SavedHead(WEIGHT[:2], BIAS)
    lora = ModuleLoRA(a=np.ones((2, 6)), b=np.ones((3, 2)), alpha=2, scaling=1)
    with pytest.raises(AdapterFormatError, match="'score' has both LoRA and a saved head"):
        Adapter(name="a", modules={"score": lora}, heads={"score": SavedHead(WEIGHT)})
    with pytest.raises(AdapterMismatchError, match=r"'score' is a saved head.*activated LoRA"):
        Adapter(name="a", modules={"q": lora}, heads={"score": SavedHead(WEIGHT)}, invocation_tokens=(1,))
