"""Reading checkpoint folders: the known layouts, and an error for each kind of damage."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jlora.models import ModelError, from_pretrained
from jlora.models.checkpoint import read_skeleton, read_weight
from tests.models import goldens


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the single-file llama checkpoint with tied embeddings."""
    return shutil.copytree(goldens.FOLDER / "llama-tied-linear", tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    return shutil.copytree(goldens.FOLDER / goldens.SHARDED, tmp_path / "sharded")


def edit(folder, change, file="model.safetensors"):
    tensors = load_file(folder / file)
    tensors = change(tensors) or tensors
    save_file(tensors, folder / file)


def params(model):
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in nnx.to_flat_state(nnx.state(model))}


def assert_same(model, other):
    mine, theirs = params(model), params(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_dtypes(dtype):
    """A bfloat16 file read as each dtype: widening is exact, narrowing is one rounding."""
    folder = goldens.FOLDER / goldens.BFLOAT16
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert stored.dtype == ml_dtypes.bfloat16
    model = from_pretrained(folder, dtype=dtype)
    assert {value.dtype for value in params(model).values()} == {np.dtype(dtype)}
    np.testing.assert_array_equal(params(model)["model.norm.scale"], stored.astype(dtype))


def test_names_without_the_model_prefix_and_old_rotary_tables(folder):
    want = from_pretrained(folder)
    edit(folder, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    edit(folder, lambda t: t.update({"layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    assert_same(from_pretrained(folder), want)


def test_tied_head_may_be_stored_twice_if_equal(folder):
    want = from_pretrained(folder)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_same(from_pretrained(folder), want)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        from_pretrained(folder)


def test_home_is_expanded_and_progress_is_reported(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    steps = []
    from_pretrained("~/model", progress=steps.append)
    assert [(step.parameters, step.num_parameters) for step in steps] == [
        (i, len(steps)) for i in range(1, len(steps) + 1)
    ]
    assert [(step.files, step.num_files) for step in steps] == [*[(0, 1)] * (len(steps) - 1), (1, 1)]


def multimodal(folder, prefix):
    """Rewrite a checkpoint of text as one of text and images, with these letters before the names of the text model."""
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": fields}))
    tower = "vision_tower.vision_model" if prefix.endswith("model.model.") else "model.vision_tower"

    def change(tensors):
        renamed = {prefix + name.removeprefix("model."): value for name, value in tensors.items()}
        return renamed | dict.fromkeys((f"{tower}.x.weight", "multi_modal_projector.x"), np.ones(3, np.float32))

    edit(folder, change)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "language_model."])
def test_names_of_multimodal_checkpoints(tmp_path, prefix):
    """Names of transformers before 4.52, since then, and of the trunk alone."""
    folder = shutil.copytree(goldens.FOLDER / "gemma3-tied", tmp_path / "model")
    want = from_pretrained(folder)
    multimodal(folder, prefix)
    assert from_pretrained(folder).config == want.config
    assert_same(from_pretrained(folder), want)


def test_two_spellings_of_a_tensor_are_refused(tmp_path):
    folder = shutil.copytree(goldens.FOLDER / "gemma3-tied", tmp_path / "model")
    multimodal(folder, "model.language_model.")
    edit(folder, lambda t: t.update({"model.norm.weight": np.ones(32, np.float32)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored twice"):
        from_pretrained(folder)


def test_end_tokens_of_the_generation_config_come_first(folder):
    own = from_pretrained(folder).config.eos_token_ids
    for found, want in ((None, own), ([1, 106], (1, 106)), (7, (7,))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": found, "top_k": 64}))
        assert from_pretrained(folder).config.eos_token_ids == want
    (folder / "generation_config.json").write_text('{"eos_token_id": "<eos>"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be an integer"):
        from_pretrained(folder)


Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q) is None, r"1 missing \['model.layers.1.self_attn.q_proj.weight'\], 0 unexpected"),
        (lambda t: t.update(extra=t[Q]), r"0 missing \[\], 1 unexpected \['extra'\]"),
        (lambda t: t.update({Q: t[Q].reshape(-1)}), r"q_proj.weight \[32, 32\], found \[1024\]"),
        (lambda t: t.update({Q: np.zeros((), np.float32)}), r"q_proj.weight \[32, 32\], found \[\]"),
        (lambda t: t.update({GATE: t[GATE].T.copy()}), r"gate_proj.weight \[40, 32\], found \[32, 40\]"),
        (lambda t: t.update({Q: t[Q].astype(np.int8)}), r"q_proj.weight is I8; expected one of"),
        (lambda t: t.update({EMBED: t[EMBED].T.copy()}), r"embed_tokens.weight \[64, 32\], found \[32, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    edit(folder, lambda tensors: change(tensors) and None)
    with pytest.raises(ModelError, match=message):
        from_pretrained(folder)


def test_slices_that_only_fit_together_are_refused(folder):
    """One row moved from query to key keeps the merged shape, and must not load."""

    def move(tensors):
        k = Q.replace("q_proj", "k_proj")
        tensors[k] = np.concatenate([tensors[k], tensors[Q][-1:]])
        tensors[Q] = tensors[Q][:-1].copy()

    edit(folder, move)
    with pytest.raises(ModelError, match=r"q_proj.weight \[32, 32\], found \[31, 32\]"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: (2**60).to_bytes(8, "little") + data[8:],
        lambda data: data[:20] + b"\xff" + data[21:],
    ],
    ids=["empty", "short header", "short data", "huge header", "bad header"],
)
def test_damaged_file(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read as safetensors"):
        from_pretrained(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: maximum recursion"),
        ('{"weight_map": {"x": "a", "x": "b"}, "model_type": "llama"}', "field 'x' is given twice"),
        ("[]", "must hold a JSON object, found a list"),
        ('{"a": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"a": "\xff"}', "is not JSON"),
    ],
)
def test_hostile_json(sharded, file, text, message):
    (sharded / file).write_bytes(text.encode("latin1"))
    with pytest.raises(ModelError, match=f"{file} .*{message}") as caught:
        from_pretrained(sharded)
    assert len(str(caught.value)) < 400


def test_huge_json_is_not_read(folder):
    with open(folder / "config.json", "r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ModelError, match=f"config.json has {2**40} bytes; expected at most"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10_000}, "num_hidden_layers is 10000, and the files hold tensors of 2 layers"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, and the files hold tensors of 2 layers"),
        ({"vocab_size": 2**24, "hidden_size": 2**20}, r"\[16777216, 1048576\], found \[64, 32\]"),
        ({"intermediate_size": 2**20}, r"down_proj.weight \[32, 1048576\], found \[32, 40\]"),
        ({"num_attention_heads": 2**20, "num_key_value_heads": 2**20, "head_dim": 2**20}, "config.json asks for"),
        ({"rope_theta": 5e-324}, "config.json: the rotary embedding"),
    ],
)
def test_sizes_beyond_the_files_are_refused_before_anything_is_allocated(folder, fields, message):
    config = json.loads((folder / "config.json").read_text())
    config = {
        name: value for name, value in config.items() if not (name == "rope_parameters" and "rope_theta" in fields)
    }
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ModelError, match=message):
        from_pretrained(folder)


def test_the_skeleton_has_the_shapes_and_no_weights(folder):
    skeleton, model = read_skeleton(folder), from_pretrained(folder)
    shapes = {path: param.shape for path, param in nnx.to_flat_state(nnx.state(skeleton))}
    assert shapes == {path: param.shape for path, param in nnx.to_flat_state(nnx.state(model))}
    assert {type(leaf) for leaf in jax.tree.leaves(nnx.state(skeleton))} == {jax.ShapeDtypeStruct}
    edit(folder, lambda t: t.update({NORM: np.ones(31, np.float32)}))
    with pytest.raises(ModelError, match=r"model.norm.weight \[32\], found \[31\]"):
        read_skeleton(folder)


def test_one_weight(folder):
    stored = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(read_weight(folder, "lm_head"), stored[EMBED])
    np.testing.assert_array_equal(read_weight(folder, Q.removesuffix(".weight")), stored[Q])
    assert read_weight(folder, "model.layers.9") is None


def test_missing_files(folder, tmp_path):
    with pytest.raises(ModelError, match="nowhere does not exist, and is not"):
        from_pretrained(tmp_path / "nowhere")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"Pickle files \(.bin, .pt\) are never opened"):
        from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: "{}", "weight_map"),
        (lambda i: json.dumps({"weight_map": {"a": 3}}), "must name files of the same folder"),
        (lambda i: json.dumps({"weight_map": {"a": "../a.safetensors"}}), "must name files of the same folder"),
        (lambda i: json.dumps({"weight_map": {"a": "a.safetensors"}}), "a.safetensors that it lists does not exist"),
        (lambda i: i.replace("model.norm.weight", "model.other.weight"), "only in the file .*model.norm.weight"),
    ],
)
def test_damaged_index(sharded, change, message):
    index = sharded / "model.safetensors.index.json"
    index.write_text(change(index.read_text()))
    with pytest.raises(ModelError, match=message):
        from_pretrained(sharded)
