"""Time one pair of kernels, shrink and expand, in three forms: Pallas' Triton lowering, jax-triton and Mosaic GPU.

    python -m benchmarks.after_triton --out after_triton.json
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.after_triton    # every launch on its own

64 tokens of 8 adapters, rank 16, bfloat16. Each form is checked against the NumPy oracle on random data, with true
ranks below 16, scales and rows without an adapter; then it is timed as `benchmarks.kernels` times, in a chain of layers
with distinct weights. `gap_us` is the part of a layer's wall time in which no kernel runs. The launches are a chain of
kernels that add one to 128 numbers. A form that fails is reported, and the others are timed.

jax-triton has the kernels and tiles of `jlora.pallas.triton.lora`, without the options that a dense call leaves out.
Mosaic GPU has a pair of its own, for up to 64 rows, because a matrix product of a warpgroup has 64 rows.
"""

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import statistics
import traceback
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from benchmarks.roofline import floor_us
from benchmarks.specs import PROJECTIONS, SLOTS, Projection, group_ids
from benchmarks.timing import chain, kernel_us, machine, random_layers, wall_us, write_rows
from jlora.pallas.plan import make_plan
from jlora.pallas.tiles import gpu_tiles
from jlora.pallas.triton import lora, parts
from tests import oracle

RANK, TOKENS, ADAPTERS, LAUNCHES = 16, 64, 8, 200
TOLERANCE = 5e-3  # error relative to the norm of the float64 delta
MISSING: dict[str, str] = {}

try:
    import triton
    import triton.backends.nvidia.driver as triton_driver
    import triton.language as tl

    # jax-triton 0.4 imports this code of TF32 for tensor descriptors, which are not used here. Triton 3.6 lacks it.
    vars(triton_driver).setdefault("TMA_TF32", 11)
    import jax_triton as jt
except ImportError as error:
    MISSING["jax_triton"] = f"{error}; needs triton and jax-triton 0.4"
try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as error:
    MISSING["mosaic_gpu"] = f"{error}; needs JAX with the CUDA plugin"


# Today: Pallas' Triton lowering.


def pallas_triton(projection: Projection):
    def apply(base, x, a, b, plan, ranks):
        return lora.add_lora(base, x, a, b, plan, slice_sizes=projection.slices, ranks=ranks)

    return apply


def pallas_triton_launch(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=like, compiler_params=parts.compiler_params(4), name="launch")(x)


# Triton's own language, through jax-triton.

if "jax_triton" not in MISSING:

    @triton.jit
    def launch(x_ptr, o_ptr, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(o_ptr + i, tl.load(x_ptr + i) + 1)

    @triton.jit
    def lora_shrink(
        used_ptr, group_ptr, rows_ptr, x_ptr, a_ptr, h_ptr,
        M: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr, BLOCK_R: tl.constexpr,
        BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        """Compute h[part, rows of a tile, block of ranks] as `lora._shrink_kernel`."""
        per_tile: tl.constexpr = WIDTH // BLOCK_R * PARTS
        steps: tl.constexpr = K // BLOCK_K // PARTS
        for u in range(tl.program_id(0), tl.load(used_ptr) * per_tile, tl.num_programs(0)):
            tile, part = u // per_tile, u % PARTS
            r = u % per_tile // PARTS * BLOCK_R + tl.arange(0, BLOCK_R)
            group = tl.load(group_ptr + tile)
            rows = tl.load(rows_ptr + tile * TILE_M + tl.arange(0, TILE_M))
            live = (rows < M)[:, None]
            total = tl.zeros((TILE_M, BLOCK_R), tl.float32)
            for j in range(steps):
                k = (j * PARTS + part) * BLOCK_K + tl.arange(0, BLOCK_K)
                x = tl.load(x_ptr + rows[:, None] * K + k[None, :], mask=live, other=0.0)
                a = tl.load(a_ptr + (group * WIDTH + r)[:, None] * K + k[None, :])
                total = tl.dot(x, tl.trans(a), total)
            h = h_ptr + (part * M + rows)[:, None] * WIDTH + r[None, :]
            tl.store(h, total.to(h_ptr.dtype.element_ty), mask=live)

    @triton.jit
    def lora_expand(
        used_ptr, group_ptr, rows_ptr, ranks_ptr, h_ptr, b_ptr, base_ptr,
        M: tl.constexpr, N: tl.constexpr, SLICES: tl.constexpr, TILE_M: tl.constexpr, RANK: tl.constexpr,
        BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    ):  # fmt: skip
        """Add the sum of the parts of h @ b[group] to base, in its place, as `lora.expand_parts`."""
        used = tl.load(used_ptr)
        n: tl.constexpr = len(SLICES)
        length = tl.minimum(tl.maximum((used * (N // BLOCK_N) + CHUNKS - 1) // CHUNKS, 1), N // BLOCK_N)
        per_tile = 0
        for s in tl.static_range(n):
            per_tile += (SLICES[s] // BLOCK_N + length - 1) // length
        for u in range(tl.program_id(0), used * per_tile, tl.num_programs(0)):
            tile, chunk = u // per_tile, u % per_tile
            i, first, stride, begin, size, start, offset = 0, 0, 1, 0, 0, 0, 0
            for s in tl.static_range(n):
                count = (SLICES[s] // BLOCK_N + length - 1) // length
                if chunk >= start:
                    i, first, stride, begin, size = s, chunk - start, count, offset, SLICES[s]
                start += count
                offset += SLICES[s]
            group = tl.load(group_ptr + tile)
            rows = tl.load(rows_ptr + tile * TILE_M + tl.arange(0, TILE_M))
            live = (rows < M)[:, None]
            r = tl.arange(0, RANK)
            true_rank = tl.load(ranks_ptr + (group * n + i) * 2)
            scale = tl.load(ranks_ptr + (group * n + i) * 2 + 1)
            total = tl.zeros((TILE_M, RANK), tl.float32)
            for part in tl.static_range(PARTS):
                at = (part * M + rows)[:, None] * (n * RANK) + i * RANK + r[None, :]
                total += tl.load(h_ptr + at, mask=live, other=0.0).to(tl.float32)
            h = tl.where(r[None, :] < true_rank, total * scale, 0.0).to(b_ptr.dtype.element_ty)
            for j in range(first, size // BLOCK_N, stride):
                col = tl.multiple_of(begin + j * BLOCK_N, BLOCK_N) + tl.arange(0, BLOCK_N)
                place = base_ptr + rows[:, None] * N + col[None, :]
                base = tl.load(place, mask=live, other=0.0).to(tl.float32)
                b = tl.load(b_ptr + (group * RANK + r)[:, None] * N + col[None, :])
                tl.store(place, tl.dot(h, b, base).to(base_ptr.dtype.element_ty), mask=live)


def jax_triton(projection: Projection, compute_capability: int | None = None):
    n, slices = len(projection.slices), projection.slices

    def apply(base, x, a, b, plan, ranks):
        # The kernel has no mask for ranks, so a block of them must divide their number.
        tiles = replace(gpu_tiles(lora.problem_of(plan, x, a, b, n)), block_r=RANK)
        sizes = {"M": plan.num_rows, "TILE_M": plan.tile_m, "PARTS": tiles.split_k}
        call = functools.partial(jt.triton_call, compute_capability=compute_capability, **sizes)
        where = plan.tiles_used, plan.tile_group, plan.tile_rows
        units = plan.num_tiles * -(-n * RANK // tiles.block_r) * tiles.split_k
        h = call(
            *where, x, a, kernel=lora_shrink, name="lora_shrink", grid=min(tiles.shrink_programs, units),
            out_type=jax.ShapeDtypeStruct((tiles.split_k, plan.num_rows, n * RANK), x.dtype),
            num_warps=tiles.shrink_warps, num_stages=tiles.shrink_stages,
            K=projection.k, WIDTH=n * RANK, BLOCK_R=tiles.block_r, BLOCK_K=tiles.block_k,
        )  # fmt: skip
        units = plan.num_tiles * projection.n // tiles.block_n
        return call(
            *where, ranks, h, b, base, kernel=lora_expand, name="lora_expand", grid=min(tiles.programs, units),
            out_type=jax.ShapeDtypeStruct(base.shape, base.dtype), input_output_aliases={6: 0},
            num_warps=tiles.warps, num_stages=tiles.stages,
            N=projection.n, SLICES=slices, RANK=RANK, BLOCK_N=tiles.block_n, CHUNKS=tiles.chunks,
        )  # fmt: skip

    return apply


def jax_triton_launch(x, compute_capability: int | None = None):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    options = {"out_type": like, "grid": 1, "name": "launch", "compute_capability": compute_capability}
    return jt.triton_call(x, kernel=launch, SIZE=x.size, **options)


# Pallas' Mosaic GPU lowering.

DEPTH = 64  # of a step of the shrink: a row of 128 bytes
TILES = 4  # of a step of the expand: 4 x 16 ranks are a row of 128 bytes
PADDED = 64  # columns of h: rows are copied one by one, from addresses that are multiples of 128 bytes


def mosaic_gpu(projection: Projection, split_k: int = 16, block_n: int = 128, programs: int = 132, interpret=None):
    """Return the layer. Its shrink and expand multiply all 64 rows by each adapter, and keep the rows of the adapter.

    The shrink takes (tile, part of K). The products of other tiles' rows are dropped when h is written, row by row. The
    expand takes a block of columns and adds up the tiles, four in one product with a depth of 4 x 16. h is zero there
    but for the row's own tile.
    """
    n, width, steps = len(projection.slices), len(projection.slices) * RANK, projection.k // split_k // DEPTH
    read = functools.partial(plgpu.load, optimized=False)
    starts = [sum(projection.slices[:i]) for i in range(n)]
    options = {"compiler_params": plgpu.CompilerParams(), "grid_names": ("program",), "interpret": interpret}

    def shrink(tile_m, used, group, rows, ranks, x, a, h, x_smem, a_smem, h_smem, ready):
        def unit(u):
            tile, part = lax.div(u, split_k), lax.rem(u, split_k)
            own = group[tile]
            for j in range(steps):
                k = pl.ds(part * (steps * DEPTH) + j * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(x.at[:, k], x_smem.at[j], ready.at[j])
                plgpu.copy_gmem_to_smem(a.at[own, :, k], a_smem.at[j, pl.ds(0, width), :], ready.at[j])

            def product(total):
                for j in range(steps):
                    plgpu.barrier_wait(ready.at[j])
                    plgpu.wgmma(total, x_smem.at[j], a_smem.at[j].T)
                return total[...]

            total = pl.run_scoped(product, plgpu.ACC((TOKENS, PADDED), jnp.float32))
            column = lax.broadcasted_iota(jnp.int32, (TOKENS, PADDED), 1)
            scaled = jnp.zeros((TOKENS, PADDED), jnp.float32)
            for i in range(n):
                end = i * RANK + ranks[own, i, 0].astype(jnp.int32)
                inside = (column >= i * RANK) & (column < end)
                scaled = jnp.where(inside, total * ranks[own, i, 1], scaled)
            h_smem[...] = scaled.astype(h_smem.dtype)
            plgpu.commit_smem()
            for m in range(tile_m):
                row = rows[tile * tile_m + m]
                one = h_smem.at[pl.ds(row, 1)], h.at[part, pl.ds(row, 1), :]
                pl.when(row < TOKENS)(functools.partial(plgpu.copy_smem_to_gmem, *one))
            plgpu.wait_smem_to_gmem(0)

        first = lax.axis_index("program")
        units = used[0] * split_k
        lax.fori_loop(0, lax.div(units - first + programs - 1, programs), lambda s, _: unit(first + s * programs), None)

    def expand(tile_m, used, group, slot, h, b, base, out, h_smem, wide, left, b_smem, base_smem, ready, filled):
        begin = lax.axis_index("program") * block_n
        i = sum((begin >= start).astype(jnp.int32) for start in starts[1:]) if n > 1 else 0
        columns = pl.ds(begin, block_n)
        rounds = lax.div(used[0] + TILES - 1, TILES)

        def fetch(turn, place):
            for t in range(TILES):
                own = group[jnp.minimum(turn * TILES + t, group.shape[0] - 1)]
                at = b_smem.at[place, pl.ds(t * RANK, RANK), :]
                plgpu.copy_gmem_to_smem(b.at[own, :, columns], at, filled.at[place])

        plgpu.copy_gmem_to_smem(h.at[:, :, pl.ds(i * RANK, RANK)], h_smem, ready.at[0])
        plgpu.copy_gmem_to_smem(base.at[:, columns], base_smem, ready.at[1])
        fetch(0, 0)
        pl.when(rounds > 1)(lambda: fetch(1, 1))
        plgpu.barrier_wait(ready.at[0])
        total = read(h_smem.at[0]).astype(jnp.float32)
        for p in range(1, split_k):
            total += read(h_smem.at[p]).astype(jnp.float32)
        for t in range(TILES):
            wide[:, pl.ds(t * RANK, RANK)] = total.astype(wide.dtype)
        plgpu.commit_smem()
        copies, own_slot = read(wide), read(slot)
        column = lax.broadcasted_iota(jnp.int32, (TOKENS, TILES * RANK), 1)

        def product(acc):
            def turn(s, _):
                place = lax.rem(s, 2)
                own = jnp.zeros((TOKENS, TILES * RANK), jnp.bool_)
                for t in range(TILES):
                    first = (s * TILES + t) * tile_m
                    row_in = (own_slot >= first) & (own_slot < first + tile_m)
                    row_in = lax.broadcast_in_dim(row_in, own.shape, (0,))
                    own |= row_in & (column >= t * RANK) & (column < t * RANK + RANK)
                left[...] = jnp.where(own, copies, jnp.zeros_like(copies))
                plgpu.commit_smem()
                plgpu.barrier_wait(filled.at[place])
                plgpu.wgmma(acc, left, b_smem.at[place])
                plgpu.wgmma_wait(0)
                pl.when(s + 2 < rounds)(lambda: fetch(s + 2, place))

            lax.fori_loop(0, rounds, turn, None)
            return acc[...]

        delta = pl.run_scoped(product, plgpu.ACC((TOKENS, block_n), jnp.float32))
        plgpu.barrier_wait(ready.at[1])
        base_smem[...] = (base_smem[...].astype(jnp.float32) + delta).astype(base_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(base_smem, out.at[:, columns])
        plgpu.wait_smem_to_gmem(0)

    def apply(base, x, a, b, plan, ranks):
        memory, kind = (
            functools.partial(plgpu.SMEM, dtype=x.dtype),
            functools.partial(jax.ShapeDtypeStruct, dtype=x.dtype),
        )
        h = plgpu.kernel(
            functools.partial(shrink, plan.tile_m), kernel_name="lora_shrink", grid=(programs,),
            out_type=kind((split_k, TOKENS, PADDED)),
            scratch_types=(
                memory((steps, TOKENS, DEPTH)), memory((steps, PADDED, DEPTH)), memory((TOKENS, PADDED)),
                plgpu.Barrier(num_arrivals=2, num_barriers=steps),
            ),
            **options,
        )(plan.tiles_used, plan.tile_group, plan.tile_rows, ranks, x, a.reshape(SLOTS, width, -1))  # fmt: skip
        return plgpu.kernel(
            functools.partial(expand, plan.tile_m), kernel_name="lora_expand", grid=(projection.n // block_n,),
            out_type=kind(base.shape),
            scratch_types=(
                memory((split_k, TOKENS, RANK)), memory((TOKENS, TILES * RANK)), memory((TOKENS, TILES * RANK)),
                memory((2, TILES * RANK, block_n)), memory((TOKENS, block_n)),
                plgpu.Barrier(num_barriers=2), plgpu.Barrier(num_arrivals=TILES, num_barriers=2),
            ),
            **options,
        )(plan.tiles_used, plan.tile_group, plan.row_slot, h, b, base)  # fmt: skip

    return apply


def mosaic_gpu_launch(x, interpret=None):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(kernel, out_type=like, kernel_name="launch", interpret=interpret)(x)


# Measurements.

LAUNCH = {"pallas_triton": pallas_triton_launch, "jax_triton": jax_triton_launch, "mosaic_gpu": mosaic_gpu_launch}
MOSAIC_SETTINGS = [{"split_k": s, "block_n": n} for s, n in ((16, 128), (8, 128), (16, 64), (16, 256))]
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def candidates(form: str, projection: Projection) -> list[tuple[dict, object]]:
    """Return (settings, layer) of a form. The fastest is reported; the tiles of the first two are those of a table."""
    if form == "mosaic_gpu":
        return [(s, mosaic_gpu(projection, **s)) for s in MOSAIC_SETTINGS]
    return [({}, {"pallas_triton": pallas_triton, "jax_triton": jax_triton}[form](projection))]


class Check:
    """Random data of one projection, and the float64 results of a batch with and without rows that have no adapter."""

    def __init__(self, projection: Projection):
        rng, n = np.random.default_rng(0), len(projection.slices)
        self.a, self.b = random_layers(projection, RANK, 1)[0]
        self.x = jnp.asarray(rng.standard_normal((TOKENS, projection.k)), jnp.bfloat16)
        self.base = jnp.asarray(rng.standard_normal((TOKENS, projection.n)), jnp.bfloat16)
        ranks = np.stack([rng.integers(1, RANK + 1, (SLOTS, n)), rng.uniform(0.5, 2, (SLOTS, n))], -1)
        self.ranks, self.cases = jnp.asarray(ranks, jnp.float32), []
        inside = np.arange(RANK) < ranks[..., :1]
        a = np.where(inside, ranks[..., 1:], 0)[..., None] * np.asarray(self.a, np.float64)
        for mix in ("distinct", "half"):
            ids = group_ids(TOKENS, ADAPTERS, mix=mix)
            self.cases.append((ids, oracle.lora_delta(self.x, ids, a, self.b, projection.slices)))

    def error(self, apply) -> float:
        """Return the greatest error of a layer, relative to the norm of the delta; raise if it is too large."""

        @jax.jit
        def run(base, x, a, b, ids, ranks):
            return apply(base, x, a, b, make_plan(ids, num_groups=SLOTS, backend="triton"), ranks)

        errors = []
        for ids, delta in self.cases:
            for base in (self.base * 0, self.base):  # the second shows that base is added, and kept without an adapter
                got = run(base, self.x, self.a, self.b, jnp.asarray(ids), self.ranks)
                want = np.asarray(base, np.float64) + delta
                errors.append(float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)))
        if not max(errors) <= TOLERANCE:
            raise AssertionError(f"relative errors {errors}")
        return max(errors)


def compiled(run, args: tuple, options: dict | None = None):
    return run.lower(*args).compile(compiler_options=options)


def measure(row: dict, projection: Projection, layers: list, check: Check) -> None:
    """Add the figures of a form to its row, as they come, so that a later failure leaves the earlier ones."""
    ids = jnp.asarray(group_ids(TOKENS, ADAPTERS))
    ranks = jnp.tile(jnp.asarray([RANK, 1], jnp.float32), (SLOTS, len(projection.slices), 1))
    x = jax.random.normal(jax.random.key(1), (TOKENS, projection.k), jnp.bfloat16)

    def base():
        return jnp.ones((TOKENS, projection.n), jnp.bfloat16)

    def wall(apply, options=None):
        run = compiled(chain(apply), (base(), x, layers, ids, ranks), options)
        us, spread = wall_us(run, base(), x, layers, ids, ranks, calls=30)
        return us / len(layers), spread / len(layers)

    tried, failed = [], {}
    for settings, apply in candidates(row["form"], projection):
        try:
            tried.append((*wall(apply), settings, apply, check.error(apply)))
        except Exception as error:  # another setting may run
            failed[json.dumps(settings)] = repr(error)[:2000]
            traceback.print_exc()
    if not tried:
        raise RuntimeError(f"no settings run: {failed}")
    us, spread, settings, apply, error = min(tried, key=lambda t: t[0])
    row |= {"wall_us": us, "spread_us": spread, "error": error, "settings": settings, "failed_settings": failed}
    row["tried"] = [{**s, "wall_us": t} for t, _, s, *_ in tried]
    row["wall_without_graphs_us"] = wall(apply, NO_GRAPHS)[0]
    run, args = compiled(chain(apply, donate=False), (base(), x, layers, ids, ranks)), (base(), x, layers, ids, ranks)
    runs = [kernel_us(run, *args) for _ in range(3)]
    for name in ("shrink", "expand"):
        row[f"{name}_us"] = statistics.median(
            sum(us for kernel, us in kernels.items() if f"lora_{name}" in kernel) / len(layers) for kernels in runs
        )
    row["gap_us"] = us - row["shrink_us"] - row["expand_us"]
    row["kernels"] = sorted(runs[0])


def launches(form: str) -> dict:
    """Return the microseconds of a launch in a chain of dependent ones."""

    def run(x):
        for _ in range(LAUNCHES):
            x = LAUNCH[form](x)
        return x

    x, row = jnp.zeros(128, jnp.float32), {}
    for name, options in (("launch_us", None), ("launch_without_graphs_us", NO_GRAPHS)):
        program = compiled(jax.jit(run), (x,), options)
        if (got := float(program(x)[-1])) != LAUNCHES:
            raise AssertionError(f"{LAUNCHES} launches add {got}")
        row[name] = wall_us(program, x)[0] / LAUNCHES
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=list(LAUNCH), default=list(LAUNCH))
    parser.add_argument("--projections", nargs="+", choices=list(PROJECTIONS), default=["qkv", "gate_up"])
    parser.add_argument("--layers", type=int, default=64, help="layers in a chain")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    about = {**machine(), "layers": args.layers, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    packages = ("jaxlib", "triton", "jax-triton")
    about |= {d.name: d.version for d in importlib.metadata.distributions() if d.name in packages}
    print(about, flush=True)
    rows, prepared = [], {}
    for form, name in itertools.product(args.forms, (None, *args.projections)):
        row = {"form": form, "projection": name}
        try:
            if form in MISSING:
                row["failed"] = MISSING[form]
            elif name is None:
                row |= launches(form)
            else:
                projection = PROJECTIONS[name]
                if name not in prepared:
                    prepared[name] = random_layers(projection, RANK, args.layers), Check(projection)
                row["floor_us"] = floor_us(projection, RANK, TOKENS, ADAPTERS)
                measure(row, projection, *prepared[name])
        except Exception:  # the other forms are timed all the same
            traceback.print_exc()
            row["failed"] = traceback.format_exc()[-4000:]
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "kernels"}), flush=True)
        if args.out:
            write_rows(args.out, about, rows)


if __name__ == "__main__":
    main()
