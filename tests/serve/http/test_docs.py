"""docs/serve.md agrees with the server: its endpoints, flags, fields, metrics and figures."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.client import ask, endpoints, make_service, post, serve_flags

TEXT = (Path(__file__).parents[3] / "docs" / "serve.md").read_text("utf-8")


def section(title):
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found


def first_cells(text):
    """Return the code in the first column of each row of the tables."""
    return [re.findall(r"`([^`]+)`", line.split(" | ")[0]) for line in text.splitlines() if line.startswith("| `")]


def test_documented_endpoints_are_all_endpoints():
    named = set()
    for cells in first_cells(section("Endpoints")):
        method = cells[0].split()[0]
        paths = [cell.removeprefix(f"{method} ") for cell in cells if re.match(rf"({method} )?/", cell)]
        named |= {(method, path.replace("NAME", "{name:path}")) for path in paths}
    assert named == endpoints(make_service())


def test_documented_flags_exist():
    flags = serve_flags()
    assert len(flags) > 20
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named <= flags.keys() | {"--help"}


def metrics_named():
    names = []
    for cells in first_cells(section("For operators")):
        prefix = cells[0].split(":")[0]  # later names of a cell may leave it out
        names += [name if ":" in name else f"{prefix}:{name}" for name in cells]
    return {re.sub(r"\{.*", "", name) for name in names}


def test_documented_metrics_are_all_metrics():
    found = text_string_to_metric_families(ask(make_service(), "GET", "/metrics").text)
    assert {name.removesuffix("_total") for name in metrics_named()} == {family.name for family in found}


@pytest.mark.parametrize("name", [name for cells in first_cells(section("Request fields")) for name in cells])
def test_documented_fields_are_read(name):
    outer, _, inner = name.partition(".")
    value = {inner: {"no": "value"}} if inner else {"no": {"value": []}}
    body = {"model": "base", "stream": True} if inner else {"model": "base"}
    chat, messages = {"messages": [{"role": "user", "content": "a"}]}, []
    for path, more in (("completions", {"prompt": "a"}), ("chat/completions", chat)):
        answer = post(make_service(), f"/v1/{path}", {**more, **body, outer: value})
        assert answer.status == 400
        messages.append(answer.error["message"])
    assert any(inner in message or outer in message for message in messages)
    assert not all("is not a field" in message or "is not implemented" in message for message in messages)


def test_ignored_fields_change_no_answer():
    body, service = {"model": "base", "prompt": "a", "max_tokens": 3}, make_service()
    (ignored,) = re.findall(r"([^\n]*(?:\n[^\n]+)*?) are accepted and have no effect", section("Request fields"))
    names = re.findall(r"`(\w+)`", ignored)
    assert len(names) > 3
    for value in ("x", {"a": "b"}, True):
        answer = post(service, "/v1/completions", {**body, **dict.fromkeys(names, value)})
        assert (answer.status, answer.json["choices"][0]["text"]) == (200, "bas")
