"""From a path or a Hugging Face repo id to a local adapter folder whose files are safe to open."""

import os
import re
import stat
from pathlib import Path

from jlora.adapters.peft_config import CONFIG_FILE
from jlora.errors import AdapterFormatError, AdapterNotFoundError

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")


def resolve(path: str | os.PathLike, adapter: str | None = None, revision: str | None = None) -> tuple[Path, str]:
    """Finds an adapter's folder, downloading it from the Hugging Face hub if there is no such local folder.

    Args:
      path: a local folder (`~` is expanded), or a repo id of the form "owner/name".
      adapter: the adapter's name; by default the last part of `path`.
      revision: branch, tag or commit of the repo; a local folder has none and ignores it.

    Returns:
      The folder, and the adapter's name.

    Raises:
      AdapterNotFoundError: no such folder, and no such repo or no way to reach it.
      AdapterFormatError: `path` is a file.
    """
    text = os.fspath(path)
    if adapter is None:
        adapter = os.path.basename(text.rstrip("/")) or text
    where = f"adapter {adapter!r}"
    local = os.path.expanduser(text)
    if text and os.path.isdir(local):
        return Path(local), adapter
    if text and os.path.exists(local):
        raise AdapterFormatError(
            f"{where}: {text!r} is a file; expected the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", text):
        raise AdapterNotFoundError(
            f'{where}: {text!r} does not exist, and is not a Hugging Face repo id of the form "owner/name"'
        )
    return _download(text, adapter, revision), adapter


def _download(repo_id: str, adapter: str, revision: str | None) -> Path:
    import huggingface_hub  # here, because it is slow to import and a local folder does not need it

    try:
        folder = huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]
        )
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through; all mean "not here"
        reason = (str(error).strip().splitlines() or [""])[0]
        at = f" at revision {revision!r}" if revision else ""
        raise AdapterNotFoundError(
            f"adapter {adapter!r}: there is no local folder {repo_id!r}, and it could not be fetched from the "
            f"Hugging Face hub{at}: {type(error).__name__}: {reason}"
        ) from error
    return Path(folder)


def adapter_files(folder: Path, adapter: str) -> tuple[Path, Path]:
    """The configuration and weights files of an adapter folder, checked to be regular files inside it.

    Raises:
      AdapterFormatError: a file is missing, is not a regular file, or is a link that leads out of the folder. The
        links of Hugging Face's cache, from `snapshots/<commit>/` to the same repo's `blobs/`, are let through. If
        only pickled weights are there, they are not opened; the message shows how to convert them.
    """
    weights = folder / WEIGHTS_FILE
    if not os.path.lexists(weights):
        for name in _PICKLE_FILES:
            if (folder / name).exists():
                raise AdapterFormatError(_pickle_message(folder / name, weights, adapter))
    return _checked(folder, CONFIG_FILE, adapter), _checked(folder, WEIGHTS_FILE, adapter)


def _checked(folder: Path, name: str, adapter: str) -> Path:
    file = folder / name
    where = f"adapter {adapter!r}: {file}"
    try:
        home, target = folder.resolve(), file.resolve(strict=True)
        mode = target.stat().st_mode
    except FileNotFoundError as error:
        raise AdapterFormatError(
            f"{where}: is missing; an adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}"
        ) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise AdapterFormatError(f"{where}: cannot be opened: {error}") from error
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    if not target.is_relative_to(home) and not in_cache:
        raise AdapterFormatError(f"{where}: is a link to {target}, outside the adapter folder; copy the file here")
    if not stat.S_ISREG(mode):
        raise AdapterFormatError(f"{where}: is not a regular file")
    return file


def _pickle_message(pickle: Path, weights: Path, adapter: str) -> str:
    code = (
        "import torch, safetensors.torch as s; "
        f"w = torch.load({str(pickle)!r}, map_location='cpu', weights_only=True); "
        f"s.save_file({{k: v.clone().contiguous() for k, v in w.items()}}, {str(weights)!r})"
    ).replace('"', '\\"')
    return (
        f"adapter {adapter!r}: {pickle}: is a pickle file, which can run any code when opened, so it is never opened. "
        f'If you trust it, convert it once:\n  python -c "{code}"'
    )
