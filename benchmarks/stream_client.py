"""A client of streamed completions with minimal cost, which stores the received bytes and parses them afterwards."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field

_JSON = "application/json"
_END = b"0\r\n\r\n"  # last chunk of a body
_EVENT = re.compile(rb"data: (\{.*?\})\n\n", re.DOTALL)


@dataclass
class Answer:
    """One answer. `parts` are the received bytes with their times (`time.perf_counter()`)."""

    asked: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds until the first event, with which the status and headers come."""
        return next(at for at, data in self.parts if b"data: " in data) - self.asked

    @property
    def seconds(self) -> float:
        return self.parts[-1][0] - self.asked

    def events(self) -> list[dict]:
        return [json.loads(event) for event in _EVENT.findall(b"".join(data for _, data in self.parts))]

    @property
    def text(self) -> str:
        """The text of completions.

        Raises:
          RuntimeError: The answer is an error.
        """
        events = self.events()
        for event in events:
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])


class Connection(asyncio.Protocol):
    """One persistent connection, for one request at a time."""

    def __init__(self) -> None:
        self._tail = b""
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        return (await asyncio.get_running_loop().create_connection(cls, host, port))[1]

    def connection_made(self, transport) -> None:
        self._transport = transport

    async def stream(self, body: dict) -> Answer:
        """Send a completion request and return its streamed answer.

        Raises:
          RuntimeError: The status is not 200.
          ConnectionError: The connection ended.
        """
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: {_JSON}\r\ncontent-length: {len(content)}"
        self._tail, self._done = b"", asyncio.get_running_loop().create_future()
        self._answer = Answer(time.perf_counter())
        self._transport.write(head.encode() + b"\r\n\r\n" + content)
        return await self._done

    def data_received(self, data: bytes) -> None:
        now, answer, done = time.perf_counter(), self._answer, self._done
        if answer is None or done is None or done.done():
            return
        if not answer.parts and not data.startswith(b"HTTP/1.1 200"):
            done.set_exception(RuntimeError(data.decode(errors="replace")))
            return
        answer.parts.append((now, data))
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            done.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the connection ended: {exc}"))

    def close(self) -> None:
        self._transport.close()
