"""The least time a projection's LoRA can take on one H200: bytes over bandwidth, or operations over the matrix rate."""

from benchmarks.specs import Projection

BANDWIDTH = 4.3e12  # bytes/s, a large copy on the device, read and written bytes counted
MATRIX_RATE = 790e12  # bfloat16 FLOP/s, an 8192³ product of random matrices


def floor_us(projection: Projection, rank: float, tokens: int, adapters: int, itemsize: int = 2) -> float:
    """Microseconds of shrink then expand, each input read once, each output written once, the hidden values free.

    The shrink reads x and the present adapters' A; the expand reads their B and the base output, and writes that again.
    One depends on the other, so the two times add. Where ranks differ, `rank` is their mean over the adapters.
    """
    n = len(projection.slices)
    shrink_bytes = tokens * projection.k + adapters * n * rank * projection.k
    expand_bytes = adapters * rank * projection.n + 2 * tokens * projection.n
    shrink = max(shrink_bytes * itemsize / BANDWIDTH, 2 * tokens * n * rank * projection.k / MATRIX_RATE)
    expand = max(expand_bytes * itemsize / BANDWIDTH, 2 * tokens * rank * projection.n / MATRIX_RATE)
    return (shrink + expand) * 1e6
