"""Send an adapter to a running `jlora serve`, without files. Needs no HTTP package."""

import contextlib
import dataclasses
import functools
import http.client
import json
import secrets
import urllib.parse
from collections.abc import Callable

from jlora import Adapter
from jlora.errors import LoRAError, LoRAUsageError, printable


def push(
    url: str,
    adapter: Adapter,
    *,
    admin_key: str,
    name: str | None = None,
    load_inplace: bool = True,
    timeout: float = 600.0,
) -> None:
    """Send an adapter to a running `jlora serve`. Requests that begin after the return are served with it.

    Args:
      url: Address of the server, such as "http://localhost:8000", in ASCII and without a user name.
      adapter: The adapter, for example of `Adapter.from_state_dict` or `LoRAManager.export_adapter`.
      admin_key: A key of `jlora serve --admin-api-key`, in printable characters. No message contains it.
      name: Name of the adapter on the server; None for its own.
      load_inplace: Replace a loaded adapter of that name, which running requests keep.
      timeout: Seconds that the server may take to answer.

    Raises:
      LoRAError: the server cannot be reached, or refuses the adapter; it then serves as before. Or PEFT's files cannot
        hold the adapter.
      LoRAUsageError: An argument has the wrong type or value.
    """
    connect, path = _address(url)
    if not isinstance(adapter, Adapter):
        raise LoRAUsageError(f"adapter must be a jlora.Adapter, got {type(adapter).__name__}")
    if not isinstance(admin_key, str) or not admin_key.isprintable():
        raise LoRAUsageError("admin_key must be a string of printable characters")
    name = adapter.name if name is None else name
    if not isinstance(name, str) or not name or not _encodable(name):
        raise LoRAUsageError(f"name must be a non-empty string of valid Unicode, got {name!r}")
    if not isinstance(load_inplace, bool):
        raise LoRAUsageError(f"load_inplace must be a bool, got {load_inplace!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 2**31:
        raise LoRAUsageError(f"timeout must be a positive number of seconds, got {timeout!r}")
    weights, config = dataclasses.replace(adapter, name=name).to_bytes()
    fields = {"lora_name": name.encode(), "load_inplace": b"true" if load_inplace else b"false"}
    boundary = secrets.token_hex(16)
    body: list[bytes] = []
    for field, value in (fields | {"adapter_config": config, "adapter_model": weights}).items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n'
        body += [head.encode(), value, b"\r\n"]
    body.append(f"--{boundary}--\r\n".encode())
    headers = {
        "Authorization": f"Bearer {admin_key}".encode(),
        "Content-Type": f"multipart/form-data; boundary={boundary}",
        "Content-Length": str(sum(map(len, body))),
    }
    where = f"adapter {name!r} was not loaded by {url}"
    connection = connect(timeout=timeout)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a refusal may end the body early
            connection.request("POST", path.rstrip("/") + "/v1/load_lora_adapter", body, headers)
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise LoRAError(f"{where}: {printable(str(error)) or type(error).__name__}") from error
    finally:
        connection.close()
    if status != 200:
        raise LoRAError(f"{where}: {status}: {_message(text)}")


def _address(url: str) -> tuple[Callable[..., http.client.HTTPConnection], str]:
    """Return the connection of a URL, to be called with its timeout, and the path of the URL."""
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    try:
        if not isinstance(url, str) or not (url.isascii() and url.isprintable()) or " " in url:
            raise ValueError
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # raises for a label that is empty or too long
        if parts.scheme in kinds and host and parts.username is None:
            return functools.partial(kinds[parts.scheme], host, port), parts.path
    except ValueError:  # also of UnicodeError
        pass
    # The name of a user may be followed by a password.
    found = "one with a user name" if isinstance(url, str) and "@" in url else repr(url)
    raise LoRAUsageError(f"url must be an address such as http://localhost:8000, got {found}")


def _encodable(text: str) -> bool:
    """Return whether a string is free of lone surrogates."""
    return text == text.encode("utf-8", "ignore").decode()


def _message(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return printable(body[:300].decode("latin-1"))
