"""Initial values of new adapters, against those of PEFT."""

import numpy as np
import peft
import pytest
import torch
from flax import nnx

import jlora

pytestmark = pytest.mark.parity


class Torch(torch.nn.Module):
    """Layers of PEFT with many values, so that their distributions can be compared."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(1024, 16)
        self.embed = torch.nn.Embedding(32, 1024)


class Wide(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(1024, 16, rngs=nnx.Rngs(0))
        self.embed = nnx.Embed(32, 1024, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        return self.up(self.embed(tokens))


def test_values_are_distributed_as_those_of_peft():
    """Compared are the largest value, and quantiles of four thousand draws."""
    targets = ["up", "embed"]
    wrapped = peft.get_peft_model(Torch(), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    wanted = {name: array.numpy() for name, array in peft.get_peft_model_state_dict(wrapped).items()}
    manager = jlora.LoRAManager(Wide(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4))
    modules = manager.new_adapter("new", rank=4, alpha=8, target_modules=targets).modules
    found = {"up.lora_A.weight": modules["up"].a, "up.lora_B.weight": modules["up"].b}
    found |= {"embed.lora_embedding_A": modules["embed"].a, "embed.lora_embedding_B": modules["embed"].b}
    assert {f"base_model.model.{name}" for name in found} == wanted.keys()
    for name, array in found.items():
        want = wanted[f"base_model.model.{name}"]
        assert (array.shape, array.dtype) == (want.shape, want.dtype)
        quantiles = [np.quantile(values, np.linspace(0.05, 0.95, 10)) for values in (array, want)]
        np.testing.assert_allclose(*quantiles, atol=0.1 * max(want.std(), 1e-9))
    assert np.abs(modules["up"].a).max() <= 1 / 32
    assert {module.scaling for module in modules.values()} == {2.0}
