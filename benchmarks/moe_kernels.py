"""Time the LoRA of experts (both products of a block) against the roofline and other serving stacks.

    python -m benchmarks.moe_kernels              # rows of peers_moe_h200.json
    python -m benchmarks.moe_kernels --others     # its rows of models for which nothing was tuned
    python -m benchmarks.moe_kernels --tokens 64  # some of them

`wall` is microseconds a layer in a jitted chain of layers with distinct weights, kernels only, as for the peers. A
layer is `add_lora` of gate and up, then of down into the pairs' rows. `plan` is the plan of a layer's rows, which the
base model has sorted by expert. Before a row is timed, its results on fresh random data are checked against the NumPy
oracle. They must have the same bits in a second run and with the tokens permuted.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import SAMPLE, TOLERANCE, geometric_mean
from benchmarks.moe_specs import MODELS, OTHER_MODELS, Batch, Experts, batch, floor_us, peers, slots
from benchmarks.timing import compile_all, machine, wall_us, write_rows
from jlora import ops
from jlora._typing import Backend
from tests import oracle

ALL_MODELS = MODELS | OTHER_MODELS
PLANS = 24  # plans in a chain
LIVE_BYTES = 150e6  # bytes of factors that a chain reads before it reads any again, several times the L2 cache
MEMORY = 40e9  # most bytes of the factors of a chain, all groups included
CHAIN_US = 1500  # least time of a chain, so that the host's part of a call (about 200 us) is not measured
REPEAT_US = 60_000  # least time of the calls of one repeat, for the same reason


@partial(jax.jit, static_argnames=("e", "groups", "rank", "layers", "dtype"))
def random_layer(key, e: Experts, groups: int, rank: int, layers: int, dtype=jnp.bfloat16):
    """Return the factors (a13, b13, a2, b2) of one of `layers` layers, scaled to keep a chain's sums near one."""
    i, h = e.intermediate, e.hidden
    shapes = ((groups, 2, rank, h), (groups, rank, 2 * i), (groups, 1, rank, i), (groups, rank, h))
    scales = (h**-0.5, (rank * layers) ** -0.5, i**-0.5, (rank * layers) ** -0.5)
    keys = jax.random.split(key, 4)
    return tuple(jax.random.normal(k, s, dtype) * dtype(c) for k, s, c in zip(keys, shapes, scales, strict=True))


def route(b: Batch, e: Experts, num_slots: int, backend: Backend = "auto"):
    """Return a layer's plan of sorted rows, the rows' tokens, and the sorted order, from the router's choice."""
    flat = b.expert.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    token = order // e.top_k
    sizes = {"num_slots": num_slots, "num_experts": e.experts}
    plan = ops.plan_experts(b.slot, token, flat[order], **sizes, backend=backend)
    return plan, token, order


def pair_rows(order, e: Experts):
    """Return [T, k], the sorted row of each pair."""
    rows = jnp.zeros(len(order), jnp.int32).at[order].set(jnp.arange(len(order), dtype=jnp.int32), unique_indices=True)
    return rows.reshape(-1, e.top_k)


class Row:
    """The compiled programs of one row of the table."""

    def __init__(self, key: dict):
        self.key, self.e = key, ALL_MODELS[key["model"]]
        self.rank, self.tokens, self.slots = key["rank"], key["tokens"], slots(key["adapters"])
        host = batch(self.e, self.tokens, key["adapters"])
        self.host, self.batch = host, Batch(jnp.asarray(host.expert), jnp.asarray(host.slot))
        self.pairs, self.groups = self.tokens * self.e.top_k, self.slots * self.e.experts
        self.present = len(np.unique(host.slot[:, None] * self.e.experts + host.expert))
        per_layer = self.present * 6 * self.rank * (self.e.hidden + self.e.intermediate)
        self.least_us = 10 + 2 * (floor_us(self.e, self.rank, self.tokens, self.present) or 0)
        most = min(96, MEMORY * self.present / (per_layer * self.groups))
        self.layers = int(np.clip(np.ceil(max(LIVE_BYTES / per_layer, CHAIN_US / self.least_us)), 8, most))

    def jobs(self) -> list[tuple]:
        """Return (jitted function, shapes of its arguments) of `_chain`, `_once`, `inputs`, `plan_all`."""
        layer = jax.eval_shape(self.random_layer, jax.random.key(0))
        inputs = jax.eval_shape(self.inputs, jax.random.key(0))
        planned = jax.eval_shape(self.plan_all, self.batch)
        ranks = jax.eval_shape(self.ranks)
        order, sample, ids = (
            jax.ShapeDtypeStruct((size,), jnp.int32) for size in (self.tokens, SAMPLE, SAMPLE * self.e.top_k)
        )
        b = jax.eval_shape(lambda b: b, self.batch)
        bits = [jax.ShapeDtypeStruct(base.shape, jnp.uint16) for base in self.by_token()]
        return [
            (jax.jit(self._chain, donate_argnums=0), (inputs[0], inputs[1:], [layer] * self.layers, planned, ranks)),
            (jax.jit(self._once), (inputs, layer, b, ranks, order, sample, ids, bits)),
            (jax.jit(self.inputs), (jax.eval_shape(lambda: jax.random.key(0)),)),
            (jax.jit(self.plan_all), (b,)),
        ]

    def random_layer(self, key):
        return random_layer(key, e=self.e, groups=self.groups, rank=self.rank, layers=self.layers)

    def plan_job(self) -> tuple:
        pairs = jax.ShapeDtypeStruct((self.pairs,), jnp.int32)
        return jax.jit(self._plans, donate_argnums=0), (pairs, pairs, jax.ShapeDtypeStruct((self.tokens,), jnp.int32))

    def inputs(self, key):
        """Return the two base outputs, x [T, H], and the activations [T, k, I], in token order."""
        e = self.e
        kx, ka = jax.random.split(key)
        bases = jnp.ones((self.pairs, 2 * e.intermediate), jnp.bfloat16), jnp.ones((self.pairs, e.hidden), jnp.bfloat16)
        x = jax.random.normal(kx, (self.tokens, e.hidden), jnp.bfloat16)
        return bases, x, jax.random.normal(ka, (self.tokens, e.top_k, e.intermediate), jnp.bfloat16)

    def by_token(self):
        """Return the shapes of the outputs of `_once`, in token order."""
        widths = 2 * self.e.intermediate, self.e.hidden
        return [jax.ShapeDtypeStruct((self.tokens, self.e.top_k, width), jnp.bfloat16) for width in widths]

    def ranks(self):
        return jnp.broadcast_to(jnp.array([self.rank, 1], jnp.float32), (self.groups, 2, 2))

    def plan_all(self, b: Batch):
        plan, token, order = route(b, self.e, self.slots)
        return plan, token, pair_rows(order, self.e)

    def _layer(self, bases, x, act, layer, planned, ranks):
        plan, token, _ = planned
        a13, b13, a2, b2 = layer
        sizes = (self.e.intermediate,) * 2
        first = ops.add_lora(bases[0], x, a13, b13, plan, slice_sizes=sizes, ranks=ranks, x_rows=token)
        return first, ops.add_lora(bases[1], act, a2, b2, plan, ranks=ranks[:, :1])

    def _chain(self, bases, data, layers, planned, ranks):
        x, act = data
        act, layer = act.reshape(self.pairs, -1), jax.jit(self._layer)
        for factors in layers:
            bases = layer(bases, x, act, factors, planned, ranks)
        return bases

    def _once(self, inputs, layer, b, ranks, order, sample, ids, others):
        """Run one layer on a base of zeros, with the tokens in `order`.

        Returns, in the tokens' original order, the bits of all values, whether they equal `others`, the values of the
        sample, and the factors of the groups `ids`.
        """
        bases, x, act = inputs
        b = Batch(b.expert[order], b.slot[order])
        planned = self.plan_all(b)
        rows = planned[2]
        sorted_act = jnp.zeros((self.pairs, act.shape[-1]), act.dtype).at[rows].set(act[order], unique_indices=True)
        zeros = tuple(base * 0 for base in bases)
        first, second = self._layer(zeros, x[order], sorted_act, layer, planned, ranks)
        outs = [jnp.zeros_like(out[rows]).at[order].set(out[rows], unique_indices=True) for out in (first, second)]
        bits = [jax.lax.bitcast_convert_type(out, jnp.uint16) for out in outs]
        same = jnp.array([(one == two).all() for one, two in zip(bits, others, strict=True)]).all()
        return bits, same, [out[sample] for out in outs], [factors[ids] for factors in layer]

    def _plans(self, expert, token, slot):
        sizes = {"num_slots": self.slots, "num_experts": self.e.experts}
        for _ in range(PLANS):
            plan = ops.plan_experts(slot, token, expert, **sizes)
            used = plan.tile_rows[0] ^ plan.tile_group[0] ^ plan.tiles_used[0]
            expert = expert ^ (used >> 30)
        return expert

    def check(self, once, inputs, layer) -> float:
        """Return the relative error of some tokens on random data; raise if it, a repeat or a permutation is wrong."""
        rng, name = np.random.default_rng(), str({k: self.key[k] for k in ("model", "rank", "tokens", "adapters")})
        sample = rng.integers(self.tokens, size=SAMPLE)
        ids = (self.host.slot[sample, None] * self.e.experts + self.host.expert[sample]).ravel()
        straight, order = (jnp.asarray(o, jnp.int32) for o in (np.arange(self.tokens), rng.permutation(self.tokens)))
        none = [jnp.zeros(base.shape, jnp.uint16) for base in self.by_token()]

        def run(order, bits):
            some, groups = jnp.asarray(sample, jnp.int32), jnp.asarray(ids, jnp.int32)
            return once(inputs, layer, self.batch, self.ranks(), order, some, groups, bits)

        bits, _, got, factors = run(straight, none)
        for again, what in ((straight, "two runs differ"), (order, "permuted tokens differ")):
            if not bool(run(again, bits)[1]):
                raise AssertionError(f"{name}: {what}")
        a13, b13, a2, b2 = (np.asarray(v, np.float64) for v in factors)
        x = np.repeat(np.asarray(inputs[1][sample], np.float64), self.e.top_k, axis=0)
        act = np.asarray(inputs[2][sample], np.float64).reshape(len(ids), -1)
        local = np.arange(len(ids))
        first = oracle.lora_delta(x, local, a13, b13, (self.e.intermediate,) * 2)
        second = oracle.lora_delta(act, local, a2, b2)
        error = 0.0
        for out, want in zip(got, (first, second), strict=True):
            value = np.asarray(out, np.float64).reshape(want.shape)
            error = max(error, float(np.linalg.norm(value - want) / np.linalg.norm(want)))
        if not error <= TOLERANCE:
            raise AssertionError(f"{name}: relative error {error:.2e}")
        return error

    def plan_us(self, plans) -> float:
        """Return the microseconds of planning."""
        flat = np.ravel(self.host.expert)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        token = jnp.asarray(order // self.e.top_k)
        return wall_us(plans, jnp.asarray(flat[order]), token, self.batch.slot, repeats=7, calls=40)[0] / PLANS

    def measure(self, chain, once, inputs, plan_all, plan: float) -> dict:
        """Return all figures of the row, given its programs and the time of its plan."""
        layers = [self.random_layer(key) for key in jax.random.split(jax.random.key(0), self.layers)]
        bases, *data = inputs(jax.random.key(np.random.default_rng().integers(2**32)))
        error = self.check(once, (bases, *data), layers[0])
        planned = plan_all(self.batch)
        ranks = self.ranks()

        def run(bases):
            return chain(bases, tuple(data), layers, planned, ranks)

        calls = max(5, -(-REPEAT_US // (self.layers * self.least_us)))
        wall, spread = wall_us(run, bases, repeats=5, calls=int(calls))
        wall, spread = wall / self.layers, spread / self.layers
        floor = floor_us(self.e, self.rank, self.tokens, self.present)
        best = self.key["best_kernels_us"]
        return {
            **{k: self.key[k] for k in ("model", "rank", "tokens", "adapters")}, "floor_us": floor, "wall_us": wall,
            "spread_us": spread, "plan_us": plan, "of_floor": floor and floor / wall, "best_peer_us": best,
            "faster": best / wall, "faster_with_plan": best / (wall + plan), "error": error,
        }  # fmt: skip


def summary(rows: list[dict]) -> dict:
    """Summarize the rows."""
    slowest = min(rows, key=lambda r: r["faster"])
    return {
        "rows": len(rows),
        "faster_than_best_peer": geometric_mean([r["faster"] for r in rows]),
        "with_plan": geometric_mean([r["faster_with_plan"] for r in rows]),
        "slowest": [slowest[k] for k in ("model", "rank", "tokens", "adapters", "faster")],
        "of_floor": geometric_mean([r["of_floor"] for r in rows if r["of_floor"]]),
        "plan_us_to_512_pairs": max((r["plan_us"] for r in rows if _pairs(r) <= 512), default=None),
        "plan_us_above": max((r["plan_us"] for r in rows if _pairs(r) > 512), default=None),
        "largest_error": max(r["error"] for r in rows),
    }


def _routing(row: dict) -> tuple:
    return row["model"], row["tokens"], row["adapters"]


def _pairs(row: dict) -> int:
    return row["tokens"] * ALL_MODELS[row["model"]].top_k


def line(r: dict) -> str:
    floor = f"floor {r['floor_us']:6.1f} {100 * r['of_floor']:3.0f}% " if r["floor_us"] else ""
    return (
        f"{r['model']:13s} r{r['rank']:<2d} {r['tokens']:4d}/{r['adapters']:<2d} "
        f"wall {r['wall_us']:7.2f} ±{r['spread_us']:5.2f} {floor}"
        f"x{r['faster']:.2f} plan {r['plan_us']:6.2f} x{r['faster_with_plan']:.2f} error {r['error']:.1e}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", action="store_true", help="time other models than those of MODELS")
    parser.add_argument("--model", nargs="+", choices=list(ALL_MODELS))
    parser.add_argument("--rank", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 256, 2048, 8192])
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    models = args.model or (OTHER_MODELS if args.others else MODELS)
    wanted = [r for r in peers() if r["model"] in models and r["rank"] in args.rank and r["tokens"] in args.tokens]
    todo, rows = [Row(key) for key in wanted], []
    routed = {_routing(row.key): row for row in todo}  # ranks share their plans
    jobs = [row.plan_job() for row in routed.values()] + [job for row in todo for job in row.jobs()]
    programs = compile_all(jobs)
    print(f"compiled {len(programs)} programs", flush=True)
    for program in programs:
        if isinstance(program, Exception):
            raise program
    remaining = iter(programs)
    plans = {key: row.plan_us(next(remaining)) for key, row in routed.items()}
    for row in todo:
        rows.append(row.measure(*(next(remaining) for _ in range(4)), plans[_routing(row.key)]))
        print(line(rows[-1]), flush=True)
        if args.out:
            write_rows(args.out, {**machine(), "summary": summary(rows)}, rows)
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
