"""Base weights stored with an adapter: equal as rounded, compared with codes, or taken for the base's."""

import logging

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.layers.wrap.discover import register_layer
from tests.manager.tiny import make_adapter, make_world

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
K, N = 64, 32


def stored_as(weight, *dtypes):
    for dtype in dtypes:
        weight = weight.astype(dtype)
    return weight


@pytest.mark.parametrize(
    ("served", "dtypes"),
    [
        (jnp.float32, [BF16]),
        (jnp.float32, [BF16, F32]),  # trained in bfloat16, saved in float32
        (jnp.float16, [BF16, F32]),
        (jnp.bfloat16, [F16]),
    ],
)
def test_a_weight_in_another_dtype_is_the_same_weight(served, dtypes):
    table = np.random.default_rng(3).normal(size=(13, 16)).astype(F32)
    table[0, :3] = 0, 1e-6, -1e-7  # subnormal in float16
    world = make_world(dtype=served)
    world.model.embed.embedding[...] = jnp.asarray(table, served)
    stored = stored_as(table, *dtypes)
    adapter = make_adapter("a", modules=["embed"])
    good = jlora.Adapter(name="good", modules=adapter.modules, base_weights={"embed": stored})
    assert world.manager.add_adapter(good)
    assert world.manager.list_adapters()["good"].warnings == ()
    coarsest = max((*dtypes, served), key=lambda dtype: float(ml_dtypes.finfo(dtype).eps))
    apart = 2.2 * float(ml_dtypes.finfo(coarsest).eps) * abs(float(stored[5, 5]))  # more than two units
    other = stored.copy()
    other[5, 5] = float(other[5, 5]) + apart
    bad = jlora.Adapter(name="bad", modules=adapter.modules, base_weights={"embed": other})
    with pytest.raises(jlora.AdapterMismatchError, match=r"embed\.base_layer\.weight: its values differ"):
        world.manager.add_adapter(bad)


class Coded(nnx.Module):
    """A weight in int8 or float8, with a scale for each column or for all."""

    def __init__(self, weight, codes, axis):
        top = np.abs(weight).max(axis, keepdims=True)
        if codes == jnp.int8:
            self.scale = nnx.Param(jnp.asarray(top / 127))
            self.weight = nnx.Param(jnp.asarray(np.round(weight / (top / 127)), jnp.int8))
        else:
            self.scale = nnx.Param(jnp.asarray(top / float(ml_dtypes.finfo(codes).max)))
            self.weight = nnx.Param(jnp.asarray(weight / np.asarray(self.scale[...])).astype(codes))

    def __call__(self, x):
        return x @ (self.weight[...].astype(jnp.float32) * self.scale[...])


def head_of(weight, codes, axis, dequantize=None):
    """Return the manager of a model of one quantized layer, and a function that makes its adapters."""
    register_layer(Coded, lambda layer: jlora.LinearSpec(K, N, param=None, dtype=F32, dequantize=dequantize))
    model = nnx.Dict(lm_head=Coded(weight, codes, axis))
    module = jlora.ModuleLoRA(a=np.ones((2, K), F32), b=np.ones((N, 2), F32), alpha=2.0, scaling=1.0)

    def adapter(name, base):
        return jlora.Adapter(name=name, modules={"lm_head": module}, base_weights={"lm_head": base})

    return jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2, max_cpu_loras=4)), adapter


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("codes", [jnp.int8, jnp.float8_e4m3fn])
def test_a_weight_is_compared_with_the_codes_of_a_quantized_layer(codes, axis):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(K, N)) * rng.uniform(0.1, 3, N)).astype(F32)
    dequantize = lambda layer: layer.weight[...].astype(jnp.float32) * layer.scale[...]  # noqa: E731
    manager, adapter = head_of(weight, codes, axis, dequantize)
    for name, dtype in (("f32", F32), ("bf16", BF16), ("f16", F16)):
        assert manager.add_adapter(adapter(name, weight.T.astype(dtype)))
    top = np.abs(weight).max(axis, keepdims=True)
    step = np.broadcast_to(top / 127 if codes == jnp.int8 else np.abs(weight) / 8, weight.shape)
    weight[3, 5] += 1.7 * step[3, 5]
    with pytest.raises(jlora.AdapterMismatchError, match="its values differ"):
        manager.add_adapter(adapter("other", weight.T))
    assert [*manager.list_adapters()] == ["f32", "bf16", "f16"]


@pytest.mark.usefixtures("registered")
def test_a_weight_that_cannot_be_compared_is_taken_for_the_bases_with_one_warning(caplog):
    manager, adapter = head_of(np.ones((K, N), F32), jnp.int8, 0)
    with caplog.at_level(logging.WARNING, "jlora"):
        assert manager.add_adapter(adapter("a", np.zeros((N, K), F32)))
        with pytest.raises(jlora.AdapterMismatchError, match="shape"):
            manager.add_adapter(adapter("b", np.zeros((N, 3), F32)))
    (record,) = caplog.records
    assert "lm_head.base_layer.weight cannot be compared" in record.getMessage()
    (warning,) = manager.list_adapters()["a"].warnings
    assert warning in record.getMessage()
