"""The measured shapes of experts: the expert products of some models, and the routing of their tokens."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.roofline import least_us

PEERS = Path(__file__).with_name("peers_moe_h200.json")


@dataclass(frozen=True)
class Experts:
    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int


MODELS = {
    e.name: e
    for e in (
        Experts("qwen3-30b-a3b", 2048, 768, 128, 8),
        Experts("gpt-oss-20b", 2880, 2880, 32, 4),
        Experts("mixtral-8x7b", 4096, 14336, 8, 2),
    )
}
# Models for which nothing was tuned.
OTHER_MODELS = {
    e.name: e
    for e in (
        Experts("qwen3-235b", 4096, 1536, 128, 8),
        Experts("deepseek-lite", 2048, 1408, 64, 6),
        Experts("gpt-oss-120b", 2880, 2880, 128, 4),
        Experts("glm-4.5-air", 4096, 1408, 128, 8),
        Experts("qwen3-next", 2048, 512, 512, 10),
        Experts("phi-3.5-moe", 4096, 6400, 16, 2),
        Experts("mixtral-8x22b", 6144, 16384, 8, 2),
        Experts("deepseek-v3-shard", 7168, 2048, 128, 8),  # half of the experts
        Experts("olmoe", 2048, 1024, 64, 8),
        Experts("ernie-4.5-21b", 2560, 1536, 64, 6),
    )
}


def slots(adapters: int) -> int:
    return max(8, adapters)


class Batch(NamedTuple):
    """The experts [T, k] of every token, and the slot [T] of every token."""

    expert: np.ndarray
    slot: np.ndarray


def batch(e: Experts, tokens: int, adapters: int, seed: int = 0) -> Batch:
    """Return random routing.

    Up to 256 tokens, each token is a sequence of its own. Above, the tokens of an adapter are consecutive.
    """
    rng = np.random.default_rng(seed)
    expert = np.argsort(rng.random((tokens, e.experts)), axis=1)[:, : e.top_k]
    slot = rng.permutation(slots(adapters))[:adapters][np.arange(tokens) * adapters // tokens]
    if tokens <= 256:
        slot = rng.permutation(slot)
    return Batch(expert.astype(np.int32), slot.astype(np.int32))


def floor_us(e: Experts, rank: int, tokens: int, present: int, *, kind: str | None = None) -> float | None:
    """Return the least microseconds of both products' LoRA, or None without rates of the device.

    Each input is read once, each output is written once, and hidden values are free. `present` is the number of
    distinct (adapter, expert) pairs. The first product adds to [T * k, 2 I], the second to [T * k, H].
    """
    pairs, h, i = tokens * e.top_k, e.hidden, e.intermediate
    first = tokens * h + 2 * pairs * 2 * i
    second = pairs * i + 2 * pairs * h
    flops = 2 * pairs * rank * (2 * h + 2 * i + i + h)
    return least_us(factor_bytes(e, rank, present) + 2 * (first + second), flops, kind)


def factor_bytes(e: Experts, rank: int, present: int) -> int:
    """Return the bf16 bytes of A and B of both products for `present` distinct (adapter, expert) pairs."""
    return 2 * present * rank * (2 * e.hidden + 2 * e.intermediate + e.intermediate + e.hidden)


def peers() -> list[dict]:
    return json.loads(PEERS.read_text())["rows"]
