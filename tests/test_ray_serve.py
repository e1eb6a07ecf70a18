"""examples/ray_serve: the answers of replicas, adapters that come and go in them, and what routing by adapter saves.

Needs Ray, which is none of the tests' requirements: pip install "jlora[ray]".
"""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.demo_process import RIGHT
from tests.two_processes import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='needs pip install "jlora[ray]"'),
]

ROOT = Path(__file__).parents[1]
# The answers do not depend on optimisations.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}
SERVE = """
import sys
import ray
from ray import serve
from examples.ray_serve import app

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(app.build(app.Options(model="jlora/demo/model", adapters=sys.argv[2], name="demo", replicas=1, held=1,
                                max_loras=2, max_lora_rank=32, max_num_seqs=4)))
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a replica that holds one adapter at a time, and the folder of its adapters."""
    adapters = tmp_path_factory.mktemp("ray") / "adapters"
    adapters.mkdir()
    for path in (ROOT / "jlora" / "demo" / "adapters").iterdir():
        (adapters / path.name).symlink_to(path)
    (adapters / "broken").mkdir()
    (adapters / "broken" / "adapter_config.json").write_text("{")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(port), str(adapters)],
        cwd=ROOT, env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert "ready\n" in iter(process.stdout.readline, "")
        yield f"http://127.0.0.1:{port}", adapters.parent
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(server, model: str, **fields) -> httpx.Response:
    body = {"model": model, "prompt": "planet=", "temperature": 0, **fields}
    return httpx.post(f"{server[0]}/v1/completions", json=body, timeout=120)


def text(server, model: str) -> str:
    answer = ask(server, model)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_answers(server):
    for name, right in RIGHT.items():
        assert text(server, name) == right
    body = ask(server, "sort", max_tokens=2).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ae", "length")
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}


def test_streams_and_refusals(server):
    client = openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none")
    stream = client.completions.create(model="sort", prompt="planet=", temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in stream) == "aelnpt"
    for name, fields, status in (("sort", {"n": 2}, 422), ("sort", {"max_tokens": 0}, 400), ("broken", {}, 500)):
        assert ask(server, name, **fields).status_code == status


@pytest.mark.parametrize("name", ["nobody", "", "..", ".", "../adapters/sort", "sort/", "/etc", "a\0b", "x" * 5000])
def test_names_of_no_adapter(server, name):
    assert ask(server, name).status_code == 404


def test_one_place_for_four_adapters(server):
    """Each request has the adapter of another unloaded, also while that one answers and while clients leave."""

    async def leave(name: str) -> None:
        body = {"model": name, "prompt": "planet=", "temperature": 0, "stream": True}
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", f"{server[0]}/v1/completions", json=body) as answer,
        ):
            if name != "swap":
                await anext(answer.aiter_bytes())

    async def all_leave() -> None:
        tasks = [asyncio.create_task(leave(name)) for name in [*RIGHT] * 4]
        await asyncio.sleep(0.05)  # some have begun to be answered; whichever they are
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    names = [*RIGHT] * 8
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(text, server, name) for name in names]
        asyncio.run(all_leave())
        assert [answer.result() for answer in answers] == [RIGHT[name] for name in names]


@pytest.mark.timeout(900)  # replicas are started twice, and each compiles
def test_requests_go_where_their_adapter_is(tmp_path):
    """Two replicas, 200 adapters, Zipf's law: at least 30% fewer loads than with requests that go anywhere."""
    subprocess.run(
        [sys.executable, "-m", "benchmarks.serve_replicas", "--requests", "800", "--port", str(free_port()),
         "--out", str(tmp_path / "results.json")],
        cwd=ROOT, env=os.environ | ENVIRONMENT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["adapters"], found["replicas"]) == (200, 2)
    for arm in ("where the adapter is", "anywhere"):
        assert found[arm]["wrong"] == []
        assert min(found[arm]["of each replica"]) > 40  # both replicas serve
    assert found["where the adapter is"]["loads"] <= 0.7 * found["anywhere"]["loads"]
