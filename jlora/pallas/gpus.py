"""The GPU that a program is compiled for, and its properties that the choice of tiles depends on."""

import functools
import logging
import re
from dataclasses import dataclass

import jax

from jlora._compat import (
    abstract_device,
    default_device,
    gpu_compute_capability,
    gpu_cores,
    gpu_shared_memory,
    triton_gap,
)
from jlora._typing import Backend


@dataclass(frozen=True)
class GPU:
    """A kind of GPU.

    Attributes:
      kind: `jax.Device.device_kind`, normalised, for example "nvidia_h200".
      shared_memory: Bytes of shared memory that one program of a kernel may use.
      capability: Compute capability, 90 for 9.0. 0 for a GPU of another vendor than NVIDIA, None if unknown.
      multiprocessors: Number of multiprocessors; that of an H200 if unknown.
    """

    kind: str
    shared_memory: int
    capability: int | None = None
    multiprocessors: int = 132


MIN_CAPABILITY = 80  # required by Triton's compiler
H200 = GPU("nvidia_h200", 227 << 10, 90)

# Compute capability -> KiB of shared memory of a block (CUDA programming guide, "Compute Capabilities").
_SHARED_KIB = {
    70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99,
}  # fmt: skip
_LEAST_SHARED = 99 << 10  # least shared memory of all NVIDIA GPUs since Ampere
# For programs that are lowered on a machine without such a device. "nvidia_a100" covers "nvidia_a100_sxm4_40gb".
_CAPABILITY = {
    "nvidia_a100": 80, "nvidia_a30": 80, "nvidia_a10": 86, "nvidia_a10g": 86, "nvidia_a40": 86, "nvidia_a16": 86,
    "nvidia_l4": 89, "nvidia_l40": 89, "nvidia_l40s": 89, "nvidia_geforce_rtx_4090": 89, "nvidia_h100": 90,
    "nvidia_h200": 90, "nvidia_gh200": 90, "nvidia_b200": 100, "nvidia_gb200": 100, "nvidia_b300": 103,
    "nvidia_gb300": 103, "nvidia_gb10": 121, "nvidia_thor": 110, "nvidia_rtx_pro": 120, "tesla_t4": 75,
    "tesla_v100": 70,
}  # fmt: skip


def platform() -> str:
    """Return the platform of uncommitted computations: "cpu", "gpu" or "tpu"."""
    device = default_device()
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def own_backend() -> Backend:
    """Return the backend that "auto" prefers on this platform; "xla" on a GPU if JAX has no Triton lowering."""
    where = platform()
    if where not in ("gpu", "cuda"):
        return "mosaic_tpu" if where == "tpu" else "xla"
    if (gap := triton_gap()) is None:
        return "triton"
    tell_once(f"backend 'auto' takes 'xla' for all layers: 'triton' {gap}")
    return "xla"


@functools.cache
def tell_once(message: str) -> None:
    """Log a warning about a slower path, once for each message (the reason and the shapes)."""
    logging.getLogger("jlora").warning(message)


def device_kind(name: str) -> str:
    """Return `jax.Device.device_kind` normalised: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def shorter_kinds(kind: str) -> list[str]:
    """Return the kind and its prefixes, longest first, because variants of a chip share its properties.

    "nvidia_h200_nvl" -> ["nvidia_h200_nvl", "nvidia_h200", "nvidia"].
    """
    words = kind.split("_")
    return ["_".join(words[:end]) for end in range(len(words), 0, -1)]


def current_gpu() -> GPU:
    """Return the GPU that a program traced now is compiled for.

    It is the abstract device set by the caller (`jax.sharding.use_abstract_mesh`), else the default device. If neither
    is a GPU, it is an H200.
    """
    local = _local_gpu()
    target = abstract_device()
    if target is not None and target[0] in ("gpu", "cuda", "rocm"):
        kind = device_kind(target[1])
        return local if local is not None and local.kind == kind else _described(kind, target[0], target[2])
    return H200 if local is None else local


def _local_gpu() -> GPU | None:
    if platform() not in ("gpu", "cuda", "rocm"):
        return None
    device = default_device()
    if device is None or isinstance(device, str):
        device = jax.local_devices(backend="gpu")[0]
    kind = device_kind(device.device_kind)
    described = _described(kind, device.platform)
    capability = gpu_compute_capability(device)
    shared = gpu_shared_memory(device)
    if shared is None:
        shared = _shared_bytes(capability) if capability else described.shared_memory
    cores = gpu_cores(device) or described.multiprocessors
    return GPU(kind, shared, described.capability if capability is None else capability, cores)


def _described(kind: str, where: str, cores: int | None = None) -> GPU:
    """Return the GPU that is known by the name of its kind, with `cores` multiprocessors if that number is known."""
    cores = cores or GPU.multiprocessors
    if where == "rocm" or kind.startswith(("gfx", "amd")):
        return GPU(kind, 64 << 10, 0, cores)
    capability = next((_CAPABILITY[name] for name in shorter_kinds(kind) if name in _CAPABILITY), None)
    return GPU(kind, _LEAST_SHARED if capability is None else _shared_bytes(capability), capability, cores)


def _shared_bytes(capability: int) -> int:
    return _SHARED_KIB[capability] << 10 if capability in _SHARED_KIB else _LEAST_SHARED
