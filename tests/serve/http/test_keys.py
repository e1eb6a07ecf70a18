"""Keys of users and administrators. Refused calls have no effect."""

import pytest

from jlora.serve.http.service import Keys
from tests.serve.client import ask, make_service, post

COMPLETION = {"model": "sort", "prompt": "a"}
USERS = [("POST", path, COMPLETION) for path in ("/v1/completions", "/v1/chat/completions")]
USERS += [("GET", path, None) for path in ("/v1/models", "/v1/models/sort", "/is_paused", "/server_info")]
ADMINS = [
    ("POST", "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "one"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "sort"}),
    ("POST", "/v1/pin_lora_adapter", {"lora_name": "sort"}),
    ("POST", "/v1/unpin_lora_adapter", {"lora_name": "sort"}),
    ("POST", "/pause", {}),
    ("POST", "/resume", {}),
]
OPEN = [("GET", path, None) for path in ("/health", "/version", "/metrics", "/status.json", "/status", "/")]


def served(engine, tmp_path, keys):
    (tmp_path / "one").mkdir()
    return make_service(engine, root=tmp_path, keys=keys)


def statuses(service, calls, key):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return [ask(service, method, path, body, **headers).status for method, path, body in calls]


# keys of users, keys of administrators, key of the request -> may use models, may change adapters
CASES = [
    ((), (), None, True, True),
    (("u",), (), None, False, False),
    (("u", "v"), (), "v", True, True),
    (("u",), ("a",), "u", True, False),
    (("u",), ("a",), "a", True, True),
    (("u",), ("a",), "ua", False, False),
    ((), ("a",), None, True, False),
    ((), ("a",), "a", True, True),
]


@pytest.mark.parametrize(("users", "admins", "key", "uses", "changes"), CASES)
def test_keys_permit_use_and_changes(engine, tmp_path, users, admins, key, uses, changes):
    service = served(engine, tmp_path, Keys(users, admins))
    before = dict(engine.loras)
    for calls, allowed in ((USERS, uses), (ADMINS, changes)):
        assert {status != 401 for status in statuses(service, calls, key)} == {allowed}
    assert {*statuses(service, OPEN, key)} == {200}
    if not uses:
        assert engine.generations == []
    made = ("add", "remove", "pin", "unpin", "abort", "resume")
    assert engine.calls == (dict.fromkeys(made, 1) if changes else {})
    assert changes or engine.loras == before


@pytest.mark.parametrize(
    "header", ["", "u", "Basic u", "Bearer", "Bearer ", "Bearer u x", "Bearer U", "bearer  u ", "Bearer \xff", "\xff"]
)
def test_only_bearer_tokens_are_accepted(header):
    assert Keys(("u",)).admit(header, admin=False) == (header == "bearer  u ")


@pytest.mark.parametrize("key", [None, "wrong", "user", "", "ADMIN"])
def test_refused_call_changes_and_reveals_nothing(engine, tmp_path, key):
    service = served(engine, tmp_path, Keys(("user",), ("admin",)))
    before = (dict(engine.loras), set(engine.pinned), dict(engine.shown), service.state)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for state in ("serving", "warming"):
        service.state = state
        for method, path, body in ADMINS:
            bodies = [body, b"{", {**body, "lora_name": "unknown"}, {**body, "lora_path": "none"}]
            answers = [ask(service, method, path, sent, **headers) for sent in bodies]
            assert len({answer.body for answer in answers}) == 1
            error, answer = answers[0].error, answers[0]
            assert (answer.status, error["type"], error["code"]) == (401, "AuthenticationError", 401)
            assert (answer.headers["www-authenticate"], answer.headers["connection"]) == ("Bearer", "close")
    service.state = "serving"
    assert (dict(engine.loras), set(engine.pinned), dict(engine.shown), service.state) == before
    assert not engine.calls


def test_keys_may_have_non_ascii_characters(engine, tmp_path):
    service = served(engine, tmp_path, Keys(("clé à part",)))
    assert post(service, "/v1/completions", COMPLETION, authorization="Bearer clé à part".encode()).status == 200
    assert post(service, "/v1/completions", COMPLETION, authorization=b"Bearer cl\xe9 \xe0 part").status == 401
