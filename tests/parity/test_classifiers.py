"""Sequence classifiers and feature extractors against transformers and PEFT: heads of the adapters, mixed rows."""

import copy
import zlib

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

import jlora
import jlora.models
from tests.models.families import SMALL

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TARGETS = ["q_proj", "v_proj", "down_proj"]
LENGTHS = np.array([9, 1, 6, 9, 4, 7], np.int32)
PAD, LENGTH = 0, 9


def random_(model, name):
    """Give every parameter random values, large enough that each part matters."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            one = weight.ndim == 1 and "norm" in key
            weight.copy_(0.3 * values + 1 if one else values * 1.5 * weight.shape[-1] ** -0.5)
    return model


def base_of(family, automatic, folder, **fields):
    config = transformers.AutoConfig.for_model(family, **{**SMALL, "pad_token_id": PAD, **fields})
    config._attn_implementation = "eager"
    model = random_(automatic.from_config(config), family).eval()
    model.save_pretrained(folder)
    return model


def adapter_of(base, name, folder, task, **fields):
    """Return PEFT's model of a random adapter, whose folder is `folder / name`."""
    copied = copy.deepcopy(base)
    model = peft.get_peft_model(copied, peft.LoraConfig(r=4, target_modules=TARGETS, task_type=task, **fields)).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder / name, save_embedding_layers=False)
    return model


def tokens_of():
    tokens = np.random.default_rng(3).integers(1, 60, (len(LENGTHS), LENGTH)).astype(np.int32)
    return np.where(np.arange(LENGTH) < LENGTHS[:, None], tokens, PAD).astype(np.int32)


def theirs(model, tokens):
    with torch.no_grad():
        mask = torch.from_numpy((np.arange(LENGTH) < LENGTHS[:, None]).astype(np.int64))
        return model(input_ids=torch.from_numpy(tokens.astype(np.int64)), attention_mask=mask)


@jax.jit
def served(model, tokens, batch):
    """Return the outputs of all positions, and those of the last token of each sequence."""
    with jlora.use(batch):
        return model(tokens), model.pooled(tokens, LENGTHS)


def relabelled(base, labels, seed):
    """Return a copy of a classifier with a new score of another number of labels, as for another task."""
    model = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Linear(base.score.in_features, labels, bias=False)
    with torch.no_grad():
        weight.weight.copy_(torch.randn(weight.weight.shape, generator=generator))
    model.score, model.num_labels, model.config.num_labels = weight, labels, labels
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sequence_classifiers(tmp_path, family):
    auto = transformers.AutoModelForSequenceClassification
    base = base_of(family, auto, tmp_path / "base", num_labels=2, tie_word_embeddings=family == "qwen2")
    of = {
        "three": adapter_of(relabelled(base, 3, 1), "three", tmp_path, "SEQ_CLS"),
        "two": adapter_of(base, "two", tmp_path, "SEQ_CLS"),
        "plain": adapter_of(base, "plain", tmp_path, None),  # LoRA alone
    }
    model = jlora.models.from_pretrained(tmp_path / "base")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=3, max_lora_rank=4, saved_heads={"score": 3}))
    for name in of:
        manager.add_adapter(jlora.LoRARequest(name, path=str(tmp_path / name)))
    outputs = {name: info.saved_outputs for name, info in manager.list_adapters().items()}
    assert outputs == {"three": {"score": 3}, "two": {"score": 2}, "plain": {}}
    tokens, names = tokens_of(), ["three", None, "two", "plain", "three", "two"]
    wanted = {name: theirs(base if name is None else of[name], tokens).logits.numpy() for name in {*names}}
    with manager.prepare(names) as batch:
        positions, scores = map(np.asarray, served(model, tokens, batch))
    assert scores.shape == (6, 3)
    for i, name in enumerate(names):
        want = wanted[name][i]
        labels = len(want)
        assert np.abs(scores[i, :labels] - want).max() <= 1e-4 * np.abs(want).max()
        assert np.isneginf(scores[i, labels:]).all()
        np.testing.assert_allclose(positions[i, LENGTHS[i] - 1], scores[i], rtol=1e-4, atol=1e-4)


def test_feature_extraction(tmp_path):
    base = base_of("qwen3", transformers.AutoModel, tmp_path / "base")
    of = {name: adapter_of(base, name, tmp_path, "FEATURE_EXTRACTION") for name in ("one", "two")}
    model = jlora.models.from_pretrained(tmp_path / "base")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4))
    for name in of:
        manager.add_adapter(jlora.LoRARequest(name, path=str(tmp_path / name)))
    tokens, names = tokens_of(), ["one", None, "two", "one", "two", None]
    wanted = {n: theirs(base if n is None else of[n], tokens).last_hidden_state.numpy() for n in {*names}}
    with manager.prepare(names) as batch:
        hidden, last = map(np.asarray, served(model, tokens, batch))
    for i, name in enumerate(names):
        want = wanted[name][i, : LENGTHS[i]]
        assert np.abs(hidden[i, : LENGTHS[i]] - want).max() <= 1e-4 * np.abs(want).max()
        assert np.abs(last[i] - want[-1]).max() <= 1e-4 * np.abs(want).max()
    changes = [np.abs(wanted[name][0] - wanted[None][0]).max() for name in of]
    assert min(changes) > 1e-2 * np.abs(wanted[None][0]).max()


def test_peft_reads_our_files(tmp_path):
    base = base_of("llama", transformers.AutoModelForSequenceClassification, tmp_path / "base", num_labels=2)
    base.score = torch.nn.Linear(base.score.in_features, 2)  # with a bias
    model = adapter_of(base, "two", tmp_path, "SEQ_CLS")
    adapter = jlora.Adapter.from_pretrained(tmp_path / "two")
    assert adapter.heads["score"].bias is not None
    adapter.save_pretrained(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "again").eval()
    want, found = (theirs(each, tokens_of()).logits.numpy() for each in (model, again))
    assert np.array_equal(found, want)
    assert not np.allclose(theirs(base, tokens_of()).logits.numpy(), want)
