"""Compile the TPU kernel for real chips without a chip, over the shapes of `specs` or of `moe_specs`.

    JAX_PLATFORMS=cpu python -m benchmarks.aot_tpu [--chips v5e tpu7x] [--out benchmarks/results/aot_tpu.json]
    JAX_PLATFORMS=cpu python -m benchmarks.aot_tpu --experts [--out benchmarks/results/aot_tpu_moe.json]

The compiled program shows that Mosaic accepts the kernel, how much VMEM it takes, that the base output is written in
place, and that only the kernel moves the weights of slots. Needs the `libtpu` wheel (group `test`).

The second command compiles two expert layers of each model with 64 slots for all its experts, allocated as by a manager
(one layer if two do not fit the chip's memory). A layer is plan, w1 and w3, activation, w2 and the sums over experts.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.metadata import version
from typing import NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu is only the compiler, without a machine
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.moe_specs import MODELS, Experts
from benchmarks.specs import PROJECTIONS, RANKS, SLOTS, TOKENS
from jlora import ops
from jlora.pallas import gpus
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.plan import make_plan

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
VMEM_MIB = {"v5e": 128, "v5p": 128, "v6e": 128, "tpu7x": 64}
HBM_GIB = {"v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}  # of one device; a tpu7x chip has two
MOE_RANKS, MOE_TOKENS = (16, 64), (64, 2048)


@lru_cache
def sharding_of(chip: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(topologies.get_topology_desc(CHIPS[chip], platform="tpu").devices[0])


def compile_add_lora(
    chip: str, tokens: int, k: int, slices: tuple[int, ...], rank: int, *, dtype="bfloat16", groups=SLOTS,
    row_scales: bool = False, int8: bool = False,
):  # fmt: skip
    """Compile one `add_lora` with a given plan, and return properties of the program. With `int8`, a and b are int8.

    Returns:
      dict: vmem_bytes, the VMEM of the kernel; temp_bytes, the HBM of the whole program; in_place, True if the result
        takes the place of the base output; weights_in_place, True if a and b are operands of the kernel without a copy;
        tile_m, tile_k, tile_n, bundle.
    """
    n, columns = len(slices), sum(slices)

    def f(base, x, a, b, ranks, row_scales, plan):
        return mosaic_tpu.add_lora(base, x, a, b, plan.scaled(row_scales), slice_sizes=slices, ranks=ranks)

    operand = partial(operand_of, chip)
    shapes = [(tokens, columns), (tokens, k), (groups, n, rank, k), (groups, rank, columns)]
    dtypes = [dtype] * 2 + ["int8" if int8 else dtype] * 2
    arrays = [operand(shape, each) for shape, each in zip(shapes, dtypes, strict=True)]
    plan = jax.eval_shape(partial(make_plan, num_groups=groups, backend="mosaic_tpu"), operand((tokens,), "int32"))
    plan = jax.tree.map(lambda leaf: operand(leaf.shape, leaf.dtype), plan)
    scales = (
        operand((groups, n, 1 + (rank if int8 else 1)), "float32"),
        operand((tokens,), "float32") if row_scales else None,
    )
    program = jax.jit(f, donate_argnums=0).lower(*arrays, *scales, plan).compile()
    (kernel,), given = _kernels(program.as_text())
    sizes = mosaic_tpu._sizes(*arrays, slices)
    return {
        "vmem_bytes": kernel.vmem_bytes,
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "in_place": kernel.aliases and kernel.base == given[0],
        "weights_in_place": (kernel.a, kernel.b) == (given[2], given[3]),
        **{name: getattr(sizes, name) for name in ("tile_m", "tile_k", "tile_n", "bundle")},
    }


def compile_experts(
    chip: str, model: Experts, tokens: int, rank: int, *, layers: int = 2, slots: int = SLOTS, int8=False
):
    """Compile the LoRA of a model's expert layers, and return properties of the program.

    A layer is plan, w1 and w3, activation, w2 and sums; its base products are operands. "auto" must choose the kernels,
    so the caller patches the platform to "tpu".

    Returns:
      dict: kernels, their number in the program; vmem_bytes, the VMEM of the largest; temp_bytes and argument_bytes,
        the HBM of the whole program; weights_in_place, True if every a and b is an operand of its kernel without a
        copy.
    """
    e, pairs = model, tokens * model.top_k
    operand = partial(operand_of, chip)

    def f(weights, slot, expert, bases, x):
        flat = expert.ravel()
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        token = order // e.top_k
        plan = ops.plan_experts(slot, token, flat[order], num_slots=slots, num_experts=e.experts)
        for slot_arrays, (base13, base2) in zip(weights, bases, strict=True):
            a13, b13, ranks13, a2, b2, ranks2 = (array.reshape(-1, *array.shape[2:]) for array in slot_arrays)
            sizes = (e.intermediate, e.intermediate)
            up = ops.add_lora(base13, x, a13, b13, plan, slice_sizes=sizes, ranks=ranks13, x_rows=token)
            hidden = jax.nn.silu(up[:, : e.intermediate]) * up[:, e.intermediate :]
            y = ops.add_lora(base2, hidden, a2, b2, plan, ranks=ranks2)
            x = jnp.zeros_like(x).at[token].add(y)
        return x

    # Slots and experts are separate axes, as in a layer, because XLA chooses the layout of an argument by its shape.
    r, h, i = rank, e.hidden, e.intermediate
    factor, scales = ("int8", r) if int8 else ("bfloat16", 1)
    shapes = [(2, r, h), (r, 2 * i), (2, 1 + scales), (1, r, i), (r, h), (1, 1 + scales)]
    dtypes = [factor, factor, "float32"] * 2
    weights = [operand((slots, e.experts, *s), dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
    bases = [operand((pairs, 2 * i), "bfloat16"), operand((pairs, h), "bfloat16")]
    ids = operand((tokens,), "int32"), operand((tokens, e.top_k), "int32")
    program = jax.jit(f).lower([weights] * layers, *ids, [bases] * layers, operand((tokens, h), "bfloat16")).compile()
    kernels, given = _kernels(program.as_text())
    memory = program.memory_analysis()
    own = [(given[6 * layer + i], given[6 * layer + i + 1]) for layer in range(layers) for i in (0, 3)]
    return {
        "kernels": len(kernels),
        "vmem_bytes": max(kernel.vmem_bytes for kernel in kernels),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "weights_in_place": [(kernel.a, kernel.b) for kernel in kernels] == own,
    }


def operand_of(chip: str, shape, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding_of(chip))


class Kernel(NamedTuple):
    """A kernel of a compiled program: the names of its operands, and whether its result aliases the base output."""

    a: str
    b: str
    base: str
    aliases: bool
    vmem_bytes: int


def _kernels(text: str) -> tuple[list[Kernel], dict[int, str]]:
    """Return the kernels in the text of a program, in order, and the names of the program's arguments.

    An operand that is a bitcast of another array has that array's name.
    """
    same = dict(re.findall(r"%([\w.-]+) = \S+ bitcast\(%([\w.-]+)\)", text))

    def source(name: str) -> str:
        return source(same[name]) if name in same else name

    kernels = []
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            operands = re.findall(r"%([\w.-]+)", re.search(r"custom-call\(([^)]*)\)", line)[1])
            a, b, _, base = map(source, operands[-4:])
            used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', line)
            kernels.append(Kernel(a, b, base, "output_to_operand_aliasing" in line, int(used[1])))
    entry = re.findall(r"%([\w.-]+) = [^=]* parameter\((\d+)\)", text[text.index("\nENTRY") :])
    return kernels, {int(number): name for name, number in entry}


def experts_layers(chip: str, model: Experts, rank: int, *, slots: int = SLOTS) -> int:
    """Return two, or one if the factors of two layers would take more than most of the chip's memory."""
    e = model
    a_layer = 2 * slots * e.experts * rank * (2 * e.hidden + 2 * e.intermediate + e.intermediate + e.hidden)
    return 2 if 2 * a_layer < 0.9 * HBM_GIB[chip] * 2**30 else 1


def _dense(chips: list[str]) -> Iterator[tuple[dict, Callable[[], dict]]]:
    for chip in chips:
        for name, p in PROJECTIONS.items():
            for rank in RANKS:
                for tokens in TOKENS:
                    row = {"chip": chip, "projection": name, "rank": rank, "tokens": tokens}
                    yield row, partial(compile_add_lora, chip, tokens, p.k, p.slices, rank)


def _experts(chips: list[str]) -> Iterator[tuple[dict, Callable[[], dict]]]:
    gpus.platform = lambda: "tpu"  # "auto" then chooses as on a TPU
    for chip in chips:
        for name, model in MODELS.items():
            for rank in MOE_RANKS:
                for tokens in MOE_TOKENS:
                    layers = experts_layers(chip, model, rank)
                    row = {
                        "chip": chip,
                        "model": name,
                        "rank": rank,
                        "tokens": tokens,
                        "slots": SLOTS,
                        "layers": layers,
                    }
                    yield row, partial(compile_experts, chip, model, tokens, rank, layers=layers)


def fits(row: dict) -> bool:
    """Return True if a compiled program fits the chip's memories."""
    used = row.get("temp_bytes", 0) + row.get("argument_bytes", 0)
    return used <= HBM_GIB[row["chip"]] << 30 and 0 < row["vmem_bytes"] <= VMEM_MIB[row["chip"]] << 20


def good(row: dict) -> bool:
    """Return True if the program fits, and only the kernel moves the base output and the weights of slots."""
    placed = row["kernels"] == 2 * row["layers"] if "kernels" in row else row["in_place"]
    return fits(row) and placed and row["weights_in_place"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows, failed = [], 0
    for row, compiled in (_experts if args.experts else _dense)(args.chips):
        start = time.perf_counter()
        row |= compiled()
        row["fits"] = fits(row)
        row["compile_s"] = round(time.perf_counter() - start, 2)
        failed += not good(row)
        rows.append(row)
        print(json.dumps(row), flush=True)
    versions = {package: version(package) for package in ("jax", "jaxlib", "libtpu")}
    with open(args.out or f"benchmarks/results/aot_tpu{'_moe' * args.experts}.json", "w") as file:
        file.write('{"versions": ' + json.dumps(versions) + ', "rows": [\n')
        file.write(",\n".join(json.dumps(row) for row in rows) + "\n]}\n")
    print(f"{len(rows)} programs compiled, {failed} outside their limits")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
