"""docs/serve.md against the server: every endpoint, flag, field and metric that the page names is there, and those that
are there are named."""

import re
from pathlib import Path

import pytest

from jlora.cli.commands import _parser
from jlora.serve.engine.request import MAX_LOGPROBS
from jlora.serve.http import prometheus, status, template
from jlora.serve.http.app import build_app
from jlora.serve.http.body import Limits
from tests.serve.client import ask, make_service, post
from tests.serve.exposition import parse

TEXT = (Path(__file__).parents[3] / "docs" / "serve.md").read_text("utf-8")


def section(title):
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return found


def first_cells(text):
    """What stands in code in the first column of its tables."""
    return [re.findall(r"`([^`]+)`", line.split(" | ")[0]) for line in text.splitlines() if line.startswith("| `")]


def test_endpoints():
    named = set()
    for cells in first_cells(section("Endpoints")):
        method = cells[0].split()[0]
        paths = [cell.removeprefix(f"{method} ") for cell in cells if re.match(rf"({method} )?/", cell)]
        named |= {(method, path.replace("NAME", "{name:path}")) for path in paths}
    routes = build_app(make_service())._router.routes
    assert named == {(method, route.path) for route in routes for method in route.methods if method != "HEAD"}


def test_flags(capsys):
    with pytest.raises(SystemExit):
        _parser().parse_args(["serve", "--help"])
    there = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out))
    assert len(there) > 20
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT))
    assert named <= there


def metrics_named():
    names = []
    for cells in first_cells(section("For operators")):
        prefix = cells[0].split(":")[0]  # which the rest of a cell leaves out
        names += [name if ":" in name else f"{prefix}:{name}" for name in cells]
    return {re.sub(r"\{.*", "", name) for name in names}


def test_metrics():
    assert metrics_named() == parse(ask(make_service(), "GET", "/metrics").text).keys()


@pytest.mark.parametrize("name", [name for cells in first_cells(section("Request fields")) for name in cells])
def test_fields_are_known(name):
    """Each is read by one of the two endpoints: what cannot be a value of it is refused as that."""
    outer, _, inner = name.partition(".")
    value = {inner: {"no": "value"}} if inner else {"no": {"value": []}}
    body = {"model": "base", "stream": True} if inner else {"model": "base"}
    messages = []
    for path, more in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = post(make_service(), path, {**more, **body, outer: value})
        assert answer.status == 400
        messages.append(answer.error["message"])
    assert any(inner in message or outer in message for message in messages)
    assert not all("is not a field" in message or "is not implemented" in message for message in messages)


(IGNORED,) = re.findall(r"^(.*?) are accepted and have no effect", section("Request fields"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", re.findall(r"`(\w+)`", IGNORED.rsplit("\n\n", 1)[-1]))
@pytest.mark.parametrize("value", ["x", {"a": "b"}, True])
def test_fields_that_change_no_answer(name, value):
    body = {"model": "base", "prompt": "a", "max_tokens": 3}
    plain = post(make_service(), "/v1/completions", body).json
    answer = post(make_service(), "/v1/completions", {**body, name: value})
    assert (answer.status, answer.json["choices"]) == (200, plain["choices"])


def test_figures():
    limits, args = Limits(), _parser().parse_args(["serve", "MODEL"])
    for sentence in (
        f"the body is slow to come ({limits.body_seconds:g} s), or longer than {limits.body_bytes // 2**20} MiB",
        f"prompts times answers: {limits.sequences} at most",
        f"up to {MAX_LOGPROBS}, in each API's own form",
        f"for at most {template._MAX_SECONDS:g} seconds and {template._MAX_TEXT // 2**20} Mi characters",
        f"`--max-loras` is {args.max_loras} by default",
        f"`--gpu-memory-utilization` ({args.gpu_memory_utilization})",
        f"The server listens on {args.host} unless",
        f"at most {prometheus._MOST:,} in all. `/status.json` shows {status._MOST}",
    ):
        assert sentence in " ".join(TEXT.split()), sentence
