"""Keys of users and administrators. Refused calls have no effect."""

import pytest

from jlora.serve.http.service import Keys
from tests.serve.client import ask, make_service, post
from tests.serve.fake_engine import FakeEngine

COMPLETION = {"model": "sort", "prompt": "a"}
USERS = [("POST", "/v1/completions", COMPLETION), ("GET", "/v1/models", None), ("GET", "/v1/models/sort", None),
         ("POST", "/v1/chat/completions", COMPLETION)]  # fmt: skip
ADMINS = [
    ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "one"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "sort"}),
    ("POST", "/v1/pin_lora_adapter", {"lora_name": "sort"}),
    ("POST", "/v1/unpin_lora_adapter", {"lora_name": "sort"}),
]
OPEN = [("GET", path, None) for path in ("/health", "/version", "/metrics", "/status.json", "/status", "/")]


@pytest.fixture
def engine():
    return FakeEngine()


def served(engine, tmp_path, keys):
    (tmp_path / "one").mkdir()
    return make_service(engine, root=tmp_path, keys=keys)


def statuses(service, calls, key):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return {path: ask(service, method, path, body, **headers).status for method, path, body in calls}


def admitted(found):
    return {path: status != 401 for path, status in found.items()}


# keys of users, keys of administrators, key of the request -> may use models, may change adapters
CASES = [
    ((), (), None, True, True),
    ((), (), "anything", True, True),
    (("u",), (), None, False, False),
    (("u",), (), "x", False, False),
    (("u",), (), "u", True, True),
    (("u", "v"), (), "v", True, True),
    (("u",), ("a",), None, False, False),
    (("u",), ("a",), "u", True, False),
    (("u",), ("a",), "a", True, True),
    (("u",), ("a",), "ua", False, False),
    ((), ("a",), None, True, False),
    ((), ("a",), "a", True, True),
    ((), ("a",), "x", True, False),
]


@pytest.mark.parametrize(("users", "admins", "key", "uses", "changes"), CASES)
def test_keys_permit_use_and_changes(engine, tmp_path, users, admins, key, uses, changes):
    service = served(engine, tmp_path, Keys(users, admins))
    before = dict(engine.loras)
    assert set(admitted(statuses(service, USERS, key)).values()) == {uses}
    assert set(admitted(statuses(service, ADMINS, key)).values()) == {changes}
    assert set(statuses(service, OPEN, key).values()) == {200}
    if not uses:
        assert engine.generations == []
    if not changes:
        assert engine.loras == before
        assert sum(engine.calls.values()) == 0
    else:
        assert engine.calls == {"add": 1, "remove": 1, "pin": 1, "unpin": 1}


def test_missing_key_is_unauthorized(engine, tmp_path):
    answer = post(served(engine, tmp_path, Keys(("u",))), "/v1/completions", COMPLETION)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (401, "AuthenticationError", 401)
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header", ["", "u", "Basic u", "Bearer", "Bearer ", "Bearer u x", "Bearer U", "bearer  u ", "Bearer \xff", "\xff"]
)
def test_only_bearer_tokens_are_accepted(header):
    assert Keys(("u",)).admit(header, admin=False) == (header == "bearer  u ")


def test_keys_may_have_non_ascii_characters(engine, tmp_path):
    """Clients send them in UTF-8."""
    service = served(engine, tmp_path, Keys(("clé à part",)))
    assert post(service, "/v1/completions", COMPLETION, authorization="Bearer clé à part".encode()).status == 200
    assert post(service, "/v1/completions", COMPLETION, authorization=b"Bearer cl\xe9 \xe0 part").status == 401


def test_refused_call_is_not_read(engine, tmp_path):
    """Malformed JSON and unknown models get the same status."""
    service = served(engine, tmp_path, Keys(("u",)))
    for body in (b"{", {"model": "unknown", "prompt": "a"}):
        answer = post(service, "/v1/completions", body)
        assert answer.status == 401
        assert answer.headers["connection"] == "close"


def test_key_is_required_during_warm_up(engine):
    service = make_service(engine, keys=Keys(("u",)), state="warming")
    assert post(service, "/v1/completions", COMPLETION).status == 401
    assert post(service, "/v1/completions", COMPLETION, authorization="Bearer u").status == 503
