"""Adapters of experts of several formats, against transformers with the same weights merged. Needs no PyTorch."""

import jax
import numpy as np
import pytest

import jlora
import jlora.models
from jlora.models.expert_parallel import spread_over
from tests.compiled import compiled_programs
from tests.matrix import thinned
from tests.models import goldens as checkpoints
from tests.models.test_mesh import make_mesh
from tests.parity import expert_goldens as goldens

pytestmark = pytest.mark.device

TOLERANCE = 1e-4  # of the largest logit


def check_mixed_batches(model, mesh=None, dispatch="all_gather", **config):
    """Compare the logits of each format beside each other and the base model, in one compiled forward."""
    want = goldens.expected(model)
    decoder = jlora.models.from_pretrained(checkpoints.FOLDER / model, mesh=mesh, dispatch=dispatch)
    manager = jlora.LoRAManager(decoder, jlora.LoRAConfig(max_lora_rank=4, max_cpu_loras=8, **config))
    for adapter in goldens.ADAPTERS:
        manager.add_adapter(jlora.LoRARequest(adapter, str(goldens.adapter_path(model, adapter))))
    tokens = np.concatenate([want["tokens"]] * 2)  # [4, L]: each sequence for two adapters

    @jax.jit
    def forward(decoder, tokens, batch):
        with jlora.use(batch):
            return decoder(tokens)

    def logits_of(rows, tokens):
        with manager.prepare(rows) as batch:
            return np.asarray(forward(manager.model, tokens, batch))

    names = [None, *goldens.ADAPTERS]
    for i, name in enumerate(names):
        rows = [name, names[i - 1], names[i - 2], name]
        found = logits_of(rows, tokens)
        for row, own in enumerate(rows):
            logits = want[str(own)][row % 2]
            assert found[row].shape == logits.shape
            assert np.abs(found[row] - logits).max() <= TOLERANCE * np.abs(logits).max(), (rows, row)
    np.testing.assert_array_equal(logits_of(rows, tokens), found)
    np.testing.assert_array_equal(logits_of(rows[::-1], tokens[::-1]), found[::-1])
    assert compiled_programs(forward) == 1
    return manager


@pytest.mark.parametrize("model", thinned(list(goldens.MODELS), 2))
def test_logits_of_mixed_batches(model):
    manager = check_mixed_batches(model, max_loras=3)
    assert manager.stats().slot_evictions >= len(goldens.ADAPTERS) - 3


ON_MESHES = [
    ("mixtral-window", {"expert": 4}, "all_gather", {}),
    ("gpt-oss-square", {"expert": 2, "tensor": 2}, "all_to_all", {"expert_slots": {"per_expert": 3, "shared": 1}}),
    ("qwen3-moe-mlp-layer", {"data": 2, "expert": 2}, "all_to_all", {}),
    ("qwen3-moe-mlp-layer", {"expert": 2, "tensor": 2}, "all_gather", {"fully_sharded": True}),
    ("gpt-oss-square", {"data": 4}, "all_gather", {}),
]


@pytest.mark.mesh
@pytest.mark.parametrize(("model", "axes", "dispatch", "config"), thinned(ON_MESHES, 0, 1), ids=str)
def test_logits_of_mixed_batches_on_meshes(model, axes, dispatch, config):
    data = [name for name in spread_over(dispatch) if name in axes]
    check_mixed_batches(model, make_mesh(axes), dispatch, max_loras=4, data_axes=data, **config)
