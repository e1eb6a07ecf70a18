"""The measured shapes: projections of Llama-3-8B and of others, ranks, tokens, adapters and mixes."""

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
# Of Gemma-3-27B and Qwen2.5-7B, for which nothing was tuned.
OTHER_PROJECTIONS = {
    p.name: p
    for p in (
        Projection("g27_qkv", 5376, (4096, 2048, 2048)),
        Projection("g27_o", 4096, (5376,)),
        Projection("g27_gate_up", 5376, (21504, 21504)),
        Projection("g27_down", 21504, (5376,)),
        Projection("q7_qkv", 3584, (3584, 512, 512)),
        Projection("q7_gate_up", 3584, (18944, 18944)),
        Projection("q7_down", 18944, (3584,)),
    )
}


def group_ids(tokens: int, adapters: int, slots: int = SLOTS, mix: str = "distinct", seed: int = 0) -> np.ndarray:
    """Return the int32 [tokens] slot of every row.

    The mixes are:

    - "distinct": every adapter has the same number of rows.
    - "zipf": the i-th adapter's share is proportional to 1 / i, with at least one row each.
    - "half": as "distinct", with every other row without an adapter.
    - "ranks": as "distinct", with other ranks (see `ranks`).

    Up to 256 tokens, each row is a sequence of its own, in random order. Above, the rows of an adapter are consecutive,
    as in a prefill.
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
    """Return the float32 [slots, n, 2] true rank of every slot and slice, and its scale, which is 1.

    All ranks are `rank`; for the mix "ranks" each is a random one of 1, 2, 4, ... `rank`. A slot has the same rank in
    all its slices, as an adapter does.
    """
    found = np.ones((slots, len(projection.slices), 2), np.float32)
    powers = np.random.default_rng(seed).integers(0, rank.bit_length(), size=(slots, 1))
    found[..., 0] = 2**powers if mix == "ranks" else rank
    return found
