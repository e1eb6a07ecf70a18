"""Module names with the prefixes that wrappers of PyTorch modules leave in them."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.adapters import Adapter
from jlora.adapters.wrapped_names import readings
from tests.adapters.conftest import lora_tensors
from tests.layers.merging import serve
from tests.manager.tiny import make_adapter, make_world

NAME = "layers.0.q_proj"


def test_prefixes():
    for wrapped in (
        *("_orig_mod.layers.0.q_proj", "module.layers.0.q_proj", "module.module.layers.0.q_proj"),
        *("module._orig_mod.base_model.model.layers.0.q_proj", "base_model.model.layers.0.q_proj"),
        *("base_model.model.base_model.model.layers.0.q_proj", "layers.0._orig_mod.q_proj", "layers.0.module.q_proj"),
        "layers._checkpoint_wrapped_module.0._fsdp_wrapped_module._checkpoint_wrapped_module.q_proj",
        "_fsdp_wrapped_module.base_model.model.layers.0._fsdp_wrapped_module.q_proj",
    ):
        assert NAME in readings(wrapped)
        assert readings(wrapped)[0] == wrapped
    for name in (NAME, "submodule.q_proj", "model._module_list.0", "base_model.q_proj", "module"):
        assert readings(name)[:1] == (name,)
    assert readings(NAME) == (NAME,)
    assert readings("model.unembed_tokens") == ("model.unembed_tokens", "lm_head")


def test_wrapped_names_are_served_as_the_plain_ones():
    plain = make_adapter("a", modules=["lm_head", "layers.0.k_proj", "embed"])
    world = make_world()
    for spell in ("_orig_mod.{}", "module.base_model.model.{}", "base_model.model.{}"):
        renamed = {spell.format(name): module for name, module in plain.modules.items()}
        renamed["model.unembed_tokens"] = renamed.pop(spell.format("lm_head"))
        world.manager.add_adapter(jlora.Adapter(name="a", modules=renamed), load_inplace=True)
        world.check(world.serve(["a", None, "a"]), [plain, None, plain])


def test_a_module_of_the_model_keeps_its_name():
    """A prefix is a prefix only where the model has no module of the full name."""

    class Model(nnx.Module):
        def __init__(self):
            self.module = nnx.Dict(proj=nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)))
            self.proj = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.module.proj(x), self.proj(x)

    manager = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    factors = np.ones((2, 4), np.float32), np.ones((4, 2), np.float32)
    model, x = manager.model, jnp.ones((1, 1, 4))
    base = [np.asarray(x @ layer.kernel[...]) for layer in (model.module.proj, model.proj)]
    manager.add_adapter(Adapter.from_arrays("a", {"module.proj": factors}, alpha=2))
    with manager.prepare(["a"], length=1) as batch:
        inside, outside = serve(model, x, batch)
    np.testing.assert_allclose(inside, base[0] + 8, atol=1e-5)
    np.testing.assert_allclose(outside, base[1], atol=1e-5)
    twice = Adapter.from_arrays("b", {"module.proj": factors, "_orig_mod.module.proj": factors}, alpha=2)
    with pytest.raises(jlora.AdapterMismatchError, match=r"_orig_mod\.module\.proj: fills .* module\.proj fills too"):
        manager.add_adapter(twice)


@pytest.mark.parametrize("raw", ["default", "_orig_mod", "default._fsdp_wrapped_module"])
def test_wrappers_of_a_factor(folder_of, raw):
    tensors = lora_tensors({"model.layers.0.self_attn.q_proj": 4})
    renamed = {key.replace("lora_A.weight", f"lora_A.{raw}.weight"): value for key, value in tensors.items()}
    assert list(Adapter.from_pretrained(folder_of(renamed)).modules) == ["model.layers.0.self_attn.q_proj"]


def test_patterns_match_the_plain_name(folder_of):
    """A regular expression or a key of a pattern was written for the names without wrappers."""
    wrapped = "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.self_attn.q_proj"
    folder = folder_of(
        lora_tensors({wrapped: 2}),
        target_modules=r"model\.layers\.\d+\.self_attn\.q_proj",
        rank_pattern={"layers.0.self_attn.q_proj": 2},
        alpha_pattern={"^model.layers.0.self_attn.q_proj": 6},
    )
    adapter = Adapter.from_pretrained(folder)
    assert adapter.modules[wrapped].scaling == 3
    assert adapter.warnings() == []
