"""Folders given in place of an adapter or a model: one error names what is there, and the fix."""

import json
import shutil

import pytest

import jlora
from jlora.cli.commands import run
from jlora.cli.demo import DEMO

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


@pytest.fixture
def adapter(tmp_path):
    return shutil.copytree(DEMO / "adapters" / "sort", tmp_path / "sort")


def emptied(folder, *files):
    for file in folder.iterdir():
        file.unlink()
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).write_bytes(b"{}")
    return folder


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda folder: folder.parent, "this one has adapter_config.json in sort; give the path of such a folder"),
        (lambda folder: folder / WEIGHTS, "sort/adapter_model.safetensors' is a file; expected the folder that holds"),
        (lambda folder: emptied(folder), "this one is empty"),
        (lambda folder: emptied(folder, *"abcde"), "this one holds a, b, c, d, ...$"),
        (lambda folder: emptied(folder, CONFIG, "README.md"), "adapter_model.safetensors: is missing; .*READ"),
        (lambda folder: emptied(folder, WEIGHTS), "adapter_config.json: is missing; .* holds adapter_model.safe"),
    ],
)  # fmt: skip
def test_in_place_of_an_adapter(adapter, make, found):
    with pytest.raises(jlora.AdapterFormatError, match=found):
        jlora.Adapter.from_pretrained(make(adapter))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pointer_of_git_lfs(adapter, name):
    (adapter / name).write_text(POINTER)
    with pytest.raises(jlora.AdapterFormatError, match=f"{name}: is a pointer of Git LFS; .*git lfs pull"):
        jlora.Adapter.from_pretrained(adapter)


def test_a_trainers_checkpoint_with_an_adapter_is_an_adapter(adapter):
    for name in ("trainer_state.json", "optimizer.pt", "rng_state.pth", "tokenizer.json", "config.json"):
        (adapter / name).write_bytes(b"{}")
    assert jlora.Adapter.from_pretrained(adapter).rank == 32


def named(folder):
    config = json.loads((folder / CONFIG).read_text()) | {"base_model_name_or_path": "owner/base"}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (named, "sort is an adapter of owner/base: jlora serve owner/base --lora-modules sort="),
        (lambda folder: (named(folder) / "config.json").write_text("{}") and folder, "is an adapter of owner/base"),
        (lambda folder: folder / WEIGHTS, "is a file; expected the folder of a checkpoint"),
        (lambda folder: emptied(folder, "final/config.json", "x"), "this one has config.json in final; give the path"),
        (lambda folder: emptied(folder), "this one is empty"),
    ],
)
def test_in_place_of_a_model(adapter, make, found, capsys):
    path = make(adapter)
    with pytest.raises(jlora.LoRAError, match=found):
        jlora.models.from_pretrained(path)
    assert run(["inspect", str(DEMO / "adapters" / "sort"), "--model", str(path)]) == 1
    assert found in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_of_git_lfs_pointers(tmp_path, name):
    folder = shutil.copytree(DEMO / "model", tmp_path / "model")
    (folder / name).write_text(POINTER)
    with pytest.raises(jlora.LoRAError, match=f"{name} is a pointer of Git LFS"):
        jlora.models.from_pretrained(folder)
