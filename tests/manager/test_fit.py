"""Base weights in an adapter, and adapters read back from their slots."""

import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from tests.manager.test_names import Merged, factors, make_manager, placed
from tests.manager.tiny import lora, make_adapter, make_world


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
