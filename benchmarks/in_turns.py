"""Time decode steps and prefills of several trees of jlora in turns, each in a process of its own on one device.

    mkdir .old && git archive COMMIT | tar -x -C .old && cp benchmarks/{in_turns,moe_specs}.py .old/benchmarks
    python -m benchmarks.in_turns .old . --model qwen3-0.6b --cells 64/8 64/0 prefill/8 loop [--rounds 9]
    python -m benchmarks.in_turns .old . --model olmoe --cells 8/8 64/8 2048/8

A cell is sequences/adapters of a decode step, prefill/adapters, or "loop": the loop of `benchmarks.decode_loop`, which
also gives the host's microseconds of a call on an idle device. For a model of `benchmarks.moe_specs`, a cell is
tokens/adapters of the blocks of `benchmarks.moe_block`. Each tree runs its own benchmarks. Prints the medians over
rounds of the base and LoRA milliseconds, and of the quotient with the first tree's LoRA in the same round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys


def serve(args: argparse.Namespace) -> None:
    """Time all cells once for each line of the standard input, with jlora of the working directory."""
    import jlora

    assert jlora.__file__.startswith(os.getcwd()), jlora.__file__
    import jax

    from benchmarks import decode_loop as loops
    from benchmarks import decode_step as steps

    cells, loop = decoder_cells(args) if args.model in steps.MODELS else (expert_cells(args), None)
    for line in sys.stdin:
        found = {}
        for (cell, way), (enqueue, *call) in cells.items():
            times = steps.timed({0: call}, 1, enqueue)
            found.setdefault(cell, {})[way] = times[0]
        if loop is not None:
            looped, cache = loop
            times, cache = loops.loop(looped, cache, 60)
            loop = looped, cache
            found["loop"] = dict(zip(("lora", "enqueue", "idle_us"), times, strict=True))
        print(json.dumps({"device": jax.devices()[0].device_kind, "round": line.strip(), "cells": found}), flush=True)


def decoder_cells(args: argparse.Namespace):
    """Return the calls (number to enqueue, function, *arguments) of a decoder, and its loop (step, cache) or None."""
    import jax.numpy as jnp
    from flax import nnx

    import jlora
    from benchmarks import decode_loop as loops
    from benchmarks import decode_step as steps
    from jlora.models import Decoder

    shape, layers, slots = steps.MODELS[args.model]
    config = shape(args.layers or layers)
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    own = {"compiler_options": jlora.compiler_options()}
    base_decode, values = steps.base_step(model, steps.decode, donate_argnums=3, **own)
    base_prefill, _ = steps.base_step(model, steps.prefill, **own)
    manager = steps.serve(model, slots, argparse.Namespace(rank=args.rank, adapters_per_sequence=None, dora=False))
    decode, prefill = manager.jit(steps.decode, donate_argnums=3), manager.jit(steps.prefill)
    looped, cells, caches = manager.jit(loops.forward, donate_argnames="cache"), {}, {}
    for cell in args.cells:
        kind, _, adapters = cell.partition("/")
        if kind == "loop":
            continue
        if kind == "prefill":
            tokens = jnp.ones((8, 512), jnp.int32)
            cells[cell, "base"] = 3, base_prefill, values, tokens, None
            cells[cell, "lora"] = 3, prefill, model, tokens, steps.make_batch(manager, 8, int(adapters))
            continue
        tokens = jnp.ones((int(kind), 1), jnp.int32)
        cache = caches.setdefault(kind, [model.init_cache(int(kind), steps.CONTEXT)])
        cells[cell, "base"] = 40, steps.Decoding(base_decode, values, tokens, cache), None
        batch = steps.make_batch(manager, int(kind), int(adapters))
        cells[cell, "lora"] = 40, steps.Decoding(decode, model, tokens, cache), batch
    if "loop" not in args.cells:
        return cells, None
    batch = steps.make_batch(manager, loops.SEQUENCES, loops.ADAPTERS)
    cache = model.init_cache(loops.SEQUENCES, steps.CONTEXT)
    return cells, (lambda t, c: looped(model, t, c, batch), cache)


def expert_cells(args: argparse.Namespace):
    """Return the calls (number to enqueue, function, *arguments) of blocks of experts."""
    import jax.numpy as jnp
    from flax import nnx

    import jlora
    from benchmarks import decode_step as steps
    from benchmarks import moe_block, moe_specs

    e = (moe_specs.MODELS | moe_specs.OTHER_MODELS)[args.model]
    blocks = moe_block.Blocks(e, args.layers or moe_block.LAYERS, nnx.Rngs(0))
    base, values = steps.base_step(blocks, moe_block.run, compiler_options=jlora.compiler_options())
    wanted = [tuple(map(int, cell.split("/"))) for cell in args.cells]
    slots = moe_specs.slots(max(adapters for _, adapters in wanted))
    manager = jlora.LoRAManager(blocks, jlora.LoRAConfig(max_loras=slots, max_lora_rank=args.rank, dtype=jnp.bfloat16))
    steps.fill_slots(manager, args.rank)
    lora, cells = manager.jit(moe_block.run), {}
    for cell, (tokens, adapters) in zip(args.cells, wanted, strict=True):
        x, routing, batch = moe_block.operands(e, {"tokens": tokens, "adapters": adapters}, manager)
        enqueue = 40 if tokens <= 256 else 5
        cells[cell, "base"] = enqueue, base, values, x, routing, None
        cells[cell, "lora"] = enqueue, lora, blocks, x, routing, batch
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--cells", nargs="+", default=["64/8", "64/64", "64/0", "8/8", "prefill/8", "loop"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        serve(args)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the device
    command, rest = [sys.executable, "-m", "benchmarks.in_turns", "--worker"], sys.argv[1 + len(args.trees) :]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {tree: subprocess.Popen([*command, tree, *rest], **pipes, cwd=tree) for tree in args.trees}
    rounds = {tree: [] for tree in args.trees}
    for number in range(args.rounds + 1):
        for tree, worker in workers.items():
            worker.stdin.write(f"{number}\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            if number:  # the first round compiles
                rounds[tree].append(json.loads(line)["cells"])
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    first = rounds[args.trees[0]]
    for cell in args.cells:
        for tree, found in rounds.items():
            ways = {way: statistics.median(each[cell][way] for each in found) for way in found[0][cell]}
            pairs = zip(found, first, strict=True)
            ways["of_first"] = statistics.median(a[cell]["lora"] / b[cell]["lora"] for a, b in pairs)
            print(json.dumps({"cell": cell, "tree": tree} | {k: round(v, 4) for k, v in ways.items()}), flush=True)


if __name__ == "__main__":
    main()
