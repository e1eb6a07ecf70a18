"""Local paths, repo ids of the Hugging Face hub and failed downloads, by one rule for adapters and models."""

import errno
import os
import re
import stat
from pathlib import Path
from typing import Literal

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
        repo, _, revision = text.partition("@")
        apart = REPO_ID.fullmatch(repo) and f": the revision {revision!r} is given apart (revision=, or --revision)"
        raise FileNotFoundError(
            errno.ENOENT, f'does not exist, and is not a Hugging Face repo id of the form "owner/name"{apart or ""}'
        )
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, "is a file")
    return Path(local)


def failure_of(
    repo_id: str, revision: str | None, error: Exception
) -> tuple[Literal["refused", "absent", "unreachable"], str]:
    """Return why a repository could not be downloaded, as its kind and in words with the fix, not escaped.

    It is "refused" if a token is needed that may read it, "absent" if there is no such repository or revision, or none
    in the cache where downloads are forbidden, and "unreachable" if a later call may succeed.

    Args:
      repo_id: The repository.
      revision: Branch, tag or commit; None for the main branch.
      error: The error of Hugging Face's client.
    """
    from huggingface_hub import constants, errors  # imported here: it is slow to import

    log_in = "log in with `hf auth login` or set HF_TOKEN"
    at = "" if revision is None else f" at revision {revision!r}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):  # a RepositoryNotFoundError too
        return "refused", f"the repository is gated: accept its terms at {constants.ENDPOINT}/{repo_id}, and {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "absent", f"the Hugging Face hub has no such repository; if it is private, {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "absent", f"the repository has no revision {revision!r}"
    if status in (401, 403):
        return "refused", f"the Hugging Face hub refuses it ({_words(error)}); {log_in}, with a token that may read it"
    if constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        return "absent", (
            f"it is not complete{at} in Hugging Face's cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids a "
            "download; unset it once"
        )
    return "unreachable", f"it could not be fetched from the Hugging Face hub{at}: {_words(error.__cause__ or error)}"


def _words(error: BaseException) -> str:
    """Return the class and the first line of the message of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
