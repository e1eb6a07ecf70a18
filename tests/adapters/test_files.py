"""Files that change during a read are refused, and the fingerprint identifies the content."""

import contextlib
import os
import re
import shutil
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import save

from jlora.adapters import Adapter
from jlora.adapters.files import StableFile
from jlora.errors import AdapterFormatError
from tests.adapters.conftest import Q, V, lora_tensors
from tests.adapters.reading import before_each_read, reading

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def constant(value, rank=4, width=6):
    return {name: np.full_like(array, value) for name, array in lora_tensors({Q: rank, V: rank}, k=width).items()}


@contextlib.contextmanager
def during(act, at=2):
    """Call `act()` before the `at`-th read of any file. Reads 1 and 2 are the configuration and the header's length."""
    reads, counting = [], threading.Lock()

    def count(offset, size):
        with counting:
            reads.append(offset)
            if len(reads) == at:
                act()

    with before_each_read(count):
        yield
    assert len(reads) >= at


@pytest.fixture(params=["by one thread", "by several"])
def small_pieces(request):
    """Read tensors 64 bytes at a time."""
    with reading(64, part=128, threads=request.param == "by several"):
        yield


def cut(file):
    os.truncate(file, 900)


def grow(file):
    os.truncate(file, file.stat().st_size + 4)


def overwrite(file):
    with open(file, "r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\1\2\3\4")


def replace(file):
    """Move a new file into the place of the old one, as `save_pretrained` does."""
    shutil.copy(file, file.with_suffix(".part"))
    os.replace(file.with_suffix(".part"), file)


def overwrite_and_restore_the_time(file):
    before = file.stat()
    overwrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [cut, grow, os.utime, overwrite, overwrite_and_restore_the_time, replace, os.remove])
@pytest.mark.parametrize("at", [2, 6])
def test_weights_that_change_during_a_read_are_refused(folder_of, small_pieces, change, at):
    folder = folder_of()
    message = r"adapter 'sql': .*changed while it was read"
    with during(lambda: change(folder / WEIGHTS), at), pytest.raises(AdapterFormatError, match=message):
        Adapter.from_pretrained(folder)
    if change not in (cut, grow, os.remove):
        assert Adapter.from_pretrained(folder).modules  # the file no longer changes


def test_a_load_of_a_file_under_rewrite_returns_one_content_or_raises(folder_of):
    """A memory map would end the process here."""
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


def test_pipes_folders_and_missing_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AdapterFormatError, match="here: is not a regular file"):
        StableFile(tmp_path / "pipe", "here")
    with pytest.raises(AdapterFormatError, match="here: is not a regular file"):
        StableFile(tmp_path, "here")
    with pytest.raises(AdapterFormatError, match="here: cannot be read: No such file"):
        StableFile(tmp_path / "none", "here")


def test_the_fingerprint_depends_on_the_bytes_alone(folder_of):
    """Times, inodes, names and the dtype after conversion do not change it."""
    folder = folder_of()
    first = Adapter.from_pretrained(folder).fingerprint
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert Adapter.from_pretrained(folder, name="other").fingerprint == first
    assert Adapter.from_pretrained(folder, dtype="bfloat16").fingerprint == first
    for name in (CONFIG, WEIGHTS):
        os.utime(folder / name)
        replace(folder / name)
    assert Adapter.from_pretrained(folder).fingerprint == first
    overwrite_and_restore_the_time(folder / WEIGHTS)
    assert Adapter.from_pretrained(folder, allow_nonfinite=True).fingerprint != first


def test_every_byte_changes_the_fingerprint(folder_of):
    folder = folder_of()
    seen = {Adapter.from_pretrained(folder).fingerprint}
    data = bytearray((folder / WEIGHTS).read_bytes())
    numbers = range(8 + int.from_bytes(data[:8], "little"), len(data), 4 * 5)
    for at in numbers:  # the low byte of a float32 each
        data[at] ^= 1
        (folder / WEIGHTS).write_bytes(data)
        seen.add(Adapter.from_pretrained(folder).fingerprint)
    (folder / CONFIG).write_text((folder / CONFIG).read_text() + " ")
    seen.add(Adapter.from_pretrained(folder).fingerprint)
    assert len(seen) == 1 + len(numbers) + 1
