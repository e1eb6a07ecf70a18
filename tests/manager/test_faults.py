"""Disks that fail or are full, processes that are killed, and files that lie: nothing wrong served, nothing lost."""

import errno
import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jlora
from jlora.manager import saved_content, saved_names
from tests.manager.test_saved import as_new, infos, request
from tests.manager.tiny import make_adapter

ROOT = Path(__file__).parents[2]


def refused(call, *args):
    """The LoRAError that a call raises, if it does."""
    try:
        call(*args)
    except jlora.LoRAError as error:
        return error
    return None


# --- loading --------------------------------------------------------------------------------------------------------


class _Fails:
    """Calls of `os` that read below a folder; the nth of them fails, and so do those after it if it `stays` broken."""

    def __init__(self, monkeypatch, folder, n, stays):
        self.calls, self.failed = 0, False
        self._folder, self._n, self._stays, self._opened = str(folder), n, stays, set()
        for name in ("open", "stat", "lstat", "fstat", "preadv", "scandir", "readlink"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real):
        def call(path, *args, **kwargs):
            ours = path in self._opened if isinstance(path, int) else self._folder in os.fspath(path)
            if ours:
                self.calls += 1
                if self.calls == self._n or (self._stays and self.calls > self._n):
                    self.failed = True
                    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            found = real(path, *args, **kwargs)
            if ours and real.__name__ == "open":
                self._opened.add(found)
            return found

        return call


@pytest.mark.parametrize("stays", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_disk_fails_on_the_nth_read(world, tmp_path, monkeypatch, stays):
    """For every n: an error that says where, others go on being served, and a later try works."""
    good, bad = request(tmp_path / "good", "good"), request(tmp_path / "bad", "bad")
    world.manager.add_adapter(good)
    want = world.serve(["good", None, None])
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for n in itertools.count(1):
        with monkeypatch.context() as patched:
            disk = _Fails(patched, tmp_path / "bad", n, stays)
            error = refused(world.manager.add_adapter, bad)
        if error is not None:
            assert disk.failed
            assert "adapter 'bad'" in str(error)
            assert str(tmp_path / "bad") in str(error)
            assert list(world.manager.list_adapters()) == ["good"]
            np.testing.assert_array_equal(world.serve(["good", None, None]), want)
        there = "bad" in world.manager.list_adapters()
        assert world.manager.add_adapter(bad) != there
        world.check(world.serve(["good", "bad", None]), [make_adapter("good"), make_adapter("bad"), None])
        world.manager.remove_adapter("bad")
        if not disk.failed:
            break
    assert n > 10
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) <= open_files


# --- saving ---------------------------------------------------------------------------------------------------------


def two_states(world, folder):
    """Save one, and go on to another. What each of them shows."""
    world.manager.add_adapter(make_adapter("a"))
    world.manager.add_adapter(make_adapter("b"))
    world.manager.save(folder)
    before = infos(world)
    world.manager.add_adapter(make_adapter("a", 1), load_inplace=True)
    world.manager.add_adapter(make_adapter("c"))
    world.manager.pin_adapter("c")
    world.manager.remove_adapter("b")
    return before, infos(world)


@pytest.mark.parametrize("call", [pytest.param("fsync", marks=pytest.mark.slow), "replace", "rename"])
def test_a_disk_is_full_at_the_nth_call(world, tmp_path, monkeypatch, call):
    """For every n: an error, the old state or the new one is there, and nothing of the other is left over."""
    _, after = two_states(world, tmp_path)
    names = (tmp_path / "names.json").read_bytes()
    real = getattr(os, call)
    for n in itertools.count(1):
        with monkeypatch.context() as patched:
            calls = itertools.count(1)

            def full(*args, at=n, calls=calls, **kwargs):
                if next(calls) == at:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args, **kwargs)

            patched.setattr(os, call, full)
            error = refused(world.manager.save, tmp_path)
        if error is None:
            break
        assert "No space left on device" in str(error)
        assert str(tmp_path) in str(error)
        assert len(list((tmp_path / "contents").iterdir())) == 2
        if (tmp_path / "names.json").read_bytes() != names:  # all but the last sync
            assert call == "fsync"
            break
    assert n > 1
    as_new(world).manager.restore(tmp_path)
    assert infos(world) == after


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Orbax's own threads
@pytest.mark.parametrize("most", [0, 100, 600])
def test_files_cannot_grow(world, tmp_path, most):
    """Wherever the bytes end, in what Orbax writes or in names.json."""
    before, _ = two_states(world, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(jlora.LoRAError, match="could not be saved"):
            world.manager.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(list((tmp_path / "contents").iterdir())) == 2
    as_new(world).manager.restore(tmp_path)
    assert infos(world) == before


@pytest.mark.slow
def test_killed_while_it_saves(tmp_path):
    """At every call that opens, renames, makes, deletes or syncs something, and at many moments in between."""
    command = [sys.executable, "-m", "tests.manager.save_process", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["points"] > 30
    assert found["old"] > 10
    assert found["new"] > 1
    assert found["old"] + found["new"] == found["killed"]


# --- files that lie -------------------------------------------------------------------------------------------------


def spoil_truncated(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def spoil_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def spoil_gone(file):
    file.unlink()


def spoil_empty(file):
    file.write_bytes(b"")


SPOIL = [spoil_truncated, spoil_bit, spoil_gone, spoil_empty]


@pytest.mark.parametrize("spoil", SPOIL)
@pytest.mark.parametrize("which", ["adapter/0", "adapter/.zarray", "_METADATA"])
def test_weights_that_lie(world, tmp_path, spoil, which):
    """Refused, or read as they were: what Orbax keeps beside the weights may have bits that mean nothing."""
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    before = infos(world)
    (folder,) = (tmp_path / "contents").iterdir()
    spoil(folder / which)
    as_new(world)
    error = refused(world.manager.restore, tmp_path)
    if error is None:
        assert which in ("adapter/.zarray", "_METADATA")
        assert infos(world) == before
        world.check(world.serve(["a", None, None]), [make_adapter("a"), None, None])
        return
    assert isinstance(error, jlora.AdapterFormatError)
    assert str(folder) in str(error)
    assert "adapter 'a'" in str(error)
    assert world.held()[:2] == ((), (None, None))
    assert world.manager._cache.last == {}


def test_weights_of_another_name(world, tmp_path):
    """A folder in the place of another is not what its name says."""
    for name in "ab":
        world.manager.add_adapter(make_adapter(name))
    world.manager.save(tmp_path)
    one, other = (tmp_path / "contents").iterdir()
    one.rename(tmp_path / "x")
    other.rename(one)
    (tmp_path / "x").rename(other)
    as_new(world)
    with pytest.raises(jlora.AdapterFormatError, match="SHA-256 is not the one that it is named by"):
        world.manager.restore(tmp_path)


def test_an_array_that_promises_more_than_there_is(world, tmp_path):
    """It is not allocated."""
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    (folder,) = (tmp_path / "contents").iterdir()
    said = json.loads((folder / "adapter" / ".zarray").read_text())
    said["shape"] = [10**15]
    (folder / "adapter" / ".zarray").write_text(json.dumps(said))
    as_new(world)
    with pytest.raises(jlora.AdapterFormatError, match="adapter 'a'"):
        world.manager.restore(tmp_path)


@pytest.mark.parametrize("spoil", [spoil_truncated, spoil_bit, spoil_empty])
def test_names_that_lie(world, tmp_path, spoil):
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    spoil(tmp_path / "names.json")
    for call in (world.manager.save, as_new(world).manager.restore):  # nor is it overwritten
        with pytest.raises(jlora.AdapterFormatError, match=r"names\.json"):
            call(tmp_path)
    assert len(list((tmp_path / "contents").iterdir())) == 1


LIES = {
    "a name twice": lambda said: said["adapters"].append(said["adapters"][0]),
    "a name that is evicted too": lambda said: said["evicted"].append({"name": "a", "path": "x"}),
    "a version below zero": lambda said: said["adapters"][0].update(version=-1),
    "a version above the last": lambda said: said["adapters"][0].update(version=7),
    "a version that is no number": lambda said: said["adapters"][0].update(version=True),
    "a name without version": lambda said: said["versions"].clear(),
    "a name that is none": lambda said: said["adapters"][0].update(name=""),
    "weights elsewhere": lambda said: said["adapters"][0].update(weights="../../etc"),
    "neither weights nor request": lambda said: said["adapters"][0].update(weights=None),
    "a request for another": lambda said: said["adapters"][0].update(request={"name": "b", "path": "x"}),
    "a request of other fields": lambda said: said["evicted"].append({"name": "z", "path": "x", "run": "rm"}),
    "a request without a path": lambda said: said["evicted"].append({"name": "z", "path": ""}),
    "a request of an empty revision": lambda said: said["evicted"].append({"name": "z", "path": "x", "revision": ""}),
    "a slot of nobody": lambda said: said["slots"].append("z"),
    "a slot twice": lambda said: said.update(slots=["a", "a"]),
    "no list": lambda said: said.update(adapters=3),
    "nothing": lambda said: said.clear(),
}


@pytest.mark.parametrize("what", LIES)
def test_names_that_make_no_sense(world, tmp_path, what):
    """Their digest is right: somebody wrote them so."""
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    found = json.loads((tmp_path / "names.json").read_text())
    LIES[what](found["saved"])
    found["sha256"] = saved_names._digest(found["saved"])
    (tmp_path / "names.json").write_text(json.dumps(found))
    as_new(world)
    with pytest.raises(jlora.AdapterFormatError, match=r"names\.json: is not what a manager saves"):
        world.manager.restore(tmp_path)
    assert world.held()[:2] == ((), (None, None))


def of_first(index, value):
    """Say something else of the first placement."""

    def lie(said, factors):
        said["placements"][0][index] = value
        return factors

    return lie


def no_placements(said, factors):
    said["placements"].clear()
    return b""


def no_fields(said, factors):
    said["adapter"] = []
    return factors


CONTENT_LIES = {
    "no fields": no_fields,
    "no placements": no_placements,
    "an alpha that no float holds": of_first(6, 10**400),
    "a scaling that no float holds": of_first(7, 10**400),
    "a slice that is not there": of_first(3, 9),
}


@pytest.mark.parametrize("what", CONTENT_LIES)
def test_weights_that_make_no_sense(world, tmp_path, what):
    """Their digests are right, too."""
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    contents = tmp_path / "contents"
    (folder,) = contents.iterdir()
    whole = saved_content._read("", folder).tobytes()
    end = len(whole) - saved_content._TRAILER
    start = end - int.from_bytes(whole[end:], "little")
    said = json.loads(whole[start:end])
    factors = CONTENT_LIES[what](said, whole[:start])
    about = json.dumps(said).encode()
    whole = factors + about + len(about).to_bytes(saved_content._TRAILER, "little")
    digest = hashlib.sha256(whole).hexdigest()
    with saved_content._orbax(contents / digest, "") as checkpointer:
        checkpointer.save(contents / digest, {"adapter": np.frombuffer(whole, np.uint8)})
    found = json.loads((tmp_path / "names.json").read_text())
    found["saved"]["adapters"][0]["weights"] = digest
    found["sha256"] = saved_names._digest(found["saved"])
    (tmp_path / "names.json").write_text(json.dumps(found))
    as_new(world)
    with pytest.raises(jlora.AdapterFormatError, match=r"adapter 'a': .*is not a saved adapter"):
        world.manager.restore(tmp_path)
    assert world.held()[:2] == ((), (None, None))


@pytest.mark.parametrize("text", ["[]", "null", "3", '{"format": 2}', '{"format": 1}', "[" * 5000, "\x00", "{}"])
def test_names_of_another_kind(world, tmp_path, text):
    (tmp_path / "names.json").write_text(text)
    as_new(world)
    with pytest.raises(jlora.AdapterFormatError, match=r"names\.json"):
        world.manager.restore(tmp_path)


def test_a_write_that_fails_restores_nothing(world, tmp_path, monkeypatch):
    """The second slot cannot be written: no name is there, and the slots mend themselves."""
    for name in "ab":
        world.manager.add_adapter(make_adapter(name))
    world.serve(["a", "b", None])
    world.manager.save(tmp_path)
    as_new(world)
    pool = world.manager._pool
    write, calls = pool.write, itertools.count()

    def fails(*args, **kwargs):
        if next(calls) == 1:
            raise MemoryError("no room")
        return write(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "write", fails)
        with pytest.raises(MemoryError):
            world.manager.restore(tmp_path)
    assert world.held()[:2] == ((), (None, None))
    world.manager.restore(tmp_path)
    world.check(world.serve(["a", "b", None]), [make_adapter("a"), make_adapter("b"), None])
