"""Time the steps of trainers of several capacities, their kernels' gradients, and the memory of remat and microbatches.

    python -m benchmarks.train_step [--model llama-3-8b] [--layers 16] [--out results.json]
    JAX_PLATFORMS=cpu python -m benchmarks.train_step --model small --layers 2 --tokens 64 --length 16 --rounds 1

The sequences of a batch belong to `--members` adapters of one rank on all projections. In milliseconds, the median of
rounds in which all forms take turns:

    base        forward pass of the model without adapters
    evaluate    forward pass with adapters, in a trainer of each capacity
    step        gradients and AdamW, in a trainer of each capacity

Memory is that of the program of the gradients, in bytes besides its arguments and results (`memory_analysis`), of 8
layers of width 512 and sequences of 256 tokens: 8 or 2 of them, without `nnx.remat` of each layer and with it. The rows
of gradients are those of `benchmarks.gradients`, with separate projections and with merged ones.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora
from benchmarks import gradients
from benchmarks.decode_step import MODELS
from benchmarks.timing import machine, write_rows
from jlora.models import Decoder
from jlora.training import losses


def loss(model: Decoder, batch: jlora.LoRABatch, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    with jlora.use(batch):
        logits = model(tokens[:, :-1])
    return -losses.token_logprobs(logits, tokens[:, 1:]).sum(axis=1), jnp.full(len(tokens), tokens.shape[1] - 1)


def trainer_of(manager: jlora.LoRAManager, args: argparse.Namespace, capacity: int, loss: Any = loss) -> jlora.Trainer:
    trainer = manager.trainer(loss, capacity=capacity, max_rank=args.rank)
    for i in range(args.members):
        trainer.add(f"adapter-{i}", rank=args.rank, alpha=args.rank, seed=i)
    return trainer


def batch_of(trainer: jlora.Trainer, sequences: int) -> jlora.LoRABatch:
    return trainer.prepare([trainer.names[i % len(trainer.names)] for i in range(sequences)])


def steps(args: argparse.Namespace) -> list[dict]:
    """Return the milliseconds of the base, and of each capacity."""
    dtype = jnp.float32 if args.model == "small" else jnp.bfloat16
    model = Decoder(MODELS[args.model][0](args.layers), dtype=dtype, rngs=nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=args.rank))
    sequences, vocabulary = args.tokens // args.length, 1000
    tokens = np.random.default_rng(0).integers(0, vocabulary, (sequences, args.length + 1)).astype(np.int32)

    @manager.jit
    def base(model: Decoder, tokens: jax.Array) -> jax.Array:
        with jlora.use(None):
            return losses.token_logprobs(model(tokens[:, :-1]), tokens[:, 1:])

    calls: dict[str, Callable[[], Any]] = {"base": lambda: base(manager.model, tokens)}
    trainers = {capacity: trainer_of(manager, args, capacity) for capacity in args.capacities}
    for capacity, trainer in trainers.items():
        batch = batch_of(trainer, len(tokens))
        calls[f"evaluate {capacity}"] = lambda trainer=trainer, batch=batch: trainer.evaluate(batch, tokens).losses
        calls[f"step {capacity}"] = lambda trainer=trainer, batch=batch: trainer.step(batch, tokens).norms
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(args.rounds + 2):  # the first compile, the second may still allocate
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if i == 0:
                print(f"# {name}: first call {time.perf_counter() - start:.1f} s", flush=True)
            if i > 1:
                times[name].append((time.perf_counter() - start) * 1e3)
    rows = [{"form": name, "ms": statistics.median(of), "spread_ms": max(of) - min(of)} for name, of in times.items()]
    first, last = (f"step {capacity}" for capacity in (args.capacities[0], args.capacities[-1]))
    ratio = statistics.median(b / a for a, b in zip(times[first], times[last], strict=True))
    sizes = {str(capacity): trainer.nbytes for capacity, trainer in trainers.items()}
    return [*rows, {"form": f"{last} / {first}", "ratio": ratio, "nbytes": sizes}]


class Layer(nnx.Module):
    """A block of a transformer without attention, of which XLA would else keep the scores."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.gate, self.up = (nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(3 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Stack(nnx.Module):
    """Layers under `nnx.scan`. XLA on a CPU undoes `nnx.remat` of layers that are called one by one."""

    def __init__(self, remat: bool, layers: int = 8, width: int = 512):
        split = nnx.split_rngs(splits=layers)
        self.layers = split(nnx.vmap(lambda rngs: Layer(width, rngs), in_axes=0, out_axes=0))(nnx.Rngs(0))
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nnx.remat(Layer.__call__) if self.remat else Layer.__call__
        run = nnx.scan(layer, in_axes=(nnx.StateAxes({jlora.SlotParam: 0, ...: 0}), nnx.Carry), out_axes=nnx.Carry)
        return run(self.layers, x)


def memory(args: argparse.Namespace) -> list[dict]:
    """Return the bytes that the program of the gradients takes, besides its arguments and results."""

    def squares(model: Stack, batch: jlora.LoRABatch, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jlora.use(batch):
            return jnp.square(model(x)).mean((1, 2)), jnp.ones(len(x))

    rows: list[dict] = []
    for remat in (False, True):
        manager = jlora.LoRAManager(Stack(remat), jlora.LoRAConfig(max_loras=1, max_lora_rank=args.rank))
        trainer = trainer_of(manager, args, args.members, squares)
        for sequences in (8, 2):
            x = np.zeros((sequences, 256, 512), np.float32)
            *_, given = trainer._of_batch("gradients", batch_of(trainer, sequences), (x,))
            found = trainer._gradients.lower(*given, x).compile().memory_analysis()
            rows.append({"remat": remat, "sequences": sequences, "temp_bytes": found.temp_size_in_bytes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--members", type=int, default=8, help="adapters of a batch")
    parser.add_argument("--capacities", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parts", nargs="+", choices=("steps", "memory", "gradients"))
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    rows: list[dict] = []
    for name, measure in (("memory", memory), ("steps", steps)):
        if args.parts is None or name in args.parts:
            found = [{"part": name, **row} for row in measure(args)]
            print(*found, sep="\n", flush=True)
            rows += found
    if args.parts is None or "gradients" in args.parts:
        small = ["--small", "--layers", "1", "--rounds", "1", "--calls", "1", "--dtype", "float32"]
        options = [f"--tokens={args.tokens}", f"--rank={args.rank}", *(small if args.model == "small" else [])]
        for merged in ([], ["--merged"]):
            found = gradients.main([*options, *merged])
            rows += [{"part": "gradients", "merged": bool(merged), **row} for row in found]
    if args.out:
        options = {key: value for key, value in vars(args).items() if key not in ("out", "parts")}
        write_rows(args.out, machine() | options, rows)


if __name__ == "__main__":
    main()
