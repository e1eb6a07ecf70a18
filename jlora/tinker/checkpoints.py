"""Training runs and their checkpoints on disk. No path of a file comes from a request.

DIR/RUN/run.json is a run, and DIR/RUN/TOKEN/ a checkpoint: a folder of PEFT, for "weights" also `state.safetensors`
with factors and optimizer in float32, and `checkpoint.json`: without it there is no checkpoint. Snapshots have none.
A folder is written as DIR/TOKEN.part, and renamed when it is complete.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from jlora import Adapter
from jlora._disk import replace_file, sync
from jlora.errors import LoRAError, LoRAUsageError

KINDS = ("weights", "sampler_weights", "external_weights")
SNAPSHOT = "snapshot"  # the kind of sampling weights without a name: never listed, and deleted with their session

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"tinker://([^/]+)/([a-z_]+)/([^/]+)")
_HEADERS = 2**16  # bytes of a checkpoint beside its arrays
_STATE = "state.safetensors"


@dataclass(frozen=True)
class Record:
    """A training run.

    Attributes:
      id: "SESSION:train:NUMBER".
      lora: options of its adapter: rank, seed, train_attn, train_mlp and train_unembed.
      metadata: given by the client.
      created: Unix seconds.
    """

    id: str
    lora: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    created: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. Its token, the name of its folder, is its adapter's name in the engine and never used again.

    `created` and `expires` are Unix seconds, `size` is in bytes.
    """

    run: str
    kind: str
    name: str
    token: str
    created: float
    expires: float | None
    size: int
    metadata: Mapping[str, str] | None = None

    @property
    def path(self) -> str:
        """The name that clients use."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


class Checkpoints:
    """All runs and checkpoints of a folder, locked by this process. Methods may be called from any thread.

    Args:
      folder: the folder, created if missing.
      max_bytes: most bytes of all checkpoints.

    Raises:
      LoRAError: another server uses the folder, or it cannot be read.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.RLock()
        self._runs: dict[str, Record] = {}
        self._found: dict[tuple[str, str, str], Checkpoint] = {}
        self._unwritten: set[str] = set()  # tokens of those of `_found` that have no folder yet
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for part in folder.glob("*.part"):
                shutil.rmtree(part)
            for path in folder.glob("*/run.json"):
                self._read(path)
        except BlockingIOError:
            os.close(self._held)
            raise LoRAError(f"--checkpoints {folder}: another server keeps its checkpoints there") from None
        except (OSError, ValueError, TypeError) as error:
            raise LoRAError(f"--checkpoints {folder}: {error}; remove or mend that file") from error

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._held)

    def add_run(self, run: Record) -> None:
        """Record a new run. Raises OSError."""
        self._folder_of(run.id).mkdir(exist_ok=True)
        _write_json(self._folder_of(run.id) / "run.json", run)
        with self._lock:
            self._runs[run.id] = run

    def runs(self) -> list[Record]:
        """Return all runs, the newest first."""
        with self._lock:
            return sorted(self._runs.values(), key=lambda run: run.created, reverse=True)

    def run(self, id: str) -> Record:
        """Return a run. Raises LoRAUsageError."""
        if (found := self._runs.get(id)) is None:
            raise LoRAUsageError(f"training run {id!r:.120} does not exist")
        return found

    def end_run(self, id: str) -> list[Checkpoint]:
        """Delete the snapshots of a run, and its record if it has no checkpoint. Return the snapshots."""
        with self._lock:
            ended = [each for each in self._found.values() if (each.run, each.kind) == (id, SNAPSHOT)]
            for each in ended:
                self.delete(each)
            if not any(each.run == id for each in self._found.values()) and self._runs.pop(id, None) is not None:
                shutil.rmtree(self._folder_of(id), ignore_errors=True)
            return ended

    def of(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run or of all, the newest first, without snapshots."""
        with self._lock:
            own = [each for each in self._found.values() if run in (None, each.run) and each.kind != SNAPSHOT]
            own = [each for each in own if each.token not in self._unwritten]
        return sorted(own, key=lambda each: each.created, reverse=True)

    def get(self, run: str, kind: str, name: str) -> Checkpoint:
        """Return a checkpoint, or a snapshot that may not be written yet. Raises LoRAUsageError if there is none."""
        with self._lock:
            found = self._found.get((run, kind, name))
            hidden = found is not None and kind != SNAPSHOT and found.token in self._unwritten
        if found is None or hidden or (found.expires is not None and found.expires <= time.time()):
            raise LoRAUsageError(f"checkpoint tinker://{run:.80}/{kind:.80}/{name:.140} does not exist")
        return found

    def at(self, path: str) -> Checkpoint:
        """Return the checkpoint of a name such as tinker://RUN/weights/NAME. Raises LoRAUsageError."""
        if (found := _PATH.fullmatch(path)) is None or found[2] not in KINDS:
            raise LoRAUsageError(
                f"expected tinker://RUN/KIND/NAME with a kind of {', '.join(KINDS)}, got {path!r:.200}"
            )
        return self.get(*found.groups())

    def check_name(self, run: str, kind: str, name: str) -> None:
        """Raise LoRAUsageError if a checkpoint cannot have this name."""
        if _NAME.fullmatch(name) is None:
            raise LoRAUsageError(f"a checkpoint's name has 1 to 128 letters, digits and ._-, got {name!r:.200}")
        if (run, kind, name) in self._found:
            raise LoRAUsageError(f"checkpoint tinker://{run}/{kind}/{name} exists; expected a new name")

    def begin(
        self,
        run: str,
        kind: str,
        name: str,
        adapter: Adapter,
        state: Mapping[str, Any] | None = None,
        *,
        ttl: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Take the name and the bytes of a checkpoint, for `write` or `delete`. A snapshot exists from now on.

        `state` is a tree of arrays to train from, and `ttl` the seconds until the checkpoint expires.

        Raises:
          LoRAUsageError: the name is wrong or exists, there is no such run, or the disk's limit would be exceeded.
        """
        arrays: dict[Any, Any] = flatten_dict(state or {})
        size = adapter.nbytes + sum(each.nbytes for each in arrays.values()) + _HEADERS
        token, now = f"{kind}-{secrets.token_hex(8)}", time.time()
        made = Checkpoint(run, kind, name, token, now, None if ttl is None else now + ttl, size, metadata)
        with self._lock:
            self.run(run)
            self.check_name(run, kind, name)
            used = sum(each.size for each in self._found.values())
            if used + size > self._max_bytes:
                raise LoRAUsageError(
                    f"the checkpoint has {size} bytes, and {used} of {self._max_bytes} bytes are taken "
                    "(--max-checkpoint-bytes); delete some"
                )
            self._found[run, kind, name] = made
            self._unwritten.add(token)
        return made

    def write(self, begun: Checkpoint, adapter: Adapter, state: Mapping[str, Any] | None = None) -> Checkpoint:
        """Write a checkpoint that was begun with these arrays, and return it. If that fails, it is deleted.

        Raises:
          LoRAUsageError: it was deleted meanwhile.
          OSError: it cannot be written.
        """
        part, folder = self._folder / f"{begun.token}.part", self.folder(begun)
        try:
            adapter.save_pretrained(part)
            if state is not None:
                arrays = {key: np.asarray(each, order="C") for key, each in flatten_dict(state, sep="/").items()}
                save_file(arrays, part / _STATE)
            made = dataclasses.replace(begun, size=sum(file.stat().st_size for file in part.iterdir()))
            if made.kind != SNAPSHOT:  # a snapshot need not survive the process
                for file in part.iterdir():
                    sync(file)
                _write_json(part / "checkpoint.json", made)
            with self._lock:
                if begun.token not in self._unwritten:
                    raise LoRAUsageError(f"{begun.path} was deleted while it was written")
                part.rename(folder)
                self._unwritten.remove(begun.token)
                self._found[made.run, made.kind, made.name] = made
            if made.kind != SNAPSHOT:
                sync(folder.parent)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            self.delete(begun)
            raise
        return made

    def state(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return the state of a checkpoint. Raises LoRAUsageError if it has none, OSError if it cannot be read."""
        if checkpoint.kind != "weights":
            raise LoRAUsageError(f"{checkpoint.path} has no state to train from; expected tinker://RUN/weights/NAME")
        return unflatten_dict(load_file(self.folder(checkpoint) / _STATE), sep="/")

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint, which PEFT can load."""
        return self._folder_of(checkpoint.run) / checkpoint.token

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, from its record on."""
        with self._lock:
            key = checkpoint.run, checkpoint.kind, checkpoint.name
            if (found := self._found.get(key)) is not None and found.token == checkpoint.token:
                del self._found[key]
            self._unwritten.discard(checkpoint.token)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.folder(checkpoint) / "checkpoint.json").unlink()
        shutil.rmtree(self.folder(checkpoint), ignore_errors=True)

    def expired(self) -> list[Checkpoint]:
        """Return the checkpoints that have expired."""
        with self._lock:
            return [each for each in self._found.values() if each.expires is not None and each.expires <= time.time()]

    def _folder_of(self, run: str) -> Path:
        return self._folder / run.replace(":", "-")  # the server made the id

    def _read(self, path: Path) -> None:
        """Read a run and its checkpoints. Remove those that are not complete, and snapshots."""
        run = Record(**json.loads(path.read_text("utf-8")))
        if path.parent != self._folder_of(run.id):
            raise ValueError(f"{path} is of the run {run.id!r:.80}")
        self._runs[run.id] = run
        for folder in (each for each in path.parent.iterdir() if each.is_dir()):
            file, own = folder / "checkpoint.json", None
            if file.exists():
                own = Checkpoint(**json.loads(file.read_text("utf-8")))
                if (own.run, own.token) != (run.id, folder.name):
                    raise ValueError(f"{file} is of the checkpoint {own.token!r:.80}")
            if own is None:
                shutil.rmtree(folder)
                continue
            self._found[own.run, own.kind, own.name] = own
        self.end_run(run.id)


def _write_json(path: Path, value: Any) -> None:
    """Write a dataclass to a file whole, or not at all."""
    replace_file(path, json.dumps(dataclasses.asdict(value)).encode())
