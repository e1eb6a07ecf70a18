"""Time the training steps of SkyRL's JAX backend, which serves the Tinker protocol too, without HTTP.

    python -m benchmarks.peers.skyrl_train MODEL [--tenants 1 8] [--capacity 34]

A round is that of `benchmarks.tinker_http`: each tenant trains its share of the sequences and moves its model. The
backend gets the requests of all tenants at once, as its engine collects them. One line of JSON is printed for each
number of tenants. MODEL is a folder of a checkpoint.
"""

import argparse
import json
import statistics
import time

import jax
import numpy as np
from skyrl.backends.jax import JaxBackendConfig, JaxBackendImpl
from skyrl.tinker import types


def batch(names: list[str], rows: int, length: int, vocab: int, seed: int) -> types.PreparedModelPassBatch:
    """Return the requests of a round, `rows` sequences of each model."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (len(names) * rows, length + 1)).tolist()
    empty: list[list[float]] = [[0.0] * length for _ in tokens]
    return types.PreparedModelPassBatch(
        all_model_inputs=[types.ModelInput(chunks=[types.EncodedTextChunk(tokens=row[:-1])]) for row in tokens],
        all_targets=[row[1:] for row in tokens],
        all_token_weights=[[1.0] * length for _ in tokens],
        all_sampling_logprobs=empty,
        all_advantages=empty,
        all_values=empty,
        all_returns=empty,
        all_model_ids=[name for name in names for _ in range(rows)],
        all_loss_fns=["cross_entropy"] * len(tokens),
        all_loss_fn_configs=[None] * len(tokens),
        request_batch_slices=[
            (name, name, first, first + rows) for name, first in zip(names, range(0, len(tokens), rows), strict=True)
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--capacity", type=int, default=34)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32, help="sequences of a round, of all tenants")
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options = {"max_lora_adapters": args.capacity, "max_lora_rank": args.rank}
    backend = JaxBackendImpl(args.model, JaxBackendConfig(train_micro_batch_size=args.microbatch, **options), 0)
    adam = types.AdamParams(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0)
    names: list[str] = []
    for tenants in args.tenants:
        for i in range(len(names), tenants):
            names.append(f"tenant-{i}")
            backend.create_model(names[-1], types.LoraConfig(rank=args.rank, alpha=32.0, seed=i))
        passes, moves = [], []
        for number in range(args.rounds + 1):  # the first compiles
            work = batch(names[:tenants], max(1, args.rows // tenants), args.length, args.vocab, number)
            begin = time.perf_counter()
            backend.forward_backward(work)
            middle = time.perf_counter()
            for name in names[:tenants]:
                backend.optim_step(name, types.OptimStepInput(adam_params=adam))
            passes.append(middle - begin)
            moves.append(time.perf_counter() - middle)
        forward, move = statistics.median(passes[1:]), statistics.median(moves[1:])
        found = {"tenants": tenants, "gradients_ms": round(1e3 * forward, 1), "optimizer_ms": round(1e3 * move, 1)}
        tokens = len(work.all_targets) * args.length
        found |= {"trained_tokens_per_s": round(tokens / (forward + move), 1), "device": jax.devices()[0].device_kind}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
