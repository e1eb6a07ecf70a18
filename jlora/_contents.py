"""The contents of a folder that is not the expected adapter or model, for messages."""

import os
from pathlib import Path

from jlora.errors import printable

ADAPTER_CONFIG = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/"
_MOST = 1000  # names that are looked into
_SHOWN = 4


def is_lfs_pointer(file: Path) -> bool:
    """Return True if a file is the short text by which Git LFS stands for a file that it has not fetched."""
    with open(file, "rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def contents(folder: Path, expected: str) -> str:
    """Return the names in a folder, or the folders directly below it that hold the expected file, with the fix."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"this one cannot be listed: {error.strerror}"
    if below := [name for name in names[:_MOST] if os.path.isfile(folder / name / expected)]:
        return f"this one has {expected} in {_listed(below)}; give the path of such a folder"
    return f"this one holds {_listed(names)}" if names else "this one is empty"


def _listed(names: list[str]) -> str:
    return printable(", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else ""))
