"""A tiny Qwen3 of random weights, adapters for it, and its answers with an adapter merged in NumPy.

The answers are those of `transformers`, which shares no code with jlora, vLLM or tpu-inference.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB, HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, LAYERS = 256, 64, 96, 4, 2, 128, 2  # HEAD as in the published Qwen3
SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "max_position_embeddings": 512}
SIZES |= {"bos_token_id": 1, "eos_token_id": 0}
CONFIG = Qwen3Config(**SIZES, head_dim=HEAD, tie_word_embeddings=False)
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.k_proj": (HIDDEN, KEY_HEADS * HEAD),
    "self_attn.v_proj": (HIDDEN, KEY_HEADS * HEAD),
    "self_attn.o_proj": (HEADS * HEAD, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
HEAD_LAYERS = {"lm_head": (HIDDEN, VOCAB), "model.embed_tokens": (VOCAB, HIDDEN)}


def save_model(folder: Path) -> Path:
    """Write a model of random weights, large enough for greedy answers that differ between adapters."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data.normal_(0, 0.15)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t0").save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int, rank: int = 4, extra: Sequence[str] = ()) -> Path:
    """Write a PEFT adapter on all projections of all layers, and on those of `HEAD_LAYERS` in `extra`."""
    layers = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in PROJECTIONS.items()}
    return write_adapter(folder, layers | {name: HEAD_LAYERS[name] for name in extra}, seed, rank)


def write_adapter(folder: Path, layers: dict[str, tuple[int, int]], seed: int, rank: int, **fields: Any) -> Path:
    """Write a PEFT adapter on layers of (inputs, outputs)."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (inputs, outputs) in layers.items():
        kinds = ("lora_embedding_A", "lora_embedding_B") if "embed" in name else ("lora_A.weight", "lora_B.weight")
        for kind, shape in zip(kinds, ((rank, inputs), (outputs, rank)), strict=True):
            tensors[f"base_model.model.{name}.{kind}"] = rng.normal(0, 0.1, shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none"}
    config |= {"r": rank, "lora_alpha": 2 * rank, "target_modules": modules, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@cache
def merged(model: Path, adapter: Path | None) -> Qwen3ForCausalLM:
    """Return the model with the adapter added to its weights in NumPy, in float64."""
    weights = {name: weight.astype(np.float64) for name, weight in load_file(model / "model.safetensors").items()}
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        for name, a in tensors.items():
            if "_A" not in name:
                continue
            b = tensors[name.replace("_A", "_B")]
            layer = name.removeprefix("base_model.model.").partition(".lora")[0] + ".weight"
            delta = config["lora_alpha"] / config["r"] * (b.astype(np.float64) @ a)
            weights[layer] += delta.T if "embed" in name else delta
    reference = Qwen3ForCausalLM(CONFIG).double().eval()
    reference.load_state_dict({name: torch.tensor(weight) for name, weight in weights.items()})
    return reference


def logprobs(model: Path, adapter: Path | None, tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probabilities [tokens, vocabulary] after each token."""
    with torch.no_grad():
        return torch.log_softmax(merged(model, adapter)(torch.tensor([tokens])).logits[0], -1).numpy()
