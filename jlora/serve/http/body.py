"""Request bodies: reading with limits of size and time, and typed access to JSON fields."""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any, cast

from starlette.requests import Request

from jlora._json import Json, JSONError, parse_object
from jlora.serve.http.errors import BAD_REQUEST, ApiError

_MOST_PARTS = 16  # of a form
_LONGEST_HEAD = 8192  # bytes of the headers of a part


@dataclass(frozen=True)
class Limits:
    """Limits for each client request.

    Attributes:
      body_bytes: Size of a body. A larger one is refused from its Content-Length, or once the limit is exceeded.
      upload_bytes: Size of a body with an adapter.
      idle_seconds: Until a connection without a request is closed. A client that closes its own sooner, as httpx does
        after 5 seconds, never sends to a closed one.
      header_seconds: Until all headers are received.
      body_seconds: Until the whole body is received; a body with an adapter has more, see `upload_pace`.
      upload_pace: Bytes of a body with an adapter whose arrival extends its time by a second.
      send_seconds: For the client to accept more of a response.
      load_seconds: For an adapter to load.
      sequences: Number of prompts times completions of each.
      embeddings: Number of inputs of a request for embeddings.
    """

    body_bytes: int = 8 * 2**20
    upload_bytes: int = 2**30
    idle_seconds: float = 75.0
    header_seconds: float = 15.0
    body_seconds: float = 30.0
    upload_pace: float = 2.0 * 2**20
    send_seconds: float = 60.0
    load_seconds: float = 600.0
    sequences: int = 128
    embeddings: int = 2048


async def read_object(request: Request, limits: Limits, kind: str) -> dict[str, Json]:
    """Read the JSON object of a request. Raises the errors of `read_body` and `parse_body`."""
    return parse_body(await read_body(request, limits, kind), kind)


def media_type(request: Request) -> str:
    """Return the content type of a request without parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(
    request: Request, limits: Limits, kind: str = BAD_REQUEST, expected: str = "application/json"
) -> bytearray:
    """Read the body of a request with the expected content type.

    Raises:
      ApiError: 400 for another content type or an encoded body, or an error of `receive_body`.
    """
    media = media_type(request)
    if media != expected:  # browsers send others than JSON across origins without a preflight
        raise ApiError(400, kind, f"the content type must be {expected}, got {media[:80] or 'none'!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(400, kind, f"the content encoding {encoding[:80]!r} is not implemented; send the body as it is")
    return await receive_body(request, limits.body_bytes, limits.body_seconds)


async def receive_body(
    request: Request, most: int, seconds: float, *, pace: float = math.inf, flag: str = ""
) -> bytearray:
    """Read the body of a request into memory.

    Args:
      request: The request.
      most: Largest number of bytes.
      seconds: Until the whole body is received.
      pace: Bytes received that extend this time by a second, so that a slow client is cut off and a large body is not.
      flag: Flag of `jlora serve` that sets `most`, for messages.

    Raises:
      ApiError: 408 for a timeout, 413 for a body that is too long.
      ClientDisconnect: the client disconnected.
    """
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > most:
        raise _too_long(most, flag)
    body, started = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(seconds) as limit:
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_long(most, flag)  # no local keeps the error: its traceback holds the body
                limit.reschedule(started + seconds + len(body) / pace)
    except TimeoutError:
        more = "" if pace == math.inf else f" and one more for each {pace / 2**20:g} MiB received"
        message = f"the body did not come within {seconds:g} seconds{more}"
        raise ApiError(408, "RequestTimeoutError", message) from None
    return body


def _too_long(most: int, flag: str) -> ApiError:
    by = f" ({flag})" if flag else ""
    message = f"the body is longer than {most} bytes, the most that this server takes{by}"
    return ApiError(413, "RequestTooLargeError", message)


def parse_form(body: bytearray, content_type: str, kind: str = BAD_REQUEST) -> dict[str, memoryview]:
    """Return the parts of a multipart/form-data body (RFC 7578) by name, as views of the body.

    Raises:
      ApiError: 400 if the body is malformed or cut short, or two parts have one name.
    """
    about = Message()
    about["content-type"] = content_type
    boundary = about.get_boundary("").encode("latin-1", "replace")
    delimiter = b"\r\n--" + boundary
    if not boundary or not body.startswith(delimiter[2:]):
        raise ApiError(400, kind, "the body: does not begin with the boundary of the content type multipart/form-data")
    parts: dict[str, memoryview] = {}
    at = len(delimiter) - 2
    while body.startswith(b"\r\n", at) and len(parts) < _MOST_PARTS:
        head = body.find(b"\r\n\r\n", at, at + _LONGEST_HEAD)
        end = -1 if head < 0 else body.find(delimiter, head + 4)
        if end < 0:
            break
        name = (
            BytesHeaderParser().parsebytes(bytes(body[at + 2 : head])).get_param("name", header="content-disposition")
        )
        if not isinstance(name, str) or name in parts:
            found = "without a name" if name is None else f"{name!r:.80}, which is given twice"
            raise ApiError(400, kind, f"the body: holds a part {found}")
        parts[name] = memoryview(body)[head + 4 : end]
        at = end + len(delimiter)
    if not body.startswith(b"--", at):
        raise ApiError(400, kind, f"the body: is cut short, or malformed, after its part {list(parts)[-1:]}")
    return parts


def parse_body(body: bytes | bytearray, kind: str = BAD_REQUEST) -> dict[str, Json]:
    """Parse the JSON object of a body. Raises `ApiError` 400 for the errors of `jlora._json`."""
    try:
        return parse_object(body)
    except JSONError as error:
        raise ApiError(400, kind, f"the body: {error}") from None


class RequestFields:
    """Typed access to the fields of a JSON object. Null counts as absent. Each error names its field."""

    def __init__(self, values: dict[str, Json], kind: str = BAD_REQUEST):
        self._values = {name: value for name, value in values.items() if value is not None}
        self._known: set[str] = set()
        self._kind = kind

    def fail(self, name: str, expected: str) -> ApiError:
        """Return the error for a field with a wrong value."""
        found = repr(self._values.get(name))
        found = found if len(found) <= 80 else found[:77] + "..."
        return ApiError(400, self._kind, f"{name} must be {expected}, got {found}", name)

    def take(self, name: str) -> Any:
        """Return the value of a field without a check; None if absent."""
        self._known.add(name)
        return self._values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return default if value is None else value

    def integer(self, name: str, least: int, most: int) -> int | None:
        """Return an integer field in [least, most]; None if absent."""
        value = self.take(name)
        if value is None:
            return None
        whole = isinstance(value, float) and value.is_integer()  # some clients send 5.0 for 5
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or not least <= value <= most:
            raise self.fail(name, f"a whole number from {least} to {most}")
        return int(value)

    def number(self, name: str, least: float, most: float = math.inf, *, open_below: bool = False) -> float | None:
        """Return a finite number in [least, most], or in (least, most] with `open_below`; None if absent."""
        value = self.take(name)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
        if not good or not least <= value <= most or (open_below and value == least):
            bounds = f"{'above' if open_below else 'of at least'} {least:g}"
            bounds += "" if most == math.inf else f" and at most {most:g}"
            raise self.fail(name, f"a number {bounds}")
        return float(value)

    def text(self, name: str, longest: int) -> str | None:
        """Return a string field of 1 to `longest` characters; None if absent."""
        value = self.take(name)
        if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= longest):
            raise self.fail(name, f"a string of 1 to {longest} characters")
        return value

    def required(self, name: str, longest: int) -> str:
        """Return a string field that must be present."""
        value = self.text(name, longest)
        if value is None:
            raise ApiError(400, self._kind, f"{name} is missing", name)
        return value

    def texts(self, name: str, count: int, longest: int) -> tuple[str, ...]:
        """Return a field with a string or a list of at most `count` strings; empty if absent."""
        value = self.take(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        values = cast("list[Json]", values)
        if len(values) > count or not all(isinstance(text, str) and 1 <= len(text) <= longest for text in values):
            raise self.fail(name, f"a string, or a list of at most {count}, of 1 to {longest} characters each")
        return tuple(cast("list[str]", values))

    def integers(self, name: str, count: int, most: int) -> tuple[int, ...]:
        """Return a field with a list of at most `count` integers from 0 to `most`; empty if absent."""
        value = self.take(name)
        values = cast("list[Json]", value) if isinstance(value, list) else []
        good = all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= most for one in values)
        if value is not None and (not isinstance(value, list) or len(values) > count or not good):
            raise self.fail(name, f"a list of at most {count} whole numbers from 0 to {most}")
        return tuple(cast("list[int]", values))

    def ignore(self, names: Iterable[str]) -> None:
        """Accept fields that have no effect."""
        self._known.update(names)

    def only(self, name: str, *accepted: Json) -> None:
        """Check a field that is not implemented: it must be absent or have one of the accepted no-op values."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in accepted):
            allowed = " or ".join(repr(one) for one in accepted)
            hint = f"; it may be left out, or be {allowed}" if accepted else "; leave it out"
            raise ApiError(400, self._kind, f"{name} is not implemented{hint}", name)

    def finish(self) -> None:
        """Refuse fields that no method has read."""
        for name in self._values:
            if name not in self._known:
                raise ApiError(400, self._kind, f"{name[:80]!r} is not a field of this endpoint", name[:80])
