"""Saves in processes of its own that are killed: python -m tests.manager.save_process FOLDER. The last line is JSON.

Each is a fork of this process.
"""

import json
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import jlora  # noqa: F401
from tests.manager.tiny import as_new, infos, make_adapter, make_world

_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def child(work) -> int:
    """The signal that ended a fork which does `work`; 0 where it ended by itself."""
    pid = os.fork()
    if not pid:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "a save failed that nobody killed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed_at(n, folder):
    """A save that ends at the nth of its calls."""
    left = [n]

    def count(*_):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event, args):
        if event not in _EVENTS or not isinstance(args[0], str | os.PathLike) or str(folder) not in str(args[0]):
            return
        if event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR):
            count()

    def save():
        sys.addaudithook(hook)
        real = os.fsync
        os.fsync = lambda number: (real(number), count())[0]
        world.manager.save(folder)

    return save


def killed_after(seconds, folder):
    def save():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process as SIGKILL does
        signal.setitimer(signal.ITIMER_REAL, seconds)
        world.manager.save(folder)
        signal.setitimer(signal.ITIMER_REAL, 0)

    return save


home = Path(sys.argv[1])
world = make_world()
manager = world.manager
manager.activate_adapter("x") if manager.add_adapter(make_adapter("x")) else None
manager.remove_adapter("x")
manager._base()  # on the device, whose threads no fork has
for name in "ab":
    manager.add_adapter(make_adapter(name))
old = infos(world)
assert child(lambda: manager.save(home / "old")) == 0
manager.add_adapter(make_adapter("a", 1), load_inplace=True)
manager.add_adapter(make_adapter("c"))
manager.pin_adapter("c")
manager.remove_adapter("b")
new = infos(world)

points = 0
while True:
    folder = home / f"at{points + 1}"
    shutil.copytree(home / "old", folder)
    if not child(killed_at(points + 1, folder)):
        break
    points += 1
for i in range(20):
    folder = home / f"after{i}"
    shutil.copytree(home / "old", folder)
    child(killed_after(0.0005 + i * 0.0005, folder))

found = {"old": 0, "new": 0}
folders = [path for path in sorted(home.iterdir()) if path.name != "old"]
for folder in folders:
    as_new(world)
    manager.restore(folder)
    state = infos(world)
    assert state in (old, new), (folder, state)
    found["old" if state == old else "new"] += 1
    versions = {"a": 0, "b": 0} if state == old else {"a": 1, "c": 0}
    for name, version in versions.items():
        world.check(world.serve([name, None, None]), [make_adapter(name, version), None, None])
    manager.save(folder)  # continues, and removes all files of the killed save
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert len(left) == 4, left  # adapters.json, the lock, and the weights of two
print(json.dumps({"points": points, "killed": len(folders), **found}))
