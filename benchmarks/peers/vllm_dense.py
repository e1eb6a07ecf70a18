"""Time vLLM's LoRA of single projections, its kernels alone, from the installed package (vllm==0.33.0).

    python -m benchmarks.peers.vllm_dense --out peers.json [--projection o] [--rank 16] [--tokens 64] [--adapters 8]

- vllm_default_us: the tiles that a server takes without a tuned configuration.
- vllm_tuned_us: the best of the tiles below, which a server can read from `VLLM_TUNED_CONFIG_FOLDER`. Each shrink and
  each expand is timed with the default of the other, then the two fastest of each together. A wrong result does not
  count.

The metadata is made before the graph. The grid has as many adapters as the batch (`--specialize-active-lora`).
"""

import itertools

import torch
from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_expand_op, lora_shrink, lora_shrink_op, utils

from benchmarks.peers.common import DENSE, DENSE_SLOTS, DEVICE, Dense, Work, check_added, graph_us, run

SHRINK = ("block_m", "block_n", "block_k", "split_k", "num_warps", "num_stages")
SHRINKS = (
    (16, 16, 256, 16, 4, 3), (16, 16, 128, 32, 4, 3), (16, 16, 128, 16, 4, 2), (16, 32, 256, 8, 8, 2),
    (16, 32, 256, 16, 4, 3), (16, 64, 256, 16, 4, 3), (16, 64, 128, 8, 4, 3), (32, 16, 128, 8, 4, 3),
    (32, 64, 128, 4, 4, 3), (64, 16, 64, 4, 4, 3), (64, 16, 128, 1, 8, 3), (64, 32, 128, 4, 4, 2),
    (64, 64, 64, 1, 4, 3), (64, 64, 64, 4, 4, 3),
)  # fmt: skip
EXPAND = ("block_m", "block_n", "block_k", "num_warps")
EXPANDS = (
    (16, 64, 16, 4), (16, 128, 16, 4), (16, 256, 16, 4), (16, 128, 32, 4), (16, 128, 64, 4), (16, 256, 64, 8),
    (32, 128, 16, 4), (32, 128, 64, 4), (64, 128, 16, 4), (64, 128, 64, 4), (64, 256, 64, 8),
)  # fmt: skip
CHOSEN: dict[str, dict | None] = {"shrink": None, "expand": None}  # None: vLLM's own choice


def choose(op_type: str, **shape):
    own = CHOSEN[op_type]
    return utils.get_lora_op_configs(op_type, **shape) if own is None else own


lora_shrink_op.get_lora_op_configs = lora_expand_op.get_lora_op_configs = choose


class Kernels:
    def __init__(self, d: Dense):
        utils._LORA_A_PTR_DICT.clear()  # by the addresses of weights, which may be those of earlier rows
        utils._LORA_B_PTR_DICT.clear()
        self.d = d
        self.a = [[part.contiguous()[:, None] for part in a.split(d.rank, 1)] for a in d.a]  # [slots, 1, R, K]
        self.b = [[part.contiguous()[:, None] for part in b.split(d.slices, 1)] for b in d.b]  # [slots, 1, N, R]
        self.h = [torch.zeros(len(d.slices), d.tokens, d.rank, device=DEVICE) for _ in d.layers]
        meta = LoRAKernelMeta.make(DENSE_SLOTS, d.tokens, DEVICE)
        meta.prepare_tensors(d.slot)
        self.meta = meta.meta_args(d.tokens, specialize_active_lora=True)

    def shrink(self, layer: int) -> None:
        lora_shrink(self.d.x[layer], self.a[layer], self.h[layer], *self.meta, 1.0)

    def expand(self, layer: int, y: torch.Tensor) -> None:
        lora_expand(self.h[layer], self.b[layer], y, *self.meta, offset_start=0, add_inputs=True)

    def add(self, layer: int, y: torch.Tensor) -> None:
        self.shrink(layer)
        self.expand(layer, y)

    def us(self, shrink: dict | None, expand: dict | None, repeats: int = 20) -> float:
        """Return the microseconds a layer of both kernels with these tiles, once their result is checked."""
        CHOSEN.update(shrink=shrink, expand=expand)
        try:
            check_added(lambda y: self.add(0, y), self.d.want)
            return graph_us(lambda: [self.add(i, self.d.y[i]) for i in self.d.layers], repeats) / len(self.d.layers)
        finally:
            CHOSEN.update(shrink=None, expand=None)

    def tuned(self) -> float:
        rank = max(16, self.d.rank)
        rest = {"num_ctas": 1, "max_nreg": None}
        shrinks = [{**dict(zip(SHRINK, s, strict=True)), "group_size_m": 8, **rest} for s in SHRINKS]
        shrinks = [s for s in shrinks if s["block_n"] <= rank and s["block_k"] * s["split_k"] <= self.d.k]
        expands = [{**dict(zip(EXPAND, e, strict=True)), "num_stages": 2, **rest} for e in EXPANDS]
        expands = [e for e in expands if e["block_k"] <= rank]
        best = [None, *self.fastest(shrinks, lambda s: self.us(s, None, 5))]
        pairs = itertools.product(best, [None, *self.fastest(expands, lambda e: self.us(None, e, 5))])
        return min(self.us(*pair) for pair in pairs)

    @staticmethod
    def fastest(choices: list[dict], us) -> list[dict]:
        times = []
        for choice in choices:
            try:
                times.append((us(choice), choice))
            except Exception as error:  # does not fit the GPU, or a wrong result
                print(f"# {choice}: {type(error).__name__}: {error}", flush=True)
                torch.cuda.synchronize()
        return [choice for _, choice in sorted(times, key=lambda pair: pair[0])[:2]]


def works(d: Dense) -> dict[str, Work]:
    kernels = Kernels(d)
    return {"vllm_default_us": lambda: kernels.us(None, None), "vllm_tuned_us": kernels.tuned}


if __name__ == "__main__":
    run(__doc__, "vllm", DENSE, Dense, works)
