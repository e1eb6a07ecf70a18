"""Time vLLM's LoRA of bf16 experts, its kernels alone, from the installed package (vllm==0.33.0).

    python -m benchmarks.peers.vllm_experts --out peers_moe.json [--model mixtral-8x7b] [--rank 16] [--tokens 64] ...

- vllm_default_us: the kernels, tiles and rows a block that a server takes.
- vllm_tuned_us: the best of other rows a block, of other tiles of the same kernel, and of the form in two kernels
  (shrink, expand), for each of the two products. A server cannot choose all of these. A wrong result does not count.

Both products of a block add into ready outputs. The alignment of the rows is made before the graph, by vLLM's kernel.
The grid has as many adapters as the batch (`--specialize-active-lora`).
"""

from functools import partial
from typing import ClassVar

import torch
import vllm._custom_ops as ops
from vllm.lora.layers.utils import try_get_optimal_moe_lora_config
from vllm.lora.ops.triton_ops import LoRAKernelMeta, fused_moe_lora_op

from benchmarks.peers.common import DEVICE, EXPERTS, Experts, Work, check_added, graph_us, int32, random, run

ONE_KERNEL = fused_moe_lora_op._FUSED_MOE_LORA_ONE_SHOT_MAX_RANK  # largest rank of the form in one kernel
# Of the form in one kernel. Sizes that the small-batch kernel lacks are left out of its launch.
TILES = (
    {}, {"NPID_FACTOR": 2}, {"NPID_FACTOR": 4}, {"NPID_FACTOR": 8},
    {"BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3},
    {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3},
    {"BLOCK_N": 128, "BLOCK_K": 256, "num_warps": 4, "num_stages": 2},
    {"BLOCK_N": 256, "BLOCK_K": 128, "num_warps": 8, "num_stages": 2},
)  # fmt: skip
# (K, split of K, N, warps) of the form in two kernels.
TWO_KERNELS = ((64, 1, 128, 4), (128, 1, 128, 4), (256, 1, 64, 4), (128, 4, 128, 4), (128, 8, 64, 4))


class Launch:
    """A kernel of vLLM, launched with other tiles while `tiles` has some."""

    tiles: ClassVar[dict[str, int]] = {}

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            tiles = {name: size for name, size in self.tiles.items() if name in kwargs}
            programs, *others = grid
            if "NPID_FACTOR" in tiles:
                programs = programs // kwargs["NPID_FACTOR"] * tiles["NPID_FACTOR"]
            return self.kernel[(programs, *others)](*args, **kwargs | tiles)

        return launch


for name in ("_fused_moe_lora_one_shot_kernel", "_fused_moe_lora_small_batch_kernel"):
    setattr(fused_moe_lora_op, name, Launch(getattr(fused_moe_lora_op, name)))


class Kernels:
    """Both products' LoRA of a chain of layers. Number 0 is gate and up, 1 is down."""

    def __init__(self, d: Experts):
        fused_moe_lora_op._LORA_PTR_DICT.clear()  # by the addresses of weights, which may be those of earlier rows
        self.d, r, i = d, d.rank, d.e.intermediate
        self.a = [[a.contiguous() for a in d.a13[layer].split(r, 2)] for layer in d.layers], [[a] for a in d.a2]
        self.b = [[b.contiguous() for b in d.b13[layer].split(i, 2)] for layer in d.layers], [[b] for b in d.b2]
        self.x = d.x, d.h
        self.y = tuple(random(d.tokens * d.e.top_k, size) for size in (2 * i, d.e.hidden))
        self.enabled = int32([1] * d.slots + [0])
        self.meta = LoRAKernelMeta.make(d.slots, d.tokens, DEVICE)
        self.meta.prepare_tensors(d.slot)
        self.direct = d.tokens * d.e.top_k * 8 <= d.e.experts * d.slots  # a server aligns no rows then
        self.aligned: dict[tuple[int, int], tuple] = {}

    def rows_a_block(self) -> int:
        """Return the rows of a block that a server takes."""
        config = try_get_optimal_moe_lora_config(
            op_type="fused_moe_lora_w13_shrink", w1_shape=self.d.w13[0].shape, w2_shape=self.d.w2[0].shape,
            rank=self.d.rank, top_k=self.d.e.top_k, dtype=None, M=self.d.tokens,
        )  # fmt: skip
        return int(config.get("BLOCK_SIZE_M") or 64)

    def rows(self, layer: int, block: int | None) -> tuple:
        """Return the sorted rows, experts and counts of blocks of `block` rows, or (None, experts, None) for None."""
        expert, d = self.d.expert[layer], self.d
        if block is None:
            return None, expert.flatten(), None
        if (layer, block) not in self.aligned:
            size = expert.numel() + d.e.experts * (block - 1)
            size = expert.numel() * block if expert.numel() < d.e.experts else size
            blocks = -(-size // block)
            found = int32([0] * d.slots * size), int32([-1] * d.slots * blocks), int32([0] * d.slots)
            ids = self.meta.active_lora_ids
            ops.moe_lora_align_block_size(
                expert, d.slot, d.e.experts, block, d.slots, size, blocks, *found, self.enabled, ids
            )
            self.aligned[layer, block] = found[0].view(d.slots, -1), found[1].view(d.slots, -1), found[2]
        return self.aligned[layer, block]

    def add(self, product: int, layer: int, y: torch.Tensor, choice: dict) -> None:
        """Add the delta of one product to y [pairs, N]."""
        d, block = self.d, choice["block"]
        k, split, n, warps = choice.get("two") or (64, 1, 64, 4)
        rank_tile, height = min(64, max(16, d.rank)), block or 64
        Launch.tiles = choice.get("tiles", {})
        fused_moe_lora_op._FUSED_MOE_LORA_ONE_SHOT_MAX_RANK = 0 if "two" in choice else ONE_KERNEL
        try:
            fused_moe_lora_op._fused_moe_lora(
                y.view(d.tokens, d.e.top_k, -1), self.x[product][layer], self.a[product][layer], self.b[product][layer],
                d.weight[layer], *self.rows(layer, block), d.slot, d.rank, d.e.top_k, self.meta.active_lora_ids,
                self.meta.num_active_loras_cpu, self.enabled, height, rank_tile, k, 8, warps, 3, split, height, n,
                rank_tile, 8, warps, 3, 1, product == 1, False, 0, True,
            )  # fmt: skip
        finally:
            Launch.tiles = {}
            fused_moe_lora_op._FUSED_MOE_LORA_ONE_SHOT_MAX_RANK = ONE_KERNEL

    def want(self, product: int) -> torch.Tensor:
        if product == 0:
            return self.d.delta13(self.d.x[0].repeat_interleave(self.d.e.top_k, 0))
        return self.d.delta2(self.d.h[0]) * self.d.weight[0].flatten()[:, None]

    def us(self, choices: dict[int, dict], repeats: int) -> float:
        """Return the microseconds a layer of some products, each with its choice."""
        work = [partial(self.add, p, layer, self.y[p], c) for layer in self.d.layers for p, c in choices.items()]
        return graph_us(lambda: [one() for one in work], repeats) / len(self.d.layers)

    def default(self) -> dict:
        return {"block": None if self.direct else self.rows_a_block()}

    def default_us(self) -> float:
        for product in (0, 1):
            check_added(lambda y, p=product: self.add(p, 0, y, self.default()), self.want(product))
        return self.us(dict.fromkeys((0, 1), self.default()), self.d.repeats)

    def tuned_us(self) -> float:
        best = {product: self.fastest(product) for product in (0, 1)}
        return self.us(best, self.d.repeats)

    def fastest(self, product: int) -> dict:
        """Return the fastest choice of a product, first over rows a block, then over tiles and kernels."""
        blocks = [16, 32, 64, 128] + ([None] if self.direct else [])
        want, times = self.want(product), []

        def measure(choices: list[dict]) -> dict:
            for choice in choices:
                try:
                    check_added(lambda y, c=choice: self.add(product, 0, y, c), want)
                    times.append((self.us({product: choice}, 5), choice))
                except Exception as error:  # does not fit the GPU, or a wrong result
                    print(f"# {product} {choice}: {type(error).__name__}: {error}", flush=True)
                    torch.cuda.synchronize()
            return min(times, key=lambda pair: pair[0])[1]

        block = measure([{"block": block} for block in blocks])["block"]
        height = {"block": block or 16}
        tiles = [{"block": block, "tiles": tiles} for tiles in TILES if tiles]
        return measure(tiles + [height | {"two": two} for two in TWO_KERNELS])


def works(d: Experts) -> dict[str, Work]:
    kernels = Kernels(d)
    return {"vllm_default_us": kernels.default_us, "vllm_tuned_us": kernels.tuned_us}


if __name__ == "__main__":
    run(__doc__, "vllm", EXPERTS, Experts, works)
