"""Check and time attention by a library: prefill of new and of continued sequences, whole prompts, and decode.

    python -m benchmarks.attention [--out results.json] [--layers 32]
    python -m benchmarks.attention --tiny          sizes for a CPU, to try the benchmark

`values` compares cuDNN or splash attention with float64 sums on the host, in cases of chunks at different starts,
windows, padding, grouped heads and sinks. All rows of caches and padding that no query may read are NaN. `decoders`
does the same through a small decoder, alone and on a mesh of one device. `layers` times one layer of Llama-3-8B's
heads: scores in memory, the same in blocks of queries, and the library for new tokens alone, for the first and the last
chunk of a cache, and as JAX exposes it. `prompts` times a whole prefill of Llama-3-8B's shape with random weights.
`decode` compares the decode kernel with the library for 64 sequences. A time is the median over rounds of the mean of
calls enqueued together. A case that fails prints its error, and the others go on.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from benchmarks.decode_step import llama_3_8b
from benchmarks.timing import machine
from jlora.models import Decoder, DecoderConfig, attention, prefill_attention
from jlora.models.decode_attention import decode_attention
from jlora.pallas.gpus import platform

HEADS, GROUPS, WIDTH = 32, 8, 128  # of Llama-3-8B
GIB, MIB = 1 << 30, 1 << 20

# name -> tokens L, capacity C, query heads, key heads, width, window, sinks, starts, counts, dtype. A capacity of 0 is
# no cache.
CASES: dict[str, tuple[int, int, int, int, int, int | None, bool, list[int], list[int], str]] = {
    "new": (256, 0, 8, 2, 128, None, False, [0, 0], [256, 256], "bfloat16"),
    "new, padded": (200, 0, 8, 2, 128, None, False, [0, 0], [200, 31], "bfloat16"),
    "new, odd length": (77, 0, 8, 8, 128, None, False, [0, 0], [77, 5], "bfloat16"),
    "new, window": (200, 0, 8, 2, 128, 64, False, [0, 0], [200, 31], "bfloat16"),
    "new, odd window": (201, 0, 8, 2, 64, 37, True, [0, 0], [201, 31], "bfloat16"),
    "first chunk": (256, 512, 8, 2, 128, None, False, [0, 0], [256, 100], "bfloat16"),
    "chunks at their own starts": (
        128,
        1024,
        8,
        2,
        128,
        None,
        False,
        [0, 700, 1, 896],
        [128, 128, 50, 128],
        "bfloat16",
    ),
    "chunks, float16": (128, 1024, 8, 2, 128, None, False, [0, 700, 1, 896], [128, 128, 50, 128], "float16"),
    "chunks, odd sizes": (17, 301, 6, 3, 128, None, False, [0, 284, 33], [17, 17, 1], "bfloat16"),
    "chunks, one key head": (64, 512, 8, 1, 128, None, False, [0, 448], [64, 64], "bfloat16"),
    "chunks, as many key heads": (64, 512, 8, 8, 128, None, False, [0, 448], [64, 64], "bfloat16"),
    "chunks, width 64": (64, 512, 8, 2, 64, None, False, [0, 448], [64, 64], "bfloat16"),
    "chunks, width 80": (64, 512, 8, 2, 80, None, False, [0, 448], [64, 64], "bfloat16"),
    "chunks, width 96": (64, 512, 8, 2, 96, None, False, [0, 448], [64, 64], "bfloat16"),
    "chunks, width 256": (64, 512, 8, 2, 256, None, False, [0, 448], [64, 64], "bfloat16"),
    "chunks, sinks": (128, 1024, 8, 2, 64, None, True, [0, 700, 1, 896], [128, 128, 50, 128], "bfloat16"),
    "chunks, window below the chunk": (
        128,
        1024,
        8,
        2,
        64,
        32,
        True,
        [0, 700, 1, 896],
        [128, 128, 50, 128],
        "bfloat16",
    ),
    "chunks, window above the chunk": (
        64,
        1024,
        8,
        2,
        128,
        256,
        False,
        [0, 700, 100, 960],
        [64, 64, 50, 64],
        "bfloat16",
    ),
    "chunks, odd window": (65, 1023, 8, 2, 128, 129, False, [0, 700, 100, 958], [65, 65, 50, 65], "bfloat16"),
    "chunks, window of one": (64, 512, 8, 2, 128, 1, False, [0, 448], [64, 64], "bfloat16"),
    "chunks, window above the cache": (64, 512, 8, 2, 128, 600, False, [0, 448], [64, 64], "bfloat16"),
    "two tokens": (2, 512, 8, 2, 128, None, False, [0, 448], [2, 1], "bfloat16"),
}


def expected(q, k, v, start, count, past, sinks, window) -> list[np.ndarray]:
    """Return attention of each sequence's real tokens in float64, over the keys that they may see only."""
    found = []
    for b, (begin, size) in enumerate(zip(start, count, strict=True)):
        keys, values = k[b, :size], v[b, :size]
        if past is not None:
            keys, values = (
                np.concatenate([old[b, :begin], new]) for old, new in zip(past, (keys, values), strict=True)
            )
        else:
            begin = 0
        keys, values = (np.repeat(rows, q.shape[2] // rows.shape[1], axis=1) for rows in (keys, values))
        scores = np.einsum("lhd,chd->hlc", q[b, :size], keys) / np.sqrt(q.shape[3])
        distance = begin + np.arange(size)[:, None] - np.arange(len(keys))[None]
        scores = np.where((distance >= 0) & (distance < (window or 1 << 30)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks[:, None] - scores.max(-1)))
        found.append(np.einsum("hlc,chd->lhd", weights / total[..., None], values))
    return found


def check(case: tuple, kernel: prefill_attention.Kernel) -> dict:
    """Return the largest error of a case, beside the largest error that rounding the result to its dtype makes."""
    length, capacity, heads, groups, width, window, with_sinks, starts, counts, dtype = case
    rng = np.random.default_rng(0)
    batch = len(starts)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, k, v = (drawn(batch, length, n, width) for n in (heads, groups, groups))
    past = tuple(drawn(batch, capacity, groups, width) for _ in range(2)) if capacity else None
    sinks = drawn(heads) if with_sinks else None
    start, count = (jnp.asarray(n, jnp.int32) for n in (starts, counts))
    k, v = (jnp.where((jnp.arange(length) < count[:, None])[..., None, None], rows, jnp.nan) for rows in (k, v))
    if past is not None:
        unread = (jnp.arange(capacity) >= start[:, None])[..., None, None]
        past = tuple(jnp.where(unread, jnp.nan, rows) for rows in past)
    run = jax.jit(partial(prefill_attention.attend, window=window, kernel=kernel))
    found = np.asarray(run(q, k, v, start, count, past, sinks), np.float64)
    exact = jax.tree.map(lambda array: np.asarray(array, np.float64), (q, k, v, past, sinks))
    want = expected(*exact[:3], starts, counts, *exact[3:], window)
    error = max(float(np.abs(found[b, :n] - want[b]).max()) for b, n in enumerate(counts))
    rounding = max(float(np.abs(np.asarray(jnp.asarray(rows, dtype), np.float64) - rows).max()) for rows in want)
    return {"error": error, "rounding": rounding, "right": bool(error < 0.02)}  # NaN is wrong


def timed(run: Callable, *args: Any, calls: int = 20) -> dict:
    """Return ms of a call, and its temporary memory in MiB."""
    compiled = jax.jit(run).lower(*args).compile()
    memory = compiled.memory_analysis()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(calls)][-1])
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return {"ms": statistics.median(times), "temp_mib": memory.temp_size_in_bytes / MIB}


def random(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.bfloat16)


def one_layer(batch: int, length: int, kernel: prefill_attention.Kernel) -> dict[str, Callable[[], dict]]:
    """Return the forms of attention of one layer by name, each as a function that times it."""
    q, k, v = (random(batch, length, n, WIDTH) for n in (HEADS, GROUPS, GROUPS))
    zero, whole = jnp.zeros(batch, jnp.int32), jnp.full(batch, length, jnp.int32)
    calls = 20 if length < 8192 else 5

    def scores(form: Callable, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(length), (batch, length))
        return form(q, k, v, places[:, :, None] >= places[:, None, :], None)

    def library(q, k, v, start, count, past):
        return prefill_attention.attend(q, k, v, start, count, past, None, window=None, kernel=kernel)

    def chunk() -> dict:
        size = length // 4
        parts = (rows[:, length - size :] for rows in (q, k, v))
        return timed(library, *parts, zero + length - size, zero + size, (k, v), calls=calls)

    def public(name: Any) -> dict:
        run = partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)
        return timed(run, q, k, v, calls=calls)

    return {
        "scores, at once": lambda: timed(partial(scores, attention._attend), q, k, v, calls=calls),
        "scores, in blocks over 1 GiB": lambda: timed(partial(scores, attention.attend), q, k, v, calls=calls),
        "library, new tokens": lambda: timed(library, q, k, v, zero, None, None, calls=calls),
        "library, first chunk of a cache": lambda: timed(library, q, k, v, zero, whole, (k, v), calls=calls),
        "library, last quarter of a cache": chunk,
        "jax.nn, cudnn": lambda: public("cudnn"),
    }


def one_prompt(form: str, layers: int, length: int) -> dict:
    """Return ms and temporary memory of a prefill of one prompt by a whole model."""
    config = llama_3_8b(layers)
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    cache = jax.jit(model.init_cache, static_argnums=(0, 1))(1, length)
    tokens = jax.random.randint(jax.random.key(0), (1, length), 0, config.vocab_size)
    positions, last = jnp.arange(length, dtype=jnp.int32)[None], jnp.array([length - 1], jnp.int32)

    def run(state, tokens, positions, cache, last):
        return nnx.merge(graph, state).extend(tokens, positions, cache, last)

    saved = attention.Attention.library, attention._SCORES
    if form != "library":
        attention.Attention.library = lambda *_: None
        attention._SCORES = 1 << 60 if form == "scores, at once" else attention._SCORES
    try:
        return timed(run, state, tokens, positions, cache, last, calls=1)
    finally:
        attention.Attention.library, attention._SCORES = saved


def decoder(on_mesh: bool, window: int | None) -> dict:
    """Return the largest error of logits of chunks over a cache of NaN, relative to float32 scores and zeros."""
    config = DecoderConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, sliding_windows=(None, window) * 2, sinks=window is not None,
        max_position_embeddings=512,
    )  # fmt: skip
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2) if on_mesh else None
    tokens = jax.random.randint(jax.random.key(0), (3, 256), 0, 512)

    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mesh=mesh)
    exact = Decoder(config, rngs=nnx.Rngs(0))
    nnx.update(exact, jax.tree.map(lambda rows: jnp.asarray(np.asarray(rows, np.float32)), nnx.state(model)))

    def logits(model: Decoder, fill: float) -> np.ndarray:
        cache = jax.tree.map(lambda rows: jnp.full_like(rows, fill), model.init_cache(3, 320))
        found = []
        for begin, size in ((0, 96), (96, 96), (192, 64)):
            places = jnp.broadcast_to(jnp.arange(begin, begin + size), (3, size))
            last = jnp.array([size - 1, size - 1, size - 1])
            step = jax.jit(lambda model, *given: model.extend(*given))
            out, cache = step(model, tokens[:, begin : begin + size], places, cache, last)
            found.append(np.asarray(out))
        return np.stack(found)

    want, found = logits(exact, 0), logits(model, float("nan"))
    error = float(np.abs(found - want).max() / np.abs(want).max())
    return {"error": error, "right": bool(error < 0.05)}


def decode(batch: int, capacity: int, context: int) -> dict[str, Callable[[], dict]]:
    """Return the forms of attention of one decode step of a layer by name, each as a function that times it."""
    q, keys, values = random(batch, 1, HEADS, WIDTH), *(random(batch, capacity, GROUPS, WIDTH) for _ in range(2))
    end = jnp.full(batch, context, jnp.int32)

    def kernel(q, keys, values, end):
        return decode_attention(q[:, 0], keys, values, jnp.zeros_like(end), end)

    def cudnn(q, keys, values, end):
        return jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=end, implementation="cudnn")

    def masked(q, keys, values, end):  # with zeros in the place of rows that may hold NaN
        return cudnn(q, *(prefill_attention._first(rows, end) for rows in (keys, values)), end)

    forms = {"decode kernel": kernel, "jax.nn, cudnn": cudnn, "jax.nn, cudnn, rows masked": masked}
    return {name: partial(timed, run, q, keys, values, end) for name, run in forms.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    kernel = prefill_attention.kernel_of(platform(), jnp.bfloat16, WIDTH)
    if kernel is None:  # for a trial on a CPU
        kernel = partial(prefill_attention.splash, interpret=True)
    results: dict[str, dict] = {"about": machine()}

    def measure(part: str, name: str, run: Callable[[], dict]) -> None:
        try:
            facts = run()
        except Exception as error:
            facts = {"failed": f"{type(error).__name__}: {error}"[:500]}
        results.setdefault(part, {})[name] = facts
        shown = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items()
        )
        print(f"{part}: {name}: {shown}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")

    print(results["about"], flush=True)
    for name, case in CASES.items():
        measure("values", name, partial(check, case, kernel))
    for on_mesh in (False, True):
        for window in (None, 37):
            name = f"{'on a mesh' if on_mesh else 'alone'}, window {window}"
            measure("decoders", name, partial(decoder, on_mesh, window))
    for batch, length in ((1, 256),) if args.tiny else ((8, 512), (2, 2048), (1, 8192)):
        for name, run in one_layer(batch, length, kernel).items():
            measure("layers", f"{batch} x {length}, {name}", run)
    sizes = ((4, 256, 100),) if args.tiny else ((64, 1024, 128), (64, 1024, 1000), (64, 4096, 4000), (64, 4096, 500))
    for batch, capacity, context in sizes:
        for name, run in decode(batch, capacity, context).items():
            measure("decode", f"{batch} sequences, {context} of {capacity} positions, {name}", run)
    if not args.tiny:
        for form in ("library", "scores, in blocks over 1 GiB", "scores, at once"):
            measure("prompts", f"8192 tokens, {form}", partial(one_prompt, form, args.layers, 8192))


if __name__ == "__main__":
    main()
