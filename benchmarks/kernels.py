"""Times the LoRA of single projections beside the roofline, other ways to write it in JAX, and other serving stacks.

    python -m benchmarks.kernels                      # every row of peers_h200.json
    python -m benchmarks.kernels --baselines          # and, at up to 256 tokens, XLA, one-hot einsum, ragged_dot
    python -m benchmarks.kernels --matrix --rank 8 16 # every row of the matrix in specs.py

A time is microseconds a layer: `wall` in a jitted chain of layers with distinct weights, the plan included; `shrink`
and `expand` of their kernels alone. Before a shape is timed, its result on random data is checked against the NumPy
oracle, twice over and with the rows permuted, which must change no bit.
"""

import argparse
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.roofline import floor_us
from benchmarks.specs import ADAPTERS, MIXES, PROJECTIONS, RANKS, SLOTS, TOKENS, Projection, group_ids
from benchmarks.timing import chain, kernel_us, random_layers, wall_us
from jlora import ops
from tests import oracle

PEERS = ("best_peer_us", "vllm_default_us")
TOLERANCE = 5e-3  # of bfloat16 results, relative to the norm of the float64 delta


def product(projection: Projection, backend: str):
    """One layer through jlora, as f(base, x, a, b, plan)."""

    def apply(base, x, a, b, plan):
        ranks = jnp.full(a.shape[:2], a.shape[2], jnp.int32)
        return ops.add_lora(base, x, a, b, plan, slice_sizes=projection.slices, ranks=ranks, backend=backend)

    return apply


def columns(projection: Projection):
    ends = np.cumsum(projection.slices).tolist()
    return [slice(end - size, end) for end, size in zip(ends, projection.slices, strict=True)]


def one_hot_einsum(projection: Projection):
    """Every slot's product for every row, and a one-hot mask that keeps one of them: how it is commonly written."""

    def apply(base, x, a, b, plan):
        slot = jnp.minimum(plan.row_slot // plan.tile_m, plan.num_tiles - 1)
        group = jnp.where(plan.row_slot < plan.num_tiles * plan.tile_m, plan.tile_group[slot], SLOTS)
        mask = jax.nn.one_hot(group, SLOTS, dtype=x.dtype)
        h = jnp.einsum("mk,gnrk,mg->nmgr", x, a, mask)
        parts = [jnp.einsum("mgr,grn->mn", h[i], b[:, :, c]) for i, c in enumerate(columns(projection))]
        return base + jnp.concatenate(parts, axis=1)

    return apply


def ragged_dot(projection: Projection):
    """Rows sorted by slot, then `jax.lax.ragged_dot` for shrink and, slice by slice, expand."""

    def apply(base, x, a, b, plan):
        count = plan.tile_end - plan.tile_start
        sizes = jnp.zeros(SLOTS, jnp.int32).at[plan.tile_group].add(count)
        _, n, rank, k = a.shape
        h = jax.lax.ragged_dot(x[plan.row_order], a.reshape(SLOTS, n * rank, k).swapaxes(1, 2), sizes)
        h = h.reshape(-1, n, rank)
        parts = [jax.lax.ragged_dot(h[:, i], b[:, :, c], sizes) for i, c in enumerate(columns(projection))]
        return base.at[plan.row_order].add(jnp.concatenate(parts, axis=1), unique_indices=True)

    return apply


BASELINES = {"xla": lambda p: product(p, "xla"), "one_hot": one_hot_einsum, "ragged_dot": ragged_dot}


def check(projection: Projection, rank: int, ids: np.ndarray, layer, backend: str) -> float:
    """Relative error of a sample of rows on fresh random data; raises if it or a repeat or a permutation is off."""
    a, b = layer
    rng = np.random.default_rng()
    x = jnp.asarray(rng.normal(size=(len(ids), projection.k)), jnp.bfloat16)
    run = jax.jit(product(projection, backend))

    def once(order):
        plan = ops.make_plan(jnp.asarray(ids[order]), num_groups=SLOTS, backend=backend)
        return np.asarray(run(jnp.zeros((len(ids), projection.n), jnp.bfloat16), x[order], a, b, plan))

    straight, order = np.arange(len(ids)), rng.permutation(len(ids))
    got = once(straight)
    bits = got.view(np.uint16)
    name = f"{projection.name} rank {rank} tokens {len(ids)}"
    if (once(straight).view(np.uint16) != bits).any():
        raise AssertionError(f"{name}: two runs differ")
    if (once(order).view(np.uint16) != bits[order]).any():
        raise AssertionError(f"{name}: permuted rows differ")
    rows = rng.permutation(len(ids))[:32]
    present = np.unique(ids[rows][ids[rows] < SLOTS])
    local = np.where(ids[rows] < SLOTS, np.searchsorted(present, ids[rows]), len(present))
    want = oracle.lora_delta(x[rows], local, a[present], b[present], projection.slices)
    error = float(np.linalg.norm(got[rows].astype(np.float64) - want) / np.linalg.norm(want))
    if not error <= TOLERANCE:
        raise AssertionError(f"{name}: relative error {error:.2e} is above {TOLERANCE:.0e}")
    return error


def measure(projection: Projection, rank: int, ids: np.ndarray, layers, backend: str, baselines: bool) -> dict:
    """All the figures of one row."""
    tokens, present = len(ids), len(np.unique(ids[ids < SLOTS]))
    error = check(projection, rank, ids, layers[0], backend)
    x = jax.random.normal(jax.random.key(1), (tokens, projection.k), jnp.bfloat16)
    calls = 3 if tokens > 256 else 30

    def time_of(apply, some_layers):
        base = jnp.ones((tokens, projection.n), jnp.bfloat16)
        return wall_us(chain(apply), base, x, some_layers, jnp.asarray(ids), calls=calls)

    wall, spread = time_of(product(projection, backend), layers)
    base = jnp.ones((tokens, projection.n), jnp.bfloat16)
    kernels = kernel_us(chain(product(projection, backend)), base, x, layers, jnp.asarray(ids))
    shrink, expand = kernels.get("lora_shrink", 0.0), kernels.get("lora_expand", 0.0)
    floor = floor_us(projection, rank, int((ids < SLOTS).sum()), present)
    row = {
        "projection": projection.name, "rank": rank, "tokens": tokens, "adapters": present, "floor_us": floor,
        "wall_us": wall, "spread_us": spread, "shrink_us": shrink, "expand_us": expand,
        "plan_us": sum(kernels.values()) - shrink - expand, "of_floor": floor / wall, "error": error,
    }  # fmt: skip
    if baselines and tokens <= 256:
        for name, make in BASELINES.items():
            row[f"{name}_us"] = time_of(make(projection), layers[:8])[0]
    return row


def geometric_mean(ratios: list[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else float("nan")


def summary(rows: list[dict]) -> dict:
    """What the rows show together: speed over peers, the worst row, and the share of the roofline floor."""
    best = [r["best_peer_us"] / r["wall_us"] for r in rows if r.get("best_peer_us")]
    default = [r["vllm_default_us"] / r["wall_us"] for r in rows if r.get("vllm_default_us")]
    large = [r["of_floor"] for r in rows if r["floor_us"] >= 20]
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
    """One row of the printed table."""
    parts = [f"{row['projection']:7s} r{row['rank']:<3d} {row['tokens']:4d}/{row['adapters']:<2d} {row['mix']:8s}"]
    parts += [f"wall {row['wall_us']:7.2f} ±{row['spread_us']:.2f}  shrink {row['shrink_us']:6.2f}"]
    parts += [f"expand {row['expand_us']:6.2f}  plan {row['plan_us']:.2f}  floor {100 * row['of_floor']:5.1f}%"]
    others = [key for key in (*PEERS, *(f"{name}_us" for name in BASELINES)) if row.get(key)]
    return "  ".join(parts + [f"{key[:-3]} x{row[key] / row['wall_us']:.2f}" for key in others])


def wanted(args) -> list[tuple[str, int, int, int, str]]:
    if not args.matrix:
        rows = json.loads(Path(__file__).with_name("peers_h200.json").read_text())["rows"]
        keys = [(r["projection"], r["rank"], r["tokens"], r["adapters"], "distinct") for r in rows]
    else:
        keys = [
            (p, r, t, n, mix) for p in PROJECTIONS for r in RANKS for t in TOKENS for n in ADAPTERS for mix in MIXES
            if n <= t and not (mix == "half" and t < 2 * n)
        ]  # fmt: skip
    return [k for k in keys if k[0] in args.projection and k[1] in args.rank and k[2] in args.tokens]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="the matrix of specs.py, not the peers' rows")
    parser.add_argument("--projection", nargs="+", default=list(PROJECTIONS))
    parser.add_argument("--rank", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--layers", type=int, default=128, help="as many as a step of Llama-3-8B has projections")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    file = Path(__file__).with_name("peers_h200.json")
    peers = {(r["projection"], r["rank"], r["tokens"], r["adapters"]): r for r in json.loads(file.read_text())["rows"]}
    rows, held, layers = [], None, []
    for name, rank, tokens, adapters, mix in wanted(args):
        projection = PROJECTIONS[name]
        if held != (name, rank):
            held, layers = (name, rank), []
            layers = random_layers(projection, rank, args.layers)
        row = measure(projection, rank, group_ids(tokens, adapters, mix=mix), layers, args.backend, args.baselines)
        row["mix"] = mix
        peer = peers.get((name, rank, tokens, adapters), {}) if mix == "distinct" else {}
        row |= {key: peer.get(key) for key in PEERS}
        rows.append(row)
        print(line(row), flush=True)
        if args.out:
            device = jax.devices()[0].device_kind
            result = {
                "device": device,
                "jax": jax.__version__,
                "layers": args.layers,
                "summary": summary(rows),
                "rows": rows,
            }
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in summary(rows).items():
        print(f"{key}: {value if isinstance(value, int) or value is None else format(value, '.4g')}")


if __name__ == "__main__":
    main()
