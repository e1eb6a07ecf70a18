"""Measure the cost of adapters on a mesh: step times against the unwrapped model's, and a swap against a plain copy.

    python -m benchmarks.mesh [--out results.json] [--model llama-3-8b] [--layers 32] [--mesh tensor=2] [--swap]
    python -m benchmarks.mesh --model qwen3-30b-a3b --layers 12 --mesh expert=2
    python -m benchmarks.mesh --model llama-3-70b --layers 24 --mesh tensor=2 --steps decode --no-single

It runs on any number of devices; `--mesh` gives names and sizes of the axes. The random bf16 weights are the same on
one device and on the mesh, and slots are filled with random values in place. Decode is one token a sequence, for
`--batch` sequences with `--adapters`, over a cache of `CONTEXT` positions. Prefill is 4096 tokens in eight sequences.
Figures are milliseconds on one device, on the mesh, and on the mesh with fully sharded slots: medians over rounds in
which all variants alternate. With `--check`, the prefill logits of two loaded adapters and of none are compared with
those of one device, as the largest difference over the largest logit. The rows of the base model show the effect of
rounding alone.

The swap is the activation of an adapter of rank 16 from the host cache, against one `device_put` of the same staged
buffers with the same shardings. Memory is the use of each device of this process after the steps, if the device reports
it, against the bytes of the steps' arguments on it. `benchmarks/mesh_of_a_host.py` runs all of this for a host's
meshes.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jlora
from benchmarks import swap
from benchmarks.decode_step import CONTEXT, MODELS, Decoding, base_step, decode, fill_slots, make_batch, prefill, timed
from benchmarks.timing import machine, write_rows
from jlora.adapters import ExpertsLoRA
from jlora.models import Decoder, DecoderConfig
from jlora.models.config import MoEConfig
from jlora.models.expert_parallel import spread_over

PROJECTIONS = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def llama_3_70b(layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    )


def tiny(layers: int) -> DecoderConfig:
    """Return a shape for trials without accelerators. It splits over eight devices as Llama-3 does."""
    return DecoderConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
    )


def tiny_experts(layers: int) -> DecoderConfig:
    """Return `tiny` with sixteen experts."""
    moe = MoEConfig(num_experts=16, experts_per_token=2, intermediate_size=32, layers=(True,) * layers)
    return dataclasses.replace(tiny(layers), moe=moe)


# model -> (shape by number of layers, number of layers: all, or as many as fit on one device)
SHAPES = {name: (shape, layers) for name, (shape, layers, _) in MODELS.items()}
SHAPES |= {"llama-3-70b": (llama_3_70b, 80), "tiny": (tiny, 2), "tiny-experts": (tiny_experts, 2)}


def steps_of(args: argparse.Namespace, config: DecoderConfig, mesh: Mesh | None, *, fully: bool) -> dict[str, Any]:
    """Return name of each step -> (function, *arguments) of the base model and with adapters; and the model's bytes."""
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mesh=mesh, dispatch=args.dispatch)
    made: dict[str, Any] = {}
    inputs: dict[str, Any] = {}
    rng = np.random.default_rng(1)
    if "decode" in args.steps:
        tokens = jnp.asarray(rng.integers(0, config.vocab_size, (args.batch, 1)), jnp.int32)
        inputs["decode"] = decode, (tokens, [model.init_cache(args.batch, CONTEXT)]), args.batch
    if "prefill" in args.steps:
        inputs["prefill"] = prefill, (jnp.asarray(rng.integers(0, config.vocab_size, (8, 512)), jnp.int32),), 8
    for name, (step, given, _) in inputs.items():
        if not fully:
            base = base_step(model, step, compiler_options=jlora.compiler_options(), **donated(name))
            made[f"{name} base"] = call_of(name, *base, *given, None)
    manager = jlora.LoRAManager(
        model,
        jlora.LoRAConfig(
            max_loras=args.slots,
            max_lora_rank=args.rank,
            dtype=jnp.bfloat16,
            target_modules=PROJECTIONS,
            fully_sharded=fully,
            data_axes=[name for name in spread_over(args.dispatch) if mesh is not None and name in mesh.axis_names],
        ),
    )
    runs = {name: manager.jit(step, **donated(name)) for name, (step, _, _) in inputs.items()}
    found: dict[str, Any] = {"calls": made}
    if args.check and not fully:
        for adapter in adapters(config, args.rank, 2):
            manager.add_adapter(adapter)
        with manager.prepare(["adapter0", None, "adapter1", "adapter0", None, "adapter1", "adapter1", None]) as batch:
            found["logits"] = logits_of((runs["prefill"], model, *inputs["prefill"][1], batch))
    fill_slots(manager, args.rank)
    manager._state.slot_arrays._known = manager._state.slot_arrays.arrays()  # frees the empty slots
    for name, (_, given, sequences) in inputs.items():
        batch = make_batch(manager, sequences, min(args.adapters, sequences))
        made[name] = call_of(name, runs[name], model, *given, batch)
    slots = [variable for layer in manager._state.wrapped.modules.values() for variable in swap_arrays(layer)]
    return found | {"slot_bytes_of_a_device": bytes_by_device(slots)[jax.local_devices()[0]]}


def bytes_by_device(tree: Any) -> dict[Any, int]:
    """Return the bytes of the distinct arrays of a tree on each device of this process."""
    found = dict.fromkeys(jax.local_devices(), 0)
    for array in {id(array): array for array in jax.tree.leaves(tree) if isinstance(array, jax.Array)}.values():
        for shard in array.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return found


def memory(calls: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of the calls' arguments on each device of this process, and the device's own statistics."""
    held = [(call.args, call.cache) for call, *_ in calls.values() if isinstance(call, Decoding)]
    arguments = bytes_by_device([held, *(args for _, *args in calls.values())])
    said = [device.memory_stats() or {} for device in arguments]
    keys = ("bytes_in_use", "peak_bytes_in_use")
    return {"step": "memory", "argument_bytes": [*arguments.values()]} | {
        key: [stats[key] for stats in said] for key in keys if all(key in stats for stats in said)
    }


def donated(name: str) -> dict[str, Any]:
    """Return the option of `jax.jit` that donates the cache of a decode step."""
    return {"donate_argnums": 3} if name == "decode" else {}


def call_of(name: str, step: Any, model: Any, *args: Any) -> tuple[Any, ...]:
    """Return (function, *arguments) of a step."""
    if name != "decode":
        return step, model, *args
    tokens, cache, batch = args
    return Decoding(step, model, tokens, cache), batch


def swap_arrays(layer: nnx.Module) -> list[jax.Array]:
    return [v.get_value() for v in vars(layer).values() if isinstance(v, jlora.SlotParam)]


def logits_of(call: tuple[Any, ...]) -> np.ndarray:
    run, *args = call
    out = run(*args)
    return np.asarray((out[0] if isinstance(out, tuple) else out).astype(jnp.float32))


def adapters(config: DecoderConfig, rank: int, count: int) -> list[jlora.Adapter]:
    """Return different adapters for all projections, experts included."""
    if config.moe is None:
        return swap.adapters(config, rank, "model.", count)
    moe = config.moe
    values = np.random.default_rng(2).standard_normal(1 << 20, np.float32).astype(jnp.bfloat16) * 0.02
    attention = {name: shape for name, shape in swap.shapes(config).items() if name[0] in "qkvo"}
    experts = {
        "gate_up_proj": (config.hidden_size, 2 * moe.intermediate_size),
        "down_proj": (moe.intermediate_size, config.hidden_size),
    }
    made: list[jlora.Adapter] = []
    for i in range(count):

        def some(*shape: int, first: int = i) -> np.ndarray:
            return np.resize(values[first:], shape)  # repeats the values, from another offset for each adapter

        modules: dict[str, Any] = {}
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            for name, (k, n) in attention.items():
                lora = jlora.ModuleLoRA(a=some(rank, k), b=some(n, rank), alpha=2.0 * rank, scaling=2.0)
                modules[f"{at}.self_attn.{name}"] = lora
            for name, (k, n) in experts.items():
                a, b = some(moe.num_experts, rank, k), some(moe.num_experts, n, rank)
                modules[f"{at}.mlp.experts.{name}"] = ExpertsLoRA(a=a, b=b, alpha=2.0 * rank, scaling=2.0)
        made.append(jlora.Adapter(name=f"adapter{i}", modules=modules))
    return made


def swaps(args: argparse.Namespace, config: DecoderConfig, mesh: Mesh) -> dict[str, Any]:
    """Return the milliseconds of an activation on the mesh, and of a `device_put` of the same buffers."""
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mesh=mesh, dispatch=args.dispatch)
    manager = jlora.LoRAManager(
        model,
        jlora.LoRAConfig(
            max_loras=4, max_lora_rank=args.rank, max_cpu_loras=8, dtype=jnp.bfloat16, target_modules=PROJECTIONS
        ),
    )
    manager.warmup()
    names = []
    for adapter in adapters(config, args.rank, 6):
        manager.add_adapter(adapter)
        names.append(adapter.name)
    contents = [manager._state.cache.loaded[name].packed for name in names]
    slot_arrays = manager._state.slot_arrays
    hosts, alls, copies = [], [], []
    for i in range(48):  # alternating, since a machine is slower after idling
        host, whole = swap.timed(manager, lambda i=i: manager.prepare([names[i % 6]]))
        hosts.append(host)
        alls.append(whole)
        blocks = contents[i % 6].blocks
        targets = [target for block in blocks for target in slot_arrays._targets(block)]
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put([x for block in blocks for x in (block.a, block.b)], targets))
        copies.append((time.perf_counter() - start) * 1e3)
    pinned = not isinstance(contents[0].blocks[0].a, np.ndarray)
    return {
        "step": "swap",
        "bytes": contents[0].nbytes,
        "pinned": pinned,
        "host_ms": statistics.median(hosts[12:]),
        "ms": statistics.median(alls[12:]),
        "device_put_ms": statistics.median(copies[12:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--mesh", nargs="+", default=[f"tensor={len(jax.devices())}"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", nargs="*", default=["decode", "prefill"])
    parser.add_argument("--dispatch", choices=["all_gather", "all_to_all"], default="all_gather")
    parser.add_argument("--no-single", action="store_true", help="skip the steps on one device")
    parser.add_argument("--no-fully", action="store_true")
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare logits, with loaded adapters")
    args = parser.parse_args()
    shape, layers = SHAPES[args.model]
    args.layers = args.layers or layers
    config = shape(args.layers)
    sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in args.mesh)}
    devices = np.array(jax.devices()[: int(np.prod([*sizes.values()]))]).reshape(*sizes.values())
    mesh = Mesh(devices, tuple(sizes))
    about = {
        **machine(),
        "devices": devices.size,
        "model": f"{args.model} shape, {args.layers} layers, bf16, context {CONTEXT}",
        "mesh": sizes,
        **({"dispatch": args.dispatch} if config.moe is not None else {}),
        "rank": args.rank,
        "slots": args.slots,
        "batch": args.batch,
        "adapters": args.adapters,
    }
    print(json.dumps(about), flush=True)
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.out is not None:
            write_rows(args.out, about, rows)

    calls: dict[str, Any] = {}
    variants = {"mesh": (mesh, False)}
    if not args.no_fully:
        variants["fully sharded"] = (mesh, True)
    if not args.no_single:
        variants = {"one device": (None, False), **variants}
    logits: dict[str, np.ndarray] = {}
    for variant, (where, fully) in variants.items():
        found = steps_of(args, config, where, fully=fully)
        for name, call in found["calls"].items():
            calls[f"{variant}: {name}"] = call
        if "logits" in found:
            logits[variant] = found.pop("logits")
        keep({"step": "slots", "variant": variant, "bytes_of_a_device": found["slot_bytes_of_a_device"]})
    for step in args.steps:
        enqueue = 10 if step == "decode" else 3
        own = {name: call for name, call in calls.items() if name.split(": ")[1].split()[0] == step}
        times = timed(own, args.rounds, enqueue)
        for variant in variants:
            base = times[f"{'one device' if variant == 'one device' else 'mesh'}: {step} base"]
            ms = times[f"{variant}: {step}"]
            row = {"step": step, "variant": variant, "base_ms": base, "ms": ms, "overhead": ms / base - 1}
            row["us_of_a_layer"] = (ms - base) * 1e3 / args.layers
            keep(row)
    keep(memory(calls))
    if len(logits) == 2:
        want, got = logits["one device"], logits["mesh"]
        rows_of_base = [1, 4, 7]
        off = np.abs(got - want).max(axis=-1) / np.abs(want).max()
        keep({"step": "logits", "off": float(off.max()), "off_of_base_rows": float(off[rows_of_base].max())})
    calls.clear()
    if args.swap:
        keep(swaps(args, config, mesh))


if __name__ == "__main__":
    main()
