"""Measure a group of answers to one prompt, and a conversation, with and without copies of rows of the cache.

    python -m benchmarks.serve_prefixes [--out results.json] [--layers 32] [--group 16] [--prompt 1000] [--turns 8]
    python -m benchmarks.serve_prefixes --tiny        sizes for a CPU, to try the benchmark

The weights are random bf16 of Llama-3-8B's shape, and one adapter of rank 16 is on all seven projections. Requests are
submitted to the engine, without HTTP.

The group is `--group` answers of `--tokens` tokens. Its prompts are equal, and are computed once, or differ in their
first token, so that each is computed. `first_ms` is the time from the request to the first token of the last of them,
and `tokens_per_second` counts all tokens over the whole time.

Each turn of the conversation adds `--question` tokens to the prompt and the answer before it. It is served with and
without `enable_prefix_caching`. `prefilled` are the tokens of prompts that were computed, and `first_ms` is the sum of
the times to the first token of each answer.
"""

import argparse
import dataclasses
import json
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora
from benchmarks.decode_step import llama_3_8b
from benchmarks.serve_decode import extent_of, make_adapters
from benchmarks.timing import machine
from jlora.models import Decoder
from jlora.serve import Engine, EngineOptions, SamplingParams


def ask(engine: Engine, prompts: list[list[int]], tokens: int, lora: str) -> tuple[float, float, list[list[int]]]:
    """Return the seconds until each of several prompts has a first token, those until all have ended, and the answers.

    The prompts are one request.
    """
    params = [SamplingParams(temperature=1, seed=i, ignore_eos=True, max_tokens=tokens) for i in range(len(prompts))]
    answers: list[list[int]] = [[] for _ in prompts]
    firsts, done = list[float](), threading.Semaphore(0)

    def hear(answer: list[int], event: Any) -> None:
        if isinstance(event, Exception):
            raise SystemExit(str(event))
        if not answer:
            firsts.append(time.perf_counter())
        answer += event.tokens
        if event.finish_reason:
            done.release()

    started = time.perf_counter()
    for generation, answer in zip(engine.submit_all(prompts, params, lora=lora), answers, strict=True):
        generation.listen(partial(hear, answer))
    for _ in prompts:
        done.acquire()
    return max(firsts) - started, time.perf_counter() - started, answers


def group(engine: Engine, equal: bool, args: argparse.Namespace, rng: np.random.Generator, lora: str) -> dict[str, Any]:
    """Return the times of groups of answers, the median of `--repeats` after a first one."""
    before, first, tokens_per_second = engine.stats(), list[float](), list[float]()
    for _ in range(args.repeats + 1):
        prompt = rng.integers(10, 500, args.prompt).tolist()
        prompts = [prompt if equal else [i, *prompt[1:]] for i in range(args.group)]
        begun, ended, answers = ask(engine, prompts, args.tokens, lora)
        first.append(begun * 1e3)
        tokens_per_second.append(sum(map(len, answers)) / ended)
    return {
        "what": "a group",
        "prompts": "equal" if equal else "different",
        "first_ms": round(statistics.median(first[1:]), 2),
        "tokens_per_second": round(statistics.median(tokens_per_second[1:]), 1),
        "prefilled": (engine.stats().prefilled_tokens - before.prefilled_tokens) // (args.repeats + 1),
    }


def conversation(engine: Engine, args: argparse.Namespace, rng: np.random.Generator, lora: str) -> dict[str, Any]:
    """Return the times and tokens of conversations, the median of `--repeats` after a first one."""
    before, first = engine.stats(), list[float]()
    for _ in range(args.repeats + 1):
        context, waited = rng.integers(10, 500, args.prompt).tolist(), 0.0
        for _ in range(args.turns):
            begun, _, (answer,) = ask(engine, [context], args.answer, lora)
            waited += begun
            context = [*context, *answer, *rng.integers(10, 500, args.question).tolist()]
        first.append(waited * 1e3)
    return {
        "what": "a conversation",
        "enable_prefix_caching": engine.options.enable_prefix_caching,
        "turns": args.turns,
        "first_ms": round(statistics.median(first[1:]), 2),
        "prefilled": (engine.stats().prefilled_tokens - before.prefilled_tokens) // (args.repeats + 1),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    longest = args.prompt + max(args.tokens, args.turns * (args.answer + args.question))
    config = dataclasses.replace(llama_3_8b(args.layers), max_position_embeddings=extent_of(longest))
    if args.tiny:
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config = dataclasses.replace(config, **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    model = Decoder(config, dtype=jnp.float32 if args.tiny else jnp.bfloat16, rngs=nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=16))
    (lora,) = make_adapters(manager, 1, 16)
    sizes = {
        name: getattr(args, name) for name in ("group", "prompt", "tokens", "turns", "question", "answer", "chunk")
    }
    found: dict[str, Any] = {**machine(), "layers": config.num_hidden_layers, **sizes, "rows": []}
    for caching in (False, True):
        options = EngineOptions(args.group, max_num_batched_tokens=args.chunk, enable_prefix_caching=caching)
        engine, started = Engine(model, manager, options=options), time.perf_counter()
        engine.start()
        print(f"# enable_prefix_caching={caching}: ready in {time.perf_counter() - started:.1f} s", flush=True)
        rng = np.random.default_rng(0)
        rows = [] if caching else [group(engine, equal, args, rng, lora) for equal in (False, True)]
        for row in [*rows, conversation(engine, args, rng, lora)]:
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer of the group")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--question", type=int, default=50, help="tokens of each turn but the first")
    parser.add_argument("--answer", type=int, default=60, help="tokens of the answer of each turn")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.tiny:
        args.group, args.prompt, args.tokens, args.turns, args.question = 4, 100, 8, 3, 5
        args.answer, args.chunk, args.repeats = 6, 32, 1
    found = measure(args)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
