"""vLLM's server with a multimodal JAX model: adapters of its language part, and aLoRA.

As test_serve.py, of another model and with other options. Run by `.ci/vllm`.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("tpu_inference") is None:
    pytest.skip("needs vLLM and tpu-inference (.ci/vllm)", allow_module_level=True)
from tests.integrations.vllm.images import image, logprobs, save_adapter, save_model
from tests.integrations.vllm.serving import Server, compare, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500), pytest.mark.filterwarnings("default")]

CALL = (17, 18, 19)  # invocation tokens
BLOCK = 16  # tokens of a block of the prefix cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    """Two adapters, and two that are called by `CALL`."""
    found = {name: save_adapter(folder / name, seed) for seed, name in enumerate("ab", start=1)}
    called = {"alora_invocation_tokens": [*CALL]}
    return found | {name: save_adapter(folder / name, seed, **called) for seed, name in enumerate("cd", start=3)}


@pytest.fixture(scope="module")
def server(folder: Path, adapters: dict[str, Path]) -> Iterator[Server]:
    flags = ("--lora-modules", *(f"{name}={path}" for name, path in adapters.items()))
    flags += ("--additional-config", '{"jlora": {"activated": true}}', "--enable-prompt-tokens-details")
    flags += ("--limit-mm-per-prompt", '{"image": 1, "video": 0}')
    with serve(save_model(folder / "model"), folder, *flags) as server:
        yield server


def check_chat(server: Server, adapters: dict[str, Path], name: str | None, text: str, seed: int | None) -> None:
    pixels, url = (None, None) if seed is None else image(seed)
    response = server.chat(name, text, url, 8)
    assert response.status_code == 200, response.text
    found = response.json()
    prompt, choice = found["prompt_token_ids"], found["choices"][0]
    assert prompt.count(252) == (0 if seed is None else 4)
    logged = [each["logprob"] for each in choice["logprobs"]["content"]]
    compare_with(server, adapters.get(name or ""), prompt, choice["token_ids"], logged, pixels)


def compare_with(
    server: Server,
    adapter: Path | None,
    prompt: Sequence[int],
    answer: Sequence[int],
    found: Sequence[float],
    pixels: np.ndarray | None = None,
    first: int = 0,
) -> None:
    asked, rows = [*prompt, *answer], slice(len(prompt) - 1, -1)
    others = [logprobs(server.model, None, asked, pixels)] if adapter is not None else []
    others += [logprobs(server.model, adapter, asked, pixels)] if first else []
    want = logprobs(server.model, adapter, asked, pixels, first)
    compare(want[rows], answer, found, [other[rows] for other in others])


def test_text_and_images_mixed(server: Server, adapters: dict[str, Path]) -> None:
    asked = [(name, f"t{5 + i} t{9 + i} t7", seed) for i, name in enumerate(("a", "b", None)) for seed in (None, 0, 1)]
    with ThreadPoolExecutor(len(asked)) as pool:
        for each in [pool.submit(check_chat, server, adapters, *one) for one in asked]:
            each.result()


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 240, count).tolist()


def check_called(
    server: Server, adapters: dict[str, Path], name: str | None, prompt: Sequence[int], first: int, cached: int
) -> None:
    """Compare an answer, and the number of prompt tokens from the prefix cache."""
    response = server.complete(name, prompt, 8)
    assert response.status_code == 200, response.text
    found = response.json()
    choice = found["choices"][0]
    logged = choice["logprobs"]["token_logprobs"]
    compare_with(server, adapters.get(name or ""), prompt, choice["token_ids"], logged, first=first)
    assert (found["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"] == cached


@pytest.mark.parametrize("first", [30, 62])
def test_alora_begins_in_any_chunk_of_the_prefill(server: Server, adapters: dict[str, Path], first: int) -> None:
    """A step has 64 tokens."""
    prompt = [*words(first, first), *CALL, *words(30, 1)]
    check_called(server, adapters, "c", prompt, first, 0)
    earlier = [*words(5, 100 + first), *CALL, *words(first - 8, first), *CALL, *words(30, 1)]
    check_called(server, adapters, "c", earlier, first, 0)  # from the last invocation on
    assert answer(server, "c", words(20, 14)) == answer(server, None, words(20, 14))  # without an invocation


def test_blocks_before_an_invocation_are_shared_with_the_base_model(server: Server, adapters: dict[str, Path]) -> None:
    prefix, rest = words(40, 11), words(20, 12)
    check_called(server, adapters, None, [*prefix, *rest], 0, 0)
    check_called(server, adapters, "c", [*prefix, *CALL, *rest], len(prefix), 2 * BLOCK)
    check_called(server, adapters, "d", [*prefix, *CALL, *rest], len(prefix), 2 * BLOCK)
    check_called(server, adapters, "c", [*prefix, *CALL, *rest], len(prefix), 3 * BLOCK)  # its own one too
    check_called(server, adapters, "a", [*prefix, *rest], 0, 0)
    prefix = words(40, 13)
    check_called(server, adapters, "c", [*prefix, *CALL, *rest], len(prefix), 0)
    check_called(server, adapters, None, [*prefix, *CALL, *rest], 0, 2 * BLOCK)
    check_called(server, adapters, None, [*prefix, *CALL, *rest], 0, 3 * BLOCK)


def answer(server: Server, name: str | None, prompt: Sequence[int]) -> list[int]:
    return server.complete(name, prompt, 8).json()["choices"][0]["token_ids"]
