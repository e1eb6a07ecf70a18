"""Adapters are found in folders and on the hub, and bad paths are refused. A stand-in replaces the download."""

import contextlib
import os
import shlex
import sys
import types

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jlora.adapters import Adapter
from jlora.adapters.resolve import AdapterFolder, resolve
from jlora.errors import (
    AdapterAccessError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoRAUsageError,
)


@pytest.fixture
def hub(monkeypatch):
    """Replace Hugging Face's client and record its calls.

    `hub.answer` is the folder of the files or the error to raise; `hub.weights` is that of the weights, if it differs.
    """
    state = types.SimpleNamespace(calls=[], answer=None, weights=None, urls=[], away=None)

    def download(repo_id, filename, *, revision, local_files_only):
        state.calls.append((repo_id, filename, revision, local_files_only))
        answer = state.weights if filename == "adapter_model.safetensors" and state.weights else state.answer
        if isinstance(answer, Exception):
            raise answer
        if not (answer / filename).exists():
            raise (LocalEntryNotFoundError if local_files_only else EntryNotFoundError)(f"no {filename}")
        return str(answer / filename)

    def metadata(url):
        state.urls.append(url)
        if state.away is not None:
            raise state.away

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    return state


@pytest.fixture
def no_hub(hub):
    """Fail if the hub is reached."""
    yield
    assert (hub.calls, hub.urls) == ([], [])


def test_a_local_folder_precedes_the_hub(folder_of, no_hub):
    folder = folder_of(name="sql")
    assert resolve(folder) == AdapterFolder(folder, "sql")
    assert resolve(f"{folder}/") == AdapterFolder(folder.parent / "sql", "sql")
    assert Adapter.from_pretrained(str(folder), name="other").name == "other"
    with contextlib.chdir(folder.parent.parent):
        assert Adapter.from_pretrained(f"{folder.parent.name}/sql").name == "sql"


@pytest.mark.parametrize(
    "path",
    [
        *("missing", "./a/b", "/no/such/folder", "a/b/c", "~/x/y", "~x/y", "", "../a", "a/../b", "a\0b", "x" * 5000),
        *("./owner/name", "owner/name/", "/owner/name", "~owner/name", "owner/name/more", "owner//name", ".owner/name"),
        *("öwner/name", "owner/name\n", "owner/\x1b[31mname", "-o/name", "owner/" + "x" * 200, "a\x85b/c/d"),
        *("a\nadapter 'b': all is well", "\x1b[2Jx", "x" * 100_000),
    ],
)
def test_neither_a_folder_nor_a_repo(path, no_hub, tmp_path):
    message = "does not exist, and is not a Hugging Face repo id"
    for name in (None, "sql", path or None):
        with contextlib.chdir(tmp_path), pytest.raises(AdapterNotFoundError, match=message) as raised:
            resolve(path, name)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 1000


@pytest.mark.usefixtures("unchecked_calls")
def test_paths_and_options_of_the_wrong_kind(folder_of, no_hub):
    for path in (3, None, b"folder", ["folder"], 3.0):
        with pytest.raises(LoRAUsageError, match="path must be a string"):
            Adapter.from_pretrained(path)
    for options in ({"name": 3}, {"name": ""}, {"revision": 3}, {"revision": ""}, {"local_only": 1}):
        with pytest.raises(LoRAUsageError, match=next(iter(options))):
            Adapter.from_pretrained(folder_of(), **options)


def test_a_repo_of_the_hub(folder_of, hub):
    hub.answer = folder_of(name="snapshot")
    adapter = Adapter.from_pretrained("org/sql-lora", revision="v2")
    assert adapter.name == "sql-lora"
    # The weights come from the commit of the configuration.
    assert hub.calls == [
        ("org/sql-lora", "adapter_config.json", "v2", False),
        ("org/sql-lora", "adapter_model.safetensors", "snapshot", False),
    ]


def test_files_come_from_the_cache_alone_if_the_hub_is_away(folder_of, hub):
    """A download would time out after minutes."""
    hub.answer, hub.away = folder_of(name="snapshot"), TimeoutError("no response")
    assert Adapter.from_pretrained("org/sql-lora").rank == 4
    assert {call[3] for call in hub.calls} == {True}
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (hub.answer / name).unlink()
        with pytest.raises(AdapterNotFoundError, match=r"could not be fetched.*no response"):
            Adapter.from_pretrained("org/sql-lora", revision="v2")
    assert hub.urls[-1].endswith("/org/sql-lora/resolve/v2/adapter_config.json")


def test_a_cached_commit_needs_no_connection(folder_of, hub):
    hub.answer, commit = folder_of(name="snapshot"), "0123456789" * 4
    assert Adapter.from_pretrained("org/sql-lora", revision=commit).rank == 4
    assert hub.urls == []
    assert {call[3] for call in hub.calls} == {True}
    (hub.answer / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFormatError, match=r"adapter_model\.safetensors: is missing"):
        Adapter.from_pretrained("org/sql-lora", revision=commit)
    assert len(hub.urls) == 1


def answered(cls, status):
    """An error of Hugging Face's client about a response."""
    request = httpx2.Request("GET", "http://hub")
    return cls(f"{status} Client Error", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "cls", "message"),
    [
        (
            answered(GatedRepoError, 403),
            AdapterAccessError,
            "is gated: accept its terms at .*/sql-lora, .*HF_TOKEN",
        ),
        (answered(HfHubHTTPError, 401), AdapterAccessError, "refuses it .*401.*HF_TOKEN"),
        (answered(RepositoryNotFoundError, 404), AdapterNotFoundError, "has no such repository; if it is private"),
        (answered(RevisionNotFoundError, 404), AdapterNotFoundError, "has no revision 'v2'"),
        (OfflineModeIsEnabled("offline"), AdapterNotFoundError, "HF_HUB_OFFLINE forbids a download"),
        (answered(HfHubHTTPError, 503), AdapterUnavailableError, "could not be fetched .*503"),
        (answered(HfHubHTTPError, 429), AdapterUnavailableError, "could not be fetched .*429"),
        (ConnectionError("no route"), AdapterUnavailableError, "could not be fetched .*no route"),
        (TimeoutError("slow"), AdapterUnavailableError, "could not be fetched .*slow"),
    ],
)
def test_errors_of_the_hub_by_cause(hub, error, cls, message):
    hub.away, hub.answer = error, LocalEntryNotFoundError("not in the cache")
    with pytest.raises(AdapterNotFoundError, match=message) as raised:
        Adapter.from_pretrained("org/sql-lora", revision="v2")
    assert type(raised.value) is cls


@pytest.mark.parametrize("path", ["me/sort@v2", "./me/sort"])
def test_a_revision_within_a_path_is_named(path, no_hub, tmp_path):
    with contextlib.chdir(tmp_path), pytest.raises(AdapterNotFoundError) as raised:
        resolve(path)
    assert ("the revision 'v2' is given apart" in str(raised.value)) == (path == "me/sort@v2")


def test_a_revision_of_a_local_folder_is_refused(folder_of, no_hub):
    with pytest.raises(LoRAUsageError, match="is a local folder, which has no revision 'v2'"):
        Adapter.from_pretrained(folder_of(), revision="v2")


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("Cannot find the requested files\nin the disk cache"),
        ConnectionError("no route"),
        TimeoutError(),
        ValueError("anything"),
    ],
)
def test_errors_of_the_hub_are_reported_on_one_line(hub, error):
    hub.answer = error
    with pytest.raises(AdapterNotFoundError) as raised:
        Adapter.from_pretrained("org/sql-lora", revision="v2")
    message = str(raised.value)
    assert "\n" not in message
    assert "no local folder 'org/sql-lora'" in message
    assert "'v2'" in message
    assert type(error).__name__ in message


def test_local_only(folder_of, hub):
    hub.answer = folder_of(name="snapshot")
    assert Adapter.from_pretrained("org/sql-lora", local_only=True).name == "sql-lora"
    (hub.answer / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFormatError, match="is missing"):
        Adapter.from_pretrained("org/sql-lora", local_only=True)
    hub.answer = LocalEntryNotFoundError("Cannot find it\x1b[31m\nin the disk cache")
    with pytest.raises(AdapterNotFoundError, match=r"not in Hugging Face's cache.*local_only forbids") as raised:
        Adapter.from_pretrained("org/sql-lora", local_only=True)
    assert str(raised.value).isprintable()
    assert {call[3:] for call in hub.calls} == {(True,)}


def test_a_repo_without_weights_or_configuration_is_refused(folder_of, hub):
    hub.answer = folder_of(name="snapshot")
    (hub.answer / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterFormatError, match=r"\.safetensors: is missing; .* 'org/sql-lora' .*Pickle files"):
        Adapter.from_pretrained("org/sql-lora")
    (hub.answer / "adapter_config.json").unlink()
    with pytest.raises(AdapterNotFoundError, match=r"repository 'org/sql-lora' has no adapter_config\.json"):
        Adapter.from_pretrained("org/sql-lora")


def test_a_local_load_does_not_import_the_hub_client(folder_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it would raise
    assert Adapter.from_pretrained(folder_of()).rank == 4


def hub_cache(folder, tmp_path, blobs):
    snapshot = tmp_path / "models--org--sql" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (tmp_path / blobs).mkdir(parents=True)
    for i, name in enumerate(("adapter_config.json", "adapter_model.safetensors")):
        (folder / name).rename(tmp_path / blobs / f"blob{i}")
        (snapshot / name).symlink_to(os.path.relpath(tmp_path / blobs / f"blob{i}", snapshot))
    return snapshot


def test_links_of_the_hub_cache_are_followed_into_its_blobs_alone(folder_of, tmp_path):
    snapshot = hub_cache(folder_of(), tmp_path, "models--org--sql/blobs")
    assert Adapter.from_pretrained(snapshot).rank == 4
    snapshot.parent.rename(snapshot.parent.parent / "adapters")  # no snapshot
    with pytest.raises(AdapterFormatError, match="outside the adapter folder"):
        Adapter.from_pretrained(tmp_path / "models--org--sql" / "adapters" / "0a1b")


@pytest.mark.parametrize(
    "beside", [*(f"models--org--sql/{name}" for name in ("elsewhere", "refs", "blobs2")), "models--org--private/blobs"]
)
def test_other_links_of_the_hub_cache_are_refused(folder_of, tmp_path, beside):
    snapshot = hub_cache(folder_of(), tmp_path, beside)
    with pytest.raises(AdapterFormatError, match="outside the adapter folder"):
        Adapter.from_pretrained(snapshot)


def test_links_to_another_snapshot(folder_of, tmp_path):
    folder = hub_cache(folder_of(), tmp_path, "models--org--sql/blobs")
    other = folder.parent / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(f"../other/{file.name}")
    assert Adapter.from_pretrained(other).rank == 4
    with pytest.raises(AdapterFormatError, match="outside the adapter folder"):
        Adapter.from_pretrained(folder)


def test_a_link_to_itself_is_refused(folder_of):
    folder = folder_of()
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to("adapter_config.json")
    with pytest.raises(AdapterFormatError, match=r"adapter_config.json: cannot be opened"):
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
    command = shlex.split(str(raised.value).split("\n")[1])
    assert command[:2] == ["python", "-c"]
    assert "weights_only=True" in command[2]
    compile(command[2], "command", "exec")
    assert str(folder / name) in str(raised.value)
