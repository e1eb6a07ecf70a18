"""Search the tiles of the GPU kernels on the current GPU, and write the tuned table <device kind>.json.

    python -m benchmarks.tune --out jlora/pallas/tuned                                    # the shapes of `specs`
    python -m benchmarks.tune --out ~/tuned --shapes 2560:4096,1024,1024 --ranks 16       # K:slices of your own model
    JLORA_TUNED_DIR=~/tuned python serve.py

The shrinks are searched first, by their kernel times. The expands are searched next, with the best shrinks of two
numbers of partial sums, since the expand reads these sums. One choice serves every mix of adapters for a number of
tokens. Candidates are therefore ranked by their geometric mean over mixes.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.specs import PROJECTIONS, RANKS, Projection, group_ids
from benchmarks.specs import ranks as true_ranks
from benchmarks.timing import chain, compile_all, kernel_us, random_layers
from jlora.pallas.gpus import current_gpu, platform
from jlora.pallas.tables import Key, Table, entry_of, read_table
from jlora.pallas.tiles import GPUTiles, rows_bucket
from jlora.pallas.triton import lora as triton

SHRINK_FIELDS = ("block_k", "split_k", "block_r", "shrink_warps", "shrink_stages", "shrink_programs")
EXPAND_FIELDS = ("block_n", "warps", "stages", "ahead", "programs", "chunks")
MIXES = {1: (1,), 8: (1, 8), 32: (1, 32), 64: (8, 64), 256: (8, 64), 2048: (1, 8), 8192: (8, 32)}  # adapters
LAYERS = 16

# block_k, steps of block_k in a part (None for one part), block_r, warps, stages, programs
FEW_SHRINKS = [
    (128, 2, 32, 2, 4, 792), (128, 4, 32, 2, 4, 792), (256, 1, 64, 2, 2, 528), (256, 1, 16, 2, 2, 1056),
    (128, 4, 16, 1, 3, 1056), (256, 4, 16, 2, 3, 792), (128, 8, 16, 2, 4, 1056), (512, 2, 16, 4, 2, 528),
    (128, 2, 64, 4, 4, 528), (128, 4, 64, 4, 4, 528), (128, 2, 16, 2, 4, 1056), (256, 2, 32, 4, 2, 792),
    (128, 2, 128, 4, 3, 528), (128, 4, 256, 4, 2, 264), (256, 2, 16, 4, 2, 1056), (128, 1, 32, 2, 1, 1056),
]  # fmt: skip
MANY_SHRINKS = [
    (128, 16, 64, 4, 3, 396), (128, 8, 64, 4, 3, 396), (128, None, 64, 4, 4, 528), (64, None, 64, 4, 6, 528),
    (128, 28, 64, 4, 5, 396), (128, None, 16, 4, 4, 528), (128, None, 32, 4, 4, 528), (128, 16, 32, 4, 4, 396),
    (64, 32, 256, 4, 3, 264), (64, 16, 256, 4, 4, 264), (64, None, 256, 8, 4, 264), (64, 28, 64, 4, 4, 264),
    (64, None, 128, 4, 4, 264), (64, 32, 128, 4, 4, 264), (256, None, 64, 4, 3, 264), (128, 16, 64, 4, 4, 264),
]  # fmt: skip
# block_n, warps, stages, ahead, programs, chunks
FEW_EXPANDS = [
    (128, 4, 2, 1, 528, 528), (256, 8, 2, 1, 528, 528), (64, 4, 2, 1, 1056, 1056), (128, 4, 2, 1, 1056, 1056),
    (128, 4, 4, 3, 264, 264), (128, 4, 2, 1, 264, 264), (256, 4, 2, 1, 264, 264), (128, 4, 1, 1, 1056, 2112),
    (128, 8, 2, 1, 528, 528), (64, 4, 2, 1, 528, 528), (64, 2, 2, 1, 1056, 1056), (128, 8, 2, 1, 264, 264),
    (128, 4, 2, 1, 1584, 1584), (64, 2, 2, 1, 1584, 1584), (256, 8, 1, 1, 528, 528), (128, 4, 1, 1, 528, 528),
]  # fmt: skip
MANY_EXPANDS = [
    (128, 4, 2, 1, 528, 528), (128, 4, 1, 1, 1056, 1056), (64, 4, 2, 1, 1056, 1056), (128, 4, 3, 1, 660, 1320),
    (128, 4, 2, 1, 1056, 1056), (128, 4, 2, 1, 264, 264), (256, 8, 2, 1, 264, 528), (128, 4, 2, 2, 528, 528),
    (64, 4, 2, 1, 512, 512), (64, 4, 2, 1, 1584, 1584), (64, 4, 2, 1, 2112, 2112), (128, 8, 2, 1, 256, 256),
    (128, 8, 2, 1, 528, 528), (128, 8, 2, 1, 1056, 1056), (64, 8, 2, 1, 528, 528), (64, 4, 2, 1, 528, 1056),
]  # fmt: skip


def shrinks(tokens: int, k: int) -> list[GPUTiles]:
    """Return candidates for the shrink, each with the default expand."""
    few, found = tokens <= 512, []
    for block_k, steps, *rest in FEW_SHRINKS if few else MANY_SHRINKS:
        if few and k > 8192:
            steps *= 2  # twice the number of parts would only be more partial sums
        split_k = 1 if steps is None else -(-k // (block_k * steps))
        found.append(GPUTiles(**dict(zip(SHRINK_FIELDS, (block_k, split_k, *rest), strict=True))))
    return list(dict.fromkeys(found))


def with_expands(shrink: GPUTiles, tokens: int) -> list[GPUTiles]:
    """Return the shrink with each candidate for the expand."""
    expands = FEW_EXPANDS if tokens <= 512 else MANY_EXPANDS
    return [dataclasses.replace(shrink, **dict(zip(EXPAND_FIELDS, e, strict=True))) for e in expands]


def tune(projection: Projection, rank: int, tokens: int, layers) -> GPUTiles:
    """Return the best tiles of one shape over its mixes."""
    x = jax.random.normal(jax.random.key(1), (tokens, projection.k), jnp.bfloat16)
    base = jnp.ones((tokens, projection.n), jnp.bfloat16)
    ranks = jnp.asarray(true_ranks(projection, rank))
    ids = [jnp.asarray(group_ids(tokens, adapters)) for adapters in MIXES[tokens]]

    def trial(tiles: GPUTiles):
        def apply(base, x, a, b, plan, ranks):
            return triton.add_lora(base, x, a, b, plan, slice_sizes=projection.slices, ranks=ranks, tiles=tiles)

        return chain(apply, donate=False), (base, x, layers, ids[0], ranks)

    def times(candidates: list[GPUTiles]) -> dict[GPUTiles, list[tuple[float, float]]]:
        """Return microseconds a layer of (shrink, expand) in each mix."""
        found = {}
        for tiles, run in zip(candidates, compile_all([trial(tiles) for tiles in candidates]), strict=True):
            if isinstance(run, Exception):  # needs too much shared memory, for example
                print(f"  {tiles}: {str(run)[:100]}", flush=True)
                continue
            found[tiles] = []
            for some in ids:
                us = kernel_us(run, base, x, layers, some, ranks)
                found[tiles].append((us["lora_shrink"] / LAYERS, us["lora_expand"] / LAYERS))
        return found

    first = times(shrinks(tokens, projection.k))
    best = {}  # number of partial sums -> fastest shrink
    for tiles in sorted(first, key=lambda tiles: sum(math.log(shrink) for shrink, _ in first[tiles])):
        best.setdefault(tiles.split_k, tiles)
    second = times([tiles for shrink in list(best.values())[:2] for tiles in with_expands(shrink, tokens)])
    tiles = min(second, key=lambda tiles: sum(math.log(sum(pair)) for pair in second[tiles]))
    shown = [(n, round(s, 2), round(e, 2)) for n, (s, e) in zip(MIXES[tokens], second[tiles], strict=True)]
    print(projection.name, rank, tokens, shown, tiles, flush=True)
    return tiles


def shape(text: str) -> Projection:
    """Parse "2560:4096,1024,1024" as K = 2560 and three slices."""
    k, _, slices = text.partition(":")
    return Projection(text, int(k), tuple(int(size) for size in slices.split(",")))


def write_table(path: Path, table: Table) -> None:
    entries = (entry_of(key, table[key]) for key in sorted(table))
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")


def command_line(doc: str) -> argparse.ArgumentParser:
    """Return the parser of a search: its table's folder and its shapes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the table")
    parser.add_argument("--projections", nargs="+", choices=sorted(PROJECTIONS), help="projections of `specs`")
    parser.add_argument("--shapes", type=shape, nargs="+", default=[], metavar="K:N,N,...")
    return parser


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Projection], Path, Table]:
    """Return the arguments, the shapes, the file of the table and its present entries."""
    args = parser.parse_args()
    if platform() not in ("gpu", "cuda"):
        parser.error(f"needs an NVIDIA GPU, but computations run on {platform()!r}; set JAX_PLATFORMS=cuda")
    names = sorted(PROJECTIONS) if args.projections is None and not args.shapes else args.projections or []
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{current_gpu().kind}.json"
    table = dict(read_table(path, path.stat().st_mtime_ns)) if path.exists() else {}
    return args, [*(PROJECTIONS[name] for name in names), *args.shapes], path, table


def main():
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=sorted(MIXES), choices=sorted(MIXES))
    args, projections, path, table = begin(parser)
    for rank in args.ranks:
        for projection in projections:
            layers = random_layers(projection, rank, LAYERS)
            for tokens in args.tokens:
                key = Key("add_lora", "bfloat16", rows_bucket(tokens), projection.k, projection.n, rank)
                table[key] = tune(projection, rank, tokens, layers)
                write_table(path, table)  # after every shape, so that an interrupted search keeps its results


if __name__ == "__main__":
    main()
