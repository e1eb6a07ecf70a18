"""Compiles the TPU kernel for real chips, with no chip in the box, over the shapes of `specs`.

    JAX_PLATFORMS=cpu python -m benchmarks.aot_tpu [--chips v5e tpu7x] [--out benchmarks/results/aot_tpu.json]

What it proves is in the compiled program: that Mosaic accepts the kernel, how much VMEM it takes, that the base output
is written in place, and that no slot's weights are moved but by the kernel. Needs the `libtpu` wheel (extra `test`).
"""

import argparse
import json
import os
import re
import sys
import time
from functools import lru_cache, partial
from importlib.metadata import version

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu is used as a compiler: there is no machine to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.specs import PROJECTIONS, RANKS, SLOTS, TOKENS
from jlora.pallas import mosaic_tpu
from jlora.pallas.plan import make_plan

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
VMEM_MIB = {"v5e": 128, "v5p": 128, "v6e": 128, "tpu7x": 64}


@lru_cache
def _sharding(chip: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(topologies.get_topology_desc(CHIPS[chip], platform="tpu").devices[0])


def compile_add_lora(
    chip: str, tokens: int, k: int, slices: tuple[int, ...], rank: int, *, dtype="bfloat16", groups=SLOTS
):
    """What the compiled program of one `add_lora`, given a plan, says of itself.

    Returns:
      dict: vmem_bytes the kernel takes; temp_bytes of HBM for the whole program; in_place: the result takes the base
      output's place; weights_in_place: a and b go to the kernel as they are; tile_m, tile_k, tile_n, bundle.
    """
    n, columns = len(slices), sum(slices)

    def f(base, x, a, b, ranks, plan):
        return mosaic_tpu.add_lora(base, x, a, b, plan, slice_sizes=slices, ranks=ranks)

    def operand(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=_sharding(chip))

    shapes = [(tokens, columns), (tokens, k), (groups, n, rank, k), (groups, rank, columns)]
    arrays = [operand(shape, dtype) for shape in shapes]
    plan = jax.eval_shape(partial(make_plan, num_groups=groups, backend="mosaic_tpu"), operand((tokens,), "int32"))
    plan = jax.tree.map(lambda leaf: operand(leaf.shape, leaf.dtype), plan)
    program = jax.jit(f, donate_argnums=0).lower(*arrays, operand((groups, n), "int32"), plan).compile()
    text = program.as_text()
    (kernel,) = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    a, b, _, base = re.findall(r"%([\w.-]+)", re.search(r"custom-call\(([^)]*)\)", kernel)[1])[-4:]
    entry = re.findall(r"%([\w.-]+) = [^=]* parameter\((\d+)\)", text[text.index("\nENTRY") :])
    given = {int(number): name for name, number in entry}  # f's arguments, in order
    used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', kernel)
    sizes = mosaic_tpu._sizes(*arrays, slices)
    return {
        "vmem_bytes": int(used[1]),
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "in_place": "output_to_operand_aliasing" in kernel and base == given[0],
        "weights_in_place": (a, b) == (given[2], given[3]),
        **{name: getattr(sizes, name) for name in ("tile_m", "tile_k", "tile_n", "bundle")},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--out", default="benchmarks/results/aot_tpu.json")
    args = parser.parse_args()
    rows, failed = [], 0
    for chip in args.chips:
        for name, p in PROJECTIONS.items():
            for rank in RANKS:
                for tokens in TOKENS:
                    start = time.perf_counter()
                    row = {"chip": chip, "projection": name, "rank": rank, "tokens": tokens}
                    row |= compile_add_lora(chip, tokens, p.k, p.slices, rank)
                    row["fits"] = row["vmem_bytes"] <= VMEM_MIB[chip] << 20
                    row["compile_s"] = round(time.perf_counter() - start, 2)
                    failed += not (row["fits"] and row["in_place"] and row["weights_in_place"])
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    versions = {package: version(package) for package in ("jax", "jaxlib", "libtpu")}
    with open(args.out, "w") as file:
        file.write('{"versions": ' + json.dumps(versions) + ', "rows": [\n')
        file.write(",\n".join(json.dumps(row) for row in rows) + "\n]}\n")
    print(f"{len(rows)} programs compiled, {failed} outside their limits")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
