"""Classifiers and trunks: checkpoints without logits, and the output at the last token."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlora.models import from_pretrained, generate, read_skeleton
from jlora.models.json_file import ModelError
from tests.models import checkpoints


def classifier(folder, labels=3, **fields):
    """Write the folder of a sequence classifier, and return its language model's tensors and its score."""
    stored = checkpoints.write(folder, checkpoints.DENSE["mistral"])
    score = np.random.default_rng(1).normal(size=(labels, stored["model.norm.weight"].size)).astype(np.float32)
    tensors = {name: value for name, value in stored.items() if name != "lm_head.weight"}
    rewrite(folder, tensors | {"score.weight": score}, architectures=["MistralForSequenceClassification"], **fields)
    return stored, score


def rewrite(folder, tensors, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "model.safetensors")


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 60, (3, 7)), jnp.int32)
LENGTHS = jnp.asarray([7, 1, 4], jnp.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of a classifier, a trunk and a language model with the same layers, and both heads."""
    root = tmp_path_factory.mktemp("classifier")
    stored, score = classifier(root / "score", id2label={str(i): "x" for i in range(3)}, tie_word_embeddings=True)
    checkpoints.write(root / "trunk", checkpoints.DENSE["mistral"])
    bare = {name.removeprefix("model."): value for name, value in stored.items() if name != "lm_head.weight"}
    rewrite(root / "trunk", bare, architectures=["MistralModel"])
    checkpoints.write(root / "causal", checkpoints.DENSE["mistral"])
    return root, score, stored["lm_head.weight"]


@pytest.mark.slow
def test_scores_and_hidden_states(folders):
    root, score, head = folders
    model, trunk, causal = (from_pretrained(root / name) for name in ("score", "trunk", "causal"))
    assert (model.config.num_labels, trunk.config.num_labels, causal.config.num_labels) == (3, 0, None)
    hidden = np.asarray(trunk(TOKENS), np.float64)
    close(model(TOKENS), hidden @ score.T)
    close(causal(TOKENS), hidden @ head.T)
    last = hidden[np.arange(3), np.asarray(LENGTHS) - 1]
    close(trunk.pooled(TOKENS, LENGTHS), last)
    close(model.pooled(TOKENS, LENGTHS), last @ score.T)
    padded = TOKENS.at[1, 1:].set(5)
    assert np.array_equal(np.asarray(model.pooled(padded, LENGTHS))[1], np.asarray(model.pooled(TOKENS, LENGTHS))[1])


def close(found, want):
    np.testing.assert_allclose(np.asarray(found, np.float64), want, atol=2e-5 * np.abs(want).max())


def test_no_logits(folders):
    for name, kind in (("score", "a classifier of 3 labels"), ("trunk", "a trunk")):
        with pytest.raises(ModelError, match=f"is of {kind}, which has no logits"):
            generate(from_pretrained(folders[0] / name), [[1, 2]], max_new_tokens=1)


def test_labels_are_those_of_the_configuration(tmp_path):
    classifier(tmp_path, labels=2)  # transformers writes no names of two labels
    assert read_skeleton(tmp_path).config.num_labels == 2
    classifier(tmp_path, labels=3)
    with pytest.raises(ModelError, match=r"score.weight \[2, 32\], found \[3, 32\]"):
        read_skeleton(tmp_path)
    classifier(tmp_path, labels=1, num_labels=1)  # a reward model
    assert read_skeleton(tmp_path).config.num_labels == 1
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), architectures=["Qwen2ForRewardModel"])
    with pytest.raises(ModelError, match=r"'Qwen2ForRewardModel', a reward model with a head of its own.*num_labels 1"):
        read_skeleton(tmp_path)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors"), architectures="score")
    with pytest.raises(ModelError, match="architectures must be a list of names"):
        read_skeleton(tmp_path)
