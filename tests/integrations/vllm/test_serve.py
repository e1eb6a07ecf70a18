"""vLLM's own server, scheduler, input batch and runner, with jlora loaded as its plugin. No test calls the plugin.

tests/integrations/vllm/without_tpu.py lists what is replaced because there is no TPU. Run by `.ci/vllm`.
"""

import importlib.util
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

if importlib.util.find_spec("tpu_inference") is None:
    pytest.skip("needs vLLM and tpu-inference (.ci/vllm)", allow_module_level=True)
from tests.integrations.vllm.checkpoints import save_adapter, save_model
from tests.integrations.vllm.serving import Server, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]

EXTRA = {"c": ("lm_head",), "d": ("lm_head", "model.embed_tokens")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    """Four adapters of ranks 1 to 4, of which `c` also has a head, and `d` a head and an embedding."""
    return {
        name: save_adapter(folder / name, seed, rank=seed, extra=EXTRA.get(name, ()))
        for seed, name in enumerate("abcd", start=1)
    }


@pytest.fixture(scope="module")
def server(folder: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    with serve(
        save_model(folder / "model"), folder, "--lora-modules", *(f"{name}={adapters[name]}" for name in "abcd")
    ) as server:
        yield server


def prompts(count: int, seed: int, low: int = 2, high: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 256, rng.integers(low, high)).tolist() for _ in range(count)]


def test_four_adapters_and_the_base_model_answer_at_once(server: Server, adapters: dict[str, Path]) -> None:
    names = [*"abcd", None] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [
            pool.submit(server.check, name, adapters.get(name), prompt, 20)
            for name, prompt in zip(names, prompts(len(names), 0), strict=True)
        ]
        for each in asked:
            each.result()
    listed = {model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert listed == {*"abcd", str(server.model)}


def test_a_long_prompt_is_prefilled_in_chunks(server: Server, adapters: dict[str, Path]) -> None:
    (prompt,) = prompts(1, 1, 100, 101)  # of 64 tokens a step
    for name in "ad":
        server.check(name, adapters[name], prompt, 8)
        server.check(name, adapters[name], prompt, 8)  # from the prefix cache
    server.check(None, None, prompt, 8)


def test_adapters_come_change_and_go_while_others_answer(
    server: Server, adapters: dict[str, Path], folder: Path
) -> None:
    stop, asked = threading.Event(), prompts(8, 3)

    def keep_asking(name: str | None) -> int:
        count = 0
        while not stop.is_set():
            server.check(name, adapters.get(name), asked[count % len(asked)], 6)
            count += 1
        return count

    (prompt,) = prompts(1, 4, 50, 51)  # three blocks, which the prefix cache keeps
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(keep_asking, name) for name in ("a", "d", None)]
        try:
            for round_ in range(3):
                first = save_adapter(folder / f"first{round_}", 100 + round_)
                second = save_adapter(folder / f"second{round_}", 200 + round_)
                assert server.complete("new", prompt, 1).status_code == 404
                assert server.load("new", first).status_code == 200
                server.check("new", first, prompt)
                assert server.load("new", second, load_inplace=True).status_code == 200
                server.check("new", second, prompt)  # its blocks of the prefix cache are not those of `first`
                third = save_adapter(folder / f"third{round_}", 300 + round_)
                shutil.copytree(third, second_again := folder / f"second{round_}", dirs_exist_ok=True)
                assert server.load("new", second_again, load_inplace=True).status_code == 200
                server.check("new", third, prompt)  # nor those of the same path
                assert server.unload("new").status_code == 200
        finally:
            stop.set()
        assert min(each.result() for each in others) > 0
