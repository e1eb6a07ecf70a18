"""Tests over a socket: clients that disconnect, are slow or send too much, and the openai client."""

import asyncio
import json
import os
import socket
import struct
import threading
import time

import httpx
import openai
import pytest

from jlora.errors import LoRAError
from jlora.serve.engine.request import Piece
from jlora.serve.http.body import Limits
from jlora.serve.http.server import listen
from jlora.serve.http.template import ChatTemplate
from tests.serve.client import make_service, on_socket, raw_post, read_all, until
from tests.serve.fake_engine import BUSY

BODY = {"model": "sort", "prompt": "ba="}
PATH = "/v1/completions"


def content(**more):
    return json.dumps({**BODY, **more}).encode()


@pytest.fixture
def served(engine):
    limits = Limits(body_bytes=10_000, header_seconds=0.5, body_seconds=0.5, send_seconds=0.5)
    service = make_service(engine, limits=limits, chat=ChatTemplate("{{ messages[-1].content }}"))
    with on_socket(service) as address:
        yield address


def connect(address):
    return socket.create_connection(address, timeout=10)


def test_connections_do_not_wait_for_acknowledgements():
    async def accepted():
        found = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: found.set_result(writer), sock=listen("127.0.0.1", 0))
        async with server:
            _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
            connection = (await found).get_extra_info("socket")
            option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()
            found.result().close()
            return option

    assert asyncio.run(accepted())


def test_pieces_are_streamed_as_they_are_made(served, engine):
    engine.hold = True
    url = f"http://{served[0]}:{served[1]}{PATH}"

    def feed():
        until(lambda: engine.generations)
        engine.generations[0].put(Piece("a", (3,)))

    feeder = threading.Thread(target=feed)
    feeder.start()
    with httpx.Client(timeout=10) as client, client.stream("POST", url, json={**BODY, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "a"
        engine.generations[0].put(Piece("b", (4,)))
        assert next(lines) == ""
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "b"
        engine.generations[0].put(LoRAError("the step failed"))
        rest = [line for line in lines if line]
    feeder.join()
    assert json.loads(rest[0].removeprefix("data: "))["error"]["type"] == "InternalServerError"
    assert rest[1:] == ["data: [DONE]"]


@pytest.mark.parametrize(
    ("stream", "began", "how"), [(False, False, "close"), (False, True, "reset"), (True, True, "close")]
)
def test_disconnect_cancels_the_requests(served, engine, stream, began, how):
    engine.hold = True
    connection = connect(served)
    connection.sendall(raw_post(PATH, content(stream=stream, n=2)))
    until(lambda: len(engine.generations) == 2 and all(one.callback for one in engine.generations))
    if began:
        for generation in engine.generations:
            generation.put(Piece("a", (3,)))
        if stream:
            assert b"200 OK" in connection.recv(10_000)
    assert not any(generation.cancelled for generation in engine.generations)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    until(lambda: all(generation.cancelled for generation in engine.generations))


def test_hundred_disconnects_leave_no_threads_or_descriptors(served, engine):
    engine.hold = True
    request = raw_post(PATH, content(stream=True))
    before, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    connections = [connect(served) for _ in range(100)]
    for connection in connections:
        connection.sendall(request)
    for connection in connections:
        connection.close()
    until(lambda: all(generation.cancelled for generation in engine.generations))
    engine.hold = False
    assert httpx.post(f"http://{served[0]}:{served[1]}{PATH}", json=BODY, timeout=30).status_code == 200
    assert threading.active_count() <= before + 4  # threads of the pool
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 8)


def test_client_that_does_not_read_is_cut_off(served, engine):
    engine.hold = True
    connection = connect(served)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(raw_post(PATH, content(stream=True)))
    until(lambda: engine.generations and engine.generations[0].callback)
    generation = engine.generations[0]

    def cut_off():
        generation.put(Piece("x" * 100_000, (3,)))
        time.sleep(0.02)
        return generation.cancelled

    until(cut_off)
    connection.close()


def test_incomplete_and_slow_headers_are_cut_off(served):
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx"):
        with connect(served) as connection:
            started = time.monotonic()
            connection.sendall(sent)
            assert read_all(connection) == b""
            assert time.monotonic() - started > 0.3  # header_seconds is 0.5
    # All headers would take seven seconds, and a byte restarts no clock.
    with connect(served) as connection:
        slow = (connection.sendall(bytes([letter])) or time.sleep(0.05) for letter in raw_post(PATH, content()))
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            list(slow)


def test_incomplete_body_times_out(served, engine):
    with connect(served) as connection:
        connection.sendall(raw_post(PATH, content()[:5], length=len(content())))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"RequestTimeoutError" in answer
    assert engine.generations == []


@pytest.mark.parametrize("path", [PATH, "/nothing", "/health"])
def test_declared_gigabyte_is_refused(served, path):
    with connect(served) as connection:
        connection.sendall(raw_post(path, b"", length=2**30))
        answer = read_all(connection)
    status = {PATH: b"413", "/nothing": b"404", "/health": b"405"}[path]
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in answer.lower()


def test_lines_and_headers_have_limits(served):
    for request in (
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",
        b"GET /nothing HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01 this is no HTTP\r\n\r\n",
    ):
        with connect(served) as connection:
            try:
                connection.sendall(request)
            except OSError:  # cut off while sending
                continue
            assert connection.recv(4096)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404", b"")
    assert httpx.get(f"http://{served[0]}:{served[1]}/health").status_code == 200


def test_headers_in_pieces_have_a_limit(served):
    with connect(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        parts = (connection.sendall(b"y" * 10_000) or time.sleep(0.01) for _ in range(20))  # less than header_seconds
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            list(parts)


def test_requests_without_a_pause_are_answered_in_order(served):
    with connect(served) as connection:
        posts = [raw_post(PATH, content(prompt=prompt)) for prompt in ("ba=", "c=")]
        connection.sendall(b"".join(posts) + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answers = read_all(connection).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * 3
    assert b"sort|ba=" in answers[0]
    assert b"sort|c=" in answers[1]


def test_bytes_after_an_answer_that_are_not_http(served):
    with connect(served) as connection:
        connection.sendall(raw_post(PATH, content()))
        answer = b""
        while not answer.endswith(b"}}}"):
            answer += connection.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"\x16\x03\x01\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_offers_of_other_protocols_are_not_taken(served, protocol):
    """As the HTTP client of Java makes them with each request, whose body is read all the same."""
    offer = {"connection": "upgrade", "upgrade": protocol}
    with httpx.Client(base_url=f"http://{served[0]}:{served[1]}", timeout=10, headers=offer) as client:
        for _ in range(2):
            assert client.post(PATH, json=BODY).json()["choices"][0]["text"] == "sort|ba="
            assert client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
@pytest.mark.parametrize("late", [False, True])
def test_bytes_that_stop_being_http_end_the_connection(served, caplog, path, late):
    """During the body of a request that is being answered, or that was answered without its body."""
    head, broken = f"GET {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode(), b"no size\r\n"
    with connect(served) as connection:
        if late:
            connection.sendall(head)
            first = connection.recv(10_000)
            assert first.startswith(b"HTTP/1.1 404" if path == "/nothing" else b"HTTP/1.1 200")
            connection.sendall(broken)
            assert b"HTTP/1.1" not in read_all(connection)
        else:
            connection.sendall(head + broken)
            assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert httpx.get(f"http://{served[0]}:{served[1]}/health").status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_bytes_that_stop_being_http_end_the_request(served, engine):
    engine.hold = True
    body = content()
    sized = b"%x\r\n%s\r\n" % (len(body), body)
    with connect(served) as connection:
        request = raw_post(PATH, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
        connection.sendall(request + sized + b"no size\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert engine.generations == []


def test_connection_serves_many_requests(served):
    with httpx.Client(base_url=f"http://{served[0]}:{served[1]}", timeout=10) as client:
        for _ in range(5):
            assert client.post(PATH, json=BODY).status_code == 200
            assert client.post(PATH, json={}).status_code == 400
            assert client.get("/health").status_code == 200
        time.sleep(0.8)  # longer than header_seconds, which starts with the first byte
        assert client.get("/health").status_code == 200


def test_idle_connection_is_closed_after_its_own_time(engine):
    assert Limits().idle_seconds > 5  # until httpx closes its idle connections
    service = make_service(engine, limits=Limits(idle_seconds=0.3))
    with on_socket(service) as address, connect(address) as connection:
        connection.sendall(raw_post(PATH, content()))
        assert b"200 OK" in read_all(connection, 3)  # uvicorn's own time is 5 seconds


def test_openai_client(served, engine):
    client = openai.OpenAI(base_url=f"http://{served[0]}:{served[1]}/v1", api_key="none", max_retries=0)
    with client:
        assert [model.id for model in client.models.list()] == ["base", "alias", "sort", "reverse"]
        assert client.models.retrieve("sort").model_extra["parent"] == "base"
        assert client.completions.create(model="sort", prompt="ba=", logprobs=1).choices[0].text == "sort|ba="
        hi = {"role": "user", "content": "hi"}
        answer = client.chat.completions.create(model="base", messages=[hi], logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == "base|hi"
        assert answer.choices[0].logprobs.content[0].token == "b"
        *parts, last = client.chat.completions.create(
            model="sort", messages=[hi, answer.choices[0].message.model_dump()], stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "sort|base|hi"
        assert last.usage.total_tokens == 19
        raw = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stop_token_ids": [5], "ignore_eos": True}
        found = client.completions.create(model="sort", prompt=[4, 3], logprobs=0, extra_body=raw, max_tokens=3)
        (choice,) = found.choices
        assert choice.model_extra == {"token_ids": engine.sent(), "prompt_token_ids": [4, 3]}
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in engine.sent()]
        assert found.system_fingerprint == "model=base&adapter=sort"
        chat = {"model": "sort", "messages": [hi], "extra_body": raw, "logprobs": True, "stream": True, "max_tokens": 4}
        parts = [*client.chat.completions.create(**chat)]
        assert parts[0].model_extra["prompt_token_ids"] == list(engine.generations[-1].prompt)
        found = [token for part in parts for token in part.choices[0].model_extra.get("token_ids", ())]
        entries = [one.token for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
        assert (found, entries) == (engine.sent(), [f"token_id:{token}" for token in engine.sent()])
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="unknown", prompt="a")
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            client.completions.create(model="sort", prompt="a", frequency_penalty=1)
        engine.refuse = BUSY
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="sort", prompt="a")
