"""Small random base models, and real PEFT adapters for them, of the parity suite and its goldens.

Functions take torch, transformers and peft as arguments, so that the import needs none of them.
"""

import copy
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.families import GEMMA3, LLAMA3_ROPE, build

VOCAB = 64
MAX_RANK = 64

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

# name -> (model type, fields of its configuration)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases-llama3": (
        "llama",
        {"num_hidden_layers": 3, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral-window": ("mistral", {"num_hidden_layers": 3, "sliding_window": 7, "head_dim": 12}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "hidden_size": 64, "num_attention_heads": 8}),
    "qwen3-tied-window": (
        "qwen3",
        {"tie_word_embeddings": True, "head_dim": 12, "use_sliding_window": True, "sliding_window": 5}
        | {"max_window_layers": 1},
    ),
    "gemma3": ("gemma3_text", GEMMA3 | {"tie_word_embeddings": True}),
}

# name -> fields of peft.LoraConfig
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]},
    "rank 64 everywhere": {"r": 64, "lora_alpha": 16, "target_modules": ALL},
    "rslora": {"r": 9, "use_rslora": True, "target_modules": ALL},
    "rank pattern": {
        "r": 4,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 3, "layers.1.self_attn.v_proj": 1, r"layers\.\d+\.mlp\.up_proj": 17},
    },
    "alpha pattern": {
        "r": 6,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "alpha_pattern": {"q_proj": 5, "^model.layers.0.self_attn.v_proj": 31},
    },
    "both patterns with rslora": {
        "r": 8,
        "use_rslora": True,
        "target_modules": ATTENTION,
        "rank_pattern": {"v_proj": 21, "^model.layers.1.self_attn.k_proj": 2},
        "alpha_pattern": {"v_proj": 3, "o_proj": 12},
    },
    "regex": {"r": 7, "target_modules": r".*\.(0|2)\.(self_attn|mlp)\.(q|up)_proj"},
    "all-linear": {"r": 5, "target_modules": "all-linear"},
    "layer 0": {"r": 12, "target_modules": ALL, "layers_to_transform": [0]},
    "layer 1 by pattern": {"r": 3, "target_modules": ALL, "layers_to_transform": 1, "layers_pattern": "layers"},
    "excluded": {"r": 10, "target_modules": ALL, "exclude_modules": ["layers.1.mlp.up_proj", "k_proj"]},
    "embedding": {"r": 4, "target_modules": ["embed_tokens"]},
    "head": {"r": 16, "target_modules": ["lm_head"]},
    "embedding and head": {
        "r": 11,
        "target_modules": ["embed_tokens", "lm_head", "v_proj"],
        "rank_pattern": {"lm_head": 2},
    },
    "bfloat16": {"r": 8, "target_modules": ALL},
}
# PEFT gives the tied head the embedding's own LoRA, transposed.
TIED_ADAPTERS: dict[str, dict[str, Any]] = {
    "tied both": {"r": 5, "target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "tied through the embedding": {"r": 3, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
}


def adapters_of(model: str) -> dict[str, dict[str, Any]]:
    """The adapters of one base model: one for each feature, and some drawn at random."""
    rng = np.random.default_rng(zlib.crc32(model.encode()))
    drawn = {}
    for i in range(2):
        targets = [t for t in [*ALL, "embed_tokens", "lm_head"] if rng.random() < 0.4] or ["o_proj"]
        drawn[f"drawn {i}"] = {
            "r": int(rng.integers(1, MAX_RANK + 1)),
            "lora_alpha": int(rng.integers(1, 65)),
            "use_rslora": bool(rng.random() < 0.5),
            "target_modules": targets,
            "rank_pattern": {t: int(rng.integers(1, MAX_RANK + 1)) for t in targets if rng.random() < 0.4},
            "alpha_pattern": {t: int(rng.integers(1, 65)) for t in targets if rng.random() < 0.4},
        }
    tied = TIED_ADAPTERS if MODELS[model][1].get("tie_word_embeddings") else {}
    return {**ADAPTERS, **tied, **drawn}


def base_model(torch, transformers, name: str, **changes):
    """One of `MODELS`, in float32, with some fields of its configuration changed."""
    model_type, fields = MODELS[name]
    model = build(torch, transformers, model_type, zlib.crc32(name.encode()) % 1000, **(fields | changes))
    model.config._name_or_path = model.name_or_path = f"random/{name}"
    return model


def peft_model(torch, peft, base, name: str, fields: dict[str, Any]):
    """A PEFT model on a copy of `base`, as if trained: its deltas are as large as the base weights themselves."""
    torch.manual_seed(zlib.crc32(name.encode()))
    config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def randomise(matrix, std: float):
        matrix.copy_(torch.randn(matrix.shape, generator=generator) * std)

    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, peft.tuners.lora.LoraLayer):
                continue
            rank, scaling = module.r["default"], module.scaling["default"]
            weight = module.get_base_layer().weight
            if isinstance(module, peft.tuners.lora.Embedding):
                randomise(module.lora_embedding_A["default"], 1.0)
                randomise(module.lora_embedding_B["default"], float(weight.std()) / (scaling * math.sqrt(rank)))
            else:
                columns = module.in_features
                randomise(module.lora_A["default"].weight, columns**-0.5)
                randomise(module.lora_B["default"].weight, float(weight.std()) * math.sqrt(columns / rank) / scaling)
        if name == "bfloat16":
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    parameter.copy_(parameter.to(torch.bfloat16))
    return model


def save_adapter(torch, model, name: str, folder: Path) -> Path:
    """PEFT's own folder of the adapter; in bfloat16 for the adapter of that name."""
    if name == "bfloat16":
        model = copy.deepcopy(model).to(torch.bfloat16)
    target = folder / name.replace(" ", "-")
    # "auto" saves whole tables beside LoRA on them. If none is targeted, it would query the hub for the base model.
    tables = {"embed_tokens", "lm_head"} & set(model.peft_config["default"].target_modules)
    model.save_pretrained(target, save_embedding_layers="auto" if tables else False)
    (target / "README.md").unlink(missing_ok=True)
    return target


def logits(torch, model, tokens) -> np.ndarray:
    """float32 [B, L, V]."""
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


def greedy(torch, model, prompt, new_tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return answer[0, len(prompt) :].tolist()
