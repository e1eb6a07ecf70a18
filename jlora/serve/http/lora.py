"""Adapters that come and go over HTTP: from where they may be loaded, which there are, and vLLM's endpoints."""

import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jlora.cli.text import shown
from jlora.config import LoRARequest
from jlora.errors import AdapterNotFoundError, LoRAError, NoFreeSlotError
from jlora.serve.http.body import Fields, read_object
from jlora.serve.http.errors import INTERNAL, INVALID_INPUT, NOT_FOUND, UNAVAILABLE, ApiError
from jlora.serve.http.log import log, log_event
from jlora.serve.lookups import LONGEST_NAME
from jlora.serve.request import AdapterExistsError, EngineClosedError
from jlora.serve.resolvers import below, listed

if TYPE_CHECKING:
    from jlora.serve.engine import Engine
    from jlora.serve.http.service import Service
    from jlora.serve.http.state import State

_LONGEST_PATH = 4096
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Places:
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
          ApiError: 400 where it is outside of the places (whether it exists or not), 404 where nothing is there.
        """
        if listed(self.repos, path) and not (self.root is not None and os.path.isdir(self.root / path)):
            if os.path.isdir(path):  # which the library would take for it
                raise _invalid(f"lora_path {path!r} is a repository, and a folder where the server runs", "lora_path")
            return path
        if self.root is None:
            raise _invalid(f"lora_path {path!r:.200} is none of the repositories that may be loaded", "lora_path")
        found = below(self.root, path)
        if found is None:
            raise _invalid(
                f"lora_path {path!r:.200} is not below the folder that adapters are loaded from", "lora_path"
            )
        if not os.path.isdir(found):
            message = f"there is no folder at lora_path {path!r:.200}"
            raise ApiError(404, NOT_FOUND, message, "lora_path")
        return str(found)


@dataclass(frozen=True)
class Known:
    """An adapter that may be asked for: where it came from, when, and the name of its base model if one was given."""

    path: str
    created: int
    parent: str | None = None


class Adapters:
    """Every adapter that may be asked for, in memory or not, and what loads and unloads them. Threads may share it.

    Args:
      engine: which serves them.
      places: from where requests may load them.
      taken: names that none may have: the base model's.
      state: what keeps them for the next server.
    """

    def __init__(self, engine: "Engine", places: Places, taken: Sequence[str], state: "State | None" = None):
        self.places = places
        self._engine = engine
        self._taken = frozenset(taken)
        self.state = state
        if state is not None:
            state.unloading = engine.unloading_loras
        self._known: dict[str, Known] = {}
        self._books = threading.Lock()
        self._turns: dict[str, tuple[threading.Lock, int]] = {}  # of each name: a lock, and how many want it

    def adopt(self) -> None:
        """Let those be asked for that the engine has already. Raises LoRAError where one has a name of the base."""
        if clash := sorted(self._taken & self.known().keys()):
            raise LoRAError(f"--lora-state: an adapter has a name of the base model: {clash[0]!r}")

    def changed(self) -> None:
        """After each change, and before anybody hears that it was made. Raises LoRAError."""
        if self.state is not None:
            self.state.changed()

    def catch_up(self) -> None:
        """Before a change, which may find that it is made already: save what could not be saved. Raises LoRAError."""
        if self.state is not None and self.state.behind:
            self.state.changed()

    def known(self) -> Mapping[str, Known]:
        """Those of the engine, however they came there."""
        with self._books:
            loaded = self._engine.list_loras()
            for name, info in loaded.items():
                if name not in self._known:  # by a resolver, or beside the server
                    self._known[name] = Known(info.path or "", int(time.time()))
            for name in [name for name in self._known if name not in loaded]:
                del self._known[name]
            return dict(self._known)

    def check_name(self, name: str) -> None:
        """Raises `ApiError` (400) for a name that no adapter can have."""
        if name in self._taken:
            raise _invalid(f"lora_name {name!r} is a name of the base model", "lora_name")
        if shown(name) != name or len(name) > LONGEST_NAME:
            raise _invalid(f"lora_name {name!r:.80} must be printable, and of at most {LONGEST_NAME} characters")

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
            self._engine.add_lora(request, timeout=timeout)
            seconds = time.monotonic() - started
            with self._books:
                self._known[request.name] = Known(path, int(time.time()), parent)
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
            with self._books:
                self._known.pop(name, None)
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
        with self._books:
            lock, count = self._turns.get(name, (threading.Lock(), 0))
            self._turns[name] = (lock, count + 1)
        try:
            with lock:
                yield
        finally:
            with self._books:
                count = self._turns[name][1] - 1
                if count:
                    self._turns[name] = (lock, count)
                else:
                    del self._turns[name]


def _invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, INVALID_INPUT, message, param)


# --- endpoints --------------------------------------------------------------------------------------------------------


async def load_adapter(service: "Service", request: Request) -> Response:
    """`POST /v1/load_lora_adapter`."""
    _check_places(service)
    fields = Fields(await read_object(request, service.limits, INVALID_INPUT), INVALID_INPUT)
    name, path = fields.text("lora_name", _LONGEST_PATH), fields.text("lora_path", _LONGEST_PATH)
    if name is None or path is None:
        missing = "lora_name" if name is None else "lora_path"
        raise _invalid(f"{missing} is missing: an adapter is loaded by lora_name and lora_path", missing)
    inplace, stacked = fields.flag("load_inplace"), fields.take("is_3d_lora_weight")
    if stacked is not None and not isinstance(stacked, bool):
        raise fields.fail("is_3d_lora_weight", "true or false")
    based_on = fields.take("base_model_name")  # which llm-d's former sidecar sends, "" where it does not know
    if based_on not in (None, "", service.root, *service.names):
        raise fields.fail("base_model_name", f"the model that is served, {service.names[0]!r}")
    fields.finish()
    service.adapters.check_name(name)

    def load() -> None:
        service.adapters.catch_up()
        if not inplace and name in service.adapters.known():  # whatever has become of its folder
            raise AdapterExistsError(name)
        found = service.adapters.places.find(path)
        wanted = LoRARequest(name, found, load_inplace=inplace, is_3d_lora_weight=stacked)
        parent = based_on if based_on in service.names else None
        service.adapters.load(wanted, path, service.limits.load_seconds, parent)

    try:
        await service.load(load)
    except AdapterExistsError:
        # "has already been loaded": production-stack looks for these words, and goes on.
        message = f"adapter '{name}' has already been loaded; load_inplace: true replaces it"
        raise _invalid(message, "lora_name") from None
    except AdapterNotFoundError as error:
        raise ApiError(404, NOT_FOUND, f"adapter '{name}' cannot be loaded: {error}", "lora_path") from None
    except (EngineClosedError, NoFreeSlotError) as error:
        raise ApiError(503, UNAVAILABLE, str(error), retry_after=1) from None
    except LoRAError as error:  # found, but not what can be served; vLLM too answers 500
        about = str(error) if repr(name) in str(error) else f"adapter {name!r}: {error}"
        log.warning("a load failed: %s", about)
        raise ApiError(500, INTERNAL, f"cannot be loaded: {about}", logged=True) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(service: "Service", request: Request) -> Response:
    """`POST /v1/unload_lora_adapter`."""
    _check_places(service)
    name = await _read_name(service, request, "lora_int_id")
    await _change(service, name, partial(service.adapters.unload, name))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def pin_adapter(service: "Service", request: Request, *, pin: bool) -> Response:
    """`POST /v1/pin_lora_adapter` and `/v1/unpin_lora_adapter`."""
    if not (service.administration or service.adapters.places):
        raise ApiError(404, NOT_FOUND, "Not Found")
    name = await _read_name(service, request)

    await _change(service, name, partial(service.adapters.pin, name, pin))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {'pinned' if pin else 'unpinned'} successfully.")


def _check_places(service: "Service") -> None:
    if not service.adapters.places:  # as if there were no such endpoint
        raise ApiError(404, NOT_FOUND, "Not Found")


async def _read_name(service: "Service", request: Request, *ignored: str) -> str:
    fields = Fields(await read_object(request, service.limits, INVALID_INPUT), INVALID_INPUT)
    name = fields.text("lora_name", _LONGEST_PATH)
    if name is None:
        raise _invalid("lora_name is missing", "lora_name")
    fields.ignore(ignored)
    fields.finish()
    return name


async def _change(service: "Service", name: str, call: Callable[[], None]) -> None:
    try:
        await service.load(call)
    except AdapterNotFoundError:
        raise ApiError(404, NOT_FOUND, f"adapter {name!r:.200} is not loaded", "lora_name") from None
    except (EngineClosedError, NoFreeSlotError) as error:
        raise ApiError(503, UNAVAILABLE, str(error), retry_after=1) from None
    except LoRAError as error:  # it could not be saved
        raise ApiError(500, INTERNAL, str(error)) from None
