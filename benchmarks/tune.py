"""Searches the GPU kernels' tiles for the shapes of `specs`, on the GPU at hand, and writes the tuned table.

    python -m benchmarks.tune --out jlora/pallas/tuned/nvidia_h200.json

Shrink and expand are searched side by side by their kernel times: each trial pairs a candidate of either. A second
round tries the best expands again with the chosen shrink, whose number of partial sums they have to read. One choice
serves every mix of adapters at a number of tokens, so candidates are ranked by their geometric mean over mixes.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.specs import PROJECTIONS, Projection, group_ids
from benchmarks.timing import chain, kernel_us, random_layers
from jlora.pallas import triton
from jlora.pallas.tiles import GPUTiles, rows_bucket

SHRINK_FIELDS = ("block_k", "split_k", "block_r", "shrink_warps", "shrink_stages", "shrink_programs")
EXPAND_FIELDS = ("block_n", "warps", "stages", "ahead", "programs", "chunks")
MIXES = {1: (1,), 8: (8,), 32: (1, 32), 64: (8, 32), 256: (32,), 2048: (8,), 8192: (8,)}  # adapters

# block_k, steps of block_k a part (None: one part), block_r, warps, stages, programs
FEW_SHRINKS = [
    (128, 2, 32, 2, 4, 792), (128, 4, 32, 2, 4, 792), (256, 1, 64, 2, 2, 528), (256, 1, 16, 2, 2, 1056),
    (128, 4, 16, 1, 3, 1056), (256, 4, 16, 2, 3, 792), (128, 8, 16, 2, 4, 1056), (512, 2, 16, 4, 2, 528),
]  # fmt: skip
MANY_SHRINKS = [
    (128, 16, 64, 4, 3, 396), (128, 8, 64, 4, 3, 396), (128, None, 64, 4, 4, 528), (64, None, 64, 4, 6, 528),
    (128, 28, 64, 4, 4, 396), (128, None, 16, 4, 4, 528), (128, None, 32, 4, 4, 528), (128, 16, 32, 4, 4, 396),
]  # fmt: skip
# block_n, warps, stages, ahead, programs, chunks
FEW_EXPANDS = [
    (128, 4, 2, 1, 528, 528), (256, 8, 2, 1, 528, 528), (64, 4, 2, 1, 1056, 1056), (128, 4, 2, 1, 1056, 1056),
    (128, 4, 4, 3, 264, 264), (128, 4, 2, 1, 264, 264), (256, 4, 2, 1, 264, 264), (128, 4, 1, 1, 1056, 2112),
]  # fmt: skip
MANY_EXPANDS = [
    (128, 4, 2, 1, 528, 528), (128, 4, 1, 1, 1056, 1056), (64, 4, 2, 1, 1056, 1056), (128, 4, 3, 1, 660, 1320),
    (128, 4, 2, 1, 1056, 1056), (128, 4, 2, 1, 264, 264), (256, 8, 2, 1, 264, 528), (128, 4, 2, 2, 528, 528),
]  # fmt: skip


def candidates(tokens: int, k: int) -> list[GPUTiles]:
    """Pairs of a shrink and an expand to try."""
    few = tokens <= 512
    pairs = []
    for shrink, expand in zip(FEW_SHRINKS if few else MANY_SHRINKS, FEW_EXPANDS if few else MANY_EXPANDS, strict=True):
        block_k, steps, *rest = shrink
        if few and k > 8192 and steps is not None:
            steps *= 2  # as many parts again would only mean more partial sums
        split_k = 1 if steps is None else -(-k // (block_k * steps))
        fields = dict(zip(SHRINK_FIELDS, (block_k, split_k, *rest), strict=True))
        pairs.append(GPUTiles(**fields, **dict(zip(EXPAND_FIELDS, expand, strict=True))))
    return pairs


def measure(
    projection: Projection, rank: int, tokens: int, adapters: int, tiles: GPUTiles, layers
) -> tuple[float, float]:
    """Microseconds a layer of the shrink's and the expand's kernel."""

    def apply(base, x, a, b, plan):
        return triton.add_lora(base, x, a, b, plan, slice_sizes=projection.slices, ranks=None, tiles=tiles)

    x = jax.random.normal(jax.random.key(1), (tokens, projection.k), jnp.bfloat16)
    base = jnp.ones((tokens, projection.n), jnp.bfloat16)
    ids = jnp.asarray(group_ids(tokens, adapters))
    times = kernel_us(chain(apply), base, x, layers, ids)
    return times["lora_shrink"], times["lora_expand"]


def mixed(tiles: GPUTiles, expand_of: GPUTiles) -> GPUTiles:
    return dataclasses.replace(tiles, **{name: getattr(expand_of, name) for name in EXPAND_FIELDS})


def tune(projection: Projection, rank: int, tokens: int, layers) -> GPUTiles:
    """The best tiles of one shape over its mixes."""
    mixes = MIXES[tokens]

    def trial(tiles):
        try:
            return [measure(projection, rank, tokens, adapters, tiles, layers) for adapters in mixes]
        except Exception as error:  # a candidate that asks for too much shared memory is no candidate
            print(f"  {tiles}: {str(error)[:100]}", flush=True)
            return [(math.inf, math.inf)] * len(mixes)

    def score(times):
        return sum(math.log(t) for t in times)

    tried = [(tiles, trial(tiles)) for tiles in candidates(tokens, projection.k)]
    best_expand = [min(times[m][1] for _, times in tried) for m in range(len(mixes))]
    by_shrink = sorted(tried, key=lambda c: score([t[0] + e for t, e in zip(c[1], best_expand, strict=True)]))
    best_shrink = [times[0] for times in by_shrink[0][1]]
    by_expand = sorted(tried, key=lambda c: score([t[1] + s for t, s in zip(c[1], best_shrink, strict=True)]))
    finals = {mixed(s, e): None for s, _ in by_shrink[:2] for e, _ in by_expand[:3]}
    for tiles in finals:
        finals[tiles] = trial(tiles)
    tiles, times = min(finals.items(), key=lambda c: score([sum(t) for t in c[1]]))
    shown = [(n, round(s, 2), round(e, 2)) for n, (s, e) in zip(mixes, times, strict=True)]
    print(projection.name, rank, tokens, shown, tiles, flush=True)
    return tiles


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=sorted(MIXES))
    parser.add_argument("--projections", nargs="+", default=sorted(PROJECTIONS))
    args = parser.parse_args()
    entries = json.loads(args.out.read_text()) if args.out.exists() else []
    table = {tuple(e[name] for name in ("op", "dtype", "rows", "k", "n", "rank")): e for e in entries}
    for rank in args.ranks:
        for name in args.projections:
            projection = PROJECTIONS[name]
            layers = random_layers(projection, rank, layers=16)
            for tokens in args.tokens:
                tiles = tune(projection, rank, tokens, layers)
                key = ("add_lora", "bfloat16", rows_bucket(tokens), projection.k, projection.n, rank)
                table[key] = {
                    **dict(zip(("op", "dtype", "rows", "k", "n", "rank"), key, strict=True)),
                    **dataclasses.asdict(tiles),
                }
                lines = ",\n".join(json.dumps(table[key]) for key in sorted(table))
                args.out.write_text(f"[\n{lines}\n]\n")  # after every shape: a stopped search keeps what it found


if __name__ == "__main__":
    main()
