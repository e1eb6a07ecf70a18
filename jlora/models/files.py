"""The files of a Hugging Face checkpoint: their names, and their download from the hub."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jlora._contents import ADAPTER_CONFIG, contents, is_lfs_pointer
from jlora._hub import failure_of, local_folder_of
from jlora.errors import printable
from jlora.models.config import read_config
from jlora.models.json_file import ModelError, read_json
from jlora.models.pooling import MODULES, PROMPTS, SETTINGS

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of the tokenizer, the chat template and the tokens that end a text, as `jlora serve` reads them.
_OF_TEXT = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)
# Of sentence-transformers, whose `modules.json` has the folder of the pooling.
_OF_EMBEDDINGS = (MODULES, SETTINGS, PROMPTS, "*_Pooling/config.json")


def model_folder(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the local folder of a checkpoint, downloaded from the Hugging Face hub if the path is a repo id.

    Only the configuration, the tokenizer, the chat template and the safetensors files of the model are downloaded, into
    Hugging Face's cache (`HF_HOME`). `HF_HUB_OFFLINE`, `HF_ENDPOINT` and tokens have the same effect as in other
    programs. A model that the decoder does not serve is refused before its weights are downloaded.

    Args:
      path: Checkpoint folder (`~` is expanded) or a repo id of the form "owner/name". A path that exists, `./x`, `/x`,
        `~/x` and names of more than two parts are never looked up on the hub.
      revision: Branch, tag or commit of the repo; None for a local folder.

    Raises:
      ModelError: The folder does not exist, or is given with a revision; the repo does not exist, is gated, cannot be
        reached or is not in the cache; or its configuration is not supported.
    """
    local = _local(path, revision)
    return _download(os.fspath(path), revision) if local is None else _checked(local, os.fspath(path))


def config_folder(path: str | os.PathLike[str], revision: str | None = None) -> tuple[Path, bool]:
    """Return a folder with the configuration of a checkpoint, and True if it is a local one, with the weights.

    Of a repo id, the weights are not downloaded. Arguments and errors are those of `model_folder`.
    """
    local = _local(path, revision)
    if local is None:
        return _without_weights(os.fspath(path), revision), False
    return _checked(local, os.fspath(path)), True


def _checked(folder: Path, given: str) -> Path:
    """Return the folder. Raise ModelError if it holds an adapter, or anything else that is no checkpoint of a model."""
    for name in (CONFIG, *_OF_TEXT):
        if (folder / name).is_file() and is_lfs_pointer(folder / name):
            raise ModelError(f"{folder / name} is a pointer of Git LFS; fetch the file: git lfs pull, in the folder")
    if (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return folder
    if (config := folder / ADAPTER_CONFIG).is_file():
        found = read_json(config).get("base_model_name_or_path")
        base = found if isinstance(found, str) and found else "MODEL"
        raise ModelError(
            printable(f"{given} is an adapter of {base}: jlora serve {base} --lora-modules {folder.name}={given}")
        )
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder / CONFIG} does not exist; expected the folder of a Hugging Face checkpoint, and "
            + contents(folder, CONFIG)
        )
    return folder


def _local(path: str | os.PathLike[str], revision: str | None) -> Path | None:
    """Return the local folder that a path names, or None if it is a repo id."""
    text = os.fspath(path)
    try:
        local = local_folder_of(text)
    except FileNotFoundError as error:
        raise ModelError(f"model {text} {error.strerror}") from error
    except NotADirectoryError as error:
        raise ModelError(
            f"model {text} is a file; expected the folder of a checkpoint with {CONFIG} and safetensors files in it"
        ) from error
    except OSError as error:
        raise ModelError(f"model {text} cannot be read: {error.strerror or error}") from error
    if local is not None and revision is not None:
        raise ModelError(f"model {text} is a local folder, which has no revision {revision!r}; leave the revision out")
    return local


def weight_map(index: Path) -> Mapping[str, str]:
    """Return tensor name -> file of the same folder, from `model.safetensors.index.json`."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict):
        raise ModelError(f"{index} must be a JSON object with an object weight_map in it, got {found!r:.80}")
    for name, file in found.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ModelError(f"{index}: weight_map must name files of the same folder, got {name!r:.80}: {file!r:.80}")
    return found


def _snapshot(repo_id: str, files: Sequence[str], revision: str | None) -> Path:
    import huggingface_hub  # imported here: it is slow to import, and local folders do not need it

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the client raises errors of several HTTP libraries
        raise _failed(repo_id, revision, error) from error


def embedding_files(repo_id: str, revision: str) -> Path:
    """Return a folder with the files of sentence-transformers that a repo has, downloaded from the hub.

    Raises:
      ModelError: The repo cannot be reached.
    """
    return _snapshot(repo_id, _OF_EMBEDDINGS, revision)


def _without_weights(repo_id: str, revision: str | None) -> Path:
    """Download the files of a model other than its weights, and refuse a model that the decoder does not serve."""
    from huggingface_hub import constants

    folder = _snapshot(repo_id, [CONFIG, INDEX, *_OF_TEXT, *_OF_EMBEDDINGS], revision)
    if not (folder / CONFIG).is_file():
        if constants.HF_HUB_OFFLINE:  # older clients return an incomplete folder
            raise _failed(repo_id, revision, FileNotFoundError(f"{CONFIG} is missing"))
        _checked(_snapshot(repo_id, [ADAPTER_CONFIG], folder.name), repo_id)
    read_config(folder / CONFIG)
    return folder


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import constants

    folder = _without_weights(repo_id, revision)
    weights = sorted(set(weight_map(folder / INDEX).values())) if (folder / INDEX).is_file() else [SINGLE]
    folder = _snapshot(repo_id, weights, folder.name)  # of the same commit
    missing = [name for name in weights if not (folder / name).is_file()]
    if missing and constants.HF_HUB_OFFLINE:  # older clients return an incomplete folder
        raise _failed(repo_id, revision, FileNotFoundError(f"{missing[0]} is missing"))
    return folder


def _failed(repo_id: str, revision: str | None, error: Exception) -> ModelError:
    """Return the error of a failed download, of one line with the fix."""
    how = failure_of(repo_id, revision, error)[1]
    return ModelError(printable(f"model {repo_id}: there is no local folder of this name, and {how}"))
