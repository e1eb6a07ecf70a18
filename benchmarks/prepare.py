"""Time `LoRAManager.prepare` on the host.

    python -m benchmarks.prepare [--out benchmarks/results/prepare.json]

Prints microseconds (median and 95th percentile):

- unchanged: the same 64 sequences over the same adapters, all in slots, as in a decode step
- reordered: the same adapters with the sequences in a new order, so the slot ids are copied to the device
- packed: unchanged, with token_counts and pad_to
- swap: one adapter of the batch is not in a slot and is written (host time until the write is dispatched)
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

import jlora

SEQUENCES, SLOTS, RANK, WIDTH, LAYERS = 64, 8, 16, 256, 4


class Stack(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])


def make_manager() -> jlora.LoRAManager:
    """Return a manager with nine adapters on the host and eight slots."""
    config = jlora.LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK, max_cpu_loras=SLOTS + 1)
    manager = jlora.LoRAManager(Stack(), config)
    rng = np.random.default_rng(0)
    for i in range(SLOTS + 1):
        modules = {
            f"layers.{layer}": jlora.ModuleLoRA(
                a=rng.normal(size=(RANK, WIDTH)).astype(np.float32),
                b=rng.normal(size=(WIDTH, RANK)).astype(np.float32),
                alpha=1.0,
                scaling=1.0 / RANK,
            )
            for layer in range(LAYERS)
        }
        manager.add_adapter(jlora.Adapter(name=f"adapter{i}", modules=modules))
    return manager


def measure(call: Callable[[], jlora.LoRABatch], repeats: int) -> dict[str, float]:
    """Time `call`, without closing its batch."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        batch = call()
        times.append((time.perf_counter() - start) * 1e6)
        batch.close()
    return {"median_us": float(np.median(times)), "p95_us": float(np.percentile(times, 95)), "repeats": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    load = os.getloadavg()[0]  # of the machine, over the last minute
    manager = make_manager()
    names = [None if i % 9 == 8 else f"adapter{i % 9}" for i in range(SEQUENCES)]
    counts = [16] * SEQUENCES
    rotations = itertools.cycle([names[i:] + names[:i] for i in range(1, SEQUENCES)])
    turns = itertools.cycle(["adapter8", "adapter0"])
    manager.prepare(names).close()
    for name in ("adapter8", "adapter0"):  # compile before timing
        manager.prepare([name]).close()

    figures = {
        "unchanged": measure(lambda: manager.prepare(names), 2000),
        "reordered": measure(lambda: manager.prepare(next(rotations)), 500),
        "packed": measure(lambda: manager.prepare(names, counts, 2048), 2000),
    }
    for i in range(1, SLOTS):
        manager.pin_adapter(f"adapter{i}")  # two adapters then alternate in the remaining slot
    figures["swap"] = measure(lambda: manager.prepare([next(turns)]), 200)

    for case, figure in figures.items():
        print(f"{case:10} {figure['median_us']:9.1f} us median {figure['p95_us']:9.1f} us p95")
    setting = {
        "date": datetime.date.today().isoformat(),
        "load before": round(load, 1),
        "sequences": SEQUENCES,
        "layers": LAYERS,
        "slots": SLOTS,
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    if args.out:
        args.out.write_text(json.dumps({"setting": setting, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
