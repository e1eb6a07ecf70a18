"""The demos and the HTTP server on an accelerator, in processes of their own, as a user starts them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from tests.serve.client import until
from tests.serve.demo_process import RIGHT, ROOT, DemoServer, recipe

pytestmark = [
    pytest.mark.device("gpu", "tpu"),
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="tests/cli and tests/serve run these on a CPU"),
]


@pytest.mark.parametrize("flags", [(), ("--moe",)], ids=["dense", "mixture"])
def test_demo_answers_all_prompts_right(flags):
    run = subprocess.run([sys.executable, "-m", "jlora", "demo", *flags], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "64 of 64 right" in run.stdout, run.stdout
    assert "0 compilations after warm-up" in run.stdout, run.stdout


def test_engine_over_http_serves_adapters_side_by_side():
    server = DemoServer(recipe())
    try:
        names = [*RIGHT] * 12
        with ThreadPoolExecutor(24) as pool:
            assert [*pool.map(server.text, names)] == [RIGHT[name] for name in names]
        until(lambda: not server.status()["manager"]["open_leases"])
        status = server.status()
        assert status["manager"]["slot_evictions"] > 0
        assert status["manager"]["compilations"] == 1
        assert status["failed_steps"] == 0
    finally:
        server.stop()
