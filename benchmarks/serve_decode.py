"""Compare the engine with the bare decode loop: tokens per second with all rows decoding, on `decode_step`'s model.

    python -m benchmarks.serve_decode [--out results.json] [--layers 32] [--batch 64] [--context 1000] [--adapters 64]
    python -m benchmarks.serve_decode --tiny          sizes for a CPU, to try the benchmark

The weights are random bf16 of Llama-3-8B's shape. The bare loop is one jitted step over a donated cache, enqueued
repeatedly. Its bytes are the weights once (only the looked-up rows of the embedding) and the live cache once. The
engine is measured through `submit`, between the first token of the last sequence and the last token of the first
sequence to end. In that time every row decodes, at contexts up to the bare loop's. With `--adapters`, each sequence
chooses one of that many adapters by Zipf's law with exponent 1.
"""

import argparse
import dataclasses
import itertools
import json
import math
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora
from benchmarks.decode_step import base_step, llama_3_8b
from benchmarks.roofline import least_us
from benchmarks.timing import machine
from jlora.models import Decoder, attention
from jlora.serve import Engine, EngineOptions, SamplingParams


def extent_of(context: int) -> int:
    return max(512, 1 << (context - 1).bit_length())


def bare_loop(model: Decoder, batch: int, context: int, steps: int) -> dict:
    """Return the milliseconds of a decode step of the unwrapped model, and the share that its reads must take."""
    extent = extent_of(context)

    def run(model, tokens, length, cache):
        here = jnp.full((batch, 1), length, jnp.int32)
        logits, cache = model.extend(tokens[:, None], here, cache, jnp.zeros(batch, jnp.int32), extent=extent)
        return jnp.argmax(logits, -1).astype(jnp.int32), cache

    step, leaves = base_step(model, run, donate_argnums=3)
    cache = jax.jit(model.init_cache, static_argnums=(0, 1))(batch, extent)
    tokens, times = jnp.zeros(batch, jnp.int32), []
    length = np.int32(context - 1)
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(steps):
            tokens, cache = step(leaves, tokens, length, cache)
        tokens.block_until_ready()
        times.append((time.perf_counter() - start) / steps)
    seconds = sorted(times[1:])[2]
    weights = sum(leaf.nbytes for leaf in leaves) - model.model.embed_tokens.embedding.nbytes
    live = sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) * context // extent
    floor = least_us(weights + live, 0)
    return {
        "what": "bare loop",
        "batch": batch,
        "context": context,
        "ms": round(seconds * 1e3, 3),
        "tokens_per_second": round(batch / seconds, 1),
        "bytes": weights + live,
        "of_floor": floor and round(floor / 1e6 / seconds, 3),
    }


def make_adapters(manager: jlora.LoRAManager, count: int, rank: int) -> list[str]:
    """Add adapters for all seven projections of every layer, with the same values under different names."""
    rng, arrays = np.random.default_rng(0), {}
    for info in manager.layers():
        if info.wrapped and "embed" not in info.path and "lm_head" not in info.path:
            made: Decoder = manager.model  # pyright: ignore[reportAssignmentType]
            config = made.config
            sizes = {
                "q_proj": config.num_attention_heads * config.head_dim,
                "k_proj": config.num_key_value_heads * config.head_dim,
                "v_proj": config.num_key_value_heads * config.head_dim,
                "gate_proj": config.intermediate_size,
                "up_proj": config.intermediate_size,
            }
            own = info.path.rpartition(".")[2]
            for name in made.packed_modules.get(own, (own,)):
                fan_in = {"down_proj": config.intermediate_size, "o_proj": sizes["q_proj"]}.get(
                    name, config.hidden_size
                )
                fan_out = sizes.get(name, config.hidden_size)
                a = rng.standard_normal((rank, fan_in), np.float32) * fan_in**-0.5
                b = rng.standard_normal((fan_out, rank), np.float32) * 0.01
                arrays[f"{info.path.rpartition('.')[0]}.{name}"] = (a, b)
    names = [f"adapter{i}" for i in range(count)]
    for name in names:
        manager.add_adapter(jlora.Adapter.from_arrays(name, arrays, alpha=2 * rank))
    return names


def through_submit(engine: Engine, names: list[str], batch: int, context: int, chunk: int, window: int) -> dict:
    """Return tokens per second while all rows decode."""
    lead = batch * math.ceil(context / chunk)  # steps until the last prompt is prefilled
    length = context - lead - window
    if length < 1:
        raise SystemExit(f"a context of {context} is too short: all prompts take {lead} steps, and {window} are timed")
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, 30, (batch, length)).tolist()
    weights = 1 / np.arange(1, len(names) + 1)
    chosen = rng.choice(names, batch, p=weights / weights.sum()).tolist() if names else [None] * batch
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=lead + window)
    times: list[list[float]] = [[] for _ in range(batch)]
    done = threading.Semaphore(0)

    def hear(own: list[float], event) -> None:
        own.append(time.perf_counter())
        if isinstance(event, Exception) or event.finish_reason:
            done.release()

    started = time.perf_counter()
    for prompt, lora, own in zip(prompts, chosen, times, strict=True):
        engine.submit(prompt, params, lora=lora).listen(partial(hear, own))
    for _ in range(batch):
        done.acquire()
    first, last = max(own[0] for own in times), min(own[-1] for own in times)
    stamps = sorted(itertools.chain(*times))
    tokens = sum(first < stamp <= last for stamp in stamps)
    return {
        "what": "submit",
        "batch": batch,
        "context": context,
        "adapters": len(set(chosen) - {None}),
        "tokens_per_second": round(tokens / (last - first), 1),
        "ms": round((last - first) * batch / tokens * 1e3, 3),
        "seconds_until_all_decode": round(first - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--window", type=int, default=150)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--no-kernel", action="store_true", help="use XLA's attention on a GPU too")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    config = dataclasses.replace(llama_3_8b(args.layers), max_position_embeddings=extent_of(args.context))
    if args.tiny:
        config = dataclasses.replace(
            config,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    if args.no_kernel:
        attention.Attention.kernels = lambda *_: None
    model = Decoder(config, dtype=jnp.float32 if args.tiny else jnp.bfloat16, rngs=nnx.Rngs(0))
    rows = [bare_loop(model, args.batch, args.context, args.steps)]
    print(json.dumps(rows[-1]), flush=True)
    slots = min(args.slots, args.adapters or 1)
    manager = jlora.LoRAManager(
        model, jlora.LoRAConfig(max_loras=slots, max_lora_rank=args.rank, max_cpu_loras=max(slots, args.adapters))
    )
    names = make_adapters(manager, args.adapters, args.rank)
    engine = Engine(model, manager, options=EngineOptions(max_num_seqs=args.batch, max_num_batched_tokens=args.chunk))
    start = time.perf_counter()
    engine.start()
    print(f"# warm after {time.perf_counter() - start:.1f} s", flush=True)
    for traffic in [[], names] if names else [[]]:
        row = through_submit(engine, traffic, args.batch, args.context, args.chunk, args.window)
        row["of_the_bare_loop"] = round(row["tokens_per_second"] / rows[0]["tokens_per_second"], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    engine.close()
    if args.out:
        about = {**machine(), "layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "rank": args.rank}
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
