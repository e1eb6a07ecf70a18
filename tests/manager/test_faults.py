"""Disks that fail during a load: served values stay right."""

import errno
import itertools
import os

import numpy as np

from tests.manager.tiny import make_adapter, refused, request


class _Fails:
    """Calls of `os` that read below a folder; the nth of them fails."""

    def __init__(self, monkeypatch, folder, n):
        self.calls, self.failed = 0, False
        self._folder, self._n, self._opened = str(folder), n, set()
        for name in ("open", "stat", "lstat", "fstat", "preadv", "scandir", "readlink"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real):
        def call(path, *args, **kwargs):
            ours = path in self._opened if isinstance(path, int) else self._folder in os.fspath(path)
            if ours:
                self.calls += 1
                if self.calls == self._n:
                    self.failed = True
                    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            found = real(path, *args, **kwargs)
            if ours and real.__name__ == "open":
                self._opened.add(found)
            return found

        return call


def test_a_disk_fails_on_the_nth_read(world, tmp_path, monkeypatch):
    """For every n, the error names the file, other adapters are served, and a later load succeeds."""
    good, bad = request(tmp_path / "good", "good"), request(tmp_path / "bad", "bad")
    world.manager.add_adapter(good)
    want = world.serve(["good", None, None])
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for n in itertools.count(1):
        with monkeypatch.context() as patched:
            disk = _Fails(patched, tmp_path / "bad", n)
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
