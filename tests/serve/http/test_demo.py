"""`jlora serve` on the demo model in a process, with OpenAI's client, curl and the README's lines."""

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from jlora.cli.demo import DENSE, demo_requests
from tests.serve.demo_process import NAMES, ROOT, DemoServer, recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a server with three slots for four adapters."""
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text("<bos>{{ messages[-1].content }}{% if add_generation_prompt %}={% endif %}")
    server = DemoServer(recipe("--chat-template", str(template)))
    yield server.url
    server.stop()


def test_mixed_requests_get_the_shipped_answers(server):
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=120)
    assert [model.id for model in client.models.list()] == ["demo", *NAMES]

    requests = demo_requests(DENSE)[:48]

    def ask(number):
        name, prompt = requests[number].adapter or "demo", requests[number].prompt
        options = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 10}
        if number % 2:
            return client.completions.create(**options).choices[0].text
        return "".join(part.choices[0].text for part in client.completions.create(**options, stream=True))

    with ThreadPoolExecutor(24) as pool:
        answers = [*pool.map(ask, range(len(requests)))]
    assert answers == [request.answer for request in requests]
    # The template writes the prompt of the completion, with its special token once.
    chat = client.chat.completions.create(model="sort", messages=[{"role": "user", "content": "planet"}], temperature=0)
    assert (chat.choices[0].message.content, chat.usage.prompt_tokens) == ("aelnpt", 8)
    stats = httpx.get(f"{server}/status.json").json()
    assert stats["manager"]["slot_evictions"] > 0
    assert stats["manager"]["compilations"] == 1
    assert stats["failed_steps"] == 0


def test_lines_of_the_readme_run(server, capsys):
    text = (ROOT / "README.md").read_text().replace("http://127.0.0.1:8000", server)
    (block,) = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["demo planet", "sort aelnpt", "reverse tenalp", "swap lpnate", "shift qmbofu", "tenalp"]
    (command,) = re.findall(r"^\$ (curl .*?\}')$", text, re.MULTILINE | re.DOTALL)
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["choices"][0]["text"] == "aelnpt"
