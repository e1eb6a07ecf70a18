"""Write tests/models/goldens: small checkpoints with logits and greedy answers by transformers (needs the extra
`parity`). Run `python -m tests.models.make_goldens` from the repository root; the result is committed."""

import copy
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.families import GEMMA3, LINEAR_ROPE, LLAMA3_ROPE, MOE, YARN_ROPE, build

GOLDENS = Path(__file__).parent / "goldens"
PROMPT_LENGTHS = (1, 5, 13, 30)
NEW_TOKENS = 20

MODELS = {
    "llama-biases-llama3": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-tied-linear": ("llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR_ROPE, "rms_norm_eps": 1e-3}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "qwen2-mixed-yarn": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "rope_parameters": YARN_ROPE},
    ),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 12, "num_key_value_heads": 1}),
    "mixtral-window": ("mixtral", {**MOE["mixtral"], "sliding_window": 9}),
    "qwen2-moe-shared": ("qwen2_moe", MOE["qwen2_moe"]),
    "qwen3-moe-mlp-layer": ("qwen3_moe", {**MOE["qwen3_moe"], "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "gpt-oss-square": ("gpt_oss", {**MOE["gpt_oss"], "intermediate_size": 32}),
    "gemma3-tied": ("gemma3_text", GEMMA3),
}
SHARDED = "llama-biases-llama3"
BFLOAT16 = "qwen3-tied"


def main():
    shutil.rmtree(GOLDENS, ignore_errors=True)
    for seed, (name, (model_type, fields)) in enumerate(MODELS.items()):
        folder = GOLDENS / name
        model = build(torch, transformers, model_type, seed, **fields)
        if name == BFLOAT16:
            # Only the weights are rounded: casting the model itself would round its rotary frequencies, too.
            copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
            for weight in model.parameters():
                weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
        else:
            model.save_pretrained(folder, max_shard_size="40KB" if name == SHARDED else "1GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, 64, (2, 48), dtype=np.int64)
        arrays = {"tokens": tokens.astype(np.int32)}
        with torch.no_grad():
            arrays["logits"] = model(torch.from_numpy(tokens)).logits.numpy()
            for i, length in enumerate(PROMPT_LENGTHS):
                prompt = rng.integers(0, 64, (1, length), dtype=np.int64)
                answer = model.generate(
                    torch.from_numpy(prompt),
                    attention_mask=torch.ones(1, length, dtype=torch.int64),
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                    eos_token_id=None,
                    pad_token_id=0,
                )
                arrays[f"prompt_{i}"] = prompt[0].astype(np.int32)
                arrays[f"answer_{i}"] = answer[0, length:].numpy().astype(np.int32)
        np.savez_compressed(folder / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
