"""The least time of a projection's LoRA on one H200: bytes over bandwidth, or operations over the matrix rate."""

from benchmarks.specs import Projection

BANDWIDTH = 4.3e12  # bytes/s of a large copy on the device, counting bytes read and written
MATRIX_RATE = 790e12  # bfloat16 FLOP/s of an 8192³ product of random matrices


def floor_us(projection: Projection, rank: float, tokens: int, adapters: int, itemsize: int = 2) -> float:
    """Return the least microseconds of shrink then expand.

    Each input is read once, each output is written once, and hidden values are free. The shrink reads x and A of the
    present adapters. The expand reads their B and the base output, and writes the output. The expand depends on the
    shrink, so the two times add. If ranks differ, `rank` is their mean over the adapters.
    """
    n = len(projection.slices)
    shrink_bytes = tokens * projection.k + adapters * n * rank * projection.k
    expand_bytes = adapters * rank * projection.n + 2 * tokens * projection.n
    shrink = max(shrink_bytes * itemsize / BANDWIDTH, 2 * tokens * n * rank * projection.k / MATRIX_RATE)
    expand = max(expand_bytes * itemsize / BANDWIDTH, 2 * tokens * rank * projection.n / MATRIX_RATE)
    return (shrink + expand) * 1e6
