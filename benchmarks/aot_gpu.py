"""Compile the GPU kernels for an A100, L4, H200 and B200 without a GPU, over the shapes of `specs` and `moe_specs`.

    .ci/aot_gpu                                                       # installs the compiler, and compiles all shapes
    PYTHONPATH=.venv/cuda:. python -m benchmarks.aot_gpu [--gpus l4] [--ranks 16] [--tokens 64] [--out kernels.json]

The compiled program shows that XLA and ptxas accept each kernel, how many registers and how much shared memory it
takes, and that no register is spilled. It needs JAX's CUDA plugin and NVIDIA's compiler as wheels (jax-cuda12-plugin
and jax-cuda12-pjrt of JAX's own version, nvidia-cuda-nvcc-cu12) in a separate folder. Installed beside JAX, they would
make it search for a GPU at every start.
"""

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.moe_kernels import ALL_MODELS, random_layer, route
from benchmarks.moe_specs import MODELS, Batch, Experts
from benchmarks.specs import PROJECTIONS, RANKS, SLOTS, TOKENS
from benchmarks.timing import machine, write_rows
from jlora import ops
from jlora.layers.forward.few_rows import parts_and_stages, product_in_parts
from tests.pallas.lowering import for_gpu


@dataclass(frozen=True)
class Target:
    """A GPU that programs are compiled for, with figures of its data sheet and of CUDA's programming guide.

    Attributes:
      kind: `jax.Device.device_kind`.
      capability: Major and minor compute capability.
      cores: Multiprocessors.
      threads: Threads of a multiprocessor.
      shared: Bytes of shared memory of a block.
      bandwidth, memory: Of the device, bytes a second and bytes.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    threads: int
    shared: int
    bandwidth: int
    memory: int

    @property
    def arch(self) -> str:
        """Architecture in the spelling of ptxas."""
        return "sm_{}{}".format(*self.capability) + ("a" if self.capability >= (9, 0) else "")

    def config(self) -> str:
        """Return XLA's GpuTargetConfig."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared}
  shared_memory_per_core: {self.shared + 1024}
  core_count: {self.cores} fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: 41943040 clock_rate_ghz: 1.7 device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.kind}"
"""


TARGETS = {
    "a100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 163 << 10, 2_039_000_000_000, 80 << 30),
    "l4": Target("NVIDIA L4", (8, 9), 58, 1536, 99 << 10, 300_000_000_000, 24 << 30),
    "h200": Target("NVIDIA H200", (9, 0), 132, 2048, 227 << 10, 4_800_000_000_000, 141 << 30),
    "b200": Target("NVIDIA B200", (10, 0), 148, 2048, 227 << 10, 8_000_000_000_000, 180 << 30),
}
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
def _sharding(target: Target) -> SingleDeviceSharding:
    topology = topologies.get_topology_desc("", platform="cuda", target_config=target.config(), topology="1x1x1")
    return SingleDeviceSharding(topology.devices[0])


def kernels_of(target: Target, run: Callable, *args: jax.ShapeDtypeStruct | Batch) -> dict[str, dict[str, int]]:
    """Return {registers, spilled, shared_memory} of each LoRA kernel in `run(*args)`, the last two in bytes.

    Raises:
      RuntimeError: The compiler is missing, or it rejects the program, or a kernel exceeds the GPU's shared memory.
    """
    folder = compiler()
    if folder is None:
        raise RuntimeError("needs the wheels jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 on the path")
    jitted = jax.jit(run, in_shardings=_sharding(target), out_shardings=_sharding(target))
    with for_gpu(target.kind, target.cores):
        lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as dump:
        # XLA cannot time its own kernels without a GPU.
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": str(folder)}
        # JAX 0.11 writes the PTX only if its emitter is named. The dumps of all emitters would take 20 times as long.
        dumps = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "ptx"}
        lowered.compile(compiler_options={**options, **dumps})
        (listing,) = Path(dump).glob("*thunk_sequence.txt")
        shared = {name: int(size) for name, size in _LAUNCH.findall(listing.read_text())}
        found = {}
        for ptx in Path(dump).glob("*.ptx"):
            if ".entry" not in ptx.read_text():
                continue  # a module whose kernels are in separate files
            command = [folder / "bin" / "ptxas", "-v", f"-arch={target.arch}", ptx, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            for name, stores, loads, registers in _KERNEL.findall(said):
                if name in shared:
                    spilled = int(stores) + int(loads)
                    found[name] = {"registers": int(registers), "spilled": spilled, "shared_memory": shared[name]}
    if found.keys() != shared.keys():
        raise RuntimeError(f"launches are {sorted(shared)}, and ptxas compiled {sorted(found)}")
    if max(shared.values()) > target.shared:
        raise RuntimeError(
            f"a kernel takes {max(shared.values())} bytes of shared memory, and {target.kind} has {target.shared}"
        )
    return found


def compile_lora(
    target: Target, tokens: int, k: int, slices: tuple[int, ...], rank: int, *, dtype="bfloat16", gradients=False
) -> dict[str, dict[str, int]]:
    """Return `kernels_of` a base product with its LoRA, or of the LoRA's gradients."""
    n, columns = len(slices), sum(slices)
    shapes = {"x": (tokens, k), "w": (k, columns), "a": (SLOTS, n, rank, k), "b": (SLOTS, rank, columns)}
    floats = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes.values()]
    ids, ranks = jax.ShapeDtypeStruct((tokens,), jnp.int32), jax.ShapeDtypeStruct((SLOTS, n, 2), jnp.float32)

    def run(x, w, a, b, ids, ranks):
        plan = ops.make_plan(ids, num_groups=SLOTS, backend="triton")
        cut = parts_and_stages(tokens, k, columns)
        base = x @ w if cut is None else product_in_parts(x, w, parts=cut[0], stages=cut[1])
        lora = partial(ops.add_lora, base, plan=plan, slice_sizes=slices, ranks=ranks, backend="triton")
        return jax.vjp(lora, x, a, b)[1](base) if gradients else lora(x, a, b)

    return kernels_of(target, run, *floats, ids, ranks)


def compile_experts(target: Target, e: Experts, tokens: int, rank: int, *, slots: int = 8) -> dict[str, dict[str, int]]:
    """Return `kernels_of` the LoRA of both products of a block of experts."""
    h, i, groups, pairs = e.hidden, e.intermediate, slots * e.experts, tokens * e.top_k
    factors = jax.eval_shape(partial(random_layer, e=e, groups=groups, rank=rank, layers=1), jax.random.key(0))
    shapes = [(tokens, h), (pairs, i), (pairs, 2 * i), (pairs, h)]
    floats = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    routing = Batch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens, e.top_k), (tokens,))))
    ranks = jax.ShapeDtypeStruct((groups, 2, 2), jnp.float32)

    def run(ranks, routing, x, act, base, pairs_base, a13, b13, a2, b2):
        plan, token, _ = route(routing, e, slots, "triton")
        first = {"slice_sizes": (i, i), "ranks": ranks, "x_rows": token, "backend": "triton"}
        second = {"ranks": ranks[:, :1], "backend": "triton"}
        return (
            ops.add_lora(base, x, a13, b13, plan, **first),
            ops.add_lora(pairs_base, act, a2, b2, plan, **second),
        )

    return kernels_of(target, run, ranks, routing, *floats, *factors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", choices=sorted(TARGETS), default=list(TARGETS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--projections", nargs="*", choices=sorted(PROJECTIONS), default=sorted(PROJECTIONS))
    parser.add_argument("--models", nargs="*", choices=sorted(ALL_MODELS), default=sorted(MODELS), help="of experts")
    parser.add_argument("--gradients", action="store_true", help="compile the gradients of the projections' LoRA")
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()
    if compiler() is None:
        parser.error("JAX's CUDA plugin or NVIDIA's compiler is not on the path; `.ci/aot_gpu` brings both")
    rows = []
    for gpu, rank, tokens, name in itertools.product(
        args.gpus, args.ranks, args.tokens, (*args.projections, *args.models)
    ):
        target, row = TARGETS[gpu], {"gpu": gpu, "rank": rank, "tokens": tokens}
        if name in PROJECTIONS:
            p = PROJECTIONS[name]
            with for_gpu(target.kind, target.cores):
                row |= {"projection": name, "product": parts_and_stages(tokens, p.k, p.n) is not None}
            row["kernels"] = compile_lora(target, tokens, p.k, p.slices, rank, gradients=args.gradients)
        else:
            row |= {"experts": name, "kernels": compile_experts(target, ALL_MODELS[name], tokens, rank)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    bad = [row for row in rows if any(kernel["spilled"] for kernel in row["kernels"].values())]
    print(f"{len(rows)} programs compiled for {', '.join(args.gpus)}, {len(bad)} with spilled registers")
    if args.out is not None:
        write_rows(args.out, {**machine(), "compiled_for": [TARGETS[gpu].kind for gpu in args.gpus]}, rows)


if __name__ == "__main__":
    main()
