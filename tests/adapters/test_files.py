"""Files that change while they are read, and what tells one content from another."""

import os
import re
import shutil
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import save

from jlora import _threads
from jlora.adapters import Adapter, tensor_data
from jlora.adapters.files import StableFile, content_key
from jlora.errors import AdapterFormatError
from tests.adapters.conftest import Q, V, lora_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def constant(value, rank=4, width=6):
    return {name: np.full_like(array, value) for name, array in lora_tensors({Q: rank, V: rank}, k=width).items()}


def during(monkeypatch, act, at=2):
    """Calls `act()` before the `at`-th read of any file (the configuration is the first, the header's length next)."""
    reads, original, counting = [], StableFile.read_into, threading.Lock()

    def read_into(self, offset, buffer):
        with counting:
            reads.append(offset)
            if len(reads) == at:
                act()
        original(self, offset, buffer)

    monkeypatch.setattr(StableFile, "read_into", read_into)
    return reads


@pytest.fixture(params=["by one thread", "by several"])
def small_pieces(request, monkeypatch):
    """Tensors are read 64 bytes at a time, where they would all be read at once."""
    monkeypatch.setattr(tensor_data, "_PIECE", 64)
    if request.param == "by several":
        monkeypatch.setattr(tensor_data, "_PART", 128)
        monkeypatch.setattr(_threads, "_WORTHWHILE", 0)


def cut(file):
    os.truncate(file, 900)


def grow(file):
    with open(file, "ab") as opened:
        opened.write(b"more")


def touch(file):
    os.utime(file)


def overwrite(file):
    with open(file, "r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\1\2\3\4")


def replace(file):
    """What `save_pretrained` does: a new file, moved into the old one's place."""
    shutil.copy(file, file.with_suffix(".part"))
    os.replace(file.with_suffix(".part"), file)


def overwrite_and_restore_the_time(file):
    before = file.stat()
    overwrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [cut, grow, touch, overwrite, overwrite_and_restore_the_time, replace, os.remove])
@pytest.mark.parametrize("at", [2, 3, 4, 6])
def test_weights_that_change_while_they_are_read(folder_of, monkeypatch, small_pieces, change, at):
    folder = folder_of()
    reads = during(monkeypatch, lambda: change(folder / WEIGHTS), at)
    with pytest.raises(AdapterFormatError, match=r"adapter 'sql': .*changed while it was read"):
        Adapter.from_pretrained(folder)
    assert len(reads) >= at
    monkeypatch.undo()
    if change not in (cut, grow, os.remove):
        assert Adapter.from_pretrained(folder).modules  # it holds still now


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_configuration_that_changes_before_the_weights_are_read(folder_of, monkeypatch, small_pieces, at):
    folder = folder_of()
    reads = during(monkeypatch, lambda: grow(folder / CONFIG), at)
    with pytest.raises(AdapterFormatError, match="changed while it was read"):
        Adapter.from_pretrained(folder)
    assert len(reads) >= at


def test_a_file_that_is_rewritten_all_the_time(folder_of):
    """Each load gives one of the contents, or an error; the process survives (a memory map would not let it)."""
    folder = folder_of()
    contents = [save(constant(value, width=4096)) for value in (1, 2, 3)]
    stop = threading.Event()

    def rewrite():
        turn = 0
        while not stop.is_set():
            (folder / WEIGHTS).write_bytes(contents[turn % 3])
            turn += 1
            time.sleep(0.004 * (turn % 4))

    writer = threading.Thread(target=rewrite)
    writer.start()
    outcomes = []
    try:
        for _ in range(60):
            try:
                found = Adapter.from_pretrained(folder).modules
            except AdapterFormatError as error:
                outcomes.append(str(error))
            else:
                values = {float(v) for lora in found.values() for array in (lora.a, lora.b) for v in np.unique(array)}
                assert len(values) == 1
                outcomes.append(values)
    finally:
        stop.set()
        writer.join()
    assert any(isinstance(outcome, str) for outcome in outcomes)


def test_a_pipe_put_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AdapterFormatError, match="here: is not a regular file"):
        StableFile(tmp_path / "pipe", "here")
    with pytest.raises(AdapterFormatError, match="here: is not a regular file"):
        StableFile(tmp_path, "here")
    with pytest.raises(AdapterFormatError, match="here: cannot be read: No such file"):
        StableFile(tmp_path / "none", "here")


def test_no_descriptor_is_left_open(folder_of, monkeypatch):
    folder = folder_of()
    before = len(os.listdir("/proc/self/fd"))
    Adapter.from_pretrained(folder)
    during(monkeypatch, lambda: cut(folder / WEIGHTS))
    for _ in range(3):
        with pytest.raises(AdapterFormatError):
            Adapter.from_pretrained(folder)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- fingerprint


def test_the_fingerprint_is_that_of_the_bytes(folder_of):
    """Not of times, inodes or names, nor of the dtype that they are converted to."""
    folder = folder_of()
    first = Adapter.from_pretrained(folder).fingerprint
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert Adapter.from_pretrained(folder, name="other").fingerprint == first
    assert Adapter.from_pretrained(folder, dtype="bfloat16").fingerprint == first
    for name in (CONFIG, WEIGHTS):
        touch(folder / name)
        replace(folder / name)
    assert Adapter.from_pretrained(folder).fingerprint == first


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_every_byte_is_in_the_fingerprint(folder_of, name):
    folder = folder_of()
    seen = {Adapter.from_pretrained(folder).fingerprint}
    if name == CONFIG:
        (folder / name).write_text((folder / name).read_text() + " ")
        seen.add(Adapter.from_pretrained(folder).fingerprint)
    else:
        data = (folder / name).read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for at in range(begin, len(data), 4):  # the low byte of a float32 each
            changed = bytearray(data)
            changed[at] ^= 1
            (folder / name).write_bytes(changed)
            seen.add(Adapter.from_pretrained(folder).fingerprint)
        assert len(seen) == 1 + (len(data) - begin) // 4
    assert len(seen) > 1


def test_two_changes_within_one_tick_of_the_clock_differ(folder_of):
    """File systems date changes in ticks of milliseconds: the key waits for one to pass."""
    folder = folder_of()
    seen = set()
    for value in range(20):
        with open(folder / WEIGHTS, "r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([value]))
        seen.add(content_key([folder / WEIGHTS]))
    assert len(seen) == 20


def test_an_old_file_is_not_waited_for(folder_of):
    folder = folder_of()
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    start = time.perf_counter()
    for _ in range(100):
        content_key([folder / CONFIG, folder / WEIGHTS])
    assert time.perf_counter() - start < 1.9


@pytest.mark.usefixtures("unchecked_calls")
def test_arrays_have_no_fingerprint():
    assert Adapter.from_arrays("a", {Q: (np.ones((1, 2)), np.ones((3, 1)))}, alpha=1).fingerprint is None


def snapshot(folder, cache, etags):
    home = cache / "models--org--sql" / "snapshots" / "0a1b"
    blobs = cache / "models--org--sql" / "blobs"
    home.mkdir(parents=True)
    blobs.mkdir()
    for name, etag in zip((CONFIG, WEIGHTS), etags, strict=True):
        shutil.copy(folder / name, blobs / etag)
        (home / name).symlink_to(os.path.relpath(blobs / etag, home))
    return home


@pytest.mark.parametrize("of_the_hub", [False, True])
def test_the_fingerprint_of_a_file_rewritten_with_its_time_restored_differs(folder_of, tmp_path, of_the_hub):
    """Also where the file is a blob of Hugging Face's cache, which is named by what it held."""
    folder = folder_of()
    if of_the_hub:
        folder = snapshot(folder, tmp_path / "cache", ["ab" * 20, "cd" * 32])
    first = Adapter.from_pretrained(folder).fingerprint
    overwrite_and_restore_the_time((folder / WEIGHTS).resolve())
    assert Adapter.from_pretrained(folder, allow_nonfinite=True).fingerprint != first


@pytest.mark.parametrize("change", [cut, overwrite])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_blob_that_changes_while_it_is_read(folder_of, tmp_path, monkeypatch, change, name):
    home = snapshot(folder_of(), tmp_path / "cache", ["ab" * 20, "cd" * 32])
    (home / CONFIG).write_text((home / CONFIG).read_text() + " " * 2000)
    during(monkeypatch, lambda: change(home / name), 1 if name == CONFIG else 4)
    with pytest.raises(AdapterFormatError, match=f"{name}: changed while it was read"):
        Adapter.from_pretrained(home)
