"""Count the adapter loads of the replicas of examples/ray_serve, with requests routed by adapter or to any replica.

    pip install ".[ray]" --group test
    python -m benchmarks.serve_replicas [--out results.json] [--adapters 200] [--requests 4000] [--held 64]
        [--replicas 2] [--in-flight 32]

The model is the demo's, on a CPU. Each adapter computes one of the demo's four functions from bytes of its own, with A
multiplied by a power of two and B divided by it. The adapter of a request follows Zipf's law, p(k) ~ 1/k. Both variants
get the same requests in the same order over HTTP. In both, a replica loads a missing adapter and unloads the least
recently used one. Every answer is checked.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import ml_dtypes
import numpy as np
import safetensors.numpy

from benchmarks.timing import machine

DEMO = Path(__file__).parents[1] / "jlora" / "demo"
_BF16 = ml_dtypes.bfloat16  # dtype of the demo's adapters; the import lets NumPy read it


class Asked(NamedTuple):
    adapter: str
    prompt: str
    answer: str


def write_adapters(folder: Path, count: int) -> dict[str, str]:
    """Write `count` adapters, each in its own folder, and return name -> the demo's adapter with the same function."""
    kinds = sorted(path.name for path in (DEMO / "adapters").iterdir())
    made = {f"tenant-{i:04}": kinds[i % len(kinds)] for i in range(count)}
    for i, (name, kind) in enumerate(made.items()):
        source, scale = DEMO / "adapters" / kind, 2.0 ** (i // len(kinds) % 64 - 32)
        tensors = safetensors.numpy.load_file(source / "adapter_model.safetensors")
        for key, tensor in tensors.items():
            assert tensor.dtype == _BF16
            factor = _BF16(scale if ".lora_A." in key else 1 / scale)
            tensors[key] = tensor * factor
        (folder / name).mkdir(parents=True)
        safetensors.numpy.save_file(tensors, folder / name / "adapter_model.safetensors")
        (folder / name / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    return made


def traffic(made: dict[str, str], requests: int, seed: int = 0) -> list[Asked]:
    """Return requests by Zipf's law with exponent 1, with a random order of the adapters by popularity."""
    random = np.random.default_rng(seed)
    questions = json.loads((DEMO / "prompts.json").read_text())
    by_kind = {kind: [one for one in questions if one["adapter"] == kind] for kind in set(made.values())}
    names = random.permutation(list(made))
    weights = 1 / np.arange(1, len(names) + 1)
    found: list[Asked] = []
    for name in random.choice(names, requests, p=weights / weights.sum()):
        choices = by_kind[made[name]]
        question = choices[random.integers(len(choices))]
        found.append(Asked(str(name), question["prompt"], question["answer"]))
    return found


async def ask_all(address: str, asked: list[Asked], in_flight: int) -> list[str]:
    """Send all requests, and return the wrong answers and error statuses."""
    wrong: list[str] = []
    waiting = iter(asked)

    async def ask(client: httpx.AsyncClient) -> None:
        for one in waiting:
            body = {"model": one.adapter, "prompt": one.prompt, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != one.answer:
                wrong.append(f"{one}: {answer.status_code} {answer.text[:200]}")

    async with httpx.AsyncClient(base_url=address, timeout=300) as client:
        await asyncio.gather(*(ask(client) for _ in range(in_flight)))
    return wrong


def measure(
    adapters: Path, asked: list[Asked], *, multiplexed: bool, port: int, in_flight: int, **options: Any
) -> dict:
    """Run all requests of one variant on new replicas. Ray must be running."""
    from ray import serve

    from examples.ray_serve.app import Options, build

    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        given = Options(
            model=str(DEMO / "model"), adapters=str(adapters), max_lora_rank=32, multiplexed=multiplexed, **options
        )
        serve.run(build(given))
        begun = time.perf_counter()
        wrong = asyncio.run(ask_all(f"http://127.0.0.1:{port}", asked, in_flight))
        seconds = time.perf_counter() - begun
        loads = serve.get_deployment_handle("Replica", "default").broadcast("loads").results()
    finally:
        serve.shutdown()
    assert len(loads) == given.replicas
    return {"loads": sum(loads), "of each replica": sorted(loads), "wrong": wrong, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    for name, default in {"adapters": 200, "requests": 4000, "held": 64, "replicas": 2, "in-flight": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    results: dict[str, Any] = {
        **machine(),
        "ray": ray.__version__,
        "cores": len(os.sched_getaffinity(0)),
        **{name: getattr(given, name) for name in ("adapters", "requests", "held", "replicas", "in_flight")},
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        ray.init(num_cpus=given.replicas + 2, include_dashboard=False, log_to_driver=False)
        made = write_adapters(Path(folder) / "adapters", given.adapters)
        asked = traffic(made, given.requests)
        results["adapters asked for"] = len({one.adapter for one in asked})
        for name, multiplexed in (("where the adapter is", True), ("anywhere", False)):
            results[name] = measure(
                Path(folder) / "adapters", asked, multiplexed=multiplexed, port=given.port, in_flight=given.in_flight,
                held=given.held, replicas=given.replicas,
            )  # fmt: skip
            print(name, json.dumps(results[name]), flush=True)
        ray.shutdown()
    saved = 1 - results["where the adapter is"]["loads"] / results["anywhere"]["loads"]
    results["fewer loads"] = round(saved, 3)
    text = json.dumps(results, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
