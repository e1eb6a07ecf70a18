"""How factors are folded into slot dtype, and which of them are refused."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jlora
from tests.manager.test_names import Merged, factors, make_manager, placed
from tests.manager.tiny import lora, make_adapter, make_world

DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64]


@pytest.mark.parametrize("slot_dtype", DTYPES[:3])
@pytest.mark.parametrize("file_dtype", DTYPES)
def test_scaling_is_folded_in_float32_and_rounded_once(rng, file_dtype, slot_dtype):
    manager = make_manager(Merged(), dtype=slot_dtype)
    scaling = 1 / 3
    module = factors(rng, 4, 3, 12, dtype=file_dtype, scaling=scaling)
    a, b, _ = placed(manager, {"proj": module})
    assert a.dtype == b.dtype == slot_dtype
    np.testing.assert_array_equal(a[0], module.a.astype(slot_dtype))
    want = (np.float32(scaling) * module.b.T.astype(np.float32)).astype(slot_dtype)
    np.testing.assert_array_equal(b, want)


def test_folding_in_float32_differs_from_folding_in_slot_dtype(rng):
    """The check above can tell the two apart."""
    b = rng.normal(size=100).astype(ml_dtypes.bfloat16)
    late = (np.float32(1 / 3) * b.astype(np.float32)).astype(ml_dtypes.bfloat16)
    early = ml_dtypes.bfloat16(1 / 3) * b
    assert (late != early).any()


def test_base_weights_equal_to_the_model_are_accepted():
    for dtype in (jnp.float32, jnp.bfloat16):
        world = make_world(dtype=dtype)
        table = np.asarray(world.model.embed.embedding[...]).astype(np.float32)
        modules = {"embed": lora("embed", 2, np.random.default_rng(0))}
        for name in ("embed", "lm_head"):
            adapter = jlora.Adapter(name=name, modules=modules, base_weights={name: table})
            assert world.manager.add_adapter(adapter)


def test_an_adapter_is_read_back_from_its_slot(world):
    adapter = make_adapter("a", rank=3)
    world.manager.add_adapter(adapter)
    with pytest.raises(jlora.LoRAError, match="in no slot"):
        world.manager.export_adapter("a")
    with pytest.raises(jlora.AdapterNotFoundError):
        world.manager.export_adapter("b")
    world.manager.activate_adapter("a")
    read = world.manager.export_adapter("a")
    assert list(read.modules) == list(adapter.modules)
    for name, module in adapter.modules.items():  # the scaling is a power of two: exact
        np.testing.assert_array_equal(read.modules[name].a, module.a)
        np.testing.assert_array_equal(read.modules[name].b, module.b)
        assert (read.modules[name].alpha, read.modules[name].scaling) == (module.alpha, module.scaling)


def test_a_scaling_of_zero_cannot_be_read_back(rng):
    manager = make_manager(Merged())
    placed(manager, {"proj": factors(rng, 2, 3, 12, scaling=0.0)})
    with pytest.raises(jlora.LoRAError, match="scaling 0"):
        manager.export_adapter("x")
