"""The shapes that are measured: projections of Llama-3-8B, ranks, tokens, adapters and mixes. No timing here."""

from dataclasses import dataclass

import numpy as np

SLOTS = 64
RANKS = (8, 16, 64, 128)
TOKENS = (1, 8, 32, 64, 256, 2048, 8192)
ADAPTERS = (1, 8, 32, 64)
MIXES = ("distinct", "zipf", "half", "ranks")


@dataclass(frozen=True)
class Projection:
    name: str
    k: int
    slices: tuple[int, ...]

    @property
    def n(self) -> int:
        return sum(self.slices)


PROJECTIONS = {
    p.name: p
    for p in (
        Projection("qkv", 4096, (4096, 1024, 1024)),
        Projection("o", 4096, (4096,)),
        Projection("gate_up", 4096, (14336, 14336)),
        Projection("down", 14336, (4096,)),
    )
}


def group_ids(tokens: int, adapters: int, slots: int = SLOTS, mix: str = "distinct", seed: int = 0) -> np.ndarray:
    """int32 [tokens] slot of every row.

    "distinct": every adapter has as many rows as any other. "zipf": the i-th adapter's share goes as 1 / i, each has at
    least one row. "half": as distinct, then every other row without an adapter. "ranks": as distinct; see `ranks`. Up
    to 256 tokens each row is a sequence of its own, in random order; above, rows of an adapter stand together, as in a
    prefill.
    """
    rng = np.random.default_rng(seed)
    slot = rng.permutation(slots)[:adapters]
    if mix == "zipf":
        share = 1 / np.arange(1, adapters + 1)
        extra = rng.choice(slot, size=tokens - adapters, p=share / share.sum())
        ids = np.sort(np.concatenate([slot, extra]))
    elif mix in ("distinct", "half", "ranks"):
        ids = slot[np.arange(tokens) * adapters // tokens]
    else:
        raise ValueError(f"unknown mix {mix!r}; one of {MIXES}")
    if tokens <= 256:
        ids = rng.permutation(ids)
    if mix == "half":
        ids = np.where(np.arange(tokens) % 2 == 0, ids, slots)
    return ids.astype(np.int32)


def ranks(projection: Projection, rank: int, slots: int = SLOTS, mix: str = "distinct", seed: int = 0) -> np.ndarray:
    """int32 [slots, n] true rank of every slot and slice: all `rank`, or for mix "ranks" a random 1, 2, 4, ... `rank`.

    A slot has the same rank in all its slices, as an adapter does.
    """
    if mix != "ranks":
        return np.full((slots, len(projection.slices)), rank, np.int32)
    powers = np.random.default_rng(seed).integers(0, rank.bit_length(), size=(slots, 1))
    return np.broadcast_to(2**powers, (slots, len(projection.slices))).astype(np.int32)
