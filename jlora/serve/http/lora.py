"""vLLM's endpoints for models and adapters: list, load, unload, pin and unpin."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from jlora import Adapter, LoRARequest
from jlora.errors import (
    AdapterAccessError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoRAError,
    NoFreeSlotError,
    printable,
)
from jlora.serve.engine.request import AdapterExistsError, EngineClosedError
from jlora.serve.engine.resolvers import LONGEST_NAME
from jlora.serve.http.body import Json, RequestFields, media_type, parse_form, read_object, receive_body
from jlora.serve.http.errors import (
    FORBIDDEN,
    INTERNAL,
    INVALID_INPUT,
    NOT_FOUND,
    UNAVAILABLE,
    ApiError,
    invalid_input,
    no_such_model,
)
from jlora.serve.http.log import log, log_event
from jlora.serve.http.responses import displayed
from jlora.serve.http.service import Service

Change: TypeAlias = Literal["removed", "pinned", "unpinned"]

_LONGEST_PATH = 4096
_OF_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_OF_EMBEDDINGS = "modules.json"  # of sentence-transformers
_WEIGHTS, _CONFIG = "adapter_model", "adapter_config"  # parts of an upload: the files of a folder


async def list_models(service: Service, request: Request) -> Response:
    """Handle `GET /v1/models`: the base model under each of its names, and every adapter that requests may name."""
    # On a thread, since listing thousands takes milliseconds and routers poll often.
    return await service.work(lambda: JSONResponse({"object": "list", "data": list(_cards(service).values())}))


async def show_model(service: Service, request: Request) -> Response:
    """Handle `GET /v1/models/NAME`."""
    name: str = request.path_params["name"]
    card = (await service.work(lambda: _cards(service))).get(name)
    if card is None:
        raise no_such_model(name)
    return JSONResponse(card)


async def load_adapter(service: Service, request: Request) -> Response:
    """Handle `POST /v1/load_lora_adapter`: JSON with the path of an adapter, or a form with its files."""
    if media_type(request) == "multipart/form-data":
        async with service.uploads:
            return await _upload_adapter(service, request)
    if not service.sources:
        upload = "; an upload in multipart/form-data needs neither" if service.administration else ""
        raise _closed(f"the server was started without --lora-root DIR or --lora-hub-repos REPO{upload}")
    fields = RequestFields(await read_object(request, service.limits, INVALID_INPUT), INVALID_INPUT)
    name, path = fields.text("lora_name", _LONGEST_PATH), fields.text("lora_path", _LONGEST_PATH)
    if name is None or path is None:
        missing = "lora_name" if name is None else "lora_path"
        raise invalid_input(f"{missing} is missing: an adapter is loaded by lora_name and lora_path", missing)
    stacked = fields.take("is_3d_lora_weight")
    if stacked is not None and not isinstance(stacked, bool):
        raise fields.fail("is_3d_lora_weight", "true or false")

    def find() -> LoRARequest:
        return LoRARequest(name, service.sources.find(path), is_3d_lora_weight=stacked)

    return await _load(service, fields, name, path, find)


async def _upload_adapter(service: Service, request: Request) -> Response:
    """Load an adapter from the bytes of its files. They are kept in memory only."""
    if not service.administration:
        raise _closed(
            "adapters are uploaded with a key of administrators, and the server was started without --admin-api-key KEY"
        )
    limits = service.limits
    body = await receive_body(
        request, limits.upload_bytes, limits.body_seconds, pace=limits.upload_pace, flag="--max-upload-bytes"
    )
    form = await service.work(lambda: parse_form(body, request.headers["content-type"], INVALID_INPUT))
    if missing := [field for field in (_WEIGHTS, _CONFIG) if field not in form]:
        found = f"an upload has lora_name, {_WEIGHTS} and {_CONFIG}, found {list(form)!r:.200}"
        raise invalid_input(f"{missing[0]} is missing: {found}", missing[0])
    weights, config = form.pop(_WEIGHTS), form.pop(_CONFIG)
    fields = RequestFields({field: _value(field, text) for field, text in form.items()}, INVALID_INPUT)
    name = fields.required("lora_name", _LONGEST_PATH)
    allow_nonfinite = service.manager.config.allow_nonfinite

    def read() -> Adapter:
        return Adapter.from_bytes(weights, config, name=name, allow_nonfinite=allow_nonfinite)

    return await _load(service, fields, name, "", read)


def _value(field: str, text: memoryview) -> Json:
    """Return the value of a text field of a form."""
    try:
        value = str(text, "utf-8")
    except UnicodeDecodeError:
        raise invalid_input(f"{field[:80]!r} must be a text in UTF-8", field[:80]) from None
    return {"true": True, "false": False}.get(value.lower(), value) if field == "load_inplace" else value


async def _load(
    service: Service, fields: RequestFields, name: str, path: str, find: Callable[[], LoRARequest | Adapter]
) -> Response:
    """Load an adapter, with the fields that all forms of the request have.

    Args:
      service: The service.
      fields: The fields that are not yet read.
      name: Name of the adapter.
      path: Displayed as its source.
      find: Returns the adapter. Called on a thread.
    """
    inplace = fields.flag("load_inplace")
    based_on = fields.take("base_model_name")  # sent by llm-d's former sidecar; "" if unknown
    if based_on not in (None, "", service.root, *service.names):
        raise fields.fail("base_model_name", f"the model that is served, {service.names[0]!r}")
    fields.finish()
    if name in service.names:
        raise invalid_input(f"lora_name {name!r} is a name of the base model", "lora_name")
    if printable(name) != name or len(name) > LONGEST_NAME:
        raise invalid_input(f"lora_name {name!r:.80} must be printable, and of at most {LONGEST_NAME} characters")
    parent = based_on if based_on in service.names else None
    seconds = service.limits.load_seconds
    try:
        await _run(service, partial(load, service, name, find, path, seconds, parent, load_inplace=inplace))
    except AdapterExistsError:
        # production-stack matches "has already been loaded" and continues.
        message = f"adapter '{name}' has already been loaded; load_inplace: true replaces it"
        raise invalid_input(message, "lora_name") from None
    except AdapterNotFoundError as error:
        status, kind = (403, FORBIDDEN) if isinstance(error, AdapterAccessError) else (404, NOT_FOUND)
        raise ApiError(status, kind, f"adapter '{name}' cannot be loaded: {error}", "lora_path") from None
    except LoRAError as error:
        about = str(error) if repr(name) in str(error) else f"adapter {name!r}: {error}"
        log.warning("a load failed: %s", about)
        if not path and isinstance(error, AdapterFormatError | AdapterMismatchError):  # the fault is in the body
            raise ApiError(400, INVALID_INPUT, f"cannot be loaded: {about}", logged=True) from None
        # The adapter exists but cannot be served; vLLM returns 500 too.
        raise ApiError(500, INTERNAL, f"cannot be loaded: {about}", logged=True) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def load(
    service: Service,
    name: str,
    find: Callable[[], LoRARequest | Adapter],
    path: str,
    timeout: float | None = None,
    parent: str | None = None,
    *,
    load_inplace: bool = False,
) -> None:
    """Load an adapter, so that requests may name it. Blocks.

    Args:
      service: The service.
      name: Name of the adapter.
      find: Returns the adapter.
      path: Displayed as its source.
      timeout: Seconds to wait; None for no limit.
      parent: The base model name that it is listed under; None for the first.
      load_inplace: Replace an adapter of the same name.

    Raises:
      AdapterExistsError: The name is loaded, and `load_inplace` is not set.
      LoRAError: It cannot be loaded, and all stays as it was; or the change could not be saved.
    """
    engine = service.engine
    with service.change(name):
        if not load_inplace and name in engine.list_loras():  # checked first, as its folder may be gone
            raise AdapterExistsError(name)
        adapter = find()
        started = time.monotonic()
        engine.add_lora(adapter, load_inplace=load_inplace, timeout=timeout, path=path, parent=parent)
        seconds = time.monotonic() - started
    log_event("loaded", adapter=name, path=path, seconds=round(seconds, 3))
    folder = adapter.path if isinstance(adapter, LoRARequest) else None
    ignored = _OF_TOKENIZERS if engine.embeds else (*_OF_TOKENIZERS, _OF_EMBEDDINGS)
    if own := [file for file in ignored if folder and os.path.isfile(os.path.join(folder, file))]:
        log_event("adapter's own tokenizer, template or pooling is ignored", adapter=name, files=own)


async def change_adapter(service: Service, request: Request, *, change: Change) -> Response:
    """Handle `POST /v1/unload_lora_adapter`, `/v1/pin_lora_adapter` and `/v1/unpin_lora_adapter`."""
    if not (service.administration or service.sources):
        raise _closed("the server was started without --lora-root DIR, --lora-hub-repos REPO or --admin-api-key KEY")
    fields = RequestFields(await read_object(request, service.limits, INVALID_INPUT), INVALID_INPUT)
    name = fields.required("lora_name", _LONGEST_PATH)
    if change == "removed":
        fields.ignore(("lora_int_id",))
    fields.finish()
    engine = service.engine
    apply = {"removed": engine.remove_lora, "pinned": engine.pin_lora, "unpinned": engine.unpin_lora}[change]

    def run() -> None:
        with service.change(name):
            apply(name)
        log_event("unloaded" if change == "removed" else change, adapter=name)

    try:
        await _run(service, run)
    except AdapterNotFoundError:
        raise ApiError(404, NOT_FOUND, f"adapter {name!r:.200} is not loaded", "lora_name") from None
    except LoRAError as error:  # the change could not be saved
        raise ApiError(500, INTERNAL, str(error)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' {change} successfully.")


def _closed(why: str) -> ApiError:
    return ApiError(404, NOT_FOUND, f"Not Found: requests cannot change adapters, because {why}")


async def _run(service: Service, change: Callable[[], None]) -> None:
    try:
        await service.load(change)
    except (EngineClosedError, NoFreeSlotError, AdapterUnavailableError) as error:
        raise ApiError(503, UNAVAILABLE, str(error), retry_after=1) from None


def _cards(service: Service) -> dict[str, dict[str, Any]]:
    base, created = service.names[0], int(service.started)
    cards = {name: _card(service, name, created, service.root, None) for name in service.names}
    for name, known in service.engine.list_loras().items():
        cards[name] = _card(service, name, known.created, known.path, known.parent or base)
    return cards


def _card(service: Service, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jlora",
        "root": displayed(root),
        "parent": parent,
        "max_model_len": service.max_model_len,
        "permission": [permission],
    }
