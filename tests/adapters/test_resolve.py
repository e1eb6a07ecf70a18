"""Where an adapter is found, and what is refused before a file is opened. No network: the download is replaced."""

import os
import shutil
import sys
import types

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from jlora.adapters import Adapter
from jlora.adapters.resolve import Found, resolve
from jlora.errors import AdapterFormatError, AdapterNotFoundError


@pytest.fixture
def no_hub(monkeypatch):
    def download(*args, **kwargs):
        raise AssertionError(f"the hub was asked for {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.fixture
def hub(monkeypatch):
    """Records calls; `hub.answer` is the folder to give back or the error to raise."""
    state = types.SimpleNamespace(calls=[], answer=None)

    def download(repo_id, *, revision, allow_patterns, local_files_only):
        state.calls.append((repo_id, revision, sorted(allow_patterns), local_files_only))
        if isinstance(state.answer, Exception):
            raise state.answer
        return str(state.answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return state


def test_local_folder(folder_of, no_hub):
    folder = folder_of(name="sql")
    assert resolve(folder) == Found(folder, "sql")
    assert resolve(f"{folder}/") == Found(folder.parent / "sql", "sql")
    assert Adapter.from_pretrained(str(folder), name="other").name == "other"


def test_home(folder_of, monkeypatch, no_hub):
    folder = folder_of(name="sql")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert Adapter.from_pretrained("~/sql").name == "sql"


def test_relative_folder_beats_the_hub(folder_of, monkeypatch, no_hub):
    folder = folder_of(name="sql")
    monkeypatch.chdir(folder.parent.parent)
    assert Adapter.from_pretrained(f"{folder.parent.name}/sql").name == "sql"


@pytest.mark.parametrize(
    "path", ["missing", "./a/b", "/no/such/folder", "a/b/c", "~/x/y", "", "../a", "a/../b", "a\0b", "x" * 5000]
)
def test_neither_a_folder_nor_a_repo(path, no_hub):
    with pytest.raises(AdapterNotFoundError, match="does not exist, and is not a Hugging Face repo id"):
        resolve(path, "sql")


def test_a_file(folder_of, no_hub):
    file = folder_of() / "adapter_config.json"
    with pytest.raises(AdapterFormatError, match="is a file; expected the folder"):
        resolve(file, "sql")


def test_hub(folder_of, hub):
    hub.answer = folder_of(name="snapshot")
    adapter = Adapter.from_pretrained("org/sql-lora", revision="v2")
    assert adapter.name == "sql-lora"
    assert hub.calls == [("org/sql-lora", "v2", ["adapter_config.json", "adapter_model.safetensors"], False)]


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("Cannot find the requested files\nin the disk cache"),
        OfflineModeIsEnabled("offline"),
        ConnectionError("no route"),
        TimeoutError(),
        ValueError("anything"),
    ],
)
def test_hub_out_of_reach(hub, error):
    hub.answer = error
    with pytest.raises(AdapterNotFoundError) as raised:
        Adapter.from_pretrained("org/sql-lora", revision="v2")
    message = str(raised.value)
    assert "\n" not in message
    assert "no local folder 'org/sql-lora'" in message
    assert "'v2'" in message
    assert type(error).__name__ in message


def test_hub_is_imported_only_when_asked(folder_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it would raise
    assert Adapter.from_pretrained(folder_of()).rank == 4


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_file(folder_of, name):
    folder = folder_of()
    (folder / name).unlink()
    with pytest.raises(AdapterFormatError, match=f"{name}: is missing"):
        Adapter.from_pretrained(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("relative", [True, False])
def test_link_out_of_the_folder(folder_of, tmp_path, name, relative):
    folder = folder_of()
    outside = tmp_path / "outside" / name
    outside.parent.mkdir()
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(os.path.join("..", "outside", name) if relative else outside)
    with pytest.raises(AdapterFormatError, match=f"{name}: is a link to .*outside the adapter folder"):
        Adapter.from_pretrained(folder)


def test_link_within_the_folder(folder_of):
    folder = folder_of()
    (folder / "adapter_model.safetensors").rename(folder / "step-10.safetensors")
    (folder / "adapter_model.safetensors").symlink_to("step-10.safetensors")
    assert Adapter.from_pretrained(folder).rank == 4


def test_folder_that_is_itself_a_link(folder_of, tmp_path):
    (tmp_path / "latest").symlink_to(folder_of(), target_is_directory=True)
    assert Adapter.from_pretrained(tmp_path / "latest").name == "latest"


def hub_cache(folder, tmp_path, blobs):
    snapshot = tmp_path / "models--org--sql" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (tmp_path / blobs).mkdir(parents=True)
    for i, name in enumerate(("adapter_config.json", "adapter_model.safetensors")):
        (folder / name).rename(tmp_path / blobs / f"blob{i}")
        (snapshot / name).symlink_to(os.path.relpath(tmp_path / blobs / f"blob{i}", snapshot))
    return snapshot


def test_links_of_the_hub_cache(folder_of, tmp_path):
    snapshot = hub_cache(folder_of(), tmp_path, "models--org--sql/blobs")
    assert Adapter.from_pretrained(snapshot).rank == 4


def test_links_to_another_repo_of_the_hub_cache(folder_of, tmp_path):
    snapshot = hub_cache(folder_of(), tmp_path, "models--org--private/blobs")
    with pytest.raises(AdapterFormatError, match="outside the adapter folder"):
        Adapter.from_pretrained(snapshot)


def test_link_to_itself(folder_of):
    folder = folder_of()
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to("adapter_config.json")
    with pytest.raises(AdapterFormatError, match=r"adapter_config.json: cannot be opened"):
        Adapter.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_not_a_regular_file(folder_of, kind):
    folder = folder_of()
    file = folder / "adapter_config.json"
    file.unlink()
    file.mkdir() if kind == "folder" else os.mkfifo(file)
    with pytest.raises(AdapterFormatError, match="is not a regular file"):
        Adapter.from_pretrained(folder)


class Bomb:
    def __reduce__(self):
        return (os._exit, (1,))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_never_opened(folder_of, name):
    import pickle

    folder = folder_of()
    (folder / "adapter_model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(AdapterFormatError, match="pickle") as raised:
        Adapter.from_pretrained(folder)
    assert 'python -c "import torch' in str(raised.value)
    assert str(folder / name) in str(raised.value)


def test_a_pickle_beside_safetensors_is_ignored(folder_of):
    folder = folder_of()
    (folder / "adapter_model.bin").write_bytes(b"anything")
    assert Adapter.from_pretrained(folder).rank == 4
