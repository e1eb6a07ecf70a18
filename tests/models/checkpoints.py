"""Checkpoint folders of any sizes with random weights, written without the code that reads them."""

import json

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
DENSE = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 3, "vocab_size": 101},
    # Fewer key heads than most meshes have shards, and a tied vocabulary that they do not divide.
    "qwen3-tied": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 101,
        "tie_word_embeddings": True,
    },
    # One key head, the tied table, and both kinds of layers.
    "gemma3": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 20,
        "sliding_window": 3,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
}


def write(folder, fields, *, dtype=np.float32, seed=0):
    """Write config.json and model.safetensors, and return the tensors."""
    config = {**SIZES, **fields}
    rng = np.random.default_rng(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    gemma = config["model_type"] == "gemma3_text"
    center = 0.0 if gemma else 1.0  # of norms
    tensors = {}

    def add(name, *shape, one=0.0):
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.5
        tensors[name] = (one + scale * rng.normal(size=shape)).astype(dtype)

    def projection(name, out, inputs, bias):
        add(f"{name}.weight", out, inputs)
        if bias:
            add(f"{name}.bias", out)

    add("model.embed_tokens.weight", config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, out, inputs in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            projection(f"{layer}.self_attn.{name}_proj", out, inputs, config.get("attention_bias", False))
        for name, out, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            projection(f"{layer}.mlp.{name}_proj", out, inputs, config.get("mlp_bias", False))
        if gemma or config["model_type"] == "qwen3":
            add(f"{layer}.self_attn.q_norm.weight", head_dim, one=center)
            add(f"{layer}.self_attn.k_norm.weight", head_dim, one=center)
        if gemma:
            add(f"{layer}.pre_feedforward_layernorm.weight", hidden)
            add(f"{layer}.post_feedforward_layernorm.weight", hidden)
        add(f"{layer}.input_layernorm.weight", hidden, one=center)
        add(f"{layer}.post_attention_layernorm.weight", hidden, one=center)
    add("model.norm.weight", hidden, one=center)
    if not config.get("tie_word_embeddings", False):
        add("lm_head.weight", config["vocab_size"], hidden)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors
