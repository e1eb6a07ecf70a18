"""Training runs and their checkpoints on disk. No path of a file comes from a request.

DIR/RUN/run.json                       the run: rank, options, metadata
DIR/RUN/TOKEN/checkpoint.json          one checkpoint, written last: a folder without it is not one
DIR/RUN/TOKEN/adapter_config.json      its PEFT adapter
DIR/RUN/TOKEN/adapter_model.safetensors
DIR/RUN/TOKEN/state.safetensors        factors and optimizer in float32; of "weights" only
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from safetensors.numpy import load_file, save_file

from jlora import Adapter
from jlora.errors import LoRAError, LoRAUsageError

Kind = Literal["weights", "sampler_weights", "external_weights", "snapshot"]
"""A snapshot is the sampling state of a run that has no name. It ends with its session, and is never listed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights)/([^/]+)")
_RUN = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")
_STATE = "state.safetensors"
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_log = logging.getLogger("jlora.serve")

State = dict[str, Any]
"""A tree of arrays, as of `Trainer.state_of`."""


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
      id: "SESSION:train:NUMBER".
      rank: rank of its adapter.
      seed: seed of its first weights.
      train_attn, train_mlp, train_unembed: the layers that the adapter has.
      metadata: given by the client.
      created: Unix seconds.
    """

    id: str
    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    created: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint. The name of its folder is also its adapter's name in the engine, and never used again.

    Attributes:
      run: the run's id.
      kind: kind.
      name: name that the client chose.
      token: name of its folder.
      created, expires: Unix seconds; no expiry is None.
      size: bytes on disk.
      metadata: given by the client.
    """

    run: str
    kind: Kind
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
      LoRAError: another server uses the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._found: dict[tuple[str, Kind, str], Checkpoint] = {}
        self._writing: dict[str, int] = {}  # token -> bytes of checkpoints that are being written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._held = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._held)
            raise LoRAError(f"--checkpoints {folder}: another server keeps its checkpoints there") from None
        except OSError as error:
            raise LoRAError(f"--checkpoints {folder}: {error.strerror or error}") from error
        for path in sorted(folder.glob("*/run.json")):
            self._read_run(path)

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._held)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def add_run(self, run: Run) -> None:
        """Record a new run. Raises OSError."""
        folder = self._folder_of(run.id)
        folder.mkdir(exist_ok=True)
        _write_json(folder / "run.json", dataclasses.asdict(run))
        with self._lock:
            self._runs[run.id] = run

    def runs(self) -> list[Run]:
        """Return all runs, the newest first."""
        with self._lock:
            return sorted(self._runs.values(), key=lambda run: run.created, reverse=True)

    def run(self, run: str) -> Run:
        """Return a run by its id. Raises LoRAUsageError."""
        with self._lock:
            if (found := self._runs.get(run)) is None:
                raise LoRAUsageError(f"training run {run!r:.120} does not exist")
            return found

    def end_run(self, run: str) -> list[Checkpoint]:
        """Delete the snapshots of a run, and its record if it has no checkpoint. Return the snapshots."""
        with self._lock:
            ended = [each for each in self._found.values() if (each.run, each.kind) == (run, "snapshot")]
            for each in ended:
                self.delete(each)
            if not self.named(run) and run in self._runs:
                del self._runs[run]
                shutil.rmtree(self._folder_of(run), ignore_errors=True)
            return ended

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def named(self, run: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run or of all, the newest first, without snapshots."""
        with self._lock:
            own = [each for each in self._found.values() if run in (None, each.run) and each.kind != "snapshot"]
            return sorted(own, key=lambda each: each.created, reverse=True)

    def get(self, run: str, kind: str, name: str) -> Checkpoint:
        """Return a checkpoint. Raises LoRAUsageError if there is none, or it has expired."""
        with self._lock:
            found = self._found.get((run, cast("Kind", kind), name))
            if found is None or (found.expires is not None and found.expires <= time.time()):
                raise LoRAUsageError(f"checkpoint tinker://{run:.80}/{kind:.80}/{name:.140} does not exist")
            return found

    def at(self, path: str) -> Checkpoint:
        """Return the checkpoint of a name such as tinker://RUN/weights/NAME. Raises LoRAUsageError."""
        if (found := _PATH.fullmatch(path)) is None:
            raise LoRAUsageError(
                f"expected tinker://RUN/KIND/NAME, got {path!r:.200}"
            )
        return self.get(*found.groups())

    def check_name(self, run: str, kind: Kind, name: str, overwrite: bool = False) -> None:
        """Raise LoRAUsageError if a checkpoint cannot have this name."""
        if _NAME.fullmatch(name) is None:
            raise LoRAUsageError(
                f"the name of a checkpoint has 1 to 128 letters, digits, '.', '_' and '-', got {name!r:.200}"
            )
        with self._lock:
            if not overwrite and (run, kind, name) in self._found:
                raise LoRAUsageError(f"checkpoint tinker://{run}/{kind}/{name} exists; expected a new name")

    def write(
        self,
        run: str,
        kind: Kind,
        name: str,
        adapter: Adapter,
        state: State | None = None,
        *,
        ttl: float | None = None,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint, which exists from then on, or not at all.

        Args:
          run: the run's id.
          kind: kind.
          name: name.
          adapter: the adapter.
          state: its state, to continue from.
          ttl: seconds until it expires.
          overwrite: replace one of the same name, once the new one is complete.
          metadata: given by the client.

        Raises:
          LoRAUsageError: the name is wrong or exists, the run does not exist, or the disk's limit would be exceeded.
          OSError: it cannot be written.
        """
        arrays = {} if state is None else dict(_flat(state))
        size = adapter.nbytes + sum(each.nbytes for each in arrays.values())
        token = f"{kind}-{secrets.token_hex(8)}"
        with self._lock:
            self.run(run)
            self.check_name(run, kind, name, overwrite)
            used = sum(each.size for each in self._found.values()) + sum(self._writing.values())
            if used + size > self._max_bytes:
                raise LoRAUsageError(
                    f"the checkpoint has {size} bytes, and {used} of {self._max_bytes} bytes are taken "
                    "(--max-checkpoint-bytes); delete some"
                )
            self._writing[token] = size
        folder = self._folder_of(run) / token
        try:
            adapter.save_pretrained(folder)
            if arrays:
                save_file(arrays, folder / _STATE)
            size = sum(file.stat().st_size for file in folder.iterdir())
            now = time.time()
            made = Checkpoint(run, kind, name, token, now, None if ttl is None else now + ttl, size, metadata)
            if kind != "snapshot":
                for file in (*folder.iterdir(), folder):
                    _sync(file)
            _write_json(folder / "checkpoint.json", dataclasses.asdict(made))
            with self._lock:
                self.run(run)  # it may have ended meanwhile
                replaced = self._found.get((run, kind, name))
                self._found[run, kind, name] = made
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            with self._lock:
                del self._writing[token]
        if replaced is not None:
            shutil.rmtree(self.folder(replaced), ignore_errors=True)
        return made

    def state(self, checkpoint: Checkpoint) -> State:
        """Return the state of a checkpoint. Raises LoRAUsageError if it has none, OSError if it cannot be read."""
        if checkpoint.kind != "weights":
            raise LoRAUsageError(f"{checkpoint.path} has no state to train from; expected tinker://RUN/weights/NAME")
        return _nested(load_file(self.folder(checkpoint) / _STATE))

    def folder(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint, which PEFT can load."""
        return self._folder_of(checkpoint.run) / checkpoint.token

    def files(self, checkpoint: Checkpoint) -> dict[str, Path]:
        """Return the files of a checkpoint that are downloaded."""
        return {name: self.folder(checkpoint) / name for name in _FILES}

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint, from its record on."""
        with self._lock:
            if self._found.get(key := (checkpoint.run, checkpoint.kind, checkpoint.name)) == checkpoint:
                del self._found[key]
        folder = self.folder(checkpoint)
        with contextlib.suppress(FileNotFoundError):
            (folder / "checkpoint.json").unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def expired(self) -> list[Checkpoint]:
        """Return the checkpoints that have expired."""
        with self._lock:
            return [each for each in self._found.values() if each.expires is not None and each.expires <= time.time()]

    # --- files --------------------------------------------------------------------------------------------------------

    def _folder_of(self, run: str) -> Path:
        assert _RUN.fullmatch(run), run  # the server made it
        return self._folder / run.replace(":", "-")

    def _read_run(self, path: Path) -> None:
        """Read a run and its checkpoints. Remove those that are not complete, and the snapshots."""
        try:
            run = Run(**json.loads(path.read_text("utf-8")))
            if path.parent != self._folder_of(run.id):
                raise ValueError(f"it is of the run {run.id!r:.80}")
        except (OSError, ValueError, TypeError, AssertionError) as error:
            _log.warning("%s is not a training run and is left alone: %s", path, error)
            return
        self._runs[run.id] = run
        for folder in [each for each in path.parent.iterdir() if each.is_dir()]:
            try:
                found = Checkpoint(**json.loads((folder / "checkpoint.json").read_text("utf-8")))
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            except (OSError, ValueError, TypeError) as error:
                _log.warning("%s is not a checkpoint and is left alone: %s", folder, error)
                continue
            if (found.run, found.token) != (run.id, folder.name):
                _log.warning("%s is not a checkpoint of its run and is left alone", folder)
                continue
            key = found.run, found.kind, found.name
            other = self._found.get(key)
            if found.kind == "snapshot" or (other is not None and other.created > found.created):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            if other is not None:
                shutil.rmtree(self.folder(other), ignore_errors=True)
            self._found[key] = found
        if not self.named(run.id):
            self.end_run(run.id)


def _write_json(path: Path, value: Any) -> None:
    """Write a file whole, or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), "utf-8")
    _sync(part)
    os.replace(part, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _flat(tree: State, prefix: str = "") -> list[tuple[str, np.ndarray]]:
    """Return the arrays of a tree of dicts by the keys on the way to them, joined by "/"."""
    found: list[tuple[str, np.ndarray]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _flat(cast("State", value), f"{prefix}{key}/")
        else:
            found.append((f"{prefix}{key}", np.ascontiguousarray(value).reshape(np.shape(value))))
    return found


def _nested(arrays: Mapping[str, np.ndarray]) -> State:
    tree: State = {}
    for path, array in arrays.items():
        *keys, last = path.split("/")
        at = tree
        for key in keys:
            at = at.setdefault(key, {})
        at[last] = array
    return tree
