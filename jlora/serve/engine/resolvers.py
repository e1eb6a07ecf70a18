"""Resolvers of unknown adapter names: a folder, repositories of the Hugging Face hub, or a function."""

import errno
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from jlora import LoRARequest, local_folder
from jlora._hub import REPO_ID
from jlora.errors import (
    AdapterAccessError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoRAError,
    LoRAUsageError,
    printable,
)

Resolve = Callable[[str], LoRARequest | None]
"""A resolver: the name of an unknown adapter -> the request that loads it, or None if there is none."""

LONGEST_NAME = 256  # characters
_CONFIG_FILE = "adapter_config.json"  # marks a folder as an adapter


def below(root: Path, path: str) -> Path | None:
    """Return the real path of `path`, relative to `root` or absolute; None if it is outside `root`, links followed."""
    try:
        root = root.resolve()
        found = (root / path).resolve()
        # From Python 3.13 on, a loop of links is resolved to a link.
        return found if found.is_relative_to(root) and not found.is_symlink() else None
    except (OSError, RuntimeError, ValueError):  # link loops before Python 3.13, names too long, NUL characters
        return None


def listed(repos: Sequence[str], name: str) -> bool:
    """Return whether a repository is one of `repos`: "owner/name", or "owner/*" for all of an owner."""
    owner = name.partition("/")[0]
    return REPO_ID.fullmatch(name) is not None and (name in repos or f"{owner}/*" in repos)


def of_folder(root: Path) -> Resolve:
    """Return a resolver for folders below `root`, named by relative path: "sql", "team/sql".

    A folder without an adapter configuration is not an adapter.
    """

    def resolve(name: str) -> LoRARequest | None:
        found = below(root, name)
        try:
            there = found is not None and (found / _CONFIG_FILE).is_file()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            there = False
        return LoRARequest(name, str(found)) if there else None

    return resolve


def of_hub(repos: Sequence[str]) -> Resolve:
    """Return a resolver for repositories of the hub, named "owner/name" and among `repos` (see `listed`).

    The resolver downloads the repository. After an eviction it is read from Hugging Face's cache, at the same commit.
    """
    return partial(_on_hub, tuple(repos))


def _on_hub(repos: tuple[str, ...], name: str) -> LoRARequest | None:
    if not listed(repos, name):
        return None
    if os.path.exists(name):  # LoRARequest would load the local path instead
        raise LoRAError(f"adapter {name!r} is a repository, and a folder or file where the server runs")
    try:
        folder = local_folder(LoRARequest(name, name))
    except (AdapterAccessError, AdapterUnavailableError):
        raise
    except AdapterNotFoundError as error:
        from huggingface_hub.errors import RepositoryNotFoundError  # imported already by `local_folder`

        if isinstance(error.__cause__, RepositoryNotFoundError):
            return None
        raise LoRAError(str(error)) from error  # the repository may exist
    return LoRARequest(name, name, revision=folder.name)


def of_function(where: str) -> Resolve:
    """Import the resolver function named "package.module:function".

    Raises:
      LoRAUsageError: the name is malformed, cannot be imported, or is not callable.
    """
    if not all(where.partition(":")):
        raise LoRAUsageError(f"{where!r:.200} is no resolver: folder, hub, or package.module:function")
    try:
        found: Any = pkgutil.resolve_name(where)
    except Exception as error:  # importing a module may raise anything
        raise LoRAUsageError(f"the resolver {where!r:.200} cannot be imported: {error!r:.300}") from error
    if not callable(found):
        raise LoRAUsageError(f"the resolver {where!r:.200} is {type(found).__name__}, and cannot be called")
    return cast("Resolve", found)


def in_order(resolvers: Sequence[Callable[[str], Any]]) -> Resolve:
    """Return a resolver that calls each of `resolvers` until one returns a result. An error ends the search."""
    return lambda name: next((found for one in resolvers if (found := one(name)) is not None), None)


# --- calls -----------------------------------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Check a name before it is passed to a resolver.

    A name must be printable, at most `LONGEST_NAME` characters long, and not lead out of a folder: it may not be
    absolute or have a part that is empty, "." or "..".

    Raises:
      AdapterNotFoundError: no adapter can have this name.
    """
    parts = re.split(r"[/\\]", name)
    if not name or len(name) > LONGEST_NAME or printable(name) != name:
        why = f"it must be printable, of 1 to {LONGEST_NAME} characters"
    elif os.path.isabs(name) or name.startswith("~") or not {"", ".", ".."}.isdisjoint(parts):
        why = "it is a path that leads elsewhere"
    else:
        return
    raise AdapterNotFoundError(f"no adapter can be called {name!r:.300}: {why}")


def resolved(resolve: Resolve, name: str) -> LoRARequest | LoRAError:
    """Call a resolver. Returns the request for this name, or the error that ends the requests that wait for it."""
    about = f"adapter {name!r}"
    try:
        answer: Any = resolve(name)
        if answer is None:
            return AdapterNotFoundError(f"{about} is not loaded, and the resolver knows none of that name")
        if inspect.iscoroutine(answer):
            answer.close()
            return LoRAError(f"{about}: the resolver is a coroutine function; it must be a plain one")
        if not isinstance(answer, LoRARequest):
            return LoRAError(f"{about}: the resolver returned {type(answer).__name__}, expected LoRARequest or None")
        if answer.name != name:
            return LoRAError(f"{about}: the resolver returned a request for {answer.name!r:.300}")
        if answer.load_inplace:
            return LoRAError(f"{about}: the resolver returned a request with load_inplace; add_lora replaces")
        return answer
    except LoRAError as error:
        return error
    except BaseException as error:  # a resolver may raise anything, and waiting requests need the error
        return LoRAError(f"{about}: the resolver failed: {_words(error)}")


def _words(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        return f"{kind}: {error!s:.500}"
    except BaseException:  # `__str__` of a foreign error may raise too
        return kind
