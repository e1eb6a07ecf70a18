"""Base weights in an adapter, and adapters read back from their slots."""

import numpy as np
import pytest
from flax import nnx

import jlora
from tests.fit.test_names import Merged, factors, make_manager, placed
from tests.manager.tiny import make_adapter


def test_an_adapter_is_read_back_from_its_slot(world):
    adapter = make_adapter("a", rank=3)
    world.manager.add_adapter(adapter)
    with pytest.raises(jlora.LoRAError, match="in no slot"):
        world.manager.export_adapter("a")
    with pytest.raises(jlora.AdapterNotFoundError):
        world.manager.export_adapter("b")
    world.manager.prepare(["a"]).close()
    read = world.manager.export_adapter("a")
    assert list(read.modules) == list(adapter.modules)
    for name, module in adapter.modules.items():
        np.testing.assert_array_equal(read.modules[name].a, module.a)
        np.testing.assert_array_equal(read.modules[name].b, module.b)
        assert (read.modules[name].alpha, read.modules[name].scaling) == (module.alpha, module.scaling)


@pytest.mark.parametrize("scaling", [0.0, 1 / 3, -1.5])
def test_any_scaling_is_read_back_with_the_bits_of_the_factors(rng, scaling):
    manager = make_manager(Merged())
    module = factors(rng, 2, 3, 12, scaling=scaling)
    placed(manager, {"proj": module})
    read = manager.export_adapter("x").modules["proj"]
    assert (read.a.tobytes(), read.b.tobytes()) == (module.a.tobytes(), module.b.tobytes())
    assert (read.rank, read.alpha, read.scaling) == (2, module.alpha, scaling)


@pytest.mark.parametrize(
    ("path", "rows", "said"),
    [("self_attn", 3, True), ("self_attn", 5, False), ("self_attn", 24, False), ("mlp", 3, False)],
)
def test_one_head_of_an_attention_b_is_refused_as_maxtexts(rng, tmp_path, path, rows, said):
    model = nnx.Dict({path: Merged()})
    jlora.Adapter(name="x", modules={f"{path}.proj": factors(rng, 2, 3, rows)}).save_pretrained(tmp_path)
    with pytest.raises(jlora.AdapterMismatchError, match=f"{path}.proj: A and B have shapes") as raised:
        make_manager(model).add_adapter(jlora.LoRARequest("x", str(tmp_path)))
    assert ("one head of 4, as MaxText exports them" in str(raised.value)) == said


def test_transposed_factors_of_a_square_layer_are_named(rng):
    manager = make_manager(nnx.Dict({"proj": nnx.Linear(6, 6, use_bias=False, rngs=nnx.Rngs(0))}))
    turned = jlora.ModuleLoRA(a=rng.normal(size=(6, 2)), b=rng.normal(size=(2, 6)), alpha=1.0, scaling=1.0)
    with pytest.raises(jlora.AdapterMismatchError, match=r"they are transposed: A is \[rank, in\]"):
        manager.add_adapter(jlora.Adapter(name="x", modules={"proj": turned}))
