"""Two processes that serve one model: what process 0 of `tests.serve.process` found, and how both were left."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from jlora.cli.demo import DEMO
from tests.serve.client import until
from tests.two_processes import free_port, run_two

pytestmark = pytest.mark.mesh

WORKER = Path(__file__).with_name("process.py")
# Read, not imported: the module sets how many devices its process has.
SCENARIOS = re.findall(r"^@scenario\ndef (\w+)", WORKER.read_text("utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    run_two("tests.serve.process", lambda _: (folder,), timeout=400)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(found, name):
    assert found[0]["scenarios"][name] == ""


def test_both_are_left_alike_and_hold_nothing(found):
    first, second = (one["left"] for one in found)
    assert first == second
    assert first["leases"] == 0
    assert first["threads"] == []


class Pair:
    """`jlora serve` in two processes on the demo model."""

    def __init__(self):
        coordinator, self.port = free_port(), free_port()
        command = [
            *(sys.executable, "-c", "import sys; from jlora.cli import main; sys.exit(main())", "serve"),
            *(str(DEMO / "model"), "--served-model-name", "demo", "--port", str(self.port)),
            *("--max-loras", "2", "--max-lora-rank", "32", "--max-num-seqs", "3", "--max-model-len", "48"),
            *("--lora-root", str(DEMO / "adapters"), "--lora-modules", f"sort={DEMO / 'adapters' / 'sort'}"),
            *("--coordinator-address", f"127.0.0.1:{coordinator}", "--num-processes", "2", "--process-id"),
        ]
        flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        self.both = [
            subprocess.Popen([*command, str(i)], env=flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for i in range(2)
        ]

    def wait(self):
        # XLA's collectives on CPUs say on stdout whom they have found.
        lines = iter(self.both[0].stdout.readline, "")
        assert any(line.startswith("jlora serves demo at ") for line in lines), self.both[0].stderr.read()

    def post(self, path, **body):
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, timeout=60)

    def answer(self, model, **more):
        return self.post("/v1/completions", model=model, prompt="planet=", temperature=0, **more)

    def under_way(self, pool):
        """A request that is decoding."""
        asked = pool.submit(self.answer, "sort", ignore_eos=True, max_tokens=40)
        running = 'vllm:num_requests_running{model_name="demo"} 1\n'
        until(lambda: running in httpx.get(f"http://127.0.0.1:{self.port}/metrics").text)
        return asked


@pytest.fixture
def pair():
    started = Pair()
    try:
        started.wait()
        yield started
    finally:
        for process in started.both:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_process_0_answers_and_all_drain_at_a_signal(pair):
    assert pair.answer("sort").json()["choices"][0]["text"] == "aelnpt"
    loaded = pair.post("/v1/load_lora_adapter", lora_name="late", lora_path="reverse")
    assert loaded.status_code == 200, loaded.text
    assert pair.answer("late").json()["choices"][0]["text"] == "tenalp"
    with ThreadPoolExecutor() as pool:
        asked = pair.under_way(pool)
        for process in pair.both:
            process.send_signal(signal.SIGTERM)
        assert asked.result().json()["usage"]["completion_tokens"] == 40
    assert [process.wait(60) for process in pair.both] == [0, 0]


@pytest.mark.slow
def test_a_process_that_is_gone_fails_the_requests_at_once(pair):
    with ThreadPoolExecutor() as pool:
        asked = pair.under_way(pool)
        pair.both[1].kill()
        answer = asked.result(timeout=30)
    assert answer.status_code == 503, answer.text
    assert "process 1 of 2 is gone" in answer.json()["error"]["message"]
    assert httpx.get(f"http://127.0.0.1:{pair.port}/health").status_code == 503
    late = pair.post("/v1/load_lora_adapter", lora_name="late", lora_path="reverse")  # nobody would let it in
    assert late.status_code >= 500, late.text
    for path in ("pin", "unload"):
        assert pair.post(f"/v1/{path}_lora_adapter", lora_name="sort").status_code >= 500


@pytest.mark.slow
def test_who_follows_ends_where_process_0_is_gone(pair):
    assert pair.answer("sort").status_code == 200
    pair.both[0].kill()
    _, said = pair.both[1].communicate(timeout=60)
    assert pair.both[1].returncode not in (0, None)
    assert "process 0 is gone" in said or "distributed service" in said, said
