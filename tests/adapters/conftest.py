"""Adapter folders written by hand: plain JSON and safetensors, without jlora's own writer."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jlora.adapters.config_file import read_config

PREFIX = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.1.self_attn.v_proj"
BASE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def lora_tensors(ranks, prefix=PREFIX, dtype=np.float32, k=6, n=5):
    """{module: rank} -> tensors of seeded values, in PEFT's names."""
    rng = np.random.default_rng(7)
    tensors = {}
    for module, r in ranks.items():
        tensors[f"{prefix}{module}.lora_A.weight"] = rng.normal(size=(r, k)).astype(dtype)
        tensors[f"{prefix}{module}.lora_B.weight"] = rng.normal(size=(n, r)).astype(dtype)
    return tensors


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(tensors=..., **config fields) -> the adapter folder. `drop` leaves config fields out."""

    def write(tensors=None, *, name="sql", drop=(), **fields):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
        config = {key: value for key, value in (config | fields).items() if key not in drop}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(lora_tensors({Q: 4, V: 4}) if tensors is None else tensors, folder / "adapter_model.safetensors")
        return folder

    return write


@pytest.fixture
def read(tmp_path):
    """`read(text)` or `read(**fields beside BASE)` -> the parsed configuration; `drop` leaves fields out."""

    def parse(text=None, *, drop=(), **fields):
        file = tmp_path / "adapter_config.json"
        config = {key: value for key, value in (BASE | fields).items() if key not in drop}
        file.write_bytes(text if isinstance(text, bytes) else (json.dumps(config) if text is None else text).encode())
        return read_config(file, "sql")

    return parse
