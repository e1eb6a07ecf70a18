"""Write files so that they survive any end of the process."""

import os
from pathlib import Path


def replace_file(file: Path, data: bytes) -> None:
    """Replace a file atomically. A killed process leaves either the old or the new file."""
    part = file.with_name(file.name + ".part")
    with open(part, "wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(part, file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
