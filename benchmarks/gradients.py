"""Time the gradient of `add_lora` beside its forward pass, for the projections of a Llama-3-8B layer.

    python -m benchmarks.gradients [--out results.json] [--tokens 4096] [--adapters 8] [--rank 16] [--mix zipf]
    JAX_PLATFORMS=cpu python -m benchmarks.gradients --small --layers 1

Times are microseconds of one projection, the median of several rounds. Every layer of a program has its own weights,
inputs and cotangents, and all layers share one plan. The columns are:

    forward      base + delta, written over base
    backward     dx, dA and dB from the saved h
    again        the same with h computed again, as `jax.checkpoint` without "lora_h" does
    xla          dx, dA and dB in plain jnp over tiles, with a scan over all groups, as before the kernels; h again
    ragged       forward and backward of a sort in each layer and two `jax.lax.ragged_dot`, the form of SkyRL tx; a
                 delta alone, without a base

Prediction by bytes of the rows, with M tokens and projections of K by N: the forward pass reads x and the base output
and writes the result, M (K + 2 N). The backward pass reads dout and x and writes dx, M (2 K + N), because each kernel
gives both of its products in one pass over the rows. h again reads x once more, M K. Ratios to the forward pass:

               backward   again
    q, o         1.00      1.33
    k, v         1.50      2.17
    gate, up     0.69      0.81
    down         1.45      2.09
    layer        0.93      1.19

The factors and their gradients add 2% at rank 16 and 8 adapters. Before it is timed, each gradient is compared with
that of the XLA form.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.roofline import least_us
from benchmarks.specs import MIXES, Projection, group_ids
from benchmarks.timing import kind_of, machine, random_layers, write_rows
from jlora import ops
from jlora.pallas import xla
from jlora.pallas.plan import Plan

PROJECTIONS = {  # with the number of each in a layer
    "q": (Projection("q", 4096, (4096,)), 1),
    "kv": (Projection("kv", 4096, (1024,)), 2),
    "o": (Projection("o", 4096, (4096,)), 1),
    "gate/up": (Projection("gate/up", 4096, (14336,)), 2),
    "down": (Projection("down", 14336, (4096,)), 1),
}
MERGED = {
    "qkv": (Projection("qkv", 4096, (4096, 1024, 1024)), 1),
    "o": PROJECTIONS["o"],
    "gate_up": (Projection("gate_up", 4096, (14336, 14336)), 1),
    "down": PROJECTIONS["down"],
}
FORMS = ("forward", "backward", "again", "xla", "ragged_forward", "ragged_backward")
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}  # of the norm of the difference from the XLA form


def xla_grads(x, a, b, plan: Plan, slice_sizes, dout):
    """Return dx, da and db as jlora computed them before the kernels."""
    h = xla.shrink(x, a, plan, ranks=None)
    x_tiles, dout_tiles = (xla.to_tiles(v, plan).astype(jnp.float32) for v in (x, dout))
    h_tiles = xla.to_slice_tiles(h, plan)
    ends = np.cumsum(slice_sizes)
    columns = [slice(end - size, end) for end, size in zip(ends, slice_sizes, strict=True)]
    b_tiles = xla.take_b(b, plan, slice_sizes, None)
    dh = jnp.stack([_dot("tmn,trn->tmr", dout_tiles[..., c], b) for c, b in zip(columns, b_tiles, strict=True)], axis=1)
    dx = _dot("tnmr,tnrk->tmk", dh, xla.pick(a, plan.tile_group).astype(jnp.float32))
    da = _sum_by_group(lambda dh, x: _dot("nmr,mk->nrk", dh, x), a.shape, plan, dh, x_tiles)

    def tile_db(h, dout):
        return jnp.concatenate([_dot("mr,mn->rn", h[i], dout[:, c]) for i, c in enumerate(columns)], axis=1)

    db = _sum_by_group(tile_db, b.shape, plan, h_tiles, dout_tiles)
    return xla.to_rows(dx, plan).astype(x.dtype), da.astype(a.dtype), db.astype(b.dtype)


def _sum_by_group(per_tile, shape, plan: Plan, *tiles):
    def step(total, tile):
        group, used, *operands = tile
        added = jnp.where(used, total[group] + per_tile(*operands), total[group])
        return jax.lax.dynamic_update_index_in_dim(total, added, group, 0), None

    used = plan.tile_start < plan.tile_end
    return jax.lax.scan(step, jnp.zeros(shape, jnp.float32), (plan.tile_group, used, *tiles))[0]


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, precision="highest")


def ragged(x, a, b, ids, slice_sizes):
    """Return the delta of SkyRL tx' form: the rows are sorted by adapter for two ragged products, and unsorted."""
    groups, n, rank, k = a.shape
    order = jnp.argsort(ids)
    sizes = jnp.bincount(ids, length=groups)
    h = jax.lax.ragged_dot(x[order], a.reshape(groups, n * rank, k).swapaxes(1, 2), sizes).reshape(-1, n, rank)
    parts, end = [], 0
    for i, size in enumerate(slice_sizes):
        parts.append(jax.lax.ragged_dot(h[:, i], b[:, :, end : end + size], sizes))
        end += size
    return jnp.concatenate(parts, axis=1)[jnp.argsort(order)]


class Case:
    """The programs and arrays of one projection."""

    def __init__(self, projection: Projection, args):
        self.projection, self.args = projection, args
        ids = group_ids(args.tokens, args.adapters, args.slots, args.mix)
        self.ids = jnp.asarray(ids)
        self.weights = random_layers(projection, args.rank, args.layers, args.slots, args.dtype)
        keys = jax.random.split(jax.random.key(1), (3, args.layers))
        rows = partial(jax.random.normal, dtype=args.dtype)
        self.x = [rows(key, (args.tokens, projection.k)) for key in keys[0]]
        self.dout = [rows(key, (args.tokens, projection.n)) for key in keys[1]]

    def bases(self):
        return [jnp.zeros_like(dout) for dout in self.dout]

    def plan(self, ids):
        return ops.make_plan(ids, num_groups=self.args.slots)

    def layer(self, plan, base, x, a, b):
        return ops.add_lora(base, x, a, b, plan, slice_sizes=self.projection.slices)

    def forward(self, bases, x, weights, ids):
        plan = self.plan(ids)
        return [self.layer(plan, base, x, *w) for base, x, w in zip(bases, x, weights, strict=True)]

    def pulls(self, bases, x, weights, ids):
        plan = self.plan(ids)
        layers = zip(bases, x, weights, strict=True)
        return [jax.vjp(partial(self.layer, plan, base), x, *w)[1] for base, x, w in layers]

    def backward(self, pulls, dout):
        return [pull(d) for pull, d in zip(pulls, dout, strict=True)]

    def again(self, bases, x, weights, ids, dout):
        """XLA removes the expand of the forward pass, whose result has no use."""
        return self.backward(self.pulls(bases, x, weights, ids), dout)

    def xla(self, x, weights, ids, dout):
        plan = self.plan(ids)
        layers = zip(x, weights, dout, strict=True)
        return [xla_grads(x, *w, plan, self.projection.slices, d) for x, w, d in layers]

    def ragged_forward(self, x, weights, ids):
        return [ragged(x, *w, ids, self.projection.slices) for x, w in zip(x, weights, strict=True)]

    def ragged_pulls(self, x, weights, ids):
        form = lambda x, a, b: ragged(x, a, b, ids, self.projection.slices)  # noqa: E731
        return [jax.vjp(form, x, *w)[1] for x, w in zip(x, weights, strict=True)]

    def error(self, some, others) -> float:
        """Return the largest distance of two lists of gradients, relative to the norm of the second."""
        pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
        return max(float(_distance(one, other)) for one, other in pairs)

    def measure(self) -> dict:
        """Return the microseconds of every form, and the bytes of memory that both backward passes take."""
        given = self.x, self.weights, self.ids
        few = self.x[:1], self.weights[:1], self.ids
        again, xla_form = jax.jit(self.again), jax.jit(self.xla)
        pulls = jax.jit(self.pulls)(self.bases(), *given)
        backward = jax.jit(self.backward)
        row = {"projection": self.projection.name, "k": self.projection.k, "n": self.projection.n}
        row["error"] = self.error(backward(pulls, self.dout)[:1], xla_form(*few, self.dout[:1]))
        if not row["error"] <= TOLERANCE[self.args.dtype]:
            raise AssertionError(f"{self.projection.name}: relative error {row['error']:.2e}")
        forward = jax.jit(self.forward, donate_argnums=0)
        outs = self.bases()

        def step():
            nonlocal outs
            outs = forward(outs, *given)
            return outs

        bases = self.bases()
        ragged_pulls = jax.jit(self.ragged_pulls)(*few)
        runs = {
            "forward": (step, len(self.x)),
            "backward": (lambda: backward(pulls, self.dout), len(self.x)),
            "again": (lambda: again(bases, *given, self.dout), len(self.x)),
            "xla": (lambda: xla_form(*few, self.dout[:1]), 1),
            "ragged_forward": (lambda: ragged_forward(*few), 1),
            "ragged_backward": (lambda: ragged_backward(ragged_pulls, self.dout[:1]), 1),
        }
        ragged_forward, ragged_backward = jax.jit(self.ragged_forward), jax.jit(self.backward)
        for name in FORMS:
            run, layers = runs[name]
            row[f"{name}_us"], row[f"{name}_spread_us"] = (t / layers for t in median_us(run, self.args))
        memory = [
            run.lower(*args).compile().memory_analysis()
            for run, args in ((backward, (pulls[:1], self.dout[:1])), (xla_form, (*few, self.dout[:1])))
        ]
        row["temp_bytes"], row["xla_temp_bytes"] = (m and m.temp_size_in_bytes for m in memory)
        if self.args.profile:
            row["kernels_us"] = {
                **kernels(backward, pulls, self.dout, layers=len(self.x)),
                **{f"again {k}": v for k, v in kernels(again, bases, *given, self.dout, layers=len(self.x)).items()},
            }
        return row | floors(self.projection, self.args)


@jax.jit
def _distance(one, other):
    one, other = one.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.linalg.norm(one - other) / jnp.linalg.norm(other)


def kernels(run, *args, layers: int) -> dict[str, float]:
    """Return the microseconds a layer of every kind of GPU kernel."""
    from jax.experimental.mosaic.gpu import profiler

    total: dict[str, float] = {}
    for name, ms in profiler.Cupti().measure(run, aggregate=False)(*args)[1] or []:
        total[kind_of(name)] = total.get(kind_of(name), 0.0) + ms * 1e3 / layers
    return dict(sorted(total.items(), key=lambda item: -item[1])[:12])


def floors(projection: Projection, args) -> dict:
    """Return the least microseconds by bytes of forward and backward, or None without rates of the device."""
    k, n, m = projection.k, projection.n, args.tokens
    factors = args.adapters * args.rank * (len(projection.slices) * k + n)
    size = jnp.dtype(args.dtype).itemsize
    return {
        "forward_floor_us": least_us(size * (m * (k + 2 * n) + factors), 0),
        "backward_floor_us": least_us(size * (m * (2 * k + n) + 2 * factors), 0),
    }


def median_us(run, args) -> tuple[float, float]:
    """Return the median and the spread of the microseconds of a call, over rounds of several enqueued calls."""
    jax.block_until_ready(run())
    times = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        for _ in range(args.calls):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) * 1e6 / args.calls)
    return statistics.median(times), max(times) - min(times)


def line(row: dict) -> str:
    cells = [f"{row['projection']:8s}"] + [f"{row[f'{name}_us']:10.1f}" for name in FORMS]
    ratios = [row[f"{name}_us"] / row["forward_us"] for name in ("backward", "again", "xla")]
    return "".join(cells) + "".join(f"{ratio:9.2f}" for ratio in ratios)


def main(argv: Sequence[str] | None = None) -> list[dict]:
    """Print the figures and return them, a row for each projection and one for a layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--mix", choices=[mix for mix in MIXES if mix != "ranks"], default="distinct")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="bfloat16")
    parser.add_argument("--layers", type=int, default=8, help="layers in a program")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--merged", action="store_true", help="q, k, v as one projection, and gate and up")
    parser.add_argument("--projections", nargs="+", choices=sorted(PROJECTIONS | MERGED))
    parser.add_argument("--profile", action="store_true", help="time single kernels of the backward passes, on a GPU")
    parser.add_argument("--small", action="store_true", help="one 32nd of the features and tokens, for a CPU")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args(argv)
    shapes = MERGED if args.merged else PROJECTIONS
    if args.small:
        args.tokens //= 32
    rows, layer = [], dict.fromkeys((f"{name}_us" for name in FORMS), 0.0)
    print(
        f"{'':8s}"
        + "".join(f"{name:>10s}" for name in (*FORMS[:4], "ragged", "ragged_b"))
        + "  b/f      again/f  xla/f"
    )
    for name in args.projections or shapes:
        projection, count = (MERGED | shapes)[name]
        if args.small:
            projection = Projection(name, projection.k // 32, tuple(size // 32 for size in projection.slices))
        row = Case(projection, args).measure()
        rows.append(row)
        for key in layer:
            layer[key] += count * row[key]
        print(line(row), flush=True)
        if args.profile:
            print("   ", {kind: round(us, 1) for kind, us in row["kernels_us"].items()}, flush=True)
    rows.append({"projection": "layer", **layer})
    print(line(rows[-1]))
    if args.out:
        options = {key: value for key, value in vars(args).items() if key not in ("out", "projections", "profile")}
        write_rows(args.out, machine() | options, rows)
    return rows


if __name__ == "__main__":
    main()
