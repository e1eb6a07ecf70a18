"""Embedding checkpoints: the files of sentence-transformers, and the pooling of hidden states that they specify."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tokenizers")

from jlora.models import Pooling, from_pretrained, generate, read_config, read_skeleton
from jlora.models.json_file import ModelError
from tests.models import checkpoints
from tests.models.test_classifier import LENGTHS, TOKENS, classifier, close
from tests.serve.embedding import write_modules

WEIGHTS = {
    "cls": lambda n: [1] + [0] * (n - 1),
    "lasttoken": lambda n: [0] * (n - 1) + [1],
    "mean": lambda n: [1 / n] * n,
    "mean_sqrt_len_tokens": lambda n: [n**-0.5] * n,
    "weightedmean": lambda n: [2 * i / (n * (n + 1)) for i in range(1, n + 1)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A language model with an untied head, and a Pooling beside it."""
    folder = tmp_path_factory.mktemp("embedding")
    checkpoints.write(folder, checkpoints.DENSE["mistral"])
    return folder


@pytest.mark.parametrize(("mode", "normalize"), [*((mode, False) for mode in WEIGHTS), ("mean", True)])
def test_pooled_hidden_states(folder, mode, normalize):
    write_modules(folder, mode, normalize=normalize)
    model = from_pretrained(folder)
    assert model.config.pooling == Pooling(mode=mode, normalize=normalize, max_length=64)
    assert (model.config.num_labels, model.config.max_position_embeddings) == (0, 64)
    hidden = np.asarray(model(TOKENS), np.float64)
    want = np.stack([WEIGHTS[mode](int(n)) @ rows[:n] for rows, n in zip(hidden, LENGTHS, strict=True)])
    want = want / np.linalg.norm(want, axis=1, keepdims=True) if normalize else want
    found = model.pooled(TOKENS, LENGTHS)
    assert found.dtype == jnp.float32
    close(found, want)
    assert np.array_equal(model.pooled(TOKENS.at[1, 1:].set(5), LENGTHS)[1], found[1])


def test_an_embedding_model_does_not_generate(folder):
    write_modules(folder)
    with pytest.raises(ModelError, match="is of an embedding model, which has no logits"):
        generate(from_pretrained(folder), [[1, 2]], max_new_tokens=1)


def pooling_of(folder, **changes):
    write_modules(folder, **changes)
    return read_config(folder / "config.json").pooling


def test_newer_files_and_defaults(folder):
    assert pooling_of(folder, mode="mean", pooling_mode="weightedmean").mode == "weightedmean"
    assert pooling_of(folder, mode="mean", pooling_mode=["cls"]).mode == "cls"
    assert pooling_of(folder, mode=None).mode == "mean"
    prompts = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    assert pooling_of(folder, prompts=prompts).prompt == "q: "
    for name in ("config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    assert read_config(folder / "config.json").pooling == Pooling(mode="lasttoken", normalize=True)
    assert read_config(folder / "config.json").max_position_embeddings == 128
    types = {"base.modules.transformer.Transformer": "", "sentence_transformer.modules.pooling.Pooling": "1_Pooling"}
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in types.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert read_config(folder / "config.json").pooling == Pooling(mode="lasttoken")


def test_other_models_have_no_pooling(folder, tmp_path):
    write_modules(folder)
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:1]))
    assert read_config(folder / "config.json").num_labels is None
    (folder / "modules.json").unlink()
    assert read_skeleton(folder).config.pooling is None
    classifier(tmp_path)
    write_modules(tmp_path)
    assert read_config(tmp_path / "config.json").pooling is None


TWO = {"pooling_mode_mean_tokens": True}
PROMPT = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "max"}, r"1_Pooling/config.json: pooling_mode must be one of \('cls'.*, got 'max'"),
        ({**TWO}, r"pooling_mode must be one of .*, got \['mean', 'lasttoken'\]"),
        ({"pooling_mode": {"a": "b"}}, "pooling_mode must be one of .*, got {'a': 'b'}"),
        ({"pooling_mode_cls_token": "yes"}, "pooling_mode_cls_token must be true or false"),
        ({"include_prompt": False, "prompts": PROMPT}, "include_prompt must be true where a default prompt"),
        ({"prompts": {"default_prompt_name": "query"}}, "config_sentence_transformers.json: default_prompt_name must"),
        ({"settings": {"do_lower_case": True}}, "sentence_bert_config.json: do_lower_case must be false"),
        ({"settings": {"max_seq_length": "x"}}, "sentence_bert_config.json: max_seq_length must be a positive integer"),
    ],
)
def test_refused_fields(folder, changes, message):
    with pytest.raises(ModelError, match=message):
        pooling_of(folder, **changes)


def test_refused_modules(folder):
    write_modules(folder)
    file = folder / "modules.json"
    modules = json.loads(file.read_text())
    dense = [*modules[:2], {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}, modules[2]]
    for content, message in (
        (dense, "modules.json: the modules must be Transformer, Pooling and at most Normalize, got .*Pooling, Dense"),
        ({"a": 1}, "modules.json must hold a JSON list of objects"),
        (["a"], "modules.json must hold a JSON list of objects"),
        ([modules[0], {**modules[1], "path": "9"}], re.escape(str(Path("9") / "config.json does not exist"))),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=message):
            read_config(folder / "config.json")


def test_attention_to_later_tokens_is_refused(folder):
    """As in gte-Qwen2, for which transformers attends in both directions."""
    config = json.loads((folder / "config.json").read_text())
    checkpoints.write(folder, {**config, "is_causal": False})
    with pytest.raises(ModelError, match="is_causal must be true"):
        read_config(folder / "config.json")
    checkpoints.write(folder, config)
