"""Tell local paths from repo ids of the Hugging Face hub, by one rule for adapters and models."""

import errno
import os
import re
import stat
from pathlib import Path

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


def local_folder_of(text: str) -> Path | None:
    """Return the local folder that a text names, or None if the text is a repo id of the Hugging Face hub.

    A path that exists is local; `~` is expanded. Any other text is a repo id if it has the form "owner/name". `./x`,
    `/x`, `~/x` and names of more than two parts are never repo ids.

    Raises:
      FileNotFoundError: The path does not exist, and the text is not a repo id.
      NotADirectoryError: The path is a file.
      OSError: The path cannot be read, for example because a disk fails.
    """
    local = os.path.expanduser(text)
    try:
        mode = os.stat(local).st_mode if text else None
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        mode = None
    except ValueError:  # NUL
        mode = None
    if mode is None:
        if REPO_ID.fullmatch(text):
            return None
        raise FileNotFoundError(
            errno.ENOENT, 'does not exist, and is not a Hugging Face repo id of the form "owner/name"'
        )
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "is a file")
    return Path(local)


def reason_of(error: BaseException) -> str:
    """Return the class and the first line of the message of a client's error, not escaped."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
