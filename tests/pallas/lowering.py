"""Lowering for an accelerator that this machine lacks."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

# JAX 0.11 asks which GPU a Triton kernel is lowered for; 0.10 did not.
_H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")


def lowered_text(run, args, platform: str) -> str:
    """The lowered program of `run(*args)` for "cpu", "cuda" or "tpu"."""
    if platform != "cuda":
        return jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=_H200)):
        return jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
