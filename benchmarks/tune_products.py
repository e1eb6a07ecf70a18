"""Search tiles for a base product fused with its LoRA on the current GPU, and write those that pay into its table.

    python -m benchmarks.tune_products --out jlora/pallas/tuned                                # the shapes of `specs`
    python -m benchmarks.tune_products --out ~/tuned --shapes 2560:4096,1024,1024 --rows 16    # K:slices of your own
    python -m benchmarks.tune_products --out ~/tuned --rows 32 --tried         # tiles that the table has for other rows

The first launch is searched by its kernel time: first the product's blocks and parts, then those of the shrink beside
it. Then the second launch is searched. The best tiles of each number of parts are compared with the oracle and must
reproduce the same bits. They are then timed by wall clock against the compiler's own product with and without
`add_lora`, in chains of layers with distinct weights, over mixes of adapters. A shape gets an entry only if the fused
launches are faster by more than a whole step loses without the compiler's own product; otherwise its entry is removed.
"""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.specs import SLOTS, Projection, group_ids
from benchmarks.specs import ranks as true_ranks
from benchmarks.timing import compile_all, kernel_us, machine, random_layers, wall_us, write_rows
from benchmarks.tune import EXPAND_FIELDS, FEW_EXPANDS, LAYERS, SHRINK_FIELDS, begin, command_line, write_table
from jlora import ops
from jlora.pallas.gpus import current_gpu
from jlora.pallas.tables import Key, gpu_tiles
from jlora.pallas.tiles import GPUTiles, ProductTiles, matrix_rows, product_shared_bytes, rows_bucket
from jlora.pallas.triton import lora as triton
from jlora.pallas.triton import product as triton_product
from tests import oracle

MIXES = {1: (0, 1), 8: (0, 1, 8), 16: (0, 1, 8, 16), 32: (0, 1, 8, 32), 64: (0, 1, 8, 64), 128: (0, 8, 64)}  # adapters
FINALISTS = 3  # numbers of parts that are searched further
# Least gain of an entry. The compiler can fuse its own product with later operations, for example the sum of a
# residual. These chains have none, but a step does. With entries for any gain, 8 rows without adapters took 3% longer
# (Llama-3-8B, H200).
GAIN = 1.03
TOLERANCE = 5e-3  # error of bfloat16 results, relative to the norm of the float64 ones
# block_k, split_k, block_r, warps, stages, programs of the shrink; warps and stages are those of the product
SHRINKS = [(128, 8, 16, 1, 1, 264), (128, 16, 16, 1, 1, 528), (256, 4, 16, 1, 1, 132), (128, 8, 32, 1, 1, 264),
           (64, 16, 32, 1, 1, 528), (128, 4, 64, 1, 1, 132), (128, 32, 16, 1, 1, 792)]  # fmt: skip


def products(rows: int, k: int, n: int, shared_memory: int) -> list[ProductTiles]:
    """Return candidates for the product, of one to about eight programs a multiprocessor and all stages that fit."""
    found, height = [], matrix_rows(rows)
    for block_n in (32, 64, 128):
        for block_k in (64, 128):
            for parts in (1, 2, 4, 8, 16):
                programs = -(-n // block_n) * parts
                if not 96 <= programs <= 1100 or -(-k // block_k) < 4 * parts:
                    continue
                for share in (1, 2):  # programs that share the shared memory
                    stages = min(8, shared_memory // share // (block_k * (height + block_n) * 2))
                    if stages >= 2:
                        warps = 8 if block_n * height > 64 * 64 else 4
                        found.append(ProductTiles(block_n, block_k, parts, warps, stages, lora=GPUTiles()))
    return list(dict.fromkeys(found))


class Search:
    """The layers of one shape, and chains of them that are compiled once for all mixes."""

    def __init__(self, projection: Projection, rank: int, rows: int):
        self.projection, self.rank, self.rows = projection, rank, rows
        keys, size = jax.random.split(jax.random.key(3), LAYERS), (projection.k, projection.n)
        make = jax.jit(lambda key: jax.random.normal(key, size, jnp.bfloat16) * jnp.bfloat16(projection.k**-0.5))
        pairs = random_layers(projection, rank, LAYERS)
        self.layers = [(make(key), *pair) for key, pair in zip(keys, pairs, strict=True)]
        self.x = jax.random.normal(jax.random.key(1), (rows, projection.k), jnp.bfloat16)
        self.ranks = jnp.asarray(true_ranks(projection, rank))
        none = np.full(rows, SLOTS, np.int32)
        _, a, b = self.layers[0]
        # Tiles that fit with the largest `tile_m` for so few rows fit with any.
        self.problem = triton.sizes_of(rows, self.x, a, b, len(projection.slices), tile_m=64)
        self.shared_memory = current_gpu().shared_memory
        self.mixes = {m: jnp.asarray(group_ids(rows, m) if m else none) for m in MIXES[rows]}

    def together(self, tiles: ProductTiles):
        def apply(x, w, a, b, plan, ranks):
            return triton_product.linear_lora(
                x, w, a, b, plan, slice_sizes=self.projection.slices, ranks=ranks, tiles=tiles
            )

        return apply

    def apart(self, x, w, a, b, plan, ranks):
        return triton.add_lora(x @ w, x, a, b, plan, slice_sizes=self.projection.slices, ranks=ranks)

    def base(self, x, w, a, b, plan, ranks):
        del a, b, plan, ranks
        return x @ w

    def job(self, apply, donate: bool):
        """Return a chain of layers and its arguments.

        All of a layer's output is computed, and a small part of it is passed on.
        """

        def run(x, layers, ids, ranks):
            plan = ops.make_plan(ids, num_groups=SLOTS)
            for w, a, b in layers:
                y = jax.lax.optimization_barrier(apply(x, w, a, b, plan, ranks))
                x = x + y[:, :1] * jnp.bfloat16(1e-30)
            return x

        ids = next(iter(self.mixes.values()))
        return jax.jit(run, donate_argnums=0 if donate else ()), (self.x, self.layers, ids, self.ranks)

    def fitting(self, candidates: list[ProductTiles]) -> list[ProductTiles]:
        return [tiles for tiles in candidates if product_shared_bytes(tiles, self.problem) <= self.shared_memory]

    def kernel_times(
        self, candidates: list[ProductTiles], mixes: slice = slice(None)
    ) -> dict[ProductTiles, tuple[float, float]]:
        """Return the microseconds a layer of the two launches, as geometric means over the given mixes."""
        found = {}
        candidates = self.fitting(candidates)
        jobs = [self.job(self.together(tiles), donate=False) for tiles in candidates]
        for tiles, run in zip(candidates, compile_all(jobs), strict=True):
            if isinstance(run, Exception):  # needs too much shared memory, for example
                print(f"  {tiles}: {str(run)[:100]}", flush=True)
                continue
            times = [kernel_us(run, self.x, self.layers, ids, self.ranks) for ids in list(self.mixes.values())[mixes]]
            first = [us["lora_product"] for us in times]
            second = [us.get("lora_product_sum", 0.0) + us.get("lora_expand", 0.0) for us in times]
            found[tiles] = _mean(first) / LAYERS, _mean(second) / LAYERS
        return found

    def check(self, tiles: ProductTiles) -> float:
        """Return the error of the result on random data.

        Raises:
          AssertionError: The error is larger than `TOLERANCE`, or a second run gives other bits.
        """
        w, a, b = self.layers[0]
        ids = list(self.mixes.values())[-1].at[0].set(SLOTS)  # one row without an adapter

        @jax.jit
        def once(x, w, a, b, ids, ranks):
            return self.together(tiles)(x, w, a, b, ops.make_plan(ids, num_groups=SLOTS), ranks)

        got, again = (np.asarray(once(self.x, w, a, b, ids, self.ranks), np.float64) for _ in range(2))
        np.testing.assert_array_equal(got, again)
        x, w = np.asarray(self.x, np.float64), np.asarray(w, np.float64)
        want = oracle.add_lora(x @ w, x, ids, a, b, self.projection.slices)
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        assert error <= TOLERANCE, (tiles, error)
        return error

    def walls(self, ways: dict) -> dict[str, dict[int, float]]:
        """Return the wall-clock microseconds a layer of each variant in each mix; variants alternate within a mix."""
        runs = dict(zip(ways, compile_all([self.job(apply, donate=True) for apply in ways.values()]), strict=True))
        found = {name: {} for name in runs}
        for mix, ids in self.mixes.items():
            for name, run in runs.items():
                found[name][mix] = wall_us(run, self.x + 0, self.layers, ids, self.ranks)[0] / LAYERS
        return found

    def finalists(self) -> list[ProductTiles]:
        """Return the tiles with the fastest kernels, each with another number of parts."""
        p, lora = self.projection, gpu_tiles(dataclasses.replace(self.problem, tile_m=16))
        first = self.kernel_times(
            [dataclasses.replace(tiles, lora=lora) for tiles in products(self.rows, p.k, p.n, self.shared_memory)],
            mixes=slice(-1, None),
        )
        found: dict[int, ProductTiles] = {}  # number of parts -> fastest tiles
        for tiles in sorted(first, key=lambda tiles: first[tiles][0]):
            found.setdefault(tiles.product_split_k, tiles)
        ends = []
        for tiles in sorted(found.values(), key=lambda tiles: sum(first[tiles]))[:FINALISTS]:
            shrinks = [_with(tiles, SHRINK_FIELDS, values) for values in SHRINKS]
            of_shrink = self.kernel_times([tiles, *shrinks], mixes=slice(-2, None))
            tiles = min(of_shrink, key=lambda tiles: of_shrink[tiles][0])
            of_sum = self.kernel_times([tiles, *(_with(tiles, EXPAND_FIELDS, values) for values in FEW_EXPANDS)])
            ends.append(min(of_sum, key=lambda tiles: sum(of_sum[tiles])))
            print(f"  {sum(of_sum[ends[-1]]):.2f} us {of_sum[ends[-1]]} {ends[-1]}", flush=True)
        return ends

    def best(self, ends: list[ProductTiles]) -> tuple[ProductTiles, dict[str, dict[int, float]], float]:
        """Return the tiles that are fastest by wall clock, the microseconds of each variant, and the error."""
        errors = {tiles: self.check(tiles) for tiles in ends}
        walls = self.walls({"base": self.base, "apart": self.apart} | {tiles: self.together(tiles) for tiles in ends})
        tiles = min(ends, key=lambda tiles: _mean(list(walls[tiles].values())))
        return tiles, {"base": walls["base"], "apart": walls["apart"], "together": walls[tiles]}, errors[tiles]


def _alike(key: Key, projection: Projection, rank: int) -> bool:
    return (key.op, key.k, key.n, key.rank) == ("linear_lora", projection.k, projection.n, rank)


def _with(tiles: ProductTiles, names: tuple[str, ...], values: tuple[int, ...]) -> ProductTiles:
    return dataclasses.replace(tiles, lora=dataclasses.replace(tiles.lora, **dict(zip(names, values, strict=True))))


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main():
    parser = command_line(__doc__)
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON file of all measurements")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--tried", action="store_true", help="only tiles that the table has for other rows of a shape")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 8], choices=sorted(MIXES))
    args, projections, path, table = begin(parser)
    results = []
    for rows in args.rows:
        for rank in args.ranks:
            for projection in projections:
                tried = [tiles for key, tiles in table.items() if _alike(key, projection, rank)] if args.tried else None
                if tried == []:
                    continue
                search = Search(projection, rank, rows)
                tiles, walls, error = search.best(search.finalists() if tried is None else search.fitting(tried))
                gain = _mean(list(walls["apart"].values())) / _mean(list(walls["together"].values()))
                key = Key("linear_lora", "bfloat16", rows_bucket(rows), projection.k, projection.n, rank)
                table.pop(key, None)
                if gain >= GAIN:
                    table[key] = tiles
                row = {"projection": projection.name, "rows": rows, "rank": rank, "gain": round(gain, 3)}
                row |= {way: {str(mix): round(us, 2) for mix, us in walls[way].items()} for way in walls}
                results.append({**row, "error": error, "tiles": dataclasses.asdict(tiles)})
                print(json.dumps(results[-1]), flush=True)
                write_table(path, table)  # after every shape, so that an interrupted search keeps its results
                if args.results:
                    write_rows(args.results, {**machine(), "unit": "us a layer, by the wall"}, results)


if __name__ == "__main__":
    main()
