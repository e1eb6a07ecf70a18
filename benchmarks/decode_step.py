"""Measure the cost of adapters for a whole model: step times of a decoder with LoRA against the unwrapped model's.

    python -m benchmarks.decode_step [--out results.json] [--layers 32] [--rank 16] [--profile]
    python -m benchmarks.decode_step --model qwen2.5-7b [--one-by-one]
    python -m benchmarks.decode_step --model qwen3-30b-a3b --layers 8 --batches 8 16 32 64
    python -m benchmarks.decode_step --adapters-per-sequence 2
    python -m benchmarks.decode_step --dora
    python -m benchmarks.decode_step --batch-invariant
    python -m benchmarks.decode_step --quantization int8
    python -m benchmarks.decode_step --lora-dtype int8

The weights are random bf16. There are 64 slots for all seven modules of a dense model, or 8 slots for attention and all
experts of Qwen3-30B-A3B, filled with random values on the device. `--model small` is a shape for CPUs, with the modules
of Llama. Decode is one token a sequence over a cache of `CONTEXT` positions, as in `generate`. Prefill is 4096 tokens
in eight sequences of 512, with the logits of the last token. Each figure is the median over several rounds of the mean
of 3 prefills or 40 decode steps enqueued together. Base and LoRA steps alternate within a round. The plan is made
inside the step and counted.
All steps are compiled as `manager.jit` does, with `jlora.compiler_options()` or, with `--one-by-one`, without them. The
cache is donated: a decode step writes it in place.

`--profile` also records the kernel times of a layer. With `--adapters-per-sequence k`, each sequence sums k of the
adapters (`jlora.Mix`), and with `--dora` every slot holds a DoRA adapter. With `--batch-invariant`, the same steps with
`LoRAConfig(batch_invariant=True)` are timed beside the default. With `--quantization`, the kernels of the base model
are in int8 or fp8, and its bytes are in the JSON beside those in bf16. With `--lora-dtype int8`, the same steps with
slots in int8 are timed beside those in bf16. `lora_bytes` of a row are the bytes of factors that its step has to read,
and `lora_tb_s` is their number over the time that LoRA adds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

import jlora
from benchmarks.roofline import least_us
from benchmarks.timing import kernel_us, kind_of, machine
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.lease import Lease
from jlora.layers.forward.make_batch import make_batch as batch_in_slots
from jlora.manager.step import FlatModel
from jlora.models import Decoder, DecoderConfig, quantized_config
from jlora.models.config import MoEConfig

CONTEXT = 128
BATCHES = (64, 1, 8, 32, 256)
ADAPTERS = (0, 1, 8, 32, 64)


def dense(
    layers: int, vocab: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int = 128, **options: bool
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **options,
    )


llama_3_2_1b = partial(dense, vocab=128256, hidden=2048, inner=8192, heads=32, kv_heads=8, head_dim=64)
qwen3_0_6b = partial(dense, vocab=151936, hidden=1024, inner=3072, heads=16, kv_heads=8, qk_norm=True)
llama_3_8b = partial(dense, vocab=128256, hidden=4096, inner=14336, heads=32, kv_heads=8)
qwen2_5_7b = partial(dense, vocab=152064, hidden=3584, inner=18944, heads=28, kv_heads=4, qkv_bias=True)
qwen3_14b = partial(dense, vocab=151936, hidden=5120, inner=17408, heads=40, kv_heads=8, qk_norm=True)
mistral_24b = partial(dense, vocab=131072, hidden=5120, inner=32768, heads=32, kv_heads=8)
olmo_2_13b = partial(dense, vocab=100352, hidden=5120, inner=13824, heads=40, kv_heads=40, qk_norm=True)
llama_3_2_3b = partial(dense, vocab=128256, hidden=3072, inner=8192, heads=24, kv_heads=8)
gemma_3_12b = partial(dense, vocab=262208, hidden=3840, inner=15360, heads=16, kv_heads=8, head_dim=256, qk_norm=True)
phi_4 = partial(dense, vocab=100352, hidden=5120, inner=17920, heads=40, kv_heads=10)
gemma_3_1b = partial(dense, vocab=262144, hidden=1152, inner=6912, heads=4, kv_heads=1, head_dim=256, qk_norm=True)
mistral_nemo_12b = partial(dense, vocab=131072, hidden=5120, inner=14336, heads=32, kv_heads=8)
glm_4_9b = partial(dense, vocab=151552, hidden=4096, inner=13696, heads=32, kv_heads=2, qkv_bias=True)


def qwen3_30b_a3b(layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        qk_norm=True,
        moe=MoEConfig(num_experts=128, experts_per_token=8, intermediate_size=768, layers=(True,) * layers),
    )


def small(layers: int) -> DecoderConfig:
    """Return a shape for CPUs."""
    return DecoderConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )


# model -> (shape by number of layers, default number of layers, slots)
MODELS = {
    "qwen3-0.6b": (qwen3_0_6b, 28, 64),
    "llama-3.2-1b": (llama_3_2_1b, 16, 64),
    "llama-3-8b": (llama_3_8b, 32, 64),
    "qwen2.5-7b": (qwen2_5_7b, 28, 64),
    "qwen3-14b": (qwen3_14b, 40, 64),
    "mistral-24b": (mistral_24b, 40, 64),
    "olmo-2-13b": (olmo_2_13b, 40, 64),
    "llama-3.2-3b": (llama_3_2_3b, 28, 64),
    "gemma-3-12b": (gemma_3_12b, 48, 64),
    "phi-4": (phi_4, 40, 64),
    "gemma-3-1b": (gemma_3_1b, 26, 64),
    "mistral-nemo-12b": (mistral_nemo_12b, 40, 64),
    "glm-4-9b": (glm_4_9b, 40, 64),
    "qwen3-30b-a3b": (qwen3_30b_a3b, 8, 8),
    "small": (small, 4, 64),
}


def adapter_bytes(config: DecoderConfig, rank: int, tokens: float, itemsize: int = 2) -> float:
    """Return the bytes of one adapter that a decode step of `tokens` has to read, in bf16 or with `itemsize` 1 in int8.

    Of the experts, it counts those that random routing is expected to choose for some token.
    """
    hidden = config.hidden_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    inner, copies = config.intermediate_size, 1.0
    if config.moe is not None:
        inner, experts = config.moe.intermediate_size, config.moe.num_experts
        copies = experts * (1 - (1 - config.moe.experts_per_token / experts) ** tokens)
    attention = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
    mlp = [(hidden, inner), (hidden, inner), (inner, hidden)]
    values = sum(k + n for k, n in attention) + copies * sum(k + n for k, n in mlp)
    return itemsize * rank * config.num_hidden_layers * values


def base_step(model: nnx.Module, run, **options):
    """Compile run(model, ...) of a model without a manager, as `manager.jit` does, for a flat list of its values.

    Returns:
      The function of `jax.jit`, and the values.
    """
    flat = FlatModel(model)
    values, structure = flat.read(), flat.structure
    return jax.jit(lambda values, *args: run(structure.merge(values), *args), **options), values


def decode(model, tokens, positions, cache, batch):
    """Run one decode step; without a batch, the base model only, wrapped or not."""
    last = jnp.zeros(tokens.shape[:1], jnp.int32)
    with jlora.use(batch):
        logits, cache = model.extend(tokens, positions, cache, last)
    return jnp.argmax(logits, -1).astype(jnp.int32)[:, None], cache


class Decoding:
    """A compiled `decode` that donates the cache. Each call takes the cache that the last one left.

    It is a `jax.stages.Wrapped`, as the profiler takes.

    Args:
      cache: a list of one cache, which steps of equal shapes share.
    """

    def __init__(self, step, model, tokens, cache: list):
        self.step, self.cache = step, cache
        self.args = model, tokens, jnp.full(tokens.shape, CONTEXT - 1, jnp.int32)

    def __call__(self, batch):
        tokens, self.cache[0] = self.step(*self.args, self.cache[0], batch)
        return tokens

    def trace(self, batch):
        return self.step.trace(*self.args, self.cache[0], batch)

    def lower(self, batch):
        return self.trace(batch).lower()


def prefill(model, tokens, batch):
    """Run prompts of one length with a new cache."""
    sequences, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    args = tokens, positions, model.init_cache(sequences, length), jnp.full(sequences, length - 1, jnp.int32)
    with jlora.use(batch):
        return model.extend(*args)


def timed(calls: dict, rounds: int, enqueue: int) -> dict:
    """Return milliseconds of each call (function, *arguments), the median over rounds in which all calls alternate."""
    for call, *args in calls.values():
        jax.block_until_ready(call(*args))
        jax.block_until_ready(call(*args))
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, *args) in calls.items():
            start = time.perf_counter()
            for _ in range(enqueue):
                out = call(*args)
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) * 1e3 / enqueue)
    return {name: statistics.median(values) for name, values in times.items()}


def fill_slots(manager: jlora.LoRAManager, rank: int) -> None:
    """Fill every slot with random values and the true rank, on the device."""
    key = jax.random.key(0)
    for site, layer in manager._state.wrapped.modules.items():
        scale = 1.0
        for name, fan_in in zip(site.attributes[:2], (site.spec.in_features, 16 * rank), strict=True):
            variable = getattr(layer, name)
            key, sub = jax.random.split(key)
            held = variable.get_value()
            if held.dtype == jnp.int8:  # 42 is a standard deviation of int8 values
                variable.set_value(_normal(sub, held.shape, held.dtype, 42.0, held.sharding))
                scale *= fan_in**-0.5 / 42
            else:
                variable.set_value(_normal(sub, held.shape, held.dtype, fan_in**-0.5, held.sharding))
        ranks = getattr(layer, site.attributes[2])
        held = ranks.get_value()
        ranks.set_value(jnp.zeros_like(held) + jnp.array([rank] + [scale] * (held.shape[-1] - 1)))
        for name in site.attributes[3 : 3 + len(site.spec.extras)]:
            variable = getattr(layer, name)
            key, sub = jax.random.split(key)
            held = variable.get_value()
            variable.set_value(1 + _normal(sub, held.shape, held.dtype, 0.1, held.sharding))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal(key, shape, dtype, scale: float, where):
    """Draw random values directly in their sharding."""
    drawn = jnp.bfloat16 if dtype == jnp.int8 else dtype
    values = jax.random.normal(key, shape, drawn) * jnp.asarray(scale, drawn)
    values = values.clip(-127, 127).round().astype(dtype) if dtype == jnp.int8 else values
    return jax.lax.with_sharding_constraint(values, where) if isinstance(where, NamedSharding) else values


def serve(model: Decoder, slots: int, args: argparse.Namespace, dtype=jnp.bfloat16, **options) -> jlora.LoRAManager:
    """Wrap the model, and fill its slots."""
    config = jlora.LoRAConfig(
        max_loras=slots,
        max_lora_rank=args.rank,
        dtype=dtype,
        target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        max_adapters_per_sequence=args.adapters_per_sequence,
        variants=["dora"] * args.dora,
        **options,
    )
    manager = jlora.LoRAManager(model, config)
    fill_slots(manager, args.rank)
    return manager


def make_batch(manager: jlora.LoRAManager, sequences: int, adapters: int):
    slots = np.full(sequences, manager.config.max_loras, np.int32)
    if adapters:
        slots = np.random.default_rng(0).permutation(np.arange(sequences) * adapters // sequences).astype(np.int32)
        slots = (slots[:, None] + np.arange(min(adapters, manager.config.max_adapters_per_sequence or 1))) % adapters
    return batch_of(manager, slots)


def batch_of(manager: jlora.LoRAManager, slots: np.ndarray):
    """Return the batch of sequences in these slots, [B] or [B, adapters of a sequence].

    The slots were filled without the manager, so the batch leases no adapter.
    """
    unserved, none = manager._state.wrapped.unserved.sites, manager.config.max_loras
    shape = BatchShape(len(slots))
    lease = Lease((), (None,) * len(slots), 0, shape)
    entries = [[(slot, 0, 1.0) for slot in np.atleast_1d(own)] for own in slots]
    index, sites = range(len(slots)), manager._state.wrapped.sites
    return batch_in_slots(entries, index, shape, sites, lease, none=none, unserved=unserved)


def weight_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a model's weights, from shapes alone."""
    model = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))


def save(args: argparse.Namespace, rows: list[dict], profiles: list[dict]) -> None:
    """Write the results so far."""
    if args.out is None:
        return
    config = MODELS[args.model][0](args.layers)
    about = {
        **machine(),
        "model": f"{args.model} shape, {args.layers} layers, bf16, context {CONTEXT}",
        "rank": args.rank,
        "slots": MODELS[args.model][2],
        "adapters_per_sequence": args.adapters_per_sequence,
        "dora": args.dora,
        "batch_invariant": args.batch_invariant,
        "lora_dtype": args.lora_dtype,
        "quantization": args.quantization,
        "one_by_one": args.one_by_one,
        "weight_bytes": weight_bytes(quantized_config(config, args.quantization)),
        "weight_bytes_in_bf16": weight_bytes(config),
    }
    with open(args.out, "w") as file:
        json.dump({"about": about, "rows": rows, "profiles": profiles}, file, indent=1)


def profile(call, *args, layers: int) -> dict[str, float]:
    """Return the microseconds a layer that a step spends in each kind of kernel, from the profiler, longest first.

    XLA numbers the kernels of one kind, which are added up. Work done once for all layers is divided among them.
    """
    found: dict[str, float] = {}
    for name, us in kernel_us(call, *args).items():
        kind = kind_of(name)
        found[kind] = found.get(kind, 0.0) + us / layers
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--steps", nargs="*", default=["prefill", "decode"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--adapters-per-sequence", type=int)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--quantization", choices=("int8", "fp8"))
    parser.add_argument("--lora-dtype", choices=("int8",))
    parser.add_argument("--one-by-one", action="store_true")
    args = parser.parse_args()

    shape, layers, slots = MODELS[args.model]
    args.layers = args.layers or layers
    config = quantized_config(shape(args.layers), args.quantization)
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    concurrent = jlora.compiler_options() or {}
    own = {"compiler_options": dict.fromkeys(concurrent) if args.one_by_one else concurrent}
    options = {"compiler_options": {} if args.one_by_one else concurrent}
    base_decode, base_values = base_step(model, decode, donate_argnums=3, **options)
    base_prefill, _ = base_step(model, prefill, **options)
    beside = {" batch invariant": {"batch_invariant": True}} if args.batch_invariant else {}
    beside |= {f" {args.lora_dtype}": {"dtype": args.lora_dtype}} if args.lora_dtype else {}
    clones = {name: nnx.clone(model) for name in beside}  # share the arrays
    served = {"": (model, serve(model, slots, args))}
    served |= {name: (clones[name], serve(clones[name], slots, args, **given)) for name, given in beside.items()}
    steps = {
        name: (manager.jit(decode, donate_argnums=3, **own), manager.jit(prefill, **own), other, manager)
        for name, (other, manager) in served.items()
    }

    def bytes_of(size: int, adapters: int, itemsize: int) -> float:
        """Return the bytes of the adapters that a decode step has to read."""
        return adapters * adapter_bytes(config, args.rank, size / adapters, itemsize) if adapters else 0.0

    rows, profiles = [], []
    if "prefill" in args.steps:
        tokens = jax.random.randint(jax.random.key(2), (8, 512), 0, config.vocab_size, jnp.int32)
        calls = {"base": (base_prefill, base_values, tokens, None)}
        for n in (0, 1, 8):
            for name, (_, step, other, manager) in steps.items():
                calls[f"{n}{name}" if name else n] = step, other, tokens, make_batch(manager, 8, n)
        measure("prefill", 8, calls, 3, bytes_of, args, rows, profiles)
    for size in args.batches if "decode" in args.steps else ():
        tokens = jax.random.randint(jax.random.key(1), (size, 1), 0, config.vocab_size, jnp.int32)
        cache = [model.init_cache(size, CONTEXT)]
        decoding = {name: Decoding(step, other, tokens, cache) for name, (step, _, other, _) in steps.items()}
        calls = {"base": (Decoding(base_decode, base_values, tokens, cache), None)}
        for n in (n for n in ADAPTERS if n <= min(size, slots)):
            for name, (*_, manager) in steps.items():
                calls[f"{n}{name}" if name else n] = decoding[name], make_batch(manager, size, n)
        if size == 64:
            calls["base only"] = (decoding[""], None)
        measure("decode", size, calls, 40, bytes_of, args, rows, profiles)


def measure(
    step: str,
    size: int,
    calls: dict,
    enqueue: int,
    bytes_of: Callable[[int, int, int], float],
    args: argparse.Namespace,
    rows: list,
    profiles: list,
) -> None:
    """Time the calls of one shape, and print and keep a row for each; with --profile, also the kernel times."""
    times = timed(calls, args.rounds, enqueue)
    for adapters in calls:
        if adapters == "base":
            continue
        row = {"step": step, "batch": size, "adapters": adapters, "base_ms": times["base"], "ms": times[adapters]}
        row["overhead"] = times[adapters] / times["base"] - 1
        row["throughput_kept"] = times["base"] / times[adapters]
        if step == "decode":
            count = 0 if adapters == "base only" else int(str(adapters).split()[0])
            read = bytes_of(size, count, 1 if str(adapters).endswith(" int8") else 2)
            least, added = least_us(read, 0), times[adapters] - times["base"]
            row["floor_overhead"] = least and least / 1e3 / times["base"]
            row |= {"lora_bytes": read, "lora_tb_s": read / added / 1e9 if added > 0 else None}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.profile and size in (8, 64):
        for name in (n for n in ("base", 0, 8, 64) if n in calls):
            kinds = {kind: round(us, 2) for kind, us in profile(*calls[name], layers=args.layers).items()}
            profiles.append({"step": step, "batch": size, "adapters": name, "us_a_layer": kinds})
            print(
                "profile",
                step,
                size,
                name,
                f"{sum(kinds.values()):.1f} us a layer",
                list(kinds.items())[:12],
                flush=True,
            )
    save(args, rows, profiles)


if __name__ == "__main__":
    main()
