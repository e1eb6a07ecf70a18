"""Resolvers of unknown adapter names: a folder, repositories of the Hugging Face hub, or a function."""

import errno
import os
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from jlora import LoRARequest, local_folder
from jlora._hub import REPO_ID
from jlora.errors import AdapterNotFoundError, LoRAError, LoRAUsageError
from jlora.serve.engine.resolver_pool import Resolve

_CONFIG_FILE = "adapter_config.json"  # marks a folder as an adapter


def below(root: Path, path: str) -> Path | None:
    """Return the real path of `path`, relative to `root` or absolute; None if it is outside `root`, links followed."""
    try:
        root = root.resolve()
        found = (root / path).resolve()
        return found if found.is_relative_to(root) else None
    except (OSError, RuntimeError, ValueError):  # link loops, NUL characters
        return None


def listed(repos: Sequence[str], name: str) -> bool:
    """Return whether a repository is one of `repos`: "owner/name", or "owner/*" for all of an owner."""
    owner = name.partition("/")[0]
    return REPO_ID.fullmatch(name) is not None and (name in repos or f"{owner}/*" in repos)


def of_folder(root: Path) -> Resolve:
    """Return a resolver for folders below `root`, named by relative path: "sql", "team/sql".

    A folder without an adapter configuration is not an adapter.
    """
    return partial(_in_folder, root)


def _in_folder(root: Path, name: str) -> LoRARequest | None:
    found = below(root, name)
    try:
        there = found is not None and (found / _CONFIG_FILE).is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        there = False
    return LoRARequest(name, str(found)) if there else None


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
    return partial(_first, tuple(resolvers))


def _first(resolvers: tuple[Callable[[str], Any], ...], name: str) -> Any:
    return next((found for one in resolvers if (found := one(name)) is not None), None)
