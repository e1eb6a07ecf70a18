"""Where adapters are that nobody has added: below a folder, on the Hugging Face hub, or where a function says."""

import errno
import os
import pkgutil
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from jlora import LoRARequest, local_folder
from jlora.errors import AdapterNotFoundError, LoRAError, LoRAUsageError
from jlora.serve.engine.resolver_pool import Resolve

_CONFIG_FILE = "adapter_config.json"  # which a folder has that is an adapter
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def below(root: Path, path: str) -> Path | None:
    """The real place of `path`, relative to `root` or absolute; None where that is not below it, links followed."""
    try:
        root = root.resolve()
        found = (root / path).resolve()
        return found if found.is_relative_to(root) else None
    except (OSError, RuntimeError, ValueError):  # loops of links, NUL
        return None


def listed(repos: Sequence[str], name: str) -> bool:
    """Whether a repository is one of these: "owner/name", or "owner/*" for all of an owner."""
    owner = name.partition("/")[0]
    return _REPO_ID.fullmatch(name) is not None and (name in repos or f"{owner}/*" in repos)


def of_folder(root: Path) -> Resolve:
    """Adapters are called as their folder below `root`: "sql", "team/sql". Folders without a configuration are none."""
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
    """Adapters are called as their repository on the hub, one of `repos` (see `listed`).

    It is downloaded by the resolver; evicted, it comes back from Hugging Face's cache, as the commit that it was.
    """
    return partial(_on_hub, tuple(repos))


def _on_hub(repos: tuple[str, ...], name: str) -> LoRARequest | None:
    if not listed(repos, name):
        return None
    if os.path.exists(name):  # which the library would take for it
        raise LoRAError(f"adapter {name!r} is a repository, and a folder or file where the server runs")
    try:
        folder = local_folder(LoRARequest(name, name))
    except AdapterNotFoundError as error:
        from huggingface_hub.errors import RepositoryNotFoundError  # imported by now

        if isinstance(error.__cause__, RepositoryNotFoundError):
            return None
        raise LoRAError(str(error)) from error  # it may well be there
    return LoRARequest(name, name, revision=folder.name)


def of_function(where: str) -> Resolve:
    """The function that "package.module:function" names. Raises LoRAUsageError."""
    if not all(where.partition(":")):
        raise LoRAUsageError(f"{where!r:.200} is no resolver: folder, hub, or package.module:function")
    try:
        found: Any = pkgutil.resolve_name(where)
    except Exception as error:  # whatever the module does when it is imported
        raise LoRAUsageError(f"the resolver {where!r:.200} cannot be imported: {error!r:.300}") from error
    if not callable(found):
        raise LoRAUsageError(f"the resolver {where!r:.200} is {type(found).__name__}, and cannot be called")
    return cast("Resolve", found)


def in_order(resolvers: Sequence[Callable[[str], Any]]) -> Resolve:
    """The first one's answer that is not None. What one raises ends the search."""
    return partial(_first, tuple(resolvers))


def _first(resolvers: tuple[Callable[[str], Any], ...], name: str) -> Any:
    return next((found for one in resolvers if (found := one(name)) is not None), None)
