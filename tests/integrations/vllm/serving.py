"""`vllm serve` as a process of its own, on CPUs, and requests to it over HTTP."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.integrations.vllm.checkpoints import logprobs
from tests.two_processes import free_port

ROOT = Path(__file__).parents[3]
TOLERANCE = 2e-4  # of log-probabilities in float32


def environment(folder: Path, entry: str = "without_tpu", **others: str) -> dict[str, str]:
    """Return the environment of vLLM on CPUs, with the module `entry` of this folder as one more plugin."""
    package = folder / f"{entry}-0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {entry}\nVersion: 0\n")
    plugin = f"{entry} = tests.integrations.vllm.{entry}:register"
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin}\n")
    return {
        **os.environ,
        "PYTHONPATH": f"{folder}:{ROOT}",
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": "v6e-1",  # else it is looked up over the network
        "TPU_NAME": "none",
        "TPU_WORKER_ID": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **others,
    }


@dataclass
class Server:
    """A running `vllm serve`.

    Attributes:
      model: folder of the base model, which is also its name.
      url: address of the server.
      log: file of its output.
      process: the process.
    """

    model: Path
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=300)

    def load(self, name: str, folder: Path, **options: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder), **options})

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def complete(self, name: str | None, prompt: Sequence[int], tokens: int) -> httpx.Response:
        body = {"model": name or str(self.model), "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        return self.post("/v1/completions", {**body, "ignore_eos": True, "logprobs": 1, "return_token_ids": True})

    def chat(self, name: str | None, text: str, image: str | None, tokens: int) -> httpx.Response:
        """Ask for an answer to an image, if there is one, and a text."""
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if image is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": image}})
        body = {"model": name or str(self.model), "messages": [{"role": "user", "content": content}], "temperature": 0}
        body |= {"max_completion_tokens": tokens, "ignore_eos": True, "logprobs": True, "top_logprobs": 1}
        body |= {"return_token_ids": True}
        return self.post("/v1/chat/completions", body)

    def check(self, name: str | None, adapter: Path | None, prompt: Sequence[int], tokens: int = 12) -> None:
        """Compare a greedy answer, and the log-probability of each of its tokens, with merged weights."""
        response = self.complete(name, prompt, tokens)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert len(choice["token_ids"]) == tokens
        asked, rows = [*prompt, *choice["token_ids"]], slice(len(prompt) - 1, -1)
        want, base = (logprobs(self.model, each, asked)[rows] for each in (adapter, None))
        others = [] if adapter is None else [base]
        compare(want, choice["token_ids"], choice["logprobs"]["token_logprobs"], others)


def compare(want: np.ndarray, answer: Sequence[int], found: Sequence[float], others: Sequence[np.ndarray]) -> None:
    """Compare log-probabilities of a greedy answer, which those of `others` do not have."""
    np.testing.assert_allclose(found, want[np.arange(len(want)), list(answer)], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(found, want.max(1), atol=TOLERANCE, rtol=0)  # greedy
    for other in others:  # the comparison can fail
        assert np.abs(want - other).max() > 100 * TOLERANCE


@contextmanager
def serve(model: Path, folder: Path, *flags: str, wait: float = 600, **variables: str) -> Iterator[Server]:
    """Start `vllm serve` and wait until it answers.

    Raises:
      RuntimeError: it ended, or did not answer within `wait` seconds. The message has the end of its output.
    """
    port, log = free_port(), folder / "vllm.log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--port", str(port)]
    sizes = {"max-model-len": 128, "max-num-seqs": 8, "max-num-batched-tokens": 64, "num-gpu-blocks-override": 128}
    sizes |= {"max-loras": 4, "max-cpu-loras": 8, "max-lora-rank": 8, "dtype": "float32"}
    command += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--enable-lora", *flags],
            env=environment(folder, **variables),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        server = Server(model, f"http://127.0.0.1:{port}", log, process)
        try:
            end = time.monotonic() + wait
            while not _answers(server):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"vllm serve does not answer:\n{log.read_text(errors='replace')[-8000:]}")
                time.sleep(0.5)
            yield server
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()


def _answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False
