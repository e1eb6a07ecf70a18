"""Adapters of experts, written in every format by plain loops, with the weights that each adds to the base model.

The formats are defined here once more, independently of jlora and PEFT.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ALPHA = 6.0

GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 7}
# model -> (type, fields of its configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "head_dim": 12,
        },
    ),
    "gpt-oss": ("gpt_oss", GPT_OSS | {"swiglu_limit": 1.5}),
    "gpt-oss-square": ("gpt_oss", GPT_OSS | {"intermediate_size": 32}),
}


class Adapter:
    """The tensors and the configuration of one adapter, and its deltas.

    Attributes:
      tensors: name -> array, as the file holds it.
      fields: of adapter_config.json.
      deltas: (layer, expert, part) -> [out, in], scaling included; part is "gate", "up" or "down", or "gate_up" in the
        order of the base model's own columns, or "router" (expert 0).
    """

    def __init__(self, rank: int, **fields):
        self.tensors: dict[str, np.ndarray] = {}
        self.fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA, **fields}
        self.deltas: dict[tuple[int, int, str], np.ndarray] = {}

    def put(self, module: str, a: np.ndarray, b: np.ndarray) -> None:
        self.tensors[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(a, np.float32)
        self.tensors[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(b, np.float32)

    def save(self, folder: Path) -> str:
        folder.mkdir(parents=True)
        save_file(self.tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(self.fields))
        return str(folder)


class Shapes:
    """Sizes of a model's experts, and random factors for them, in those layers that have experts."""

    def __init__(self, name: str, hidden: int, inner: int, layers: tuple[int, ...] = (0, 1)):
        self.type, fields = MODELS[name]
        self.layers = layers
        self.experts = fields.get("num_experts") or fields["num_local_experts"]
        self.hidden, self.inner = hidden, inner
        self.sizes = {
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
            "gate_up": (hidden, 2 * inner),
            "router": (hidden, self.experts),
        }
        self.block = "block_sparse_moe" if self.type == "mixtral" else "mlp"
        names = ("w1", "w3", "w2") if self.type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        self.names = dict(zip(("gate", "up", "down"), names, strict=True))

    def pair(self, seed: str, part: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """A [r, in] and B [out, r], whose product changes the outputs as much as the base weights do."""
        rng = np.random.default_rng(zlib.crc32(f"{seed} {part} {rank}".encode()))
        k, n = self.sizes[part]
        return rng.normal(size=(rank, k)) * k**-0.5, rng.normal(size=(n, rank)) * (0.7 * rank**0.5 / ALPHA)

    def each(self, seed: str, rank: int, parts=("gate", "up", "down"), experts=None, ranks=None, router=0) -> Adapter:
        """PEFT's 2D format: a module for each expert and projection. `ranks`: expert -> rank."""
        ranks = ranks or {}
        pattern = {rf"experts\.{e}\.{self.names[part]}": r for e, r in ranks.items() for part in parts}
        targets = [self.names[part] for part in parts] + (["gate", "router"] if router else [])
        if router:
            pattern[rf"{self.block}\.(gate|router)"] = router
        adapter = Adapter(rank, target_modules=targets, rank_pattern=pattern)
        for layer in self.layers:
            for e in range(self.experts) if experts is None else experts:
                for part in parts:
                    r = ranks.get(e, rank)
                    a, b = self.pair(f"{seed} {layer} {e}", part, r)
                    adapter.put(f"model.layers.{layer}.{self.block}.experts.{e}.{self.names[part]}", a, b)
                    adapter.deltas[layer, e, part] = ALPHA / r * b @ a
            if router:
                a, b = self.pair(f"{seed} {layer}", "router", router)
                name = "router" if self.type == "gpt_oss" else "gate"
                adapter.put(f"model.layers.{layer}.{self.block}.{name}", a, b * 0.1)
                adapter.deltas[layer, 0, "router"] = ALPHA / router * b @ a * 0.1
        return adapter

    def listed(self, seed: str, rank: int) -> Adapter:
        """Unsloth's linear layers of gpt-oss in 4 bits: gate and up of one expert in one tensor, as they alternate."""
        adapter = Adapter(rank, target_modules=r".*\.(gate_up_projs|down_projs)\.\d+")
        for layer in self.layers:
            for e in range(self.experts):
                for part in ("gate_up", "down"):
                    a, b = self.pair(f"{seed} {layer} {e}", part, rank)
                    adapter.put(f"model.layers.{layer}.mlp.experts.{part}_projs.{e}", a, b)
                    adapter.deltas[layer, e, part] = ALPHA / rank * b @ a
        return adapter

    def fused(
        self, seed: str, rank: int, parts=("gate_up", "down"), exchanged=False, grouped=False, old=False
    ) -> Adapter:
        """PEFT's `target_parameters`, written out number by number."""
        block = self.block if old else "mlp"
        adapter = Adapter(rank, target_modules=[], target_parameters=[f"{block}.experts.{part}_proj" for part in parts])
        if grouped:
            adapter.fields["lora_B_layout"] = "grouped_by_expert"
        for layer in self.layers:
            places = [f"model.layers.{layer}.{block}.experts.base_layer", f"model.layers.{layer}.{block}.experts"]
            for place, part in zip(places[-len(parts) :], parts, strict=True):
                pairs = [self.pair(f"{seed} {layer} {e}", part, rank) for e in range(self.experts)]
                for e, (a, b) in enumerate(pairs):
                    adapter.deltas[layer, e, part] = ALPHA / rank * b @ a
                adapter.put(place, *flat(pairs, exchanged, grouped))
        return adapter

    def stacked(self, seed: str, rank: int, shared: bool) -> Adapter:
        """Tinker's three axes: w1, w3 and w2 of all experts; `shared`: one A for w1 and w3, one B for w2."""
        adapter = Adapter(rank, target_modules="all-linear")
        for layer in self.layers:
            for name, part in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                pairs = [self.pair(f"{seed} {layer} {e}", part, rank) for e in range(self.experts)]
                a, b = np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs])
                if shared and part == "down":
                    b = b[:1]
                elif shared:
                    a = a[:1]
                for e in range(self.experts):
                    adapter.deltas[layer, e, part] = ALPHA / rank * b[e % len(b)] @ a[e % len(a)]
                adapter.put(f"model.layers.{layer}.mlp.experts.{name}", a, b)
        return adapter

    def adapters(self) -> dict[str, Adapter]:
        """Every format, ranks 1 to 32."""
        made = {
            "each": self.each("each", 3),
            "each, rank 1": self.each("one", 1),
            "each, rank 32 and the router": self.each("router", 32, router=2),
            "some experts, ranks of their own": self.each("some", 4, experts=(1, 3), ranks={3: 7}),
            "one projection": self.each("up", 5, parts=("up",)),
            "fused": self.fused("fused", 4),
            "fused, exchanged": self.fused("exchanged", 6, exchanged=True),
            "fused, grouped by expert": self.fused("grouped", 2, grouped=True),
            "three axes": self.stacked("stacked", 8, shared=False),
            "three axes, shared": self.stacked("shared", 3, shared=True),
        }
        # A square parameter alone does not determine its input and output axes.
        if self.hidden != 2 * self.inner:
            made["gate and up alone"] = self.fused("alone", 2, parts=("gate_up",))
        if self.hidden != self.inner:
            made["down alone, exchanged"] = self.fused("down", 9, parts=("down",), exchanged=True)
        if self.type == "mixtral":
            made["fused, older paths"] = self.fused("old", 3, old=True)
        if self.type == "gpt_oss":
            made["listed"] = self.listed("listed", 3)
        return made


def flat(pairs, exchanged: bool, grouped: bool) -> tuple[np.ndarray, np.ndarray]:
    """A (E * r, in), one expert after the other, and B (out, r * E): the experts of a rank side by side, or grouped the
    ranks of an expert.

    Exchanged: those of the transposed delta, (B A)ᵀ = Aᵀ Bᵀ.
    """
    if exchanged:
        pairs = [(b.T, a.T) for a, b in pairs]
    experts, rank = len(pairs), len(pairs[0][0])
    a = np.zeros((experts * rank, pairs[0][0].shape[1]))
    b = np.zeros((pairs[0][1].shape[0], experts * rank))
    for e, (own_a, own_b) in enumerate(pairs):
        for i in range(rank):
            a[e * rank + i] = own_a[i]
            b[:, e * rank + i if grouped else i * experts + e] = own_b[:, i]
    return a, b


def merge(torch, model, shapes: Shapes, adapter: Adapter) -> None:
    """Add an adapter's deltas to a transformers model, expert by expert, in place."""
    with torch.no_grad():
        for (layer, e, part), delta in adapter.deltas.items():
            block = model.model.layers[layer].mlp
            change = torch.tensor(delta, dtype=torch.float32)
            if part == "router":
                router = block.router if shapes.type == "gpt_oss" else block.gate
                router.weight += change
                continue
            weight = (block.experts.down_proj if part == "down" else block.experts.gate_up_proj)[e]
            weight = weight.T if shapes.type == "gpt_oss" else weight  # [out, in]
            if part == "gate_up" or part == "down":
                weight += change
            elif shapes.type == "gpt_oss":  # gate and up alternate
                weight[{"gate": 0, "up": 1}[part] :: 2] += change
            else:
                first = {"gate": 0, "up": shapes.inner}[part]
                weight[first : first + shapes.inner] += change
