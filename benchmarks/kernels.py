"""Time the LoRA of single projections against the roofline, other implementations in JAX, and other serving stacks.

    python -m benchmarks.kernels                      # the rows of Llama-3-8B in peers_h200.json
    python -m benchmarks.kernels --others             # its rows of other models
    python -m benchmarks.kernels --baselines          # also XLA, one-hot einsum, ragged_dot
    python -m benchmarks.kernels --matrix --layers 32 # every row of the matrix in specs.py

Times are microseconds a layer. `wall` is measured in a jitted chain of layers with distinct weights, the plan included.
`shrink` and `expand` are the times of their kernels, for the distinct mix. `predicted` is the floor plus two launches
that have next to no work. Floors are null on devices that roofline.py has no rates of. One compilation serves all rows
of a projection, rank and number of tokens. Before a row is timed, its result on fresh random data is checked against
the NumPy oracle. It must have the same bits in a second run and with the batch permuted.
"""

import argparse
import functools
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.roofline import floor_us
from benchmarks.specs import (
    ADAPTERS,
    MIXES,
    OTHER_PROJECTIONS,
    PROJECTIONS,
    RANKS,
    SLOTS,
    TOKENS,
    Projection,
    group_ids,
)
from benchmarks.specs import ranks as true_ranks
from benchmarks.timing import chain, compile_all, kernel_us, machine, random_layers, wall_us, write_rows
from jlora import ops
from tests import oracle

ALL_PROJECTIONS = PROJECTIONS | OTHER_PROJECTIONS
PEERS = ("best_peer_us", "vllm_default_us")
BASELINE_LAYERS = 8
SAMPLE = 8  # number of rows that are compared with the oracle
TWO_LAUNCHES = 4.0  # microseconds of two kernels with next to no work
TOLERANCE = 5e-3  # error of bfloat16 results, relative to the norm of the float64 delta


def product(projection: Projection, backend: str):
    """Return one layer of jlora as f(base, x, a, b, plan, ranks)."""

    def apply(base, x, a, b, plan, ranks):
        return ops.add_lora(
            base, x, a, b, plan, slice_sizes=projection.slices, ranks=ranks, backend=backend, finite=True
        )

    return apply


def columns(projection: Projection):
    ends = np.cumsum(projection.slices).tolist()
    return [slice(end - size, end) for end, size in zip(ends, projection.slices, strict=True)]


def one_hot_einsum(projection: Projection):
    """Return a common baseline: the product of every slot for every row, with a one-hot mask that keeps one of them."""

    def apply(base, x, a, b, plan, ranks):
        del ranks
        slot = jnp.minimum(plan.row_slot // plan.tile_m, plan.num_tiles - 1)
        group = jnp.where(plan.row_slot < plan.num_tiles * plan.tile_m, plan.tile_group[slot], SLOTS)
        mask = jax.nn.one_hot(group, SLOTS, dtype=x.dtype)
        h = jnp.einsum("mk,gnrk,mg->nmgr", x, a, mask)
        parts = [jnp.einsum("mgr,grn->mn", h[i], b[:, :, c]) for i, c in enumerate(columns(projection))]
        return base + jnp.concatenate(parts, axis=1)

    return apply


def ragged_dot(projection: Projection):
    """Return a baseline of rows sorted by slot, with `jax.lax.ragged_dot` for shrink and each slice of expand."""

    def apply(base, x, a, b, plan, ranks):
        del ranks
        count = plan.tile_end - plan.tile_start
        sizes = jnp.zeros(SLOTS, jnp.int32).at[plan.tile_group].add(count)
        _, n, rank, k = a.shape
        h = jax.lax.ragged_dot(x[plan.row_order], a.reshape(SLOTS, n * rank, k).swapaxes(1, 2), sizes)
        h = h.reshape(-1, n, rank)
        parts = [jax.lax.ragged_dot(h[:, i], b[:, :, c], sizes) for i, c in enumerate(columns(projection))]
        return base.at[plan.row_order].add(jnp.concatenate(parts, axis=1), unique_indices=True)

    return apply


BASELINES = {"xla": lambda p: product(p, "xla"), "one_hot": one_hot_einsum, "ragged_dot": ragged_dot}


class Shape:
    """The compiled programs of one projection, rank and number of tokens. They serve every mix."""

    def __init__(self, projection: Projection, rank: int, tokens: int, layers, backend: str, baselines: bool):
        self.projection, self.rank, self.tokens, self.layers = projection, rank, tokens, layers
        self.name = f"{projection.name} rank {rank} tokens {tokens}"
        x, base = self.x(jax.random.key(1)), self.base()
        args = (base, x, layers, *self.batch(1, "distinct"))
        few = (base, x, layers[:BASELINE_LAYERS], *args[3:])
        apply = product(projection, backend)
        once = (base, x, *layers[0], *args[3:], jnp.arange(tokens), jnp.zeros(SAMPLE, jnp.int32))
        self.jobs = [(chain(apply), args), (chain(apply, donate=False), args), (self._once(apply), once)]
        if baselines:
            self.jobs += [(chain(make(projection)), few) for make in BASELINES.values()]
        self.x1 = x

    def x(self, key):
        return jax.random.normal(key, (self.tokens, self.projection.k), jnp.bfloat16)

    def base(self):
        return jnp.ones((self.tokens, self.projection.n), jnp.bfloat16)

    def batch(self, adapters: int, mix: str):
        ids = group_ids(self.tokens, adapters, mix=mix)
        return jnp.asarray(ids), jnp.asarray(true_ranks(self.projection, self.rank, mix=mix))

    def _once(self, apply):
        def once(base, x, a, b, ids, ranks, order, sample):
            """Run the rows `order` of the batch; return all bits and a sample of values in the original order."""
            plan = ops.make_plan(ids[order], num_groups=SLOTS)
            out = jnp.zeros_like(base).at[order].set(apply(base * 0, x[order], a, b, plan, ranks))
            return jax.lax.bitcast_convert_type(out, jnp.uint16), out[sample]

        return jax.jit(once)

    def compiled(self, programs: list) -> None:
        """Store the programs that `compile_all` returned for `jobs`."""
        for program in programs:
            if isinstance(program, Exception):
                raise program
        self.wall, self.kernels, self.once, *self.others = programs

    def check(self, adapters: int, mix: str) -> float:
        """Return the relative error of some rows on random data; raise if it, a repeat or a permutation is wrong."""
        rng = np.random.default_rng()
        ids, ranks = self.batch(adapters, mix)
        x, (a, b) = self.x(jax.random.key(rng.integers(2**32))), self.layers[0]
        host_ids = np.asarray(ids)
        rows = np.concatenate([rng.permutation(np.flatnonzero(host_ids < SLOTS)), np.flatnonzero(host_ids >= SLOTS)])
        sample = np.resize(rows[np.r_[: SAMPLE // 2, -SAMPLE // 2 : 0] % len(rows)], SAMPLE)
        straight, order = jnp.arange(self.tokens), jnp.asarray(rng.permutation(self.tokens))
        run = functools.partial(self.once, self.base(), x, a, b, ids, ranks)
        (bits, got), (again, _), (permuted, _) = (
            run(o, jnp.asarray(sample, jnp.int32)) for o in (straight, straight, order)
        )
        if not bool(_same(bits, again)):
            raise AssertionError(f"{self.name}, {adapters} adapters, {mix}: two runs differ")
        if not bool(_same(bits, permuted)):
            raise AssertionError(f"{self.name}, {adapters} adapters, {mix}: permuted rows differ")
        present = np.unique(host_ids[sample][host_ids[sample] < SLOTS])
        local = np.where(host_ids[sample] < SLOTS, np.searchsorted(present, host_ids[sample]), len(present) + SAMPLE)
        present = np.resize(present, SAMPLE)  # one shape, so that the gather compiles once
        inside = np.arange(self.rank) < np.asarray(ranks)[present][..., :1]  # [G, n, R]
        a_present = np.where(inside[..., None], np.asarray(a[present]), 0)
        want = oracle.lora_delta(x[sample], local, a_present, b[present], self.projection.slices)
        error = float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))
        if not error <= TOLERANCE:
            raise AssertionError(f"{self.name}, {adapters} adapters, {mix}: relative error {error:.2e}")
        return error

    def measure(self, adapters: int, mix: str, calls: int, profile: bool) -> dict:
        """Return all figures of one row."""
        error = self.check(adapters, mix)
        ids, ranks = self.batch(adapters, mix)
        wall, spread = wall_us(self.wall, self.base(), self.x1, self.layers, ids, ranks, repeats=3, calls=calls)
        count = len(self.layers)
        used = np.asarray(ids)[np.asarray(ids) < SLOTS]
        present = np.unique(used)  # a half-empty batch may not have all adapters
        floor = floor_us(self.projection, float(np.asarray(ranks)[present, :, 0].mean()), len(used), len(present))
        row = {
            "projection": self.projection.name, "rank": self.rank, "tokens": self.tokens, "adapters": adapters,
            "mix": mix, "floor_us": floor, "predicted_us": floor and floor + TWO_LAUNCHES, "wall_us": wall / count,
            "spread_us": spread / count, "of_floor": floor and floor / wall * count, "error": error,
        }  # fmt: skip
        if profile:  # takes longer than all the rest
            kernels = kernel_us(self.kernels, self.base(), self.x1, self.layers, ids, ranks)
            row["shrink_us"] = kernels.get("lora_shrink", 0.0) / count
            row["expand_us"] = kernels.get("lora_expand", 0.0) / count
            row["plan_us"] = sum(us for n, us in kernels.items() if "lora_" not in n and "copy" not in n) / count
        few = self.layers[:BASELINE_LAYERS]
        for name, run in zip(BASELINES, self.others, strict=False):
            row[f"{name}_us"] = wall_us(run, self.base(), self.x1, few, ids, ranks, calls=3)[0] / len(few)
        return row


@jax.jit
def _same(bits, others):
    return (bits == others).all()


def geometric_mean(ratios: list[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios else None


def summary(rows: list[dict]) -> dict:
    """Summarize the rows: speed over peers, the worst row, and the share of the roofline floor."""
    best = [r["best_peer_us"] / r["wall_us"] for r in rows if r.get("best_peer_us")]
    default = [r["vllm_default_us"] / r["wall_us"] for r in rows if r.get("vllm_default_us")]
    large = [r["of_floor"] for r in rows if (r["floor_us"] or 0) >= 20]
    return {
        "rows": len(rows),
        "faster_than_best_peer": geometric_mean(best),
        "slowest_against_best_peer": min(best, default=None),
        "rows_over_10_percent_slower": sum(ratio < 1 / 1.1 for ratio in best),
        "faster_than_vllm_default": geometric_mean(default),
        "least_of_floor_where_floor_is_20_us": min(large, default=None),
        "largest_error": max(r["error"] for r in rows),
    }


def line(row: dict) -> str:
    """Return one row of the printed table."""
    parts = [f"{row['projection']:7s} r{row['rank']:<3d} {row['tokens']:4d}/{row['adapters']:<2d} {row['mix']:8s}"]
    parts += [f"wall {row['wall_us']:7.2f} ±{row['spread_us']:.2f}"]
    parts += [f"{name} {row[f'{name}_us']:6.2f}" for name in ("shrink", "expand", "plan") if f"{name}_us" in row]
    parts += [f"floor {100 * row['of_floor']:5.1f}%"] if row["of_floor"] else []
    others = [key for key in (*PEERS, *(f"{name}_us" for name in BASELINES)) if row.get(key)]
    return "  ".join(parts + [f"{key[:-3]} x{row[key] / row['wall_us']:.2f}" for key in others])


def wanted(args) -> list[tuple[str, int, int, int, str]]:
    shapes = OTHER_PROJECTIONS if args.others else PROJECTIONS
    if not args.matrix:
        rows = json.loads(Path(__file__).with_name("peers_h200.json").read_text())["rows"]
        keys = [(r["projection"], r["rank"], r["tokens"], r["adapters"], "distinct") for r in rows]
    else:
        keys = [
            (p, r, t, n, mix) for p in shapes for r in RANKS for t in TOKENS for n in ADAPTERS for mix in MIXES
            if n <= t and not (mix == "half" and t < 2 * n)
        ]  # fmt: skip
    chosen = shapes if args.projection is None else args.projection
    return [k for k in keys if k[0] in chosen and k[1] in args.rank and k[2] in args.tokens and k[4] in args.mix]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="time the matrix of specs.py instead of the peers' rows")
    parser.add_argument("--others", action="store_true", help="time projections of other models than Llama-3-8B")
    parser.add_argument("--projection", nargs="+")
    parser.add_argument("--rank", type=int, nargs="+", default=[*RANKS, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--mix", nargs="+", default=list(MIXES))
    parser.add_argument("--layers", type=int, default=128, help="layers in a chain (128: all of Llama-3-8B)")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--wall", action="store_true", help="skip the profiler's times of single kernels")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    file = Path(__file__).with_name("peers_h200.json")
    peers = {(r["projection"], r["rank"], r["tokens"], r["adapters"]): r for r in json.loads(file.read_text())["rows"]}
    rows, todo = [], wanted(args)
    for name, rank in dict.fromkeys((key[0], key[1]) for key in todo):
        layers = random_layers(ALL_PROJECTIONS[name], rank, args.layers)
        here = [key[2:] for key in todo if key[:2] == (name, rank)]
        shapes = {
            tokens: Shape(ALL_PROJECTIONS[name], rank, tokens, layers, args.backend, args.baselines)
            for tokens in dict.fromkeys(tokens for tokens, _, _ in here)
        }
        programs = iter(compile_all([job for shape in shapes.values() for job in shape.jobs]))
        for shape in shapes.values():
            shape.compiled([next(programs) for _ in shape.jobs])
        for tokens, adapters, mix in here:
            profile = mix == "distinct" and not args.wall
            row = shapes[tokens].measure(adapters, mix, calls=3 if tokens > 256 else 30, profile=profile)
            peer = peers.get((name, rank, tokens, adapters), {}) if mix == "distinct" else {}
            row |= {key: peer.get(key) for key in PEERS}
            rows.append(row)
            print(line(row), flush=True)
        if args.out:
            write_rows(args.out, {**machine(), "layers": args.layers, "summary": summary(rows)}, rows)
    for key, value in summary(rows).items():
        print(f"{key}: {value if isinstance(value, int) or value is None else format(value, '.4g')}")


if __name__ == "__main__":
    main()
