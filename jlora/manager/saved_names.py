"""names.json: what a manager says of its adapters when it is saved, without their weights."""

import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jlora.config import LoRARequest
from jlora.errors import AdapterFormatError, LoRAError
from jlora.manager.saved_content import sync

_FORMAT = 1
_FILE = "names.json"


@dataclass(frozen=True)
class Entry:
    """An adapter of the host cache: `weights` is the digest of its content, None where that was not saved."""

    name: str
    version: int
    pinned: bool
    request: LoRARequest | None
    weights: str | None


@dataclass(frozen=True)
class Names:
    """What names.json says.

    Attributes:
      base: tells base models apart, and what names of layers mean there.
      layers: tells apart what adapters are packed for.
      adapters: of the host cache, least recently used first.
      slots: the names of those in slots, least recently used first.
      evicted: what evicted adapters are loaded from.
      versions: name -> its last version, and what tells that content from others (`PackedAdapter.key`).
    """

    base: str
    layers: str
    adapters: tuple[Entry, ...]
    slots: tuple[str, ...]
    evicted: tuple[LoRARequest, ...]
    versions: dict[str, tuple[int, str | None]]

    @property
    def weights(self) -> set[str]:
        return {entry.weights for entry in self.adapters if entry.weights is not None}


def write_names(folder: Path, names: Names) -> None:
    """Replace what a folder says, in one step: who is killed before it leaves what was there.

    Raises:
      OSError: it could not be written.
      LoRAError: nobody could read it; what was there stays.
    """
    saved = {
        "base": names.base,
        "layers": names.layers,
        "adapters": [{**vars(e), "request": None if e.request is None else asdict(e.request)} for e in names.adapters],
        "slots": names.slots,
        "evicted": [asdict(request) for request in names.evicted],
        "versions": names.versions,
    }
    try:
        _parsed(json.loads(json.dumps(saved)))
    except (KeyError, TypeError, ValueError) as error:
        raise LoRAError(f"{folder}: what the manager knows cannot be saved: {error!s:.200}") from error
    part = folder / f"{_FILE}.part"
    with open(part, "wb") as file:
        file.write(json.dumps({"format": _FORMAT, "sha256": _digest(saved), "saved": saved}).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / _FILE)
    sync(folder)


def read_names(folder: Path) -> Names | None:
    """What was saved to a folder; None where nothing was.

    Raises:
      AdapterFormatError: the file is not as it was written.
    """
    file = folder / _FILE
    try:
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AdapterFormatError(f"{file}: cannot be read: {error}") from error
    try:
        found = json.loads(text)
        if found["format"] != _FORMAT:
            raise AdapterFormatError(f"{file}: has format {found['format']!r:.40}; this release reads {_FORMAT}")
        if found["sha256"] != _digest(found["saved"]):
            raise AdapterFormatError(f"{file}: its SHA-256 is not the one that it says; it was changed since")
        names = _parsed(found["saved"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:  # UTF-8, too
        raise AdapterFormatError(
            f"{file}: is not what a manager saves: {type(error).__name__}: {error!s:.200}"
        ) from error
    return names


def _parsed(said: Any) -> Names:
    entries = tuple(
        Entry(
            name=_text(one["name"]),
            version=_whole(one["version"]),
            pinned=_flag(one["pinned"]),
            request=None if one["request"] is None else _request(one["request"]),
            weights=None if one["weights"] is None else _text(one["weights"]),
        )
        for one in said["adapters"]
    )
    names = Names(
        base=_text(said["base"]),
        layers=_text(said["layers"]),
        adapters=entries,
        slots=tuple(map(_text, said["slots"])),
        evicted=tuple(map(_request, said["evicted"])),
        versions={
            name: (_whole(last), None if key is None else _text(key)) for name, (last, key) in said["versions"].items()
        },
    )
    own = [entry.name for entry in entries]
    for name, count in Counter([*own, *(request.name for request in names.evicted)]).items():
        if count > 1:
            raise ValueError(f"the name {name!r} is there {count} times")
    for entry in entries:
        if entry.request is not None and entry.request.name != entry.name:
            raise ValueError(f"{entry.name!r} was loaded as {entry.request.name!r}")
        if entry.weights is not None and not re.fullmatch(r"[0-9a-f]{64}", entry.weights):
            raise ValueError(f"{entry.name!r} has weights {entry.weights!r:.80}")
        if entry.weights is None and entry.request is None:
            raise ValueError(f"{entry.name!r} has neither weights nor a request")
        if entry.name not in names.versions or entry.version > names.versions[entry.name][0]:
            raise ValueError(f"{entry.name!r} has version {entry.version}, which is above its last")
    if len(set(names.slots)) < len(names.slots) or not set(names.slots) <= set(own):
        raise ValueError("slots hold a name twice, or one that is not on the host")
    return names


def _request(said: Any) -> LoRARequest:
    return LoRARequest(**said)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a text, found {value!r:.80}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number, found {value!r:.80}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {value!r:.80}")
    return value


def _digest(saved: Any) -> str:
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(file: Path, *, shared: bool = False) -> Generator[None, None, None]:
    """Alone with a folder, among all processes; or among those that only read. A killed process has left it."""
    try:
        number = os.open(file, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        if not shared:
            raise
        yield  # nobody saves to what cannot be written, or has not been yet
        return
    try:
        fcntl.flock(number, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
