"""The base models and adapters in the committed goldens (see make_goldens.py)."""

from pathlib import Path

import numpy as np

from tests.parity.cases import ADAPTERS, ALL, TIED_ADAPTERS

FOLDER = Path(__file__).parent / "goldens"
PROMPT_LENGTHS = (3, 9)
NEW_TOKENS = 10

_PARTS = {"r": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"v_proj": 3}}
# base model -> its adapters, with the fields of their peft.LoraConfig
MODELS: dict[str, dict[str, dict]] = {
    "llama-biases-llama3": {
        "rank 1": ADAPTERS["rank 1"],
        "rank pattern": {**ADAPTERS["rank pattern"], "lora_alpha": 6},
        "regex": ADAPTERS["regex"],
        "head": ADAPTERS["head"],
        "bfloat16": ADAPTERS["bfloat16"],
    },
    "mistral-window": {
        "rslora": {"r": 6, "use_rslora": True, "target_modules": ALL},
        "layer 1 by pattern": ADAPTERS["layer 1 by pattern"],
        "embedding and head": {**ADAPTERS["embedding and head"], "r": 4},
        "alpha pattern": ADAPTERS["alpha pattern"],
    },
    "qwen2-tied": {
        "all-linear": {**ADAPTERS["all-linear"], "r": 3},
        "tied both": {**TIED_ADAPTERS["tied both"], "r": 2},
        "parts": _PARTS,
        "rank 64": {"r": 64, "target_modules": ["k_proj"], "layers_to_transform": [1]},
    },
    "qwen3-tied-window": {
        "head": {**ADAPTERS["head"], "r": 5},
        "excluded": {**ADAPTERS["excluded"], "r": 4},
        "both patterns with rslora": ADAPTERS["both patterns with rslora"],
        "bfloat16": {**ADAPTERS["bfloat16"], "r": 2},
    },
}


def adapter_path(model: str, adapter: str) -> str:
    return str(FOLDER / model / adapter.replace(" ", "-"))


def expected(model: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / model / "expected.npz") as arrays:
        return dict(arrays)
