"""Two hosts under vLLM's own Ray executor: two processes of one mesh, with JAX's coordination service between them.

hosts.py makes the hosts. Each has a home folder of its own, so that files under `~` can differ between them.
"""

import importlib.util
import json
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

if importlib.util.find_spec("tpu_inference") is None:
    pytest.skip("needs vLLM and tpu-inference (.ci/vllm)", allow_module_level=True)
import psutil

import jlora
from jlora.serve import push
from tests.integrations.vllm.checkpoints import save_adapter, save_model
from tests.integrations.vllm.hosts import two_hosts
from tests.integrations.vllm.serving import Server, environment, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]

TIMEOUT = 15.0  # jlora's `process_timeout`


@dataclass
class Slice:
    """A server on two hosts.

    Attributes:
      server: the server.
      homes: the home folder of each host.
      nodes: the process of each host, the ancestor of its worker.
    """

    server: Server
    homes: list[Path]
    nodes: list[psutil.Process]

    def worker(self, host: int) -> psutil.Process:
        (found,) = [each for each in self.nodes[host].children(recursive=True) if "RayWorkerProc" in each.name()]
        return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Slice]:
    model = save_model(tmp_path / "model")
    with two_hosts(tmp_path, environment(tmp_path)) as (variables, nodes):
        flags = ["--tensor-parallel-size=2", "--max-loras=2"]
        flags.append(f"--additional-config={json.dumps({'jlora': {'process_timeout': TIMEOUT}})}")
        variables["VLLM_PLUGINS"] = "jlora_vllm_jax,jlora_vllm_jax_upload,register_layers,without_tpu"
        with serve(model, tmp_path, *flags, **variables) as server:
            yield Slice(server, [tmp_path / f"home{i}" for i in range(2)], nodes)


def prompt(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(2, 256, length).tolist()


def test_two_hosts_load_swap_reload_and_fail_together(served: Slice, tmp_path: Path) -> None:
    server = served.server
    server.check(None, None, prompt(0))

    # More adapters than slots, so that steps swap; each of them, and the base model, at once.
    adapters = {name: save_adapter(tmp_path / name, seed, rank=seed) for seed, name in enumerate("abcd", start=1)}
    for name, folder in adapters.items():
        assert server.load(name, folder).status_code == 200
    names = [*"abcd", None] * 2
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [
            pool.submit(server.check, name, adapters.get(name), prompt(i, 10 + 4 * i)) for i, name in enumerate(names)
        ]
        for each in asked:
            each.result()

    # Files on one host only, and files that differ, are refused by both, and both go on.
    shutil.copytree(adapters["a"], served.homes[0] / "one")
    response = server.load("one", Path("~/one"))
    assert response.status_code >= 400
    for home, name in zip(served.homes, "ab", strict=True):
        shutil.copytree(adapters[name], home / "other")
    response = server.load("other", Path("~/other"))
    assert response.status_code == 500
    server.check("a", adapters["a"], prompt(1))

    # The same files on both, then others in their place.
    for name in "cd":
        for home in served.homes:
            shutil.copytree(adapters[name], home / "same", dirs_exist_ok=True)
        assert server.load("same", Path("~/same"), load_inplace=True).status_code == 200
        server.check("same", adapters[name], prompt(2))

    # A reload that fails on one host leaves the earlier weights on both.
    shutil.rmtree(served.homes[1] / "same")
    assert server.load("same", Path("~/same"), load_inplace=True).status_code >= 400
    server.check("same", adapters["d"], prompt(2))

    # Bytes reach both hosts, and a refusal leaves both as they are.
    push(server.url, jlora.Adapter.from_pretrained(adapters["a"]), admin_key="", name="pushed")
    server.check("pushed", adapters["a"], prompt(4))
    push(server.url, jlora.Adapter.from_pretrained(adapters["b"]), admin_key="", name="pushed")
    server.check("pushed", adapters["b"], prompt(4))
    large = jlora.Adapter.from_pretrained(save_adapter(tmp_path / "large", 9, rank=16))
    with pytest.raises(jlora.LoRAError, match="rank 16"):
        push(server.url, large, admin_key="", name="pushed")
    server.check("pushed", adapters["b"], prompt(4))

    # A host that is lost ends the server.
    served.worker(1).send_signal(signal.SIGKILL)
    with pytest.raises((AssertionError, httpx.HTTPError)):
        server.check("a", adapters["a"], prompt(3))
    server.process.wait(300)


def test_a_host_that_hangs_fails_the_load_within_process_timeout(served: Slice, tmp_path: Path) -> None:
    server, adapter = served.server, save_adapter(tmp_path / "a", 1)
    assert server.load("a", adapter).status_code == 200
    stopped = served.worker(1)
    stopped.suspend()
    try:
        # The other host gives up after `process_timeout`, and the call returns when this one runs again.
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(server.load, "late", save_adapter(tmp_path / "late", 2))
            wait_for(server.log, f"within {TIMEOUT:g} s")
            stopped.resume()
            assert late.result().status_code == 500
    finally:
        stopped.resume()
    with pytest.raises((AssertionError, httpx.HTTPError)):  # neither host serves adapters after that
        server.check("a", adapter, prompt(3))


def wait_for(log: Path, text: str) -> None:
    end = time.monotonic() + 20 * TIMEOUT
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < end, log.read_text(errors="replace")[-4000:]
        time.sleep(0.5)
