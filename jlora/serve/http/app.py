"""The ASGI application: routes, access checks and error responses."""

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jlora
from jlora.serve.http.control import is_paused, pause, resume, server_info
from jlora.serve.http.errors import BAD_REQUEST, INTERNAL, NOT_FOUND, ApiError
from jlora.serve.http.generate import chat_completions, completions, embeddings
from jlora.serve.http.log import log, log_event
from jlora.serve.http.lora import change_adapter, list_models, load_adapter, show_model
from jlora.serve.http.prometheus import metrics
from jlora.serve.http.service import Service
from jlora.serve.http.status import status_json, status_page

Endpoint = Callable[[Service, Request], Awaitable[Response]]

_LONGEST = 300  # characters of a method or a path in the log
_QUIET = ("/health", "/metrics", "/status.json")  # polled every few seconds, so not logged


def build_app(service: Service) -> ASGIApp:
    """Return the application with all endpoints of a server.

    `/health`, `/version`, `/metrics` and the status page are open, as in vLLM. The others require keys.
    """
    anybody = partial(_route, service)
    users = partial(_route, service, admin=False)
    admins = partial(_route, service, method="POST", admin=True)
    routes = [
        users("/v1/completions", completions, method="POST"),
        users("/v1/chat/completions", chat_completions, method="POST"),
        users("/v1/embeddings", embeddings, method="POST"),
        users("/v1/models", list_models),
        users("/v1/models/{name:path}", show_model),
        admins("/v1/load_lora_adapter", load_adapter),
        admins("/v1/unload_lora_adapter", partial(change_adapter, change="removed")),
        admins("/v1/pin_lora_adapter", partial(change_adapter, change="pinned")),
        admins("/v1/unpin_lora_adapter", partial(change_adapter, change="unpinned")),
        admins("/pause", pause),
        admins("/resume", resume),
        users("/is_paused", is_paused),
        users("/server_info", server_info),
        anybody("/health", _health),
        anybody("/version", _version),
        anybody("/metrics", metrics),
        anybody("/status.json", status_json),
        anybody("/status", status_page),
        anybody("/", status_page),
    ]
    return Outermost(routes, _QUIET)


def _route(service: Service, path: str, endpoint: Endpoint, *, method: str = "GET", admin: bool | None = None) -> Route:
    """Return a route with its access check: `admin` is None for open, False for users, True for administrators."""

    async def answer(request: Request) -> Response:
        if admin is not None:
            if not service.keys.admit(request.headers.get("authorization", ""), admin=admin):
                raise ApiError(
                    401, "AuthenticationError", "a key that may do this is needed: Authorization: Bearer KEY"
                )
            service.check_ready()
        return await endpoint(service, request)

    return Route(path, answer, methods=[method])


async def _health(service: Service, request: Request) -> Response:
    try:
        service.check_ready()
    except ApiError as error:
        done, total = service.progress
        about = {"status": service.condition, "done": done, "total": total, "step_seconds": service.step_seconds}
        body = {**about, **error.body()}
        return JSONResponse(body, error.status, error.headers())
    return JSONResponse({"status": service.condition})


async def _version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": jlora.__version__})


class Outermost:
    """Converts errors into responses, and writes one log line for each request.

    Args:
      routes: The routes. A further slash at the end of a path has no effect.
      quiet: Paths of requests that are not logged.
    """

    def __init__(self, routes: Sequence[Route], quiet: Collection[str]):
        self._router, self._quiet = Router(routes, redirect_slashes=False), quiet
        self._paths = frozenset(route.path for route in routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":  # WebSocket is not supported
            return await send({"type": "websocket.close", "code": 1000})
        started = time.monotonic()
        note: dict[str, Any] = {}
        scope["jlora.note"] = note
        scope["app"] = self  # makes the router raise if no route matches
        if scope["path"].removesuffix("/") in self._paths:
            scope["path"] = scope["path"].removesuffix("/")
        status, read = 0, False

        async def counted_receive() -> Message:
            nonlocal read
            message = await receive()
            read = not message.get("more_body", False)
            return message

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                await self._router(scope, counted_receive, noted_send)
            except ClientDisconnect:
                note["client"] = "left"
            except Exception as error:
                failure = _as_answer(error)
                if not failure.logged:
                    note["error"] = failure.message
                if status:
                    raise  # the status is sent already; the connection is closed
                headers = {
                    **failure.headers(),
                    **(dict(error.headers or {}) if isinstance(error, HTTPException) else {}),
                }
                if not read and _has_body(scope):  # do not read the rest of the body
                    headers["connection"] = "close"
                response = JSONResponse(failure.body(), failure.status, headers)
                await response(scope, receive, noted_send)
        finally:
            if scope["path"] not in self._quiet:
                seconds = round(time.monotonic() - started, 4)
                about = {"method": scope["method"][:_LONGEST], "path": scope["path"][:_LONGEST], "status": status}
                log_event("request", **about, seconds=seconds, **note)
        return None


def _as_answer(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, NOT_FOUND if error.status_code == 404 else BAD_REQUEST, error.detail)
    log.exception("a request failed", exc_info=error)
    return ApiError(500, INTERNAL, "an error that nobody foresaw; the server's log has it")


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        what = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{what}.complete"})
        if what == "shutdown":
            return
