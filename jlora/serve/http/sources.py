"""Sources that requests may load adapters from."""

import os
from dataclasses import dataclass
from pathlib import Path

from jlora._hub import REPO_ID
from jlora.serve.engine.resolvers import below, listed
from jlora.serve.http.errors import NOT_FOUND, ApiError, invalid_input


@dataclass(frozen=True)
class AllowedSources:
    """Sources that requests may load adapters from.

    Attributes:
      root: The folder that contains them; None for none. A folder takes precedence over a repository of the same name.
      repos: Repositories of the Hugging Face hub: "owner/name", or "owner/*" for all of an owner.
    """

    root: Path | None = None
    repos: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.root is not None or bool(self.repos)

    def find(self, path: str) -> str:
        """Return the `LoRARequest.path` for the `lora_path` of a request.

        Raises:
          ApiError: 400 if it is outside the sources (existing or not), 404 if it does not exist.
        """
        if listed(self.repos, path) and not (self.root is not None and os.path.isdir(self.root / path)):
            if os.path.isdir(path):  # LoRARequest would load the local path instead
                raise invalid_input(
                    f"lora_path {path!r} is a repository, and a folder where the server runs", "lora_path"
                )
            return path
        if self.root is None:
            raise invalid_input(
                f"lora_path {path!r:.200} is none of the repositories of --lora-hub-repos{self._unlisted(path)}, and "
                "the server was started without --lora-root DIR",
                "lora_path",
            )
        found = below(self.root, path)
        if found is None:
            raise invalid_input(
                f"lora_path {path!r:.200} is not below the folder that adapters are loaded from", "lora_path"
            )
        if not os.path.isdir(found):
            message = f"there is no folder at lora_path {path!r:.200}{self._unlisted(path)}"
            raise ApiError(404, NOT_FOUND, message, "lora_path")
        return str(found)

    def _unlisted(self, path: str) -> str:
        """Return why a path of the form "owner/name" is no repository to load from, or an empty string."""
        repo, at, _ = path.partition("@")
        if REPO_ID.fullmatch(repo) is None:
            return ""
        if at:
            return f" (a repository has no revision here: {repo!r})"
        return f" (--lora-hub-repos {repo} or {repo.partition('/')[0]}/* would list the repository)"
