"""Every private or undocumented name of JAX that we use, once, with the versions in which it was seen to hold.

JAX is imported inside the functions: parts of jlora that must not load it may import this module.
"""

from typing import Any


def default_device() -> Any:
    """What `jax.default_device(...)` set: a device, the name of a platform, or None.

    The setting is documented, its attribute of `jax.config` is not: JAX 0.10.0 to 0.11.2.
    """
    import jax

    return getattr(jax.config, "jax_default_device", None)


def abstract_device() -> tuple[str, str] | None:
    """(platform, device kind) that a program is being lowered for under `use_abstract_mesh`, or None.

    `AbstractMesh.abstract_device`, undocumented: JAX 0.10.0 to 0.11.2. JAX 0.11 lowers Triton kernels for the GPU that
    it names where the machine has none; 0.10 takes compute capability 9.0 there and does not ask.
    """
    import jax

    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if device is None else (device.platform, device.device_kind)


def gpu_shared_memory(device: object) -> int | None:
    """Bytes of shared memory that one block of a CUDA device may ask for, or None where the device does not say.

    An attribute of PJRT's CUDA devices, undocumented: jaxlib 0.10.2 and 0.11.2.
    """
    found: Any = getattr(device, "shared_memory_per_block_optin", None)
    return found if isinstance(found, int) and found > 0 else None


def gpu_compute_capability(device: object) -> int | None:
    """90 for compute capability 9.0; 0 for a GPU that is not NVIDIA's; None where the device does not say.

    An attribute of PJRT's GPU devices, "9.0" or "gfx942", undocumented: jaxlib 0.10.2 and 0.11.2.
    """
    found: Any = getattr(device, "compute_capability", None)
    if not isinstance(found, str):
        return None
    major, _, minor = found.partition(".")
    return int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else 0
