"""Adapters of experts of several formats, against transformers with the same weights merged. Needs no PyTorch."""

import jax
import numpy as np
import pytest

import jlora
import jlora.models
from tests.compiled import compiled_programs
from tests.matrix import thinned
from tests.models import goldens as checkpoints
from tests.parity import expert_goldens as goldens

pytestmark = pytest.mark.device

TOLERANCE = 1e-4  # of the largest logit

each = pytest.mark.parametrize("model", thinned(list(goldens.MODELS), 2))


@each
def test_logits_of_mixed_batches(model):
    """Each format beside each other and the base model, through three slots, in one compiled forward."""
    want = goldens.expected(model)
    config = jlora.LoRAConfig(max_loras=3, max_lora_rank=4, max_cpu_loras=8)
    manager = jlora.LoRAManager(jlora.models.from_pretrained(checkpoints.FOLDER / model), config)
    for adapter in goldens.ADAPTERS:
        manager.add_adapter(jlora.LoRARequest(adapter, str(goldens.adapter_path(model, adapter))))
    tokens = np.concatenate([want["tokens"]] * 2)  # [4, L]: each sequence for two adapters

    @jax.jit
    def forward(decoder, tokens, batch):
        with jlora.use(batch):
            return decoder(tokens)

    names = [None, *goldens.ADAPTERS]
    for i, name in enumerate(names):
        rows = [name, names[i - 1], names[i - 2], name]
        with manager.prepare(rows) as batch:
            found = np.asarray(forward(manager.model, tokens, batch))
        for row, own in enumerate(rows):
            logits = want[str(own)][row % 2]
            assert found[row].shape == logits.shape
            assert np.abs(found[row] - logits).max() <= TOLERANCE * np.abs(logits).max(), (rows, row)
    assert compiled_programs(forward) == 1
    assert manager.stats().slot_evictions >= len(goldens.ADAPTERS) - 3


@each
def test_goldens_tell_adapters_apart(model):
    """Each adapter's logits differ clearly from the others' and the base's, as the comparison above assumes."""
    want = goldens.expected(model)
    logits = [want[str(name)] for name in (None, *goldens.ADAPTERS)]
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert np.abs(one - other).max() > 100 * TOLERANCE * np.abs(one).max()
