"""Writes tests/parity/expert_goldens: adapters of experts for the checkpoints of tests/models/goldens, and the logits
of transformers with the weights of each merged (needs the group `parity`). Run
`python -m tests.parity.make_expert_goldens` from the repository root; commit the result."""

import copy
import shutil

import numpy as np
import torch
import transformers

from tests.models import goldens
from tests.parity import expert_files
from tests.parity.cases import VOCAB, logits
from tests.parity.expert_goldens import FOLDER, MODELS, adapter_path, made, shapes_of

LENGTH = 12


def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, name in enumerate(MODELS):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            goldens.FOLDER / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tokens = np.random.default_rng(seed).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
        arrays = {"tokens": tokens, "None": logits(torch, base, tokens)}
        for adapter, files in made(name).items():
            files.save(adapter_path(name, adapter))
            model = copy.deepcopy(base)
            expert_files.merge(torch, model, shapes_of(name), files)
            arrays[adapter] = logits(torch, model, tokens)
        np.savez_compressed(FOLDER / name / "expected.npz", **arrays)


if __name__ == "__main__":
    main()
