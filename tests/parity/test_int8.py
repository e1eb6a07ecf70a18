"""Deltas in slots of int8 against those of PEFT."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

import jlora
from tests.layers.merging import serve

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


class Layer(nnx.Module):
    """A layer of zeros, whose output for the identity is the delta."""

    def __init__(self, k, n):
        self.proj = nnx.Linear(k, n, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.proj(x)


def deltas(k, n, rank):
    """Return the delta [N, K] of an adapter that PEFT saves, as PEFT and slots of int8 have it."""
    torch.manual_seed(0)
    base = torch.nn.Sequential()
    base.add_module("proj", torch.nn.Linear(k, n, bias=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["proj"]))
    layer = model.base_model.model.proj
    for factor in (layer.lora_A["default"].weight, layer.lora_B["default"].weight):
        torch.nn.init.normal_(factor)
    factors = peft.get_peft_model_state_dict(model)
    a, b = (factors[f"base_model.model.proj.lora_{half}.weight"].numpy() for half in "AB")
    manager = jlora.LoRAManager(Layer(k, n), jlora.LoRAConfig(max_loras=1, max_lora_rank=rank, dtype="int8"))
    manager.add_adapter(jlora.Adapter.from_arrays("x", {"proj": (a, b)}, alpha=2 * rank))
    with manager.prepare(["x"]) as batch:
        served = np.asarray(serve(manager.model, jnp.eye(k)[None], batch))[0].T
    return layer.get_delta_weight("default").detach().numpy(), served


@pytest.mark.parametrize(("k", "n", "rank"), [(4096, 512, 16), (512, 4096, 4)])
def test_gaussian_factors(k, n, rank):
    theirs, served = deltas(k, n, rank)
    error = np.linalg.norm(served - theirs) / np.linalg.norm(theirs)
    assert 0.005 < error <= 0.0135
