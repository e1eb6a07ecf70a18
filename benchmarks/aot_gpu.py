"""Compile the GPU kernels for an H200 without a GPU, over the shapes of `specs` and of the tuned table.

    make aot-gpu                                                      # installs the compiler, and compiles all shapes
    PYTHONPATH=.venv/cuda:. python -m benchmarks.aot_gpu [--ranks 16] [--tokens 64] [--out kernels.json]

The compiled program shows that XLA and ptxas accept each kernel, how many registers and how much shared memory it
takes, and that no register is spilled. It needs JAX's CUDA plugin and NVIDIA's compiler as wheels (jax-cuda12-plugin
and jax-cuda12-pjrt of JAX's own version, nvidia-cuda-nvcc-cu12) in a separate folder. Installed beside JAX, they would
make it search for a GPU at every start.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.specs import PROJECTIONS, RANKS, SLOTS, TOKENS
from benchmarks.timing import machine, write_rows
from jlora.pallas.plan import make_plan
from jlora.pallas.tables import product_tiles
from jlora.pallas.tiles import ProductTiles
from jlora.pallas.triton import lora as triton
from jlora.pallas.triton import product as triton_product
from tests.pallas.lowering import for_h200

# The properties of a device that XLA reads (its GpuTargetConfig), from NVIDIA's data sheet and CUDA's programming guide
# for capability 9.0.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  core_count: 132 fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150754820096
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H200"
"""
# XLA's list of launches: "lora_shrink grid: [264, 1, 1] threads: [128, 1, 1]  shared_memory: 65536 bytes".
_LAUNCH = re.compile(r"(lora_\w+) .*?shared_memory: (\d+)")
_KERNEL = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)


def compiler() -> Path | None:
    """Return the folder of NVIDIA's compiler, or None if it or JAX's plugin is missing."""
    found = [importlib.util.find_spec(name) for name in ("nvidia.cuda_nvcc", "jax_plugins.xla_cuda12")]
    if None in found or found[0].submodule_search_locations is None:
        return None
    return Path(next(iter(found[0].submodule_search_locations)))


@cache
def _sharding() -> SingleDeviceSharding:
    topology = topologies.get_topology_desc("", platform="cuda", target_config=TARGET, topology="1x1x1")
    return SingleDeviceSharding(topology.devices[0])


def kernels_of(run: Callable, *args: jax.ShapeDtypeStruct) -> dict[str, dict[str, int]]:
    """Return {registers, spilled, shared_memory} of each LoRA kernel in `run(*args)`, the last two in bytes.

    Raises:
      RuntimeError: The compiler is missing, or it rejects the program.
    """
    folder = compiler()
    if folder is None:
        raise RuntimeError("needs the wheels jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 on the path")
    jitted = jax.jit(run, in_shardings=_sharding(), out_shardings=_sharding())
    with for_h200():
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as dump:
        # XLA cannot time its own kernels without a GPU.
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": str(folder)}
        # The emitters' dumps include the PTX. JAX 0.11 writes them only for the emitters that are named.
        dumps = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": ".*"}
        lowered.compile(compiler_options={**options, **dumps})
        (listing,) = Path(dump).glob("*thunk_sequence.txt")
        shared = {name: int(size) for name, size in _LAUNCH.findall(listing.read_text())}
        found = {}
        for ptx in Path(dump).glob("*.ptx"):
            if ".entry" not in ptx.read_text():
                continue  # a module whose kernels are in separate files
            command = [folder / "bin" / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            for name, stores, loads, registers in _KERNEL.findall(said):
                if name in shared:
                    spilled = int(stores) + int(loads)
                    found[name] = {"registers": int(registers), "spilled": spilled, "shared_memory": shared[name]}
    if found.keys() != shared.keys():
        raise RuntimeError(f"launches are {sorted(shared)}, and ptxas told of {sorted(found)}")
    return found


def compile_lora(
    tokens: int, k: int, slices: tuple[int, ...], rank: int, *, tiles: ProductTiles | None = None, dtype="bfloat16"
) -> dict[str, dict[str, int]]:
    """Return `kernels_of` an `add_lora` with its chosen tiles, or of a `linear_lora` with `tiles`."""
    n, columns = len(slices), sum(slices)
    shapes = {
        "base": (tokens, columns),
        "x": (tokens, k),
        "w": (k, columns),
        "a": (SLOTS, n, rank, k),
        "b": (SLOTS, rank, columns),
    }
    floats = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes.values()]
    ids, ranks = jax.ShapeDtypeStruct((tokens,), jnp.int32), jax.ShapeDtypeStruct((SLOTS, n, 2), jnp.float32)

    def run(base, x, w, a, b, ids, ranks):
        plan = make_plan(ids, num_groups=SLOTS, backend="triton")
        if tiles is None:
            return triton.add_lora(base, x, a, b, plan, slice_sizes=slices, ranks=ranks)
        return triton_product.linear_lora(x, w, a, b, plan, slice_sizes=slices, ranks=ranks, tiles=tiles)

    return kernels_of(run, *floats, ids, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--projections", nargs="+", choices=sorted(PROJECTIONS), default=sorted(PROJECTIONS))
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    if compiler() is None:
        parser.error("JAX's CUDA plugin or NVIDIA's compiler is not on the path; `make aot-gpu` brings both")
    rows = []
    for rank in args.ranks:
        for name in args.projections:
            p = PROJECTIONS[name]
            for tokens in args.tokens:
                like = [
                    jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, p.k), (1, 1, rank, p.k), (1, rank, p.n))
                ]
                together = product_tiles(triton.sizes_of(tokens, *like, len(p.slices)))
                for tiles in (None, together) if together else (None,):
                    row = {"projection": name, "rank": rank, "tokens": tokens, "product": tiles is not None}
                    row["kernels"] = compile_lora(tokens, p.k, p.slices, rank, tiles=tiles)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    bad = [row for row in rows if any(kernel["spilled"] for kernel in row["kernels"].values())]
    print(f"{len(rows)} programs compiled for an H200, {len(bad)} with spilled registers")
    if args.out is not None:
        write_rows(args.out, {**machine(), "compiled_for": "NVIDIA H200"}, rows)


if __name__ == "__main__":
    main()
