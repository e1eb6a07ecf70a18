"""The server process: it answers `/health` during warm-up, serves, and drains at the first signal."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from jlora.serve.http.app import build_app
from jlora.serve.http.body import Limits
from jlora.serve.http.log import log_event
from jlora.serve.http.service import Service

_LAST_SECONDS = 5  # time for finished responses to reach their clients
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket to this address. Raises OSError if it cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY on connections of such sockets only. Without it the body of
    # a response waits for the acknowledgement of its head, which clients delay by 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def address(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    service: Service,
    bound: socket.socket,
    *,
    drain_seconds: float,
    log_level: str = "warning",
    ready: Callable[[], None] = lambda: None,
    app: ASGIApp | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Call on the main thread.

    The engine starts on a thread, while `/health` reports its progress. The first signal refuses new requests, finishes
    those under way, and closes the engine. The second signal ends the process at once.

    Args:
      service: The service, with an engine that is not started.
      bound: The socket.
      drain_seconds: For requests under way; later they end with an error.
      log_level: Of uvicorn's own log.
      ready: Called once requests are served.
      app: The application; None for that of `build_app`.

    Returns:
      The exit status: 0, or 1 if requests were cut off.

    Raises:
      Exception: the error that prevented the start of the engine.
    """
    config = uvicorn.Config(
        app or build_app(service),
        http=_protocol(service.limits),
        log_level=log_level,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        ws="none",
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_Life(service, _Server(config), bound, drain_seconds, ready).run())


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers. Uvicorn's own would end the process with the signal as its status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Life:
    """Life cycle of the server: warm-up, serving, drain."""

    def __init__(
        self,
        service: Service,
        server: _Server,
        bound: socket.socket,
        drain_seconds: float,
        ready: Callable[[], None],
    ):
        self._service, self._server, self._bound = service, server, bound
        self._drain_seconds, self._ready = drain_seconds, ready
        self._stop: asyncio.Future[None]
        self._signals = 0

    async def run(self) -> int:
        service, loop = self._service, asyncio.get_running_loop()
        self._stop = loop.create_future()
        before = {number: signal.signal(number, self._signaled) for number in (signal.SIGTERM, signal.SIGINT)}
        serving = loop.create_task(self._server.serve([self._bound]))
        warm: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._start, args=(loop, warm), name="jlora-warm", daemon=True).start()
        try:
            await asyncio.wait((warm, self._stop, serving), return_when=asyncio.FIRST_COMPLETED)
            if not warm.done():  # compilation cannot be interrupted, and no request was accepted
                log_event("stopped before it was warm")
                sys.stdout.flush()
                os._exit(0)
            drained = warm.exception() is None
            if drained:
                service.state = "serving"
                self._ready()
                log_event("serving", address=address(self._bound))
                await asyncio.wait((self._stop, serving), return_when=asyncio.FIRST_COMPLETED)
                service.state = "closing"
                log_event("closing", seconds=self._drain_seconds)
                drained = await asyncio.to_thread(service.engine.close, self._drain_seconds)
                if service.saved is not None:
                    await asyncio.to_thread(service.saved.close)
            self._server.should_exit = True
            await serving
        finally:
            idle = service.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        warm.result()
        log_event("closed", drained=drained)
        status = 0 if drained else 1
        if not idle:  # a load may hang on a disk or a network, and a normal exit would wait for it
            sys.stdout.flush()
            os._exit(status)
        return status

    def _start(self, loop: asyncio.AbstractEventLoop, warm: "asyncio.Future[None]") -> None:
        error: BaseException | None = None
        try:
            self._service.engine.start(self._progress)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: warm.set_exception(error) if error else warm.set_result(None))

    def _progress(self, done: int, total: int) -> None:
        self._service.progress, self._service.step_started = (done, total), time.monotonic()

    def _signaled(self, number: int, frame: Any) -> None:
        self._signals += 1
        if self._signals > 1:
            os.write(2, f"jlora: ended at once, at {signal.Signals(number).name}\n".encode())
            os._exit(128 + number)
        # Signal handlers run on the main thread, which may be blocked until the loop's next event.
        self._stop.get_loop().call_soon_threadsafe(lambda: self._stop.done() or self._stop.set_result(None))


def _protocol(limits: Limits) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1 protocol, with timeouts for slow headers and slow readers."""

    class Patient(H11Protocol):
        _waiting: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self.timeout_keep_alive: float = limits.idle_seconds
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_headers()

        def _await_headers(self) -> None:
            """Start or stop the timer for headers.

            It runs from the connection, or from the first byte of a later request, until the headers are complete. It
            also runs while a body arrives after its response was sent.
            """
            theirs = self.conn.their_state
            late = theirs is h11.IDLE or (theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE)
            if late and not self.transport.is_closing():
                self._waiting = self._waiting or self.loop.call_later(limits.header_seconds, self.transport.abort)
            elif self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def send_400_response(self, msg: str) -> None:
            """Answer bytes that are not HTTP, and close. A request under way ends as if its client had disconnected."""
            cycle: Any = self.cycle  # None before the first request
            if cycle is not None:
                cycle.disconnected = True  # its response can no longer be sent
                cycle.message_event.set()
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:  # a response has begun, or ended before the body
                self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self._writing or self.loop.call_later(limits.send_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._waiting, self._writing):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

    return Patient
