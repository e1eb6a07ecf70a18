"""Errors of a served adapter against PEFT's own module of the same dtype."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import peft
import pytest
import torch
from flax import nnx

import jlora

pytestmark = pytest.mark.parity

ROWS, K, N, R = 64, 48, 40, 4
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(K, N, bias=False)


class Model(nnx.Module):
    def __init__(self, dtype):
        self.proj = nnx.Linear(K, N, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))


def of_peft(dtype, x, a, b, scaling):
    """Return PEFT's output for a base of zeros, in `dtype`."""
    kind = getattr(torch, dtype)
    config = peft.LoraConfig(r=R, lora_alpha=scaling * R, target_modules=["proj"])
    model = peft.get_peft_model(Layer().to(kind), config, autocast_adapter_dtype=False).eval()
    layer = model.base_model.model.proj
    assert layer.scaling["default"] == scaling
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        for linear, factor in ((layer.lora_A, a), (layer.lora_B, b)):
            linear["default"].weight.copy_(torch.from_numpy(factor.astype(np.float32)))
        out = layer(torch.from_numpy(x.astype(np.float32)).to(kind))
    assert out.dtype == kind
    return out.double().numpy()


@pytest.mark.parametrize("size", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_twice_those_of_peft(dtype, size):
    model = Model(dtype)
    model.proj.kernel[...] = jnp.zeros((K, N), dtype)
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=R))
    rng = np.random.default_rng(0)
    x, a, b = (
        (scale * rng.normal(size=shape)).astype(DTYPES[dtype])
        for scale, shape in ((1, (ROWS, K)), (K**-0.5, (R, K)), (size, (N, R)))
    )
    wide_x, wide_a, wide_b = (array.astype(np.float64) for array in (x, a, b))
    for scaling in 2.0 ** np.arange(-10, 6.5, 1.5):
        module = jlora.ModuleLoRA(a=a, b=b, alpha=scaling * R, scaling=scaling)
        manager.add_adapter(jlora.Adapter(name="x", modules={"proj": module}), load_inplace=True)
        with manager.prepare(["x"]) as batch, jlora.use(batch):
            found = model.proj(jnp.asarray(x)[None])[0]
        assert found.dtype == dtype
        exact = scaling * wide_x @ wide_a.T @ wide_b.T
        ours = np.linalg.norm(np.asarray(found, np.float64) - exact)
        theirs = np.linalg.norm(of_peft(dtype, x, a, b, scaling) - exact)
        assert ours <= 2 * theirs, (scaling, ours, theirs)
