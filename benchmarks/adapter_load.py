"""How long an adapter of experts takes to be read and checked, beside a plain read of the same file.

    python -m benchmarks.adapter_load [--out results.json] [--layers 48] [--experts 64] [--rank 32] [--repeats 5]

The shape is Qwen3-30B-A3B's (hidden 2048, experts of 768). By default 18,432 tensors of 1.7 GB in bfloat16, expert by
expert; and the same numbers as PEFT's target_parameters have them, in 192 tensors. Times are medians in seconds, of the
clock and of the processor: `read` fills one buffer again and again, `read into new memory` keeps what it reads, as a
load must. Files are in the page cache. Peak memory is the process's own, with one adapter held.
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

import ml_dtypes
import numpy as np
import safetensors.numpy

from jlora.adapters import Adapter

HIDDEN, INNER = 2048, 768
PROJECTIONS = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
PARAMETERS = {"base_layer.": (HIDDEN, 2 * INNER), "": (INNER, HIDDEN)}
CHUNK = 1 << 22


def one_by_one(layers: int, experts: int, rank: int) -> dict[str, tuple[int, int]]:
    """Tensor -> shape, a module of each expert."""
    return {
        f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{half}.weight": shape
        for layer in range(layers)
        for expert in range(experts)
        for name, (k, n) in PROJECTIONS.items()
        for half, shape in (("A", (rank, k)), ("B", (n, rank)))
    }


def fused(layers: int, experts: int, rank: int) -> dict[str, tuple[int, int]]:
    """Tensor -> shape, two parameters of all experts."""
    return {
        f"base_model.model.model.layers.{layer}.mlp.experts.{name}lora_{half}.weight": shape
        for layer in range(layers)
        for name, (k, n) in PARAMETERS.items()
        for half, shape in (("A", (experts * rank, k)), ("B", (n, rank * experts)))
    }


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
    results: dict[str, Any] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    for name, shapes_of in {"expert by expert": one_by_one, "target_parameters": fused}.items():
        shapes = shapes_of(given.layers, given.experts, given.rank)
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), shapes, given.rank)
            file = Path(folder) / "adapter_model.safetensors"
            results[name] = {
                "tensors": len(shapes),
                "bytes": file.stat().st_size,
                "read": timed(lambda file=file: read(file, keep=False), given.repeats),
                "read into new memory": timed(lambda file=file: read(file, keep=True), given.repeats),
                "load": timed(lambda folder=folder: Adapter.from_pretrained(folder), given.repeats),
                "load as float32": timed(lambda folder=folder: Adapter.from_pretrained(folder, dtype="float32"), 1),
            }
    results["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = json.dumps(results, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
