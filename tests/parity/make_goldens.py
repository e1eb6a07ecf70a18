"""Write tests/parity/goldens and tests/parity/expert_goldens (needs the group `parity`): tiny base models, adapters as
PEFT saved them, and PEFT's logits and greedy answers; adapters of experts for the checkpoints of tests/models/goldens,
and the logits of transformers with the weights of each merged.

Run `python -m tests.parity.make_goldens` from the repository root; the result is committed.
"""

import copy
import shutil

import numpy as np
import peft
import torch
import transformers

from tests.models import goldens as checkpoints
from tests.parity import cases, expert_files, expert_goldens
from tests.parity.goldens import FOLDER, MODELS, NEW_TOKENS, PROMPT_LENGTHS


def write_dense() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, adapters) in enumerate(MODELS.items()):
        base = cases.base_model(torch, transformers, name, num_hidden_layers=2)
        # Stored in bfloat16, computed in float32. Casting the model that runs would round its rotary tables, too.
        copy.deepcopy(base).to(torch.bfloat16).save_pretrained(FOLDER / name / "base")
        (FOLDER / name / "base" / "generation_config.json").unlink(missing_ok=True)
        for weight in base.parameters():
            weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
        tokens = np.random.default_rng(seed).integers(0, cases.VOCAB, (2, 16)).astype(np.int32)
        arrays, answers = {"tokens": tokens}, {}
        for adapter in (None, *adapters):
            model = base
            if adapter is not None:
                model = cases.peft_model(torch, peft, base, adapter, adapters[adapter])
                cases.save_adapter(torch, model, adapter, FOLDER / name)
            arrays[f"logits {adapter}"] = cases.logits(torch, model, tokens)
            for i, length in enumerate(PROMPT_LENGTHS):
                answer = cases.greedy(torch, model, tokens[i, :length].tolist(), NEW_TOKENS)
                answers[f"answer {i} {adapter}"] = np.array(answer, np.int32)
        save(FOLDER / name, arrays, answers)


def write_experts() -> None:
    shutil.rmtree(expert_goldens.FOLDER, ignore_errors=True)
    for seed, name in enumerate(expert_goldens.MODELS):
        folder = checkpoints.FOLDER / name
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokens = np.random.default_rng(seed).integers(0, cases.VOCAB, (2, 12)).astype(np.int32)
        arrays = {"tokens": tokens, "None": cases.logits(torch, base, tokens)}
        for adapter, files in expert_goldens.made(name).items():
            files.save(expert_goldens.adapter_path(name, adapter))
            model = copy.deepcopy(base)
            expert_files.merge(torch, model, expert_goldens.shapes_of(name), files)
            arrays[adapter] = cases.logits(torch, model, tokens)
        save(expert_goldens.FOLDER / name, arrays, {})


def save(folder, arrays, answers) -> None:
    """Write the arrays of a model, whose logits must differ clearly between all adapters and the base model."""
    _, *logits = arrays.values()
    for i, one in enumerate(logits):
        assert all(np.abs(one - other).max() > 1e-2 * np.abs(one).max() for other in logits[:i])
    np.savez_compressed(folder / "expected.npz", **arrays, **answers)


if __name__ == "__main__":
    write_dense()
    write_experts()
