"""Folders given in place of an adapter or a model: one error names what is there, and the fix."""

import json
import shlex
import shutil
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file

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
        (lambda folder: DEMO / "model", "it is the folder of a model, not of an adapter: give it as the model"),
        (lambda folder: folder.parent, "it holds 1 adapter, sort; give the path of one of them"),
        (lambda folder: folder / WEIGHTS, "sort/adapter_model.safetensors' is a file; expected the folder that holds"),
        (lambda folder: emptied(folder), "it is empty"),
        (lambda folder: emptied(folder, "a.gguf", "b"), "it holds a GGUF file, a.gguf; give the PEFT folder"),
        (lambda folder: emptied(folder, CONFIG, "adapters.safetensors"), "it is an adapter of mlx-lm"),
        (lambda folder: emptied(folder, "pytorch_lora_weights.safetensors"), "it is a LoRA of a diffusion model"),
        (lambda folder: emptied(folder, "trainer_state.json", "optimizer.pt"), "it is a checkpoint of a trainer"),
        (lambda folder: emptied(folder, "snapshots/0a1b/adapter_config.json"), "1 adapter, snapshots/0a1b; give"),
        (lambda folder: emptied(folder, CONFIG, "README.md"), "adapter_model.safetensors: is missing; .* it holds "),
        (lambda folder: emptied(folder, WEIGHTS), "adapter_config.json: is missing; .* it holds adapter_model.safe"),
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


@pytest.mark.parity
def test_shards_are_joined_by_the_command_of_the_message(adapter):
    pytest.importorskip("torch")
    tensors = load_file(adapter / WEIGHTS)
    names = sorted(tensors)
    (adapter / WEIGHTS).unlink()
    for i, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, adapter / f"adapter_model-{i + 1:05}-of-00002.safetensors")
    (adapter / "adapter_model.safetensors.index.json").write_text("{}")
    with pytest.raises(jlora.AdapterFormatError, match="its weights are in shards") as raised:
        jlora.Adapter.from_pretrained(adapter)
    python, *arguments = shlex.split(str(raised.value).split("\n")[1])
    assert python == "python"
    subprocess.run([sys.executable, *arguments], check=True, timeout=120)
    assert sorted(load_file(adapter / WEIGHTS)) == names
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
        (lambda folder: emptied(folder, "model.Q4.gguf"), "it holds a GGUF file, model.Q4.gguf"),
        (lambda folder: emptied(folder, "consolidated.00.pth", "params.json"), "in the format of their authors"),
        (lambda folder: emptied(folder, "final/config.json", "final/x"), "it holds 1 model, final; give the path"),
        (lambda folder: emptied(folder), "it is empty"),
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
