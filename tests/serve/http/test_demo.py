"""`jlora serve` on the demo model in a process, with OpenAI's client, curl and the README's lines."""

import contextlib
import io
import json
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from jlora.cli.commands import run
from jlora.cli.demo import DENSE, demo_requests
from tests.serve.client import until
from tests.serve.demo_process import ADAPTERS, NAMES, ROOT, DemoServer, recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL, process and log of a server with three slots for four adapters."""
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text("<bos>{{ messages[-1].content }}{% if add_generation_prompt %}={% endif %}")
    server = DemoServer(recipe("--chat-template", str(template)))
    yield server.url, server.process, server.log
    server.stop()


@pytest.fixture(scope="module")
def requests():
    return [(request.adapter or "demo", request.prompt) for request in demo_requests(DENSE)[:48]]


@pytest.fixture(scope="module")
def expected(requests):
    """The output of `jlora generate` for the same prompts."""
    adapters = [f"--adapter={name}={ADAPTERS / name}" for name in NAMES]
    prompts = [f"--prompt={'' if name == 'demo' else name}:{prompt}" for name, prompt in requests]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert (
            run(["generate", "--model", str(ROOT / "jlora/demo/model"), *adapters, *prompts, "--max-new-tokens=10"])
            == 0
        )
    lines = out.getvalue().splitlines()
    answers = [line.partition(": ")[2].removeprefix(prompt) for line, (_, prompt) in zip(lines, requests, strict=True)]
    assert len({*answers}) > 24
    return answers


def test_mixed_requests_answer_as_generate_does(server, requests, expected):
    """Concurrent requests, half of them streaming, get the answers of `jlora generate`."""
    client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", timeout=120)
    assert [model.id for model in client.models.list()] == ["demo", *NAMES]

    def ask(numbered):
        number, (name, prompt) = numbered
        options = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 10}
        if number % 2:
            return client.completions.create(**options).choices[0].text
        return "".join(part.choices[0].text for part in client.completions.create(**options, stream=True))

    with ThreadPoolExecutor(24) as pool:
        answers = [*pool.map(ask, enumerate(requests))]
    assert answers == expected
    stats = httpx.get(f"{server[0]}/status.json").json()
    assert stats["manager"]["slot_evictions"] > 0
    assert stats["manager"]["compilations"] == 1
    assert stats["failed_steps"] == 0


def test_lines_of_the_readme_run(server, capsys):
    text = (ROOT / "README.md").read_text().replace("http://127.0.0.1:8000", server[0])
    (block,) = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["demo planet", "sort aelnpt", "reverse tenalp", "swap lpnate", "shift qmbofu", "tenalp"]
    (command,) = re.findall(r"^\$ (curl .*?\}')$", text, re.MULTILINE | re.DOTALL)
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["choices"][0]["text"] == "aelnpt"


def test_adapters_are_loaded_replaced_and_unloaded(server):
    client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)

    def post(path, **body):
        answer = httpx.post(f"{server[0]}/v1/{path}", json=body, timeout=60)
        return answer.status_code, answer.text

    def ask(name):
        return client.completions.create(model=name, prompt="planet=", temperature=0).choices[0].text

    assert post("load_lora_adapter", lora_name="mine", lora_path="sort")[0] == 200
    assert ask("mine") == "aelnpt"
    assert post("load_lora_adapter", lora_name="mine", lora_path="reverse")[0] == 400
    assert post("load_lora_adapter", lora_name="mine", lora_path="reverse", load_inplace=True)[0] == 200
    assert ask("mine") == "tenalp"
    assert post("pin_lora_adapter", lora_name="mine")[0] == 200
    assert 'adapter_name="mine",level="slot",pinned="true"' in httpx.get(f"{server[0]}/metrics").text
    assert post("unload_lora_adapter", lora_name="mine")[0] == 200
    with pytest.raises(openai.NotFoundError):
        ask("mine")
    until(lambda: 'adapter_name="mine"' not in httpx.get(f"{server[0]}/metrics").text)
    assert post("load_lora_adapter", lora_name="mine", lora_path="../model")[0] == 400
    assert post("load_lora_adapter", lora_name="mine", lora_path="missing")[0] == 404
    status, text = post("load_lora_adapter", lora_name="mine", lora_path=".")
    assert (status, "adapter_config.json" in text) == (500, True)
    assert ask("sort") == "aelnpt"


def test_logprobs_seeds_and_stops(server):
    client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(model="sort", prompt="planet=", temperature=0, logprobs=3, stop="n")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("ael", "stop")
    assert choice.logprobs.tokens[:3] == ["a", "e", "l"]
    assert all(len(top) == 3 and max(top, key=top.get) in "aeln" for top in choice.logprobs.top_logprobs[:3])
    options = {"model": "demo", "prompt": "planet=", "temperature": 3, "n": 4, "seed": 7, "max_tokens": 8}
    one, two = (client.completions.create(**options) for _ in range(2))
    assert [choice.text for choice in one.choices] == [choice.text for choice in two.choices]
    assert len({choice.text for choice in one.choices}) > 1
    with pytest.raises(openai.BadRequestError, match="64"):
        client.completions.create(model="sort", prompt="a" * 100)


def test_chats_answer_as_completions_do(server):
    """The template writes the prompt of the completion, with its special token once."""
    client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)
    right = {"demo": "planet", "sort": "aelnpt", "reverse": "tenalp", "swap": "lpnate", "shift": "qmbofu"}
    for name, text in right.items():
        options = {"model": name, "messages": [{"role": "user", "content": "planet"}], "temperature": 0}
        answer = client.chat.completions.create(**options)
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (text, 8)
        parts = [part.choices[0] for part in client.chat.completions.create(**options, stream=True)]
        assert "".join(part.delta.content or "" for part in parts) == text
        assert parts[-1].finish_reason == "stop"


def test_disconnected_clients_release_their_rows(server):
    """There are more clients than rows."""
    for _ in range(40):
        with contextlib.suppress(httpx.TimeoutException):
            body = {"model": "sort", "prompt": "a", "ignore_eos": True, "max_tokens": 60}
            httpx.post(f"{server[0]}/v1/completions", json=body, timeout=0.01)
    until(lambda: httpx.get(f"{server[0]}/status.json").json()["running"] == 0)
    status = httpx.get(f"{server[0]}/status.json").json()
    assert status["manager"]["leased"] == 0


def test_sigterm_drains(server):
    """Requests under way are answered, and the status is 0. This test ends the server of the module."""
    address, process, log = server
    body = {"model": "sort", "prompt": "planet=", "temperature": 0, "ignore_eos": True, "max_tokens": 55}
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=60) for _ in range(8)]
        until(lambda: httpx.get(f"{address}/status.json").json()["running"] > 0)
        process.send_signal(signal.SIGTERM)
        answers = [one.result() for one in pending]
    assert process.wait(30) == 0
    served = [answer for answer in answers if answer.status_code == 200]
    assert served
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert len({answer.json()["choices"][0]["text"] for answer in served}) == 1
    until(lambda: any('"drained": true' in line for line in log))
    assert not any("Traceback" in line for line in log)
    assert process.stdout.read() == ""
