"""Changes of adapters over HTTP: allowed sources, and the steps of each change."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from jlora import Adapter, LoRARequest
from jlora._hub import REPO_ID
from jlora.errors import LoRAError, printable
from jlora.serve.engine.engine import Engine
from jlora.serve.engine.resolvers import LONGEST_NAME, below, listed
from jlora.serve.http.errors import NOT_FOUND, ApiError, invalid_input
from jlora.serve.http.log import log_event
from jlora.serve.http.state import StateFolder

_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_OF_EMBEDDINGS = "modules.json"  # of sentence-transformers


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


class Adapters:
    """Changes of the engine's adapters, safe for threads.

    Changes of one name run one at a time. Each is saved before it is acknowledged.

    Args:
      engine: The engine that serves the adapters.
      sources: Sources that requests may load from.
      taken: Reserved names; those of the base model.
      state: Persistent state; None without one.
    """

    def __init__(self, engine: Engine, sources: AllowedSources, taken: Sequence[str], state: StateFolder | None = None):
        self.sources = sources
        self._engine = engine
        self._taken = frozenset(taken)
        self.state = state
        if state is not None:
            state.unloading = engine.unloading_loras
        self._lock = threading.Lock()
        self._turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()  # locks in use, by name

    def adopt(self) -> None:
        """Check the adapters that the engine has at the start. Raises LoRAError if one has a name of the base model."""
        if clash := sorted(self._taken & self._engine.list_loras().keys()):
            raise LoRAError(f"--lora-state: an adapter has a name of the base model: {clash[0]!r}")

    def changed(self) -> None:
        """Save a change, before it is acknowledged. Raises LoRAError."""
        if self.state is not None:
            self.state.changed()

    def catch_up(self) -> None:
        """Save an earlier change that could not be saved, before a new one is compared with it. Raises LoRAError."""
        if self.state is not None and self.state.behind:
            self.state.changed()

    def check_name(self, name: str) -> None:
        """Check that an adapter can have this name. Raises `ApiError` (400)."""
        if name in self._taken:
            raise invalid_input(f"lora_name {name!r} is a name of the base model", "lora_name")
        if printable(name) != name or len(name) > LONGEST_NAME:
            raise invalid_input(f"lora_name {name!r:.80} must be printable, and of at most {LONGEST_NAME} characters")

    def load(
        self,
        adapter: LoRARequest | Adapter,
        path: str,
        timeout: float | None,
        parent: str | None = None,
        *,
        load_inplace: bool = False,
    ) -> None:
        """Load an adapter, so that requests may name it. Blocks.

        Args:
          adapter: A request for a folder or repository, or an adapter in memory.
          path: Displayed as its source.
          timeout: Seconds to wait; None for no limit.
          parent: The base model name that it is listed under; None for the first.
          load_inplace: Replace an adapter of the same name, as the field of a request.

        Raises:
          AdapterExistsError: the name is loaded, and `load_inplace` is not set.
          LoRAError: it cannot be loaded, and all stays as it was; or the change could not be saved.
        """
        with self._turn(adapter.name):
            started = time.monotonic()
            self._engine.add_lora(adapter, load_inplace=load_inplace, timeout=timeout, path=path, parent=parent)
            seconds = time.monotonic() - started
            self.changed()
        log_event("loaded", adapter=adapter.name, path=path, seconds=round(seconds, 3))
        folder = adapter.path if isinstance(adapter, LoRARequest) else None
        ignored = _OF_TOKENIZERS if self._engine.embeds else (*_OF_TOKENIZERS, _OF_EMBEDDINGS)
        own = [file for file in ignored if folder and os.path.isfile(os.path.join(folder, file))]
        if own:
            log_event("adapter's own tokenizer, template or pooling is ignored", adapter=adapter.name, files=own)

    def unload(self, name: str) -> None:
        """Refuse new requests for an adapter from now on. Blocks.

        Raises:
          AdapterNotFoundError: it is not loaded.
          LoRAError: the change could not be saved.
        """
        with self._turn(name):
            self.catch_up()
            self._engine.remove_lora(name)
            self.changed()
        log_event("unloaded", adapter=name)

    def pin(self, name: str, keep: bool) -> None:
        """Pin an adapter to a slot, or unpin it. Blocks.

        Raises:
          AdapterNotFoundError: it is not loaded.
          NoFreeSlotError: every slot is pinned or in use.
          LoRAError: the change could not be saved.
        """
        with self._turn(name):
            (self._engine.pin_lora if keep else self._engine.unpin_lora)(name)
            self.changed()
        log_event("pinned" if keep else "unpinned", adapter=name)

    def _turn(self, name: str) -> threading.Lock:
        """Return the lock that changes of one name take. Other names are not blocked."""
        with self._lock:
            return self._turns.setdefault(name, threading.Lock())
