"""The least time of a projection's LoRA on this device: bytes over bandwidth, or operations over the matrix rate."""

from typing import NamedTuple

from benchmarks.specs import Projection


class Rates(NamedTuple):
    """What a device reaches.

    Attributes:
      bandwidth: Bytes/s of a large copy, counting bytes read and written.
      matrix: bfloat16 FLOP/s of an 8192³ product of random matrices.
    """

    bandwidth: float
    matrix: float


# By device_kind, as JAX and PyTorch give it. Those of the H200 are measured. The H100 has the same multiprocessors, and
# its bandwidth is taken as the same share of the specified one (3.35 of 4.8 TB/s).
RATES = {"NVIDIA H200": Rates(4.3e12, 790e12), "NVIDIA H100 80GB HBM3": Rates(3.0e12, 790e12)}


def least_us(moved: float, flops: float, kind: str | None = None) -> float | None:
    """Return the least microseconds of moving so many bytes and of so many operations, or None without rates.

    `kind` is the device_kind, that of JAX's first device by default.
    """
    if kind is None:
        import jax  # benchmarks.peers runs without JAX

        kind = jax.devices()[0].device_kind
    rates = RATES.get(kind)
    return None if rates is None else max(moved / rates.bandwidth, flops / rates.matrix) * 1e6


def floor_us(
    projection: Projection, rank: float, tokens: int, adapters: int, itemsize: int = 2, kind: str | None = None
) -> float | None:
    """Return the least microseconds of shrink then expand, or None without rates of the device.

    Each input is read once, each output is written once, and hidden values are free. The shrink reads x and A of the
    present adapters. The expand reads their B and the base output, and writes the output. The expand depends on the
    shrink, so the two times add. If ranks differ, `rank` is their mean over the adapters.
    """
    n = len(projection.slices)
    shrink_bytes = tokens * projection.k + adapters * n * rank * projection.k
    expand_bytes = adapters * rank * projection.n + 2 * tokens * projection.n
    shrink = least_us(shrink_bytes * itemsize, 2 * tokens * n * rank * projection.k, kind)
    expand = least_us(expand_bytes * itemsize, 2 * tokens * rank * projection.n, kind)
    return None if shrink is None or expand is None else shrink + expand
