"""Resolve a path or a Hugging Face repo id to a local adapter folder with files that are safe to open."""

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from jlora._contents import contents, is_lfs_pointer
from jlora._hub import failure_of, local_folder_of
from jlora.adapters.config_file import CONFIG_FILE
from jlora.adapters.files import in_hub_cache
from jlora.config import LoRARequest
from jlora.errors import (
    AdapterAccessError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoRAUsageError,
    printable,
    shown,
    shown_path,
    shown_value,
)

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth", "pytorch_model.bin")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_PATH = 500
_FAILURES = {"refused": AdapterAccessError, "absent": AdapterNotFoundError, "unreachable": AdapterUnavailableError}


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's folder on this machine.

    Attributes:
      folder: Path of the folder.
      name: Name of the adapter.
      repo_id: Repository on the Hugging Face hub that the folder was downloaded from; None for a local path, and for a
        repository in the local cache with `local_only`.
    """

    folder: Path
    name: str
    repo_id: str | None = None

    @property
    def commit(self) -> str | None:
        """The commit that names a folder of Hugging Face's cache; None for other folders."""
        found = self.folder.parent.name == "snapshots" and _COMMIT.fullmatch(self.folder.name)
        return self.folder.name if found else None


def resolve(
    path: str | os.PathLike[str], adapter: str | None = None, revision: str | None = None, *, local_only: bool = False
) -> AdapterFolder:
    """Find an adapter's folder, or download it from the Hugging Face hub if it is not a local folder.

    Args:
      path: Local folder (`~` is expanded) or a repo id of the form "owner/name". `./x`, `/x`, `~/x` and names of more
        than two parts are never looked up on the hub.
      adapter: Name of the adapter; by default the last part of `path`.
      revision: Branch, tag or commit of the repo; None for a local folder.
      local_only: Look up a repo in Hugging Face's local cache only.

    Raises:
      AdapterNotFoundError: Neither the folder nor the repo exists. An AdapterAccessError if the hub refuses the repo,
        and an AdapterUnavailableError if the hub cannot be reached.
      AdapterFormatError: `path` is a file or cannot be read.
      LoRAUsageError: An argument is of the wrong type, or a revision of a local folder is given.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise LoRAUsageError(f"an adapter's path must be a string or a path of text, got {shown_value(path)}")
    for argument, value in (("name", adapter), ("revision", revision)):
        if value is not None and (not isinstance(value, str) or not value):
            raise LoRAUsageError(f"an adapter's {argument} must be a non-empty string, got {shown_value(value)}")
    if not isinstance(local_only, bool):
        raise LoRAUsageError(f"local_only must be a bool, got {shown_value(local_only)}")
    if adapter is None:
        adapter = os.path.basename(text.rstrip("/")) or text
    where = f"adapter {shown(adapter)}: {shown(text, _MAX_PATH)}"
    try:
        local = local_folder_of(text)
    except FileNotFoundError as error:
        raise AdapterNotFoundError(f"{where} {error.strerror}") from error
    except NotADirectoryError as error:
        folder = Path(os.path.expanduser(text)).parent
        there = f": {shown_path(folder)}" if (folder / CONFIG_FILE).is_file() else ""
        raise AdapterFormatError(
            f"{where} is a file; expected the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}{there}"
        ) from error
    except OSError as error:
        raise AdapterFormatError(f"{where}: cannot be read: {printable(error.strerror or str(error))}") from error
    if local is not None and revision is not None:
        raise LoRAUsageError(
            f"{where} is a local folder, which has no revision {shown(revision)}; leave the revision out"
        )
    if local is not None:
        return AdapterFolder(local, adapter)
    return AdapterFolder(_download(text, adapter, revision, local_only), adapter, None if local_only else text)


def local_folder(request: LoRARequest) -> Path:
    """Return the local folder of a request's adapter, downloaded from the Hugging Face hub if the path is a repo id.

    A resolver can use it to pin a revision, since a downloaded folder is named after its commit.

    Raises:
      AdapterNotFoundError: Neither the folder nor the repo exists. An AdapterAccessError if the hub refuses the repo,
        and an AdapterUnavailableError if the hub cannot be reached.
      AdapterFormatError: The path is a file or cannot be read.
      LoRAUsageError: The path is a local folder, and the request has a revision.
    """
    return resolve(request.path, request.name, request.revision, local_only=request.local_only).folder


def _download(repo_id: str, adapter: str, revision: str | None, local_only: bool) -> Path:
    import huggingface_hub  # imported here: it is slow to import, and local folders do not need it
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    away: Exception | None = None
    try:
        if revision is not None and _COMMIT.fullmatch(revision):  # a commit never changes, so the cache is current
            with contextlib.suppress(LocalEntryNotFoundError):
                files = [
                    huggingface_hub.hf_hub_download(repo_id, name, revision=revision, local_files_only=True)
                    for name in (CONFIG_FILE, WEIGHTS_FILE)
                ]
                return Path(files[0]).parent
        if not local_only:
            # One request with a time limit (HF_HUB_ETAG_TIMEOUT). A download retries for minutes if the hub hangs.
            url = huggingface_hub.hf_hub_url(repo_id, CONFIG_FILE, revision=revision)
            try:
                huggingface_hub.get_hf_file_metadata(url)
            except Exception as error:  # any error, as below; the cache is used instead
                away = error
        cached = local_only or away is not None
        config = huggingface_hub.hf_hub_download(repo_id, CONFIG_FILE, revision=revision, local_files_only=cached)
        folder = Path(config).parent
        try:  # from the same commit
            huggingface_hub.hf_hub_download(repo_id, WEIGHTS_FILE, revision=folder.name, local_files_only=cached)
        except EntryNotFoundError as error:  # reported by `adapter_files`
            if isinstance(error, LocalEntryNotFoundError) and not local_only:  # the hub is unreachable
                raise
    except Exception as caught:  # the client raises errors of several HTTP libraries
        error = away or caught
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise AdapterNotFoundError(
                f"adapter {shown(adapter)}: the repository {repo_id!r} has no {CONFIG_FILE}; expected an adapter of "
                "PEFT in its top folder"
            ) from error
        if local_only:
            at = f" at revision {revision!r}" if revision else ""
            kind, how = "absent", f"it is not in Hugging Face's cache{at}, and local_only forbids to use the network"
        else:
            kind, how = failure_of(repo_id, revision, error)
        raise _FAILURES[kind](
            printable(f"adapter {shown(adapter)}: there is no local folder {repo_id!r}, and {how}")
        ) from error
    return folder


def adapter_files(found: AdapterFolder) -> tuple[Path, Path]:
    """Return the paths of an adapter's configuration and weights, checked to be regular files in its folder.

    Raises:
      AdapterFormatError: A file is missing, is not a regular file, or is a link out of the folder. Links of Hugging
        Face's cache, from `snapshots/<commit>/` to the same repo's `blobs/`, are accepted. Pickled weights are never
        opened; if the folder has only these, the message shows how to convert them.
    """
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not os.path.lexists(found.folder / name)]
    if missing:
        pickled = next((name for name in _PICKLE_FILES if os.path.isfile(found.folder / name)), None)
        if pickled is not None and WEIGHTS_FILE in missing:
            raise _pickled(found, pickled)
        if found.repo_id is None:
            instead = contents(found.folder, CONFIG_FILE)
        else:
            instead = (
                f"the repository {found.repo_id!r} has no such file. Pickle files (.bin, .pt) are never opened; for an "
                "adapter in one, load it with PEFT and save it with save_pretrained, which writes safetensors"
            )
        where = f"adapter {shown(found.name)}: {shown_path(found.folder / missing[0])}"
        raise AdapterFormatError(
            f"{where}: is missing; an adapter folder holds {CONFIG_FILE} and {WEIGHTS_FILE}, and {instead}"
        )
    return _checked(found.folder, CONFIG_FILE, found.name), _checked(found.folder, WEIGHTS_FILE, found.name)


def _checked(folder: Path, name: str, adapter: str) -> Path:
    file = folder / name
    where = f"adapter {shown(adapter)}: {shown_path(file)}"
    try:
        home, target = folder.resolve(), file.resolve(strict=True)
        mode = target.stat().st_mode
        pointer = stat.S_ISREG(mode) and is_lfs_pointer(target)
    except FileNotFoundError as error:
        raise AdapterFormatError(f"{where}: is missing: a link to a file that does not exist") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise AdapterFormatError(f"{where}: cannot be opened: {printable(str(error))}") from error
    if not target.is_relative_to(home) and not in_hub_cache(folder, target):
        raise AdapterFormatError(
            f"{where}: is a link to {shown_path(target)}, outside the adapter folder; copy the file here"
        )
    if not stat.S_ISREG(mode):
        raise AdapterFormatError(f"{where}: is not a regular file")
    if pointer:
        raise AdapterFormatError(f"{where}: is a pointer of Git LFS; fetch the file: git lfs pull, in the folder")
    return file


def _pickled(found: AdapterFolder, name: str) -> AdapterFormatError:
    code = (
        "import torch, safetensors.torch as s; "
        f"w = torch.load({str(found.folder / name)!r}, map_location='cpu', weights_only=True); "
        f"s.save_file({{k: v.clone().contiguous() for k, v in w.items()}}, {str(found.folder / WEIGHTS_FILE)!r})"
    ).replace('"', '\\"')
    return AdapterFormatError(
        f"adapter {shown(found.name)}: {shown_path(found.folder / name)}: is a pickle file, which can run any code "
        f'when opened, so it is never opened. If you trust it, convert it once:\n  python -c "{code}"'
    )
