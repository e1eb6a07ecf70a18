"""Send an adapter to a running `jlora serve`, without files. Needs no HTTP package."""

import contextlib
import dataclasses
import http.client
import json
import secrets
import urllib.parse

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
      url: Address of the server, such as "http://localhost:8000".
      adapter: The adapter, for example of `Adapter.from_state_dict` or `LoRAManager.export_adapter`.
      admin_key: A key of `jlora serve --admin-api-key`.
      name: Name of the adapter on the server; None for its own.
      load_inplace: Replace a loaded adapter of that name, which running requests keep.
      timeout: Seconds that the server may take to answer.

    Raises:
      LoRAError: the server cannot be reached, or refuses the adapter; it then serves as before. Or PEFT's files cannot
        hold the adapter.
      LoRAUsageError: `url` is not an address of HTTP.
    """
    parts = urllib.parse.urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise LoRAUsageError(f"url must be an address such as http://localhost:8000, got {url!r}")
    name = adapter.name if name is None else name
    weights, config = dataclasses.replace(adapter, name=name).to_bytes()
    fields = {"lora_name": name.encode(), "load_inplace": b"true" if load_inplace else b"false"}
    boundary = secrets.token_hex(16)
    body: list[bytes] = []
    for field, value in (fields | {"adapter_config": config, "adapter_model": weights}).items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n'
        body += [head.encode(), value, b"\r\n"]
    body.append(f"--{boundary}--\r\n".encode())
    headers = {
        "Authorization": f"Bearer {admin_key}",
        "Content-Type": f"multipart/form-data; boundary={boundary}",
        "Content-Length": str(sum(map(len, body))),
    }
    where = f"adapter {name!r} was not loaded by {url}"
    connection = kinds[parts.scheme](parts.hostname, parts.port, timeout=timeout)
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a refusal may end the body early
            connection.request("POST", parts.path.rstrip("/") + "/v1/load_lora_adapter", body, headers)
        response = connection.getresponse()
        status, text = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise LoRAError(f"{where}: {printable(str(error)) or type(error).__name__}") from error
    finally:
        connection.close()
    if status != 200:
        raise LoRAError(f"{where}: {status}: {_message(text)}")


def _message(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return printable(body[:300].decode("latin-1"))
