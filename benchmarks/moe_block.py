"""Time a whole block of experts (both products, activation, weighted sum) with and without LoRA, against SGLang's.

    python -m benchmarks.moe_block [--tokens 64 2048] [--rank 16] [--model qwen3-30b-a3b] [--out block.json]
    python -m benchmarks.moe_block --model glm-4.5-air --tokens 64 --adapters 8 32
    XLA_FLAGS=--xla_gpu_command_buffer_scheduling_mode=CONCURRENT python -m benchmarks.moe_block

Times are microseconds a layer in a jitted chain of bf16 layers with distinct weights. Every token is routed at random,
in the same way in all layers, so sorting and planning count once a chain (in SGLang they are outside the graph). Up to
256 tokens, each token is a sequence of its own. Above, the tokens of an adapter are one sequence. Base and LoRA
alternate. A model of which SGLang has no figures is timed with the given numbers of adapters.

"added_us" is LoRA's time of a layer, "factor_mb" the A and B that it reads, and "tb_s" one over the other.
"""

import argparse
import json
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora
from benchmarks.decode_step import base_step, batch_of, fill_slots, timed
from benchmarks.moe_specs import MODELS, OTHER_MODELS, Batch, Experts, batch, factor_bytes, peers, slots
from benchmarks.timing import machine
from jlora.models.moe import Experts as ExpertsLayer
from jlora.models.routing import Routing

LAYERS = 4


class Blocks(nnx.Module):
    """A chain of blocks of experts."""

    def __init__(self, e: Experts, layers: int, rngs: nnx.Rngs):
        self.layers = nnx.List(
            ExpertsLayer(e.hidden, e.intermediate, e.experts, dtype=jnp.bfloat16, rngs=rngs) for _ in range(layers)
        )

    def __call__(self, x, routing: Routing):
        first, *others = (nnx.split(layer) for layer in self.layers)  # only the first has state that a manager checks
        for layers in filter(None, ([first], others)):
            one = jax.jit(partial(_apply, layers[0][0]))  # equal layers compile once
            for _, state in layers:
                x = one(state, x, routing)
        return x


def _apply(graphdef, state, x, routing: Routing):
    return nnx.merge(graphdef, state)(x, routing)


def run(blocks: Blocks, x, routing: Routing, lora_batch):
    with jlora.use(lora_batch, without=["*"]):  # equal layers run as the first of them
        return blocks(x, routing)


def measure(e: Experts, rank: int, wanted: list[dict], layers: int) -> list[dict]:
    """Return the rows of one model, one rank and one number of slots."""
    blocks = Blocks(e, layers, nnx.Rngs(0))
    base, values = base_step(blocks, run, compiler_options=jlora.compiler_options())
    config = jlora.LoRAConfig(max_loras=slots(wanted[0]["adapters"]), max_lora_rank=rank, dtype=jnp.bfloat16)
    manager = jlora.LoRAManager(blocks, config)
    fill_slots(manager, rank)
    lora = manager.jit(run)
    rows = []
    for key in wanted:
        x, routing, one = operands(e, key, manager)
        us = timed({"base": (base, values, x, routing, None), "lora": (lora, blocks, x, routing, one)}, 7, 10)
        row = {name: key[name] for name in ("model", "rank", "tokens", "adapters")}
        row |= {"base_us": us["base"] * 1e3 / layers, "lora_us": us["lora"] * 1e3 / layers}
        row["kept"] = us["base"] / us["lora"]
        host = batch(e, key["tokens"], key["adapters"])
        present = len(np.unique(host.slot[:, None] * e.experts + host.expert))
        added = row["lora_us"] - row["base_us"]
        row |= {"added_us": added, "factor_mb": factor_bytes(e, rank, present) / 1e6}
        row["tb_s"] = row["factor_mb"] / added
        if "sglang_block_us" in key:
            row |= {"sglang_base_us": key["sglang_base_block_us"], "sglang_lora_us": key["sglang_block_us"]}
            row["sglang_kept"] = key["sglang_base_block_us"] / key["sglang_block_us"]
            row["faster_than_sglang"] = row["sglang_lora_us"] / row["lora_us"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def operands(e: Experts, key: dict, manager: jlora.LoRAManager):
    """Return the input x [B, L, H], the routing of its tokens, and the batch of its sequences."""
    host: Batch = batch(e, key["tokens"], key["adapters"])
    sequences = key["tokens"] if key["tokens"] <= 256 else key["adapters"]
    length = key["tokens"] // sequences
    x = jax.random.normal(jax.random.key(1), (sequences, length, e.hidden), jnp.bfloat16)
    weights = jnp.full(host.expert.shape, 1 / e.top_k, jnp.float32)
    ids = np.ascontiguousarray(host.slot[::length], np.int32)
    return x, Routing(jnp.asarray(host.expert), weights), batch_of(manager, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=[*MODELS, *OTHER_MODELS])
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 256, 2048, 8192])
    parser.add_argument("--adapters", type=int, nargs="+", default=[8], help="for models without figures of SGLang")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    rows = []
    for name in args.model:
        for rank in args.rank:
            if name in MODELS:
                keys = [k for k in peers() if (k["model"], k["rank"]) == (name, rank) and k["tokens"] in args.tokens]
            else:
                some = [
                    (tokens, adapters) for tokens in args.tokens for adapters in args.adapters if adapters <= tokens
                ]
                keys = [dict(model=name, rank=rank, tokens=tokens, adapters=adapters) for tokens, adapters in some]
            for adapters in sorted({slots(key["adapters"]) for key in keys}):  # slots take memory
                wanted = [key for key in keys if slots(key["adapters"]) == adapters]
                rows += measure((MODELS | OTHER_MODELS)[name], rank, wanted, args.layers)
                device = {**machine(), "layers": args.layers, "xla_flags": os.environ.get("XLA_FLAGS", "")}
                if args.out:
                    args.out.write_text(json.dumps({"about": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
