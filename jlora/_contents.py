"""Describe the files of a folder that lacks the expected ones, with the fix, for adapters and models."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jlora.errors import printable

ADAPTER_CONFIG = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/"
_SHARD = re.compile(r"adapter_model-\d+-of-\d+\.safetensors")
_MODELS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TRAINER = ("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt")
_MOST = 1000
_SHOWN = 4


def is_lfs_pointer(file: Path) -> bool:
    """Return True if a file is the short text by which Git LFS stands for a file that it has not fetched."""
    with open(file, "rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def names_in(folder: Path) -> list[str]:
    """Return the names of up to 1,000 files in a folder and two levels below it, relative to it, with `/`."""
    found: list[str] = []
    for name in _walk(folder, "", 2):
        found.append(name)
        if len(found) == _MOST:
            break
    return sorted(found)


def _walk(folder: Path, prefix: str, deeper: int) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    if deeper:
                        yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", deeper - 1)
                else:
                    yield prefix + entry.name
    except OSError:  # it only makes a message clearer
        return


def instead_of_adapter(names: Sequence[str], folder: str) -> str:
    """Return the contents of a folder that is not one adapter, and the fix.

    Args:
      names: Names of its files, relative to it.
      folder: Its path, for commands.
    """
    top = {name for name in names if "/" not in name}
    below = _parents(names, ADAPTER_CONFIG)
    if any(map(_SHARD.fullmatch, top)):
        code = (
            "import glob, safetensors.torch as s; "
            f"s.save_file({{k: v for f in glob.glob({folder + '/adapter_model-*.safetensors'!r}) "
            f"for k, v in s.load_file(f).items()}}, {folder + '/adapter_model.safetensors'!r})"
        ).replace('"', '\\"')
        return f'its weights are in shards, which PEFT does not read either; join them once:\n  python -c "{code}"'
    if "adapters.safetensors" in top or "adapters.npz" in top:
        return "it is an adapter of mlx-lm, whose format differs from PEFT's; convert it to PEFT's format"
    if "pytorch_lora_weights.safetensors" in top:
        return "it is a LoRA of a diffusion model (diffusers), which jlora does not serve"
    if ggufs := [name for name in top if name.endswith(".gguf")]:
        return f"it holds a GGUF file, {_listed(ggufs)}; give the PEFT folder that it was converted from"
    if ADAPTER_CONFIG not in top and not top.isdisjoint(_MODELS):
        return "it is the folder of a model, not of an adapter: give it as the model, jlora serve " + folder
    if below:
        return f"it holds {_counted(below, 'adapter')}, {_listed(below)}; give the path of one of them"
    if not top.isdisjoint(_TRAINER):
        return (
            f"it is a checkpoint of a trainer without an adapter ({_listed(sorted(top & set(_TRAINER)))}); save the "
            "adapter with PEFT's save_pretrained"
        )
    return _holds(names)


def instead_of_model(names: Sequence[str]) -> str:
    """Return the contents of a folder that is not the checkpoint of a model, and the fix."""
    top = {name for name in names if "/" not in name}
    if ggufs := [name for name in top if name.endswith(".gguf")]:
        return f"it holds a GGUF file, {_listed(ggufs)}; give the checkpoint in safetensors that it was converted from"
    if not top.isdisjoint(("params.json", "consolidated.00.pth", "consolidated.safetensors")):
        return "it holds the weights in the format of their authors; give the checkpoint in the format of transformers"
    if below := _parents(names, "config.json"):
        return f"it holds {_counted(below, 'model')}, {_listed(below)}; give the path of one of them"
    return _holds(names)


def _parents(names: Iterable[str], file: str) -> list[str]:
    return [name.removesuffix(f"/{file}") for name in names if name.endswith(f"/{file}")]


def _counted(found: Sequence[str], what: str) -> str:
    return f"{len(found)} {what}{'s' if len(found) > 1 else ''}"


def _holds(names: Sequence[str]) -> str:
    return f"it holds {_listed(names)}" if names else "it is empty"


def _listed(names: Sequence[str]) -> str:
    return printable(", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else ""))
