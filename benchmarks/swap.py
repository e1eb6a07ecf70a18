"""Measure the cost of bringing an adapter into a slot, and its effect on a concurrent decode loop.

    python -m benchmarks.swap [--out results.json] [--layers 32] [--rank 16] [--seconds 20] [--dora] [--lora-dtype int8]

Adapters of rank 16 have all seven modules of the Llama-3-8B shape (84 MB in bf16). They are loaded into two models, the
reference decoder (128 merged projections) and one with 224 separate projections. Times are medians in milliseconds:
`host` until the call returns, `all` until the slot arrays are ready. For comparison, plain copies of as many bytes, and
launches of a program with as many arrays that changes none of them, are timed. With `--dora`, only the decode loop is
measured, beside loads of DoRA adapters, whose norms the device computes between steps.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

import jlora
from benchmarks.decode_step import CONTEXT, llama_3_8b
from benchmarks.timing import machine
from jlora._compat import launch_of
from jlora.models import Decoder, DecoderConfig
from jlora.slots import programs

SLOTS, ADAPTERS, SEQUENCES = 8, 12, 64


class Separate(nnx.Module):
    """The seven projections of each layer as separate modules, which are never called."""

    def __init__(self, config: DecoderConfig):
        def linear(k: int, n: int) -> nnx.Linear:
            init = nnx.initializers.zeros_init()
            return nnx.Linear(k, n, use_bias=False, param_dtype=jnp.bfloat16, kernel_init=init, rngs=nnx.Rngs(0))

        self.layers = nnx.List(
            [nnx.Dict({name: linear(*shape) for name, shape in shapes(config).items()}) for _ in range(layers(config))]
        )


def layers(config: DecoderConfig) -> int:
    return config.num_hidden_layers


def shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return K and N of the seven modules."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }  # fmt: skip


def adapters(config: DecoderConfig, rank: int, prefix: str, count: int, *, dora: bool = False) -> list[jlora.Adapter]:
    """Return random adapters on all seven modules, with the model's module names, and magnitudes if `dora` is True."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        modules = {}
        for layer in range(layers(config)):
            for name, (k, n) in shapes(config).items():
                part = (
                    "" if not prefix else "self_attn." if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp."
                )
                a = (rng.standard_normal((rank, k), np.float32) * 0.02).astype(ml_dtypes.bfloat16)
                b = (rng.standard_normal((n, rank), np.float32) * 0.02).astype(ml_dtypes.bfloat16)
                modules[f"{prefix}layers.{layer}.{part}{name}"] = jlora.ModuleLoRA(
                    a=a, b=b, alpha=2.0 * rank, scaling=2.0, vectors={"dora": np.ones(n, np.float32)} if dora else {}
                )
        made.append(jlora.Adapter(name=f"adapter{i}", modules=modules))
    return made


def slot_arrays(manager: jlora.LoRAManager) -> list[jax.Array]:
    return manager._state.slot_arrays.arrays()


def check(manager: jlora.LoRAManager, name: str, adapter: jlora.Adapter) -> None:
    """Check that the slot holds the factors: bitwise, or in int8 within half a step of each row's largest value."""
    manager.prepare([name]).close()
    found = manager.export_adapter(name)
    for module, lora in adapter.modules.items():
        for got, want, axis in ((found.modules[module].a, lora.a, 1), (found.modules[module].b, lora.b, 0)):
            if manager.config.dtype == "int8":
                wanted = np.asarray(want, np.float32)
                step = np.abs(wanted).max(axis, keepdims=True) / 127
                assert (np.abs(np.asarray(got, np.float32) - wanted) <= 0.51 * step).all(), module
            else:
                np.testing.assert_array_equal(got, want)


def timed(manager: jlora.LoRAManager, call: Callable[[], object]) -> tuple[float, float]:
    """Return milliseconds until the call returns, and until the slot arrays are ready."""
    jax.block_until_ready(slot_arrays(manager))
    start = time.perf_counter()
    result = call()
    host = time.perf_counter()
    jax.block_until_ready(slot_arrays(manager))
    end = time.perf_counter()
    if isinstance(result, jlora.LoRABatch):
        result.close()
    return (host - start) * 1e3, (end - start) * 1e3


class Serving:
    """A thread that prepares and steps continuously. After idling its caches would be cold, which costs twice as much.

    The step is a product of about 2 ms that takes every slot array as an operand, as a decode step does.
    """

    def __init__(self, manager: jlora.LoRAManager):
        self.manager = manager
        self.x = jnp.full((8192, 8192), 1e-4, jnp.bfloat16)
        self.step = jax.jit(lambda x, slots, batch: x @ x, keep_unused=True)

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            with self.manager.prepare([None]) as batch:
                jax.block_until_ready(self.step(self.x, jax.tree.leaves(self.manager.slots), batch))

    def seconds(self, length: float) -> None:
        end = time.perf_counter() + length
        self.until(lambda: time.perf_counter() > end)


def median(times: list[tuple[float, float]]) -> dict[str, float]:
    host, total = zip(*times, strict=True)
    return {"host_ms": round(statistics.median(host), 3), "all_ms": round(statistics.median(total), 3)}


def measure(manager: jlora.LoRAManager, made: list[jlora.Adapter], folder: Path, profile: bool) -> dict[str, object]:
    """Time the swaps of one model."""
    figures: dict[str, object] = {}
    start = time.perf_counter()
    manager._state.slot_arrays.compile()
    figures["compile_s"] = round(time.perf_counter() - start, 2)
    start = time.perf_counter()
    manager.warmup()
    figures["first_write_s"] = round(time.perf_counter() - start, 2)
    added = []
    for adapter in made:
        start = time.perf_counter()
        manager.add_adapter(adapter)
        added.append((time.perf_counter() - start) * 1e3)
    figures["add_from_arrays_ms"] = round(statistics.median(added), 1)
    info = manager.list_adapters()[made[0].name]
    figures["adapter_MB"] = round(info.nbytes / 1e6, 1)

    def swaps(get: Callable[[int], Callable[[], object]], count: int) -> dict[str, float]:
        return median([timed(manager, get(i)) for i in range(count)][2:])

    names = [adapter.name for adapter in made]  # one more than there are slots, so each prepare evicts
    figures["cached"] = swaps(lambda i: lambda: manager.prepare([names[i % len(names)]]), 4 * len(names))
    check(manager, names[3], made[3])
    if profile:
        with cProfile.Profile() as profiler:
            for i in range(60):
                timed(manager, lambda i=i: manager.prepare([names[i % len(names)]]))
        pstats.Stats(profiler).sort_stats("tottime").print_stats(14)
    figures["unchanged_prepare"] = swaps(lambda i: lambda: manager.prepare([names[0]]), 50)

    requests = []
    for adapter in made:
        adapter.save_pretrained(folder / adapter.name)
        requests.append(jlora.LoRARequest(f"file {adapter.name}", str(folder / adapter.name)))
    manager.remove_all_adapters()
    serving = Serving(manager)

    def prefetched(i: int) -> Callable[[], object]:
        request = requests[i % len(requests)]
        future = manager.prefetch(request)
        serving.until(future.done)
        serving.seconds(0.02)
        return lambda: manager.prepare([request.name])

    figures["prefetched"] = swaps(prefetched, 5 * len(requests))
    figures["as many donated arrays unchanged, prefetched"] = unchanged(manager, prefetched, 2 * len(requests))
    check(manager, requests[4].name, made[4])
    start = time.perf_counter()
    fresh = jlora.LoRARequest("fresh", str(folder / made[0].name))
    manager.add_adapter(fresh)
    figures["read_from_disk_ms"] = round((time.perf_counter() - start) * 1e3, 1)

    manager.prepare(["fresh"]).close()
    on_device = []
    for adapter in made[:3]:
        tensors = {}
        for name, module in adapter.modules.items():
            tensors[f"{name}.lora_A.weight"] = jnp.asarray(module.a)
            tensors[f"{name}.lora_B.weight"] = jnp.asarray(module.b)
        on_device.append(jax.block_until_ready(tensors))
    before = manager.stats().compilations

    def update(i: int) -> Callable[[], object]:
        serving.seconds(0.3)  # wait for the copy back of the previous update
        return lambda: manager.update_adapter("fresh", on_device[i % 3])

    figures["update_from_device"] = swaps(update, 12)
    check(manager, "fresh", made[11 % 3])
    figures["compilations"] = manager.stats().compilations
    assert manager.stats().compilations == before == 1
    return figures


def unchanged(manager: jlora.LoRAManager, before: Callable[[int], object], count: int) -> dict[str, float]:
    """Time a program that returns as many donated arrays as a swap writes, under the same conditions.

    This is the part of a swap that is JAX's own. Unlike slots, no step reads these arrays in between, so they may be
    colder.
    """
    arrays = [jnp.zeros(16, jnp.bfloat16) for site in manager._state.slot_arrays.sites for _ in site.spec.factors]
    same = jax.jit(lambda *arrays: (*arrays[:-1], arrays[-1] + 1), donate_argnums=range(len(arrays)), keep_unused=True)
    launch = launch_of(same.lower(*arrays).compile())
    times: list[tuple[float, float]] = []
    for i in range(count):
        before(i)
        jax.block_until_ready(arrays)
        start = time.perf_counter()
        arrays = launch(arrays)
        host = time.perf_counter()
        jax.block_until_ready(arrays)
        times.append(((host - start) * 1e3, (time.perf_counter() - start) * 1e3))
    return median(times[2:])


def plain_copies(nbytes: int) -> dict[str, float]:
    """Return the milliseconds to copy as many bytes to the device."""
    device = jax.devices()[0]
    whole = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    eight = np.array_split(whole, 8)
    pinned = jax.device_put(whole, SingleDeviceSharding(device, memory_kind="pinned_host"))
    place = SingleDeviceSharding(device)

    def best(call: Callable[[], object]) -> float:
        times = []
        for _ in range(10):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append((time.perf_counter() - start) * 1e3)
        return round(statistics.median(times), 2)

    return {
        "pageable_ms": best(lambda: jax.device_put(whole, place)),
        "eight_pageable_ms": best(lambda: jax.device_put(eight, [place] * 8)),
        "pinned_ms": best(lambda: jax.device_put(pinned, place)),
    }


def decode_beside_swaps(
    manager: jlora.LoRAManager, model: Decoder, requests: list[jlora.LoRARequest], seconds: float
) -> dict[str, float]:
    """Measure tokens per second and the longest step of a decode loop alone, and beside one load and swap a second.

    Four steps are waited for together. The longest step is a quarter of the longest four.
    """
    graphdef, *states = nnx.split(model, jlora.SlotParam, ...)
    slots_tree, rest_tree = map(jax.tree.structure, states)
    rest = jax.tree.leaves(states[1])
    tokens = jax.random.randint(jax.random.key(1), (SEQUENCES, 1), 0, model.config.vocab_size, jnp.int32)
    positions = jnp.full((SEQUENCES, 1), CONTEXT - 1, jnp.int32)
    cache = model.init_cache(SEQUENCES, CONTEXT)

    @jax.jit
    def step(slots, rest, tokens, batch):
        merged = nnx.merge(graphdef, jax.tree.unflatten(slots_tree, slots), jax.tree.unflatten(rest_tree, rest))
        with jlora.use(batch):
            logits, _ = merged.extend(tokens, positions, cache, jnp.zeros(SEQUENCES, jnp.int32))
        return jnp.argmax(logits, -1).astype(jnp.int32)[:, None]

    def loop(length: float, swap: bool) -> tuple[float, float, list[float]]:
        nonlocal tokens
        names, ready, loads, stop = ["adapter0"] * SEQUENCES, [], [], threading.Event()

        def feed() -> None:
            for i in range(10**6):
                if stop.wait(1.0):
                    return
                request = requests[i % len(requests)]
                manager.remove_adapter(request.name, timeout=10)
                begun = time.perf_counter()
                manager.prefetch(request).result()
                loads.append(time.perf_counter() - begun)
                ready.append(request.name)

        if swap:
            threading.Thread(target=feed, daemon=True).start()
        count, longest, start = 0, 0.0, time.perf_counter()
        last = start
        while time.perf_counter() - start < length:
            if ready:
                names = [ready.pop()] * 8 + ["adapter0"] * (SEQUENCES - 8)
            with manager.prepare(names) as batch:
                tokens = step(jax.tree.leaves(manager.slots), rest, tokens, batch)
            count += 1
            if count % 4 == 0:
                jax.block_until_ready(tokens)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
        jax.block_until_ready(tokens)
        elapsed = time.perf_counter() - start
        stop.set()
        return count * SEQUENCES / elapsed, longest / 4 * 1e3, loads

    manager.prepare(["adapter0"]).close()
    loop(3.0, False)
    alone, longest_alone, _ = loop(seconds, False)
    beside, longest, loads = loop(seconds, True)
    time.sleep(1.5)
    again, _, _ = loop(seconds, False)
    return {
        "alone_tokens_s": round(alone), "beside_tokens_s": round(beside), "alone_again_tokens_s": round(again),
        "swaps": len(loads), "slower": round(1 - beside / max(alone, again), 4),
        "longest_step_alone_ms": round(longest_alone, 2), "longest_step_beside_ms": round(longest, 2),
        "first_load_s": round(loads[0], 3), "load_s": round(statistics.median(loads), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--lora-dtype", choices=("bfloat16", "int8"), default="bfloat16")
    args = parser.parse_args()
    config = llama_3_8b(args.layers)
    options = jlora.LoRAConfig(
        max_loras=SLOTS, max_lora_rank=args.rank, max_cpu_loras=3 * ADAPTERS, dtype=args.lora_dtype
    )
    result: dict[str, object] = {
        "about": {
            **machine(),
            "model": f"Llama-3-8B shape, {args.layers} layers, rank {args.rank} on all seven modules, bf16",
            "lora_dtype": args.lora_dtype,
        },
    }  # fmt: skip

    def keep(name: str, figures: object) -> None:
        result[name] = figures
        print(name, json.dumps(figures), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")

    if not args.dora:
        with tempfile.TemporaryDirectory() as folder:
            made = adapters(config, args.rank, "", ADAPTERS)
            keep("plain copies", plain_copies(made[0].nbytes))
            manager = jlora.LoRAManager(Separate(config), options)
            assert len(manager._state.slot_arrays.sites) == 7 * args.layers
            keep("224 separate", measure(manager, made, Path(folder), args.profile))
            del manager, made
        programs.compiled_write.cache_clear()
        programs.compiled_whole.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        made = adapters(config, args.rank, "model.", ADAPTERS, dora=args.dora)
        model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
        options = jlora.LoRAConfig(
            max_loras=SLOTS, max_lora_rank=args.rank, max_cpu_loras=3 * ADAPTERS, dtype=args.lora_dtype,
            target_modules=targets, variants=["dora"] * args.dora,
        )  # fmt: skip
        manager = jlora.LoRAManager(model, options)
        if args.dora:
            for adapter in made[1:]:
                adapter.save_pretrained(Path(folder) / adapter.name)
        else:
            keep("128 merged", measure(manager, made, Path(folder), args.profile))
            manager.remove_all_adapters()
        manager.add_adapter(made[0])
        requests = [jlora.LoRARequest(f"file {a.name}", str(Path(folder) / a.name)) for a in made[1:]]
        keep("decode beside swaps", decode_beside_swaps(manager, model, requests, args.seconds))


if __name__ == "__main__":
    main()
