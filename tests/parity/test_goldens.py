"""Adapters that PEFT saved, against the logits and answers that PEFT computed with them. Needs no PyTorch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
import jlora.models
from tests.compiled import compiled_programs
from tests.matrix import thinned
from tests.parity import goldens

pytestmark = pytest.mark.device

TOLERANCE = 1e-4  # of the largest logit


@functools.cache
def served(model: str) -> jlora.LoRAManager:
    decoder = jlora.models.from_pretrained(goldens.FOLDER / model / "base", dtype=jnp.float32)
    manager = jlora.LoRAManager(decoder, jlora.LoRAConfig(max_loras=3, max_lora_rank=64, max_cpu_loras=8))
    for adapter in goldens.MODELS[model]:
        manager.add_adapter(jlora.LoRARequest(adapter, goldens.adapter_path(model, adapter)))
    return manager


@pytest.mark.parametrize("model", thinned(list(goldens.MODELS), 0, 2))
def test_logits_of_mixed_batches(model):
    manager, want = served(model), goldens.expected(model)
    tokens = np.concatenate([want["tokens"]] * 2)  # [4, L]: each sequence for two adapters

    @jax.jit
    def forward(decoder, tokens, batch):
        with jlora.use(batch):
            return decoder(tokens)

    names = [None, *goldens.MODELS[model]]
    for first in names:
        for second in names:
            rows = [first, second, second, first]
            with manager.prepare(rows) as batch:
                got = np.asarray(forward(manager.model, tokens, batch))
            for i, name in enumerate(rows):
                logits = want[f"logits {name}"][i % 2]
                assert got[i].shape == logits.shape
                assert np.abs(got[i] - logits).max() <= TOLERANCE * np.abs(logits).max(), (first, second, i)
    assert compiled_programs(forward) == 1
    assert manager.stats().slot_evictions >= len(names) - 1


@pytest.mark.parametrize("model", ["llama-biases-llama3", "qwen3-tied-window"])
@pytest.mark.slow
def test_greedy_answers(model):
    manager, want = served(model), goldens.expected(model)
    names = [None, *goldens.MODELS[model]]
    prompts = [want["tokens"][i, :length].tolist() for i, length in enumerate(goldens.PROMPT_LENGTHS)]
    for i in range(0, len(names), 2):
        pair = (names[i : i + 2] * 2)[:2]
        with manager.prepare([name for name in pair for _ in prompts]) as batch:
            answers = jlora.models.generate(manager.model, prompts * 2, batch=batch, max_new_tokens=goldens.NEW_TOKENS)
        expected = [want[f"answer {p} {name}"].tolist() for name in pair for p in range(len(prompts))]
        assert answers == expected, pair
