"""Time the decode loop of a user in each way to pass the model to a jitted step.

    python -m benchmarks.decode_loop [--model qwen3-0.6b] [--layers 28] [--steps 60]

64 sequences of 8 adapters of rank 16 decode over a donated cache. Each step takes the tokens of the one before. Prints
milliseconds of a step, those in which the host enqueues it, and the microseconds of a call while the device is idle.
All ways alternate, and each figure is the median over rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import jlora
from benchmarks.decode_step import CONTEXT, MODELS, base_step, make_batch, serve
from jlora.models import Decoder

SEQUENCES, ADAPTERS, POSITION = 64, 8, 20


def forward(model, tokens, cache, batch):
    """Run one decode step; without a batch, the base model only, wrapped or not."""
    positions = jnp.full(tokens.shape, POSITION, jnp.int32)
    with jlora.use(batch):
        logits, cache = model.extend(tokens, positions, cache, jnp.zeros(SEQUENCES, jnp.int32))
    return jnp.argmax(logits, -1).astype(jnp.int32)[:, None], cache


def loop(step: Callable, cache, steps: int) -> tuple[tuple[float, float, float], object]:
    """Return (ms of a step, ms to enqueue it, us of a call while the device is idle), and the cache."""
    tokens, host, idle = jnp.zeros((SEQUENCES, 1), jnp.int32), 0.0, []
    for _ in range(3):
        tokens, cache = step(tokens, cache)
    jax.block_until_ready(tokens)
    start = time.perf_counter()
    for _ in range(steps):
        begun = time.perf_counter()
        tokens, cache = step(tokens, cache)
        host += time.perf_counter() - begun
    jax.block_until_ready(tokens)
    elapsed = time.perf_counter() - start
    for _ in range(steps):
        begun = time.perf_counter()
        tokens, cache = step(tokens, cache)
        idle.append(time.perf_counter() - begun)
        jax.block_until_ready((tokens, cache))
    return (elapsed / steps * 1e3, host / steps * 1e3, statistics.median(idle) * 1e6), cache


def report(ways: dict[str, Callable], model: Decoder, steps: int, rounds: int) -> None:
    caches = {name: model.init_cache(SEQUENCES, CONTEXT) for name in ways}
    found = {name: [] for name in ways}
    for _ in range(rounds):
        for name, step in ways.items():
            times, caches[name] = loop(step, caches[name], steps)
            found[name].append(times)
    for name, times in found.items():
        step, host, idle = map(statistics.median, zip(*times, strict=True))
        print(f"{name:40s} {step:6.2f} ms a step, enqueued in {host:5.2f} ms; {idle:6.0f} us idle", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    shape, layers, slots = MODELS[args.model]
    config = shape(args.layers or layers)
    print(jax.devices()[0].device_kind, args.model, config.num_hidden_layers, "layers")
    model, options = (
        Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)),
        {"compiler_options": jlora.compiler_options()},
    )
    whole = jax.jit(forward, donate_argnames="cache")
    flat, values = base_step(model, forward, donate_argnums=2, **options)
    base = {
        "base, model through jax.jit": lambda t, c: whole(model, t, c, None),
        "base, flat": lambda t, c: flat(values, t, c, None),
    }
    report(base, model, args.steps, args.rounds)
    serving = argparse.Namespace(rank=16, adapters_per_sequence=None, dora=False)
    manager = serve(model, slots, serving)
    batch = make_batch(manager, SEQUENCES, ADAPTERS)
    graphdef, _, rest = nnx.split(model, jlora.SlotParam, ...)
    split = jax.jit(lambda s, r, *a: forward(nnx.merge(graphdef, s, r), *a), donate_argnums=3, **options)
    flat_lora, own = base_step(model, forward, donate_argnums=2, **options)
    plain = jax.jit(forward, donate_argnames="cache")
    optimized = jax.jit(forward, donate_argnames="cache", **options)
    step = manager.jit(forward, donate_argnames="cache")
    ways = {
        "jax.jit(forward)": lambda t, c: plain(model, t, c, batch),
        "jax.jit(forward, compiler_options=)": lambda t, c: optimized(model, t, c, batch),
        "nnx.split(model, SlotParam, ...)": lambda t, c: split(manager.slots, rest, t, c, batch),
        "flat": lambda t, c: flat_lora(own, t, c, batch),
        "manager.jit(forward)": lambda t, c: step(model, t, c, batch),
    }
    report(ways, model, args.steps, args.rounds)


if __name__ == "__main__":
    main()
