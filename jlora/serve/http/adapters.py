"""Adapters that come and go over HTTP: from where they may be loaded, and what each change takes."""

import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jlora import LoRARequest
from jlora.errors import LoRAError, printable
from jlora.serve.engine.engine import Engine
from jlora.serve.engine.resolver_pool import LONGEST_NAME
from jlora.serve.engine.resolvers import below, listed
from jlora.serve.http.errors import NOT_FOUND, ApiError, invalid_input
from jlora.serve.http.log import log_event
from jlora.serve.http.state import State

_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class AllowedSources:
    """From where requests may load adapters.

    Attributes:
      root: the folder below which they lie; None for none. What is there comes before a repository of that name.
      repos: of the Hugging Face hub: "owner/name", or "owner/*" for all of an owner.
    """

    root: Path | None = None
    repos: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.root is not None or bool(self.repos)

    def find(self, path: str) -> str:
        """What `LoRARequest.path` is for the `lora_path` of a request.

        Raises:
          ApiError: 400 where it is outside of the sources (whether it exists or not), 404 where nothing is there.
        """
        if listed(self.repos, path) and not (self.root is not None and os.path.isdir(self.root / path)):
            if os.path.isdir(path):  # which the library would take for it
                raise invalid_input(
                    f"lora_path {path!r} is a repository, and a folder where the server runs", "lora_path"
                )
            return path
        if self.root is None:
            raise invalid_input(f"lora_path {path!r:.200} is none of the repositories that may be loaded", "lora_path")
        found = below(self.root, path)
        if found is None:
            raise invalid_input(
                f"lora_path {path!r:.200} is not below the folder that adapters are loaded from", "lora_path"
            )
        if not os.path.isdir(found):
            message = f"there is no folder at lora_path {path!r:.200}"
            raise ApiError(404, NOT_FOUND, message, "lora_path")
        return str(found)


class Adapters:
    """Changes of the engine's adapters, as clients ask for them: one of a name at a time, each saved before it is
    acknowledged. Threads may share it.

    Args:
      engine: which serves them.
      sources: from where requests may load them.
      taken: names that none may have: the base model's.
      state: what keeps them for the next server.
    """

    def __init__(self, engine: Engine, sources: AllowedSources, taken: Sequence[str], state: State | None = None):
        self.sources = sources
        self._engine = engine
        self._taken = frozenset(taken)
        self.state = state
        if state is not None:
            state.unloading = engine.unloading_loras
        self._lock = threading.Lock()
        self._turns: dict[str, tuple[threading.Lock, int]] = {}  # of each name: a lock, and how many want it

    def adopt(self) -> None:
        """Let those be asked for that the engine has already. Raises LoRAError where one has a name of the base."""
        if clash := sorted(self._taken & self._engine.list_loras().keys()):
            raise LoRAError(f"--lora-state: an adapter has a name of the base model: {clash[0]!r}")

    def changed(self) -> None:
        """After each change, and before anybody hears that it was made. Raises LoRAError."""
        if self.state is not None:
            self.state.changed()

    def catch_up(self) -> None:
        """Before a change, which may find that it is made already: save what could not be saved. Raises LoRAError."""
        if self.state is not None and self.state.behind:
            self.state.changed()

    def check_name(self, name: str) -> None:
        """Raises `ApiError` (400) for a name that no adapter can have."""
        if name in self._taken:
            raise invalid_input(f"lora_name {name!r} is a name of the base model", "lora_name")
        if printable(name) != name or len(name) > LONGEST_NAME:
            raise invalid_input(f"lora_name {name!r:.80} must be printable, and of at most {LONGEST_NAME} characters")

    def load(self, request: LoRARequest, path: str, timeout: float | None, parent: str | None = None) -> None:
        """Load an adapter and let it be asked for. Blocks.

        Args:
          request: what to load.
          path: shown as where it came from.
          timeout: seconds to wait; None for as long as it takes.
          parent: the name of the base model that it is shown under; None for the first.

        Raises:
          AdapterExistsError: the name is loaded, and the request does not say to replace it.
          LoRAError: it cannot be loaded; nothing changes then.
        """
        with self._turn(request.name):
            started = time.monotonic()
            self._engine.add_lora(request, timeout=timeout, path=path, parent=parent)
            seconds = time.monotonic() - started
            self.changed()
        log_event("loaded", adapter=request.name, path=path, seconds=round(seconds, 3))
        own = [file for file in _OF_TOKENIZERS if os.path.isfile(os.path.join(request.path, file))]
        if own:
            log_event("adapter's own tokenizer or template is ignored", adapter=request.name, files=own)

    def unload(self, name: str) -> None:
        """Refuse new requests for it from now on. Blocks.

        Raises:
          AdapterNotFoundError: there is none of that name.
        """
        with self._turn(name):
            self.catch_up()
            self._engine.remove_lora(name)
            self.changed()
        log_event("unloaded", adapter=name)

    def pin(self, name: str, keep: bool) -> None:
        """Keep it in a slot, or let it go. Blocks.

        Raises:
          AdapterNotFoundError: there is none of that name.
          NoFreeSlotError: every slot is pinned or in use.
        """
        with self._turn(name):
            (self._engine.pin_lora if keep else self._engine.unpin_lora)(name)
            self.changed()
        log_event("pinned" if keep else "unpinned", adapter=name)

    @contextmanager
    def _turn(self, name: str) -> Generator[None, None, None]:
        """One change of a name at a time; others go on meanwhile."""
        with self._lock:
            lock, count = self._turns.get(name, (threading.Lock(), 0))
            self._turns[name] = (lock, count + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                count = self._turns[name][1] - 1
                if count:
                    self._turns[name] = (lock, count)
                else:
                    del self._turns[name]
