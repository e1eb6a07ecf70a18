"""Adapters that PEFT trained on a multimodal model, on its text model."""

import jax
import peft
import pytest
import torch
import transformers

import jlora
from jlora.errors import AdapterMismatchError
from jlora.models import from_pretrained
from tests.models import goldens
from tests.models.families import GEMMA3_VISION, build
from tests.parity import cases

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TEXT = r".*language_model.*_proj"


@jax.jit
def forward(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return Gemma 3 of transformers, the folder of its checkpoint, and a prompt longer than the window."""
    theirs = build(torch, transformers, "gemma3", 11, **GEMMA3_VISION)
    folder = tmp_path_factory.mktemp("gemma")
    theirs.save_pretrained(folder / "base")
    return theirs, folder, jax.random.randint(jax.random.key(0), (3, 20), 0, 64, "int32")


def adapter_of(served, name, targets):
    """Return PEFT's model with an adapter, and the folder of the adapter."""
    theirs, folder, _ = served
    model = cases.peft_model(torch, peft, theirs, name, {"r": 5, "target_modules": targets})
    return model, str(cases.save_adapter(torch, model, name, folder))


def manager_of(served, **options):
    return jlora.LoRAManager(
        from_pretrained(served[1] / "base"), jlora.LoRAConfig(max_loras=2, max_lora_rank=8), **options
    )


def test_all_projections_of_the_text_model(served):
    theirs, _, tokens = served
    tuned, path = adapter_of(served, "text", TEXT)
    manager = manager_of(served)
    manager.add_adapter(jlora.LoRARequest("text", path))
    with manager.prepare(["text", None, "text"]) as batch:
        found = forward(manager.model, tokens, batch)
    for i, model in enumerate((tuned, theirs, tuned)):
        assert goldens.relative_error(found[i], cases.logits(torch, model, tokens)[i]) < 1e-4


def test_weights_of_the_tower_are_refused_by_name(served):
    _, path = adapter_of(served, "all", ["q_proj"])
    with pytest.raises(AdapterMismatchError, match=r"vision_tower.*q_proj"):
        manager_of(served).add_adapter(jlora.LoRARequest("all", path))
    manager_of(served, skip=["vision_tower"]).add_adapter(jlora.LoRARequest("all", path))
