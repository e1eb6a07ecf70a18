"""Adapters pushed to a server while it serves: versions of running requests, and many rounds under load."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("starlette")

import httpx

from jlora import Adapter
from jlora.serve import push
from jlora.serve.http.adapters import Adapters, AllowedSources
from jlora.serve.http.service import Keys, Service
from tests.serve.client import on_socket
from tests.serve.conftest import ADAPTERS
from tests.serve.demo_process import RIGHT

NAMES = sorted(ADAPTERS)
LOADED = {name: Adapter.from_pretrained(path) for name, path in ADAPTERS.items()}


@pytest.fixture
def url(world):
    """The address of a server over the session's engine."""
    adapters = Adapters(world.engine, AllowedSources(), ("demo",))
    keys = Keys((), ("secret",))
    service = Service(
        world.engine, world.manager, world.tokenizer, ("demo",), "demo", 64, adapters, keys=keys,
        administration=True, state="serving",
    )  # fmt: skip
    with on_socket(service) as (host, port):
        yield f"http://{host}:{port}"


def ask(url, name, **more):
    body = {"model": name, "prompt": "planet=", "temperature": 0, "max_tokens": 10, **more}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def memory():
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
def test_rounds_of_push_and_sample_under_load(world, url):
    """Every answer is of the version pushed before it. The fixture checks that nothing compiles."""
    rounds, warm, stop = 120, 30, threading.Event()

    def load(name):
        while not stop.is_set():
            assert ask(url, name) == RIGHT[name]

    sizes = []
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(load, name) for name in NAMES[:2]]
        try:
            for number in range(rounds):
                version = NAMES[number % len(NAMES)]
                push(url, LOADED[version], admin_key="secret", name="policy")
                assert ask(url, "policy") == RIGHT[version]
                if number >= warm:
                    sizes.append((memory(), world.manager.stats().host_bytes))
        finally:
            stop.set()
        for other in others:
            other.result()
    assert world.manager.list_adapters(["policy"])["policy"].version >= rounds - 1
    kept = [size for _, size in sizes]
    assert max(kept) <= 2 * min(kept)  # the newest version, and the one before it while it is in use
    assert sizes[-1][0] - sizes[0][0] < len(sizes) * LOADED["sort"].nbytes / 4
