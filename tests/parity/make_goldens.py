"""Writes tests/parity/goldens: tiny base models, adapters as PEFT saved them, and PEFT's logits and greedy answers
(needs the group `parity`). Run `python -m tests.parity.make_goldens` from the repository root; commit the result."""

import copy
import shutil

import numpy as np
import peft
import torch
import transformers

from tests.parity import cases
from tests.parity.goldens import FOLDER, MODELS, NEW_TOKENS, PROMPT_LENGTHS

LENGTH = 16


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, adapters) in enumerate(MODELS.items()):
        base = cases.base_model(torch, transformers, name, num_hidden_layers=2)
        # Stored in bfloat16, computed in float32. Casting the model that runs would round its rotary tables, too.
        copy.deepcopy(base).to(torch.bfloat16).save_pretrained(FOLDER / name / "base")
        (FOLDER / name / "base" / "generation_config.json").unlink(missing_ok=True)
        for weight in base.parameters():
            weight.data = weight.data.to(torch.bfloat16).to(torch.float32)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, cases.VOCAB, (2, LENGTH)).astype(np.int32)
        arrays = {"tokens": tokens}
        for adapter in (None, *adapters):
            model = base
            if adapter is not None:
                model = cases.peft_model(torch, peft, base, adapter, adapters[adapter])
                cases.save_adapter(torch, model, adapter, FOLDER / name)
            arrays[f"logits {adapter}"] = cases.logits(torch, model, tokens)
            for i, length in enumerate(PROMPT_LENGTHS):
                arrays[f"answer {i} {adapter}"] = np.array(
                    cases.greedy(torch, model, tokens[i, :length].tolist(), NEW_TOKENS), np.int32
                )
        np.savez_compressed(FOLDER / name / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
