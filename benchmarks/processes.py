"""Compare one process with N devices to N processes with one each: logits, versions after a swap, and times.

    python -m benchmarks.processes --devices 2 [--model llama-3-8b] [--layers 8] [--out results.json]

It starts the processes itself, one variant after the other. On GPUs each process sees its own device only. Both
variants have the same random bf16 weights, split over "tensor", and the same adapters of rank 16 in memory. There are
batches of eight prompts. The second batch swaps all adapters of the first, and one of them is replaced in place before
the third. Timed are an activation of an adapter in the host cache (the processes first agree on its slot), a `prepare`
that changes nothing, and a prefill step with adapters. Times are medians in milliseconds in process 0.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import jlora
from benchmarks import swap
from benchmarks.decode_step import prefill, timed
from benchmarks.mesh import PROJECTIONS, SHAPES
from benchmarks.timing import machine
from jlora.models import Decoder

LENGTH = 128


def work(args: argparse.Namespace) -> None:
    """Run the work of one process."""
    shape, _ = SHAPES[args.model]
    config = shape(args.layers)
    mesh = jax.make_mesh((args.devices,), ("tensor",), axis_types=(AxisType.Auto,))
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mesh=mesh)
    manager = jlora.LoRAManager(
        model,
        jlora.LoRAConfig(
            max_loras=3, max_lora_rank=16, max_cpu_loras=8, dtype=jnp.bfloat16, target_modules=PROJECTIONS
        ),
    )
    adapters = swap.adapters(config, 16, "model.", 6)
    names = [adapter.name for adapter in adapters]
    for adapter in adapters:
        manager.add_adapter(adapter)
    manager.warmup()
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (8, LENGTH)).astype(np.int32)
    step = manager.jit(prefill)
    logits, versions, slots = [], [], []
    for batch_of in ([0, 1, None, 2, 0, 1, 2, None], [3, 4, None, 5, 3, 4, 5, None], [0, 3, None, 5, 0, 0, 5, None]):
        if len(logits) == 2:
            other = jlora.Adapter(name=names[0], modules=adapters[1].modules)
            manager.add_adapter(other, load_inplace=True)
        with manager.prepare([None if i is None else names[i] for i in batch_of]) as batch:
            out = step(model, tokens, batch)[0]
            logits.append(multihost_utils.process_allgather(out.astype(jnp.float32), tiled=True))
            versions.append(batch.versions)
            slots.append({name: info.slot for name, info in manager.list_adapters(level="slot").items()})
    compiled = manager.stats().compilations, step._cache_size()
    for i in range(6):
        manager.prepare([names[i]]).close()
    swaps = [swap.timed(manager, lambda i=i: manager.prepare([names[i % 6]]))[1] for i in range(24)]
    same = []
    for _ in range(200):
        start = time.perf_counter()
        manager.prepare([names[5]]).close()
        same.append((time.perf_counter() - start) * 1e3)
    with manager.prepare([names[5]] * 8) as batch:
        (step_ms,) = timed({"prefill": (step, model, tokens, batch)}, 7, 3).values()
    if jax.process_index() == 0:
        found = {
            **machine(),
            "processes": jax.process_count(),
            "versions": versions,
            "slots": slots,
            "compilations": compiled,
            "swap_ms": statistics.median(swaps),
            "prepare_ms": statistics.median(same),
            "prefill_ms": step_ms,
        }
        args.folder.mkdir(exist_ok=True)
        (args.folder / f"{jax.process_count()}.json").write_text(json.dumps(found))
        np.save(args.folder / f"{jax.process_count()}.npy", np.stack(logits))


def start(args: argparse.Namespace, processes: int, folder: str) -> dict[str, Any]:
    """Run one variant and return the results of its process 0."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    each = args.devices // processes
    running = []
    for i in range(processes):
        own = ",".join(str(d) for d in range(i * each, (i + 1) * each))
        flags = f" --xla_force_host_platform_device_count={each}" if jax.default_backend() == "cpu" else ""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": own, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + flags}
        command = [sys.executable, "-m", "benchmarks.processes", "--devices", str(args.devices), "--folder", folder]
        command += ["--model", args.model, "--layers", str(args.layers), "--coordinator", coordinator]
        running.append(subprocess.Popen([*command, "--process", f"{i}/{processes}"], env=environment))
    if codes := [code for process in running if (code := process.wait())]:
        sys.exit(f"{processes} processes: {codes}")
    return json.loads((Path(folder) / f"{processes}.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--model", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        me, count = map(int, args.process.split("/"))
        if count > 1:
            jax.distributed.initialize(args.coordinator, count, me)
        work(args)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves the devices' memory to the others
    with tempfile.TemporaryDirectory() as folder:
        one, many = (start(args, processes, folder) for processes in (1, args.devices))
        logits = [np.load(Path(folder) / f"{processes}.npy") for processes in (1, args.devices)]
    off = np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()
    about = f"{args.model} shape, {args.layers} layers, bf16, prompts of {LENGTH}"
    found = {
        "model": about,
        "devices": args.devices,
        "logits_off": float(off),
        "same_versions": one["versions"] == many["versions"],
        "same_slots": one["slots"] == many["slots"],
        "one_process": one,
        "a_process_each": many,
    }
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
