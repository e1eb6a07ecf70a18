"""Adapters in the body of a request: forms, limits, keys, and uploads under load."""

import contextlib
import socket
import time

import numpy as np
import pytest

from jlora import Adapter, LoRAError, LoRAUsageError
from jlora.cli.demo import DEMO
from jlora.errors import AdapterMismatchError, NoFreeSlotError
from jlora.serve import push
from jlora.serve.http.body import Limits
from jlora.serve.http.service import Keys
from tests.serve.client import ask, make_service, on_socket, post, raw_post, read_all

LOAD = "/v1/load_lora_adapter"
FOLDER = DEMO / "adapters" / "sort"
WEIGHTS, CONFIG = (FOLDER / "adapter_model.safetensors").read_bytes(), (FOLDER / "adapter_config.json").read_bytes()
PARTS = {"lora_name": b"new", "adapter_config": CONFIG, "adapter_model": WEIGHTS}
ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture
def service(engine):
    return make_service(engine, administration=True, keys=Keys((), ("secret",)))


def form(parts, boundary=b"----x", heads=()):
    """Return a body as RFC 7578 has it. `parts` are (name, value), or a mapping."""
    lines = []
    for name, value in parts.items() if isinstance(parts, dict) else parts:
        head = [f'Content-Disposition: form-data; name="{name}"; filename="any"'.encode(), *heads]
        lines += [b"--" + boundary, *head, b"", value]
    return b"\r\n".join([*lines, b"--" + boundary + b"--", b""])


def upload(service, body, boundary="----x", **headers):
    headers = {"content_type": f"multipart/form-data; boundary={boundary}", **ADMIN, **headers}
    return post(service, LOAD, body, **headers)


def refused(answer, status, *words):
    assert answer.status == status
    assert all(word in answer.error["message"] for word in words), answer.error


def test_an_upload_adds_an_adapter(service, engine):
    answer = upload(service, form(PARTS | {"base_model_name": b"alias"}, heads=[b"Content-Type: application/x"]))
    assert (answer.status, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    (adapter,) = engine.uploaded
    expected = Adapter.from_pretrained(FOLDER)
    assert adapter.name == "new"
    for name, lora in expected.modules.items():
        np.testing.assert_array_equal(adapter.modules[name].b, lora.b)
    card = ask(service, "GET", "/v1/models/new").json
    assert (card["root"], card["parent"]) == ("", "alias")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lora_name": None}, ["lora_name is missing"]),
        ({"adapter_model": None, "model": b""}, ["adapter_model is missing: an upload has lora_name", "'model'"]),
        ({"adapter_config": None}, ["adapter_config is missing"]),
        ({"lora_name": b"base"}, ["'base' is a name of the base model"]),
        ({"lora_name": b"a\nb"}, ["must be printable"]),
        ({"lora_name": b"\xff"}, ["'lora_name' must be a text in UTF-8"]),
        ({"load_inplace": b"yes"}, ["load_inplace must be true or false, got 'yes'"]),
        ({"adapter_model.safetensors": b"one"}, ["'adapter_model.safetensors' is not a field"]),
        ({"adapter_model": WEIGHTS[:-1]}, ["'new': adapter_model.safetensors: is not a whole safetensors file"]),
        ({"adapter_model": b"PK\x03\x04" + bytes(99)}, ["is not a whole safetensors file", "pickle, which is never"]),
        ({"adapter_config": CONFIG.replace(b'"LORA"', b'"LOHA"')}, ["'LOHA'; only \"LORA\" is served"]),
        ({"adapter_config": CONFIG.replace(b"q_proj", b"x_proj")}, ["does not target module"]),
    ],
)
def test_wrong_parts_are_named(service, engine, change, words):
    parts = {name: value for name, value in (PARTS | change).items() if value is not None}
    answer = upload(service, form(parts))
    refused(answer, 400, *words)
    assert answer.error["type"] == "InvalidUserInput"
    assert not engine.uploaded


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ["does not begin with the boundary"]),
        (form(PARTS, b"other"), ["does not begin with the boundary"]),
        (form(PARTS)[:-4], ["is cut short", "'adapter_model'"]),
        (form([*PARTS.items(), ("lora_name", b"x")]), ["'lora_name', which is given twice"]),
        (form(PARTS).replace(b' name="lora_name";', b""), ["a part without a name"]),
        (form([(f"a{i}", b"") for i in range(100)]), ["malformed"]),
        (form({"a": b""}, heads=[b"x: " + b"y" * 9000]), ["malformed"]),
        (form(PARTS | {"lora_path": b"\r\n------\r\n--x--\r\n\r\n\r\n"}), ["'lora_path' is not a field"]),
    ],
)
def test_malformed_forms_are_refused(service, engine, body, words):
    refused(upload(service, body), 400, *words)
    assert engine.calls["add"] == 0


def test_an_upload_needs_a_key_of_administrators(engine, tmp_path):
    service = make_service(engine, administration=True, keys=Keys(("user",), ("secret",)))
    for key in ("", "Bearer wrong", "Bearer user"):
        assert upload(service, form(PARTS), authorization=key).status == 401
    for keys in (Keys(), Keys(("secret",))):  # without such keys
        service = make_service(engine, root=tmp_path, keys=keys)
        refused(upload(service, form(PARTS)), 404, "--admin-api-key KEY")
    assert engine.calls["add"] == 0


def test_a_body_above_the_limit_is_refused(engine):
    body = form(PARTS)
    options = {"administration": True, "keys": Keys((), ("secret",))}
    enough = make_service(engine, limits=Limits(upload_bytes=len(body)), **options)
    assert upload(enough, body).status == 200
    service = make_service(engine, limits=Limits(upload_bytes=len(body) - 1), **options)
    refused(upload(service, body), 413, f"longer than {len(body) - 1} bytes", "--max-upload-bytes")


def test_a_failed_load_has_the_status_of_its_cause(service, engine):
    for error, status in (
        (AdapterMismatchError("adapter 'new' does not fit this model: a"), 400),
        (NoFreeSlotError("the host cache is full"), 503),
        (LoRAError("--lora-state: no space left on device"), 500),
    ):
        engine.broken["memory"] = error
        refused(upload(service, form(PARTS)), status, str(error))


def head_of(body):
    """Return the head of a request that uploads `body`."""
    heads = ("content-type: multipart/form-data; boundary=----x", "authorization: Bearer secret")
    request = raw_post(LOAD, b"", *heads, length=len(body))
    return request.replace(b"content-type: application/json\r\n", b"")


def test_slow_uploads_are_cut_off_and_make_room_for_others(engine):
    service = make_service(
        engine, administration=True, keys=Keys((), ("secret",)), limits=Limits(body_seconds=1.0, upload_pace=2**20)
    )
    body = form(PARTS)
    with on_socket(service) as address, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(4)]
        for connection in slow:
            connection.sendall(head_of(body) + body[:1000])
        other = stack.enter_context(socket.create_connection(address, timeout=10))
        other.sendall(head_of(body) + body)
        assert other.recv(10_000).startswith(b"HTTP/1.1 200 ")
        for connection in slow:
            answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"did not come within 1 seconds and one more for each 1 MiB received" in answer


def test_an_upload_that_goes_on_has_more_time(engine):
    """Its body takes five times `body_seconds`."""
    limits = Limits(body_seconds=0.3, upload_pace=len(form(PARTS)) / 9)
    service = make_service(engine, administration=True, keys=Keys((), ("secret",)), limits=limits)
    body = form(PARTS)
    with on_socket(service) as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(head_of(body))
        for i in range(6):
            connection.sendall(body[i * len(body) // 6 : (i + 1) * len(body) // 6])
            time.sleep(0.25)
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200 ")


def test_no_file_is_written(service, engine, tmp_path, monkeypatch):
    """Neither the form nor its parts go through a temporary file, as those of web frameworks do."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", None)
    big = {f"m{i}.q_proj": (np.ones((16, 4096), np.float32), np.ones((64, 16), np.float32)) for i in range(16)}
    weights, config = Adapter.from_arrays("new", big, alpha=1).to_bytes()
    assert len(weights) > 2**22
    assert upload(service, form(PARTS | {"adapter_model": weights, "adapter_config": config})).status == 200


BAD_URLS = (
    *("localhost:8000", "ftp://host", "http://", "", None, b"http://host", "http://host:x", "http://host:99999"),
    *("http://[::1", "http://a b/", "http://host/a\nb", "http://host/\u00e9", "http://a..b", f"http://{'a' * 80}"),
    "http://me:secret@host",
)


def test_push(service, engine):
    adapter = Adapter.from_pretrained(FOLDER)
    with on_socket(service) as (host, port):
        url = f"http://{host}:{port}"
        push(url, adapter, admin_key="secret")
        push(url + "/", adapter, admin_key="secret", name="other", load_inplace=False)
        assert [one.name for one in engine.uploaded] == ["sort", "other"]
        for options, cause in (
            ({"load_inplace": False}, "400: adapter 'sort' has already been loaded"),
            ({"admin_key": "wrong"}, "401: a key that may do this is needed"),
            ({"name": "base"}, "adapter 'base' was not loaded by .*: 400: .* is a name of the base model"),
        ):
            with pytest.raises(LoRAError, match=cause):
                push(url, adapter, **({"admin_key": "secret"} | options))
    with pytest.raises(LoRAError, match=f"adapter 'sort' was not loaded by {url}: .*[Rr]efused"):
        push(url, adapter, admin_key="secret")
    assert len(engine.uploaded) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"url": url}, "url must be an address such as http://localhost:8000") for url in BAD_URLS),
        *(
            ({"admin_key": key}, "admin_key must be a string of printable")
            for key in (None, b"secret", "secret\n", "\ud800")
        ),
        *(({"name": name}, "name must be a non-empty string") for name in (5, "", "\ud800")),
        *(
            ({"timeout": t}, "timeout must be a positive number of seconds")
            for t in ("5", -1, 0, 1e300, float("nan"), None)
        ),
        ({"load_inplace": "no"}, "load_inplace must be a bool"),
        ({"adapter": None}, "adapter must be a jlora.Adapter, got NoneType"),
    ],
)
def test_wrong_arguments_of_push_are_usage_errors_without_the_key(wrong, message):
    given = {"url": "http://127.0.0.1:9", "adapter": Adapter.from_pretrained(FOLDER), "admin_key": "secret"} | wrong
    with pytest.raises(LoRAUsageError, match=message) as caught:
        push(given.pop("url"), given.pop("adapter"), **given)
    assert "secret" not in str(caught.value)


def test_push_takes_a_key_of_any_script(engine):
    service = make_service(engine, administration=True, keys=Keys((), ("clé€",)))
    with on_socket(service) as (host, port):
        push(f"http://{host}:{port}", Adapter.from_pretrained(FOLDER), admin_key="clé€")
    assert len(engine.uploaded) == 1


def test_push_reports_a_refusal_before_the_body_is_read(service):
    arrays = {f"m{i}": (np.ones((16, 2**16), np.float32), np.ones((64, 16), np.float32)) for i in range(8)}
    adapter = Adapter.from_arrays("big", arrays, alpha=1)
    with on_socket(service) as (host, port), pytest.raises(LoRAError, match="401: a key that may do this"):
        push(f"http://{host}:{port}", adapter, admin_key="wrong")
