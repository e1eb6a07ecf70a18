"""Serve one model from several processes. Each process has some of the devices, and all make the same calls.

    python examples/serve_multihost.py                    two processes on this machine, with four CPU devices each

On a TPU pod slice or a cluster that JAX detects (Slurm, Open MPI, Kubernetes), start one process on each host:

    python examples/serve_multihost.py --cluster

On other machines, give the coordinator's address, the number of processes and the index of each:

    python examples/serve_multihost.py --coordinator HOST:PORT --processes 2 --process 0    (and 1 on the other host)

There are three differences from `serve_tp.py`. `jax.distributed.initialize` is called first. The adapter folders exist
on all hosts. All processes make the same manager calls in the same order. If one process cannot read an adapter, none
loads it.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
from jax.sharding import AxisType

import jlora
from jlora.models import from_pretrained, generate

DEMO = Path(jlora.__file__).parent / "demo"
BATCHES = ["sort", None, "reverse", "sort"], ["swap", "shift", None, "swap"]  # two slots: the second swaps both
EOS = 2


def serve() -> None:
    first = jax.process_index() == 0
    heads = json.loads((DEMO / "model" / "config.json").read_text())["num_attention_heads"]
    tensor = math.gcd(jax.device_count(), heads)
    sizes = {"data": jax.device_count() // tensor, "tensor": tensor}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    if first:
        print(f"{jax.process_count()} processes, mesh: {dict(mesh.shape)}", flush=True)

    model = from_pretrained(DEMO / "model", mesh=mesh)  # each process reads the shards of its devices
    config = jlora.LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=4, data_axes=["data"])
    manager = jlora.LoRAManager(model, config)
    for folder in sorted((DEMO / "adapters").iterdir()):
        manager.add_adapter(jlora.LoRARequest(folder.name, path=str(folder)))

    try:  # one host lacks the files, so all processes raise the same error and no state changes
        missing = DEMO / "adapters" / ("sort" if first else "nowhere")
        manager.add_adapter(jlora.LoRARequest("broken", path=str(missing)))
    except jlora.LoRAError as error:
        # One write with the line end, because the other process prints at the same time.
        print(f"process {jax.process_index()}: {type(error).__name__}: {error}\n", end="", flush=True)

    prompt = [1, *(ord(letter) - 93 for letter in "planet"), 3]  # 1 begins a prompt, 3 is "="
    for names in BATCHES:
        with manager.prepare(names) as batch:  # the same slots in all processes
            answers = generate(model, [prompt] * len(names), batch=batch, max_new_tokens=10, stop_tokens=[EOS])
        for name, answer in zip(names, answers, strict=True):
            if first:
                word = "".join(chr(93 + token) for token in answer if token != EOS)
                print(f"{name or '(base)':8s} planet={word}", flush=True)
    if first:
        print(f"{manager.stats().slot_loads} adapters brought into {config.max_loras} slots", flush=True)


def start_two() -> int:
    """Run two processes of this script with four virtual devices each, and return the larger exit status."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--coordinator", coordinator, "--processes", "2", "--process"]
    running = [subprocess.Popen([*command, str(i)], env=environment) for i in range(2)]
    return max(process.wait() for process in running)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve adapters from several processes.")
    parser.add_argument("--cluster", action="store_true", help="let JAX find the other processes")
    parser.add_argument("--coordinator", help="host and port of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int, help="which of them this is")
    args = parser.parse_args()
    if not (args.cluster or args.coordinator):
        sys.exit(start_two())
    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    serve()


if __name__ == "__main__":
    main()
