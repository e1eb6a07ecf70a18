"""Time the loading of an adapter of experts by a manager, against a plain read of the same file.

    python -m benchmarks.adapter_load [--out results.json] [--layers 48] [--experts 64] [--rank 32] [--repeats 5]

The shape is Qwen3-30B-A3B's (hidden 2048, experts of 768). By default the adapter is 18,432 tensors of 1.7 GB in
bfloat16, one for each expert; or, in the form of PEFT's target_parameters, 192 tensors of 1.3 GB. The base model has
shapes only, and its slots are bfloat16. Times are medians in seconds, of the clock and of the processor:

  read                  the file into one buffer, again and again
  read into new memory  the same, but the data is kept, as a load must
  load                  `Adapter.from_pretrained`, which reads and checks
  total                 `LoRAManager.add_adapter`, which reads, checks, casts and packs
  stage                 total less load
  times a read          total over a read into new memory

Files are in the page cache. Peak memory is that of the process, with one slot and at most one adapter and its blocks.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from flax import nnx

import jlora
from benchmarks.timing import machine
from jlora.models.moe import Experts

HIDDEN, INNER = 2048, 768
PROJECTIONS = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
PARAMETERS = {"base_layer.": (HIDDEN, 2 * INNER), "": (INNER, HIDDEN)}
CHUNK = 1 << 22


def one_by_one(layers: int, experts: int, rank: int) -> dict[str, tuple[int, int]]:
    """Return tensor -> shape for one module of each expert."""
    return {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{half}.weight": shape
        for layer in range(layers)
        for expert in range(experts)
        for name, (k, n) in PROJECTIONS.items()
        for half, shape in (("A", (rank, k)), ("B", (n, rank)))
    }


def fused(layers: int, experts: int, rank: int) -> dict[str, tuple[int, int]]:
    """Return tensor -> shape for two parameters of all experts."""
    return {
        f"base_model.model.model.layers.{layer}.mlp.experts.{name}lora_{half}.weight": shape
        for layer in range(layers)
        for name, (k, n) in PARAMETERS.items()
        for half, shape in (("A", (experts * rank, k)), ("B", (n, rank * experts)))
    }


class Block(nnx.Module):
    """Experts with shapes and no weights."""

    def __init__(self, experts: int):
        self.experts = nnx.eval_shape(lambda: Experts(HIDDEN, INNER, experts, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


class Layer(nnx.Module):
    def __init__(self, experts: int):
        self.mlp = Block(experts)


class Decoder(nnx.Module):
    def __init__(self, layers: int, experts: int):
        self.layers = nnx.List([Layer(experts) for _ in range(layers)])


class Model(nnx.Module):
    """A model in which only experts take adapters, with the paths of Qwen3-MoE."""

    def __init__(self, layers: int, experts: int):
        self.model = Decoder(layers, experts)


def added(manager: jlora.LoRAManager, request: jlora.LoRARequest) -> None:
    manager.add_adapter(request)
    manager.remove_adapter(request.name)


def write(folder: Path, shapes: dict[str, tuple[int, int]], rank: int) -> None:
    largest = max(rows * columns for rows, columns in shapes.values())
    numbers = np.random.default_rng(0).normal(size=largest).astype(ml_dtypes.bfloat16)
    tensors = {name: numbers[: rows * columns].reshape(rows, columns) for name, (rows, columns) in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTIONS),
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def read(file: Path, *, keep: bool) -> None:
    size = file.stat().st_size
    buffer = np.empty(size if keep else CHUNK, np.uint8)
    with open(file, "rb", buffering=0) as opened:
        for at in range(0, size, CHUNK):
            opened.readinto((buffer[at : at + CHUNK] if keep else buffer).data)


def timed(act: Callable[[], Any], repeats: int) -> dict[str, float]:
    clock, processor = list[float](), list[float]()
    for _ in range(repeats):
        before = time.perf_counter(), time.process_time()
        held = act()
        clock.append(time.perf_counter() - before[0])
        processor.append(time.process_time() - before[1])
        del held
    return {"clock": round(statistics.median(clock), 3), "processor": round(statistics.median(processor), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    for name, default in {"layers": 48, "experts": 64, "rank": 32, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=given.rank, max_cpu_loras=1)
    manager = jlora.LoRAManager(Model(given.layers, given.experts), config)
    results: dict[str, Any] = {
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load before": round(os.getloadavg()[0], 1),  # of the whole machine, over one minute
    }
    for name, shapes_of in {"expert by expert": one_by_one, "target_parameters": fused}.items():
        shapes = shapes_of(given.layers, given.experts, given.rank)
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), shapes, given.rank)
            file = Path(folder) / "adapter_model.safetensors"
            found: dict[str, Any] = {
                "tensors": len(shapes),
                "bytes": file.stat().st_size,
                "read": timed(lambda file=file: read(file, keep=False), given.repeats),
                "read into new memory": timed(lambda file=file: read(file, keep=True), given.repeats),
                "load": timed(lambda folder=folder: jlora.Adapter.from_pretrained(folder), given.repeats),
            }
            request = jlora.LoRARequest("x", folder)
            found["total"] = timed(lambda request=request: added(manager, request), given.repeats)
            found["stage"] = {key: round(found["total"][key] - found["load"][key], 3) for key in found["load"]}
            plain = found["read into new memory"]
            found["times a read"] = {key: round(found["total"][key] / plain[key], 1) for key in plain}
            results[name] = found
    results["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = json.dumps(results, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
