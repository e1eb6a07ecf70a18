"""Lowering for an accelerator that this machine lacks, and the shared memory of compiled GPU kernels."""

import re
from contextlib import AbstractContextManager
from pathlib import Path

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def for_gpu(kind: str = "NVIDIA H200", cores: int = 132) -> AbstractContextManager[None]:
    """Make a GPU the target of lowering for CUDA inside the block.

    From 0.11 on, JAX reads which GPU a Triton kernel is lowered for; 0.10 assumes compute capability 9.0. The choice of
    tiles reads it in all versions.
    """
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lowered_text(run, args, platform: str) -> str:
    """The lowered program of `run(*args)` for "cpu", "cuda" or "tpu"."""
    if platform != "cuda":
        return jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    with for_gpu():
        return jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def shared_memory(lowered: jax.stages.Lowered, folder: Path) -> dict[str, int]:
    """Compile for a GPU and return the bytes of shared memory of each kernel, by name.

    A compiled program has no attribute for them. XLA lists its launches in a dump, "lora_shrink grid: [264, 1, 1]
    threads: [128, 1, 1]  shared_memory: 65536 bytes" (JAX 0.11.2).
    """
    lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True})
    (listing,) = folder.glob("*thunk_sequence.txt")
    return {name: int(size) for name, size in re.findall(r"(lora_\w+) .*?shared_memory: (\d+)", listing.read_text())}
