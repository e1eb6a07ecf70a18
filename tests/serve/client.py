"""A service over the fake engine, and requests to it in this process or over a socket."""

import asyncio
import contextlib
import io
import json
import re
import socket
import threading
import time
from dataclasses import dataclass

import httpx

from jlora.cli.commands import run
from jlora.config import LoRARequest
from jlora.serve.http.app import build_app
from jlora.serve.http.lora import load
from jlora.serve.http.service import Service
from jlora.serve.http.sources import AllowedSources
from tests.serve.fake_engine import FakeEngine, fake_manager

JSON = {"content-type": "application/json"}


def make_service(engine=None, *, root=None, repos=(), state="serving", names=("base", "alias"), **options) -> Service:
    engine = engine or FakeEngine()
    before, engine.loras = engine.loras, {}
    sources = AllowedSources(root, tuple(repos))
    service = Service(
        engine, fake_manager(engine), engine.tokenizer, names, "models/base", 128, sources, state=state, **options
    )
    for request in before.values():
        load_into(service, request.name, request.path)
    engine.calls.clear()
    return service


def load_into(service, name, path):
    load(service, name, lambda: LoRARequest(name, path), path)


@dataclass
class Answer:
    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def text(self):
        return self.body.decode()

    @property
    def events(self):
        """The events of a stream, which must end with [DONE]."""
        lines = self.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert all(line.startswith("data: ") for line in lines[:-1])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def ask(service: Service, method: str, path: str, content=None, **headers) -> Answer:
    """Send one request in this process.

    Args:
      content: body, as bytes or as a value to write as JSON; None for no body.
      headers: names with _ for -.
    """
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if content is not None:
        given = JSON | given
        content = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def send() -> Answer:
        transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.request(method, path, content=content, headers=given)
            return Answer(answer.status_code, answer.headers, answer.content)

    return asyncio.run(send())


def post(service: Service, path: str, content, **headers) -> Answer:
    return ask(service, "POST", path, content, **headers)


def endpoints(service: Service) -> set[tuple[str, str]]:
    """Return (method, path) of every endpoint, except for HEAD."""
    routes = build_app(service)._router.routes  # no response lists them
    return {(method, route.path) for route in routes for method in route.methods if method != "HEAD"}


def serve_flags() -> dict[str, str]:
    """Return flag -> default of `jlora serve`, as its help shows them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run(["serve", "--help"])
    entries = re.split(r"\n  (?=--)", out.getvalue())[1:]
    texts = [" ".join(entry.split()) for entry in entries]
    return {text.split()[0].rstrip(","): re.findall(r"\(default: (.*?)\)", text)[-1] for text in texts}


def until(condition, seconds=60.0):
    """Wait until `condition()` is true. Raises AssertionError after `seconds`, a safety limit."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.005)


@contextlib.contextmanager
def on_socket(service: Service):
    """Serve on a socket of this machine, without the signals of `serve`. Yields (host, port)."""
    import uvicorn

    from jlora.serve.http.server import _protocol, listen  # the limits of headers have no other entry point

    bound = listen("127.0.0.1", 0)
    config = uvicorn.Config(build_app(service), http=_protocol(service.limits), log_config=None, access_log=False,
                            ws="none", timeout_graceful_shutdown=1)  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run([bound]), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield bound.getsockname()[:2]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def raw_post(path: str, content: bytes, *headers: str, length: int | None = None) -> bytes:
    """Return the bytes of a request."""
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", *headers,
             f"content-length: {len(content) if length is None else length}"]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + content


def read_all(connection: socket.socket, seconds=10.0) -> bytes:
    """Return the bytes received until the other side closes."""
    connection.settimeout(seconds)
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)
