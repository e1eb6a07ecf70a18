"""`target_modules`: which layers are wrapped, by dotted suffix or full path, and what raises."""

import numpy as np
import pytest
from flax import nnx

from jlora.config import LoRAConfig
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.scope import use
from jlora.manager.manager import LoRAManager
from tests.layers.merging import Target, make_adapter, make_manager


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.qkv_proj = nnx.Linear(6, 12, rngs=rngs)
        self.q_proj = nnx.Linear(6, 6, rngs=rngs)
        self.proj = nnx.Linear(6, 6, rngs=rngs)
        self.conv = nnx.Conv(6, 6, (1,), rngs=rngs)


class Model(nnx.Module):
    packed_modules = {"qkv_proj": ("query", "key", "value")}

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.layers = nnx.List([Attention(rngs), Attention(rngs)])
        self.proj = nnx.Linear(6, 6, rngs=rngs)


def wrapped(*targets: str) -> set[str]:
    return {site.path for site in make_manager(Model(), target_modules=targets)._pool.sites}


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        (["q_proj"], {"layers.0.q_proj", "layers.1.q_proj"}),
        (["layers.1.q_proj"], {"layers.1.q_proj"}),
        (["1.q_proj"], {"layers.1.q_proj"}),
        (["proj"], {"proj", "layers.0.proj", "layers.1.proj"}),  # never q_proj or qkv_proj
        (["qkv_proj"], {"layers.0.qkv_proj", "layers.1.qkv_proj"}),
        (["key"], {"layers.0.qkv_proj", "layers.1.qkv_proj"}),
        (["layers.0.value", "embed"], {"layers.0.qkv_proj", "embed", "embed.attend"}),
        (["lm_head"], {"embed.attend"}),
        (["embed.attend", "proj"], {"embed.attend", "proj", "layers.0.proj", "layers.1.proj"}),
    ],
)
def test_suffixes_full_paths_and_packed_names(targets, paths):
    assert wrapped(*targets) == paths


def test_every_eligible_layer_by_default():
    paths = {site.path for site in make_manager(Model())._pool.sites}
    names = ("qkv_proj", "q_proj", "proj")
    assert paths == {"embed", "embed.attend", "proj"} | {f"layers.{i}.{name}" for i in (0, 1) for name in names}


@pytest.mark.parametrize("target", ["roj", "q_pro", "layers", "0", "layers.0", "layers.2.q_proj", "Proj", "s.0.proj"])
def test_a_target_that_matches_nothing_raises(target):
    model = Model()
    with pytest.raises(LoRAError, match=r"match no layer of Model|match 'layers"):
        make_manager(model, target_modules=["q_proj", target])
    assert type(model.proj) is nnx.Linear


def test_a_target_that_cannot_be_wrapped_raises():
    model = Model()
    with pytest.raises(LoRAError, match=r"\['conv'\] match 'layers.0.conv' \(Conv\), but Conv is not a linear"):
        make_manager(model, target_modules=["proj", "conv"])
    assert type(model.proj) is nnx.Linear


def test_a_model_with_nothing_to_wrap_raises():
    class Bare(nnx.Module):
        def __init__(self):
            self.norm = nnx.RMSNorm(6, rngs=nnx.Rngs(0))

    with pytest.raises(LoRAError, match=r"Bare has no layer that can serve LoRA"):
        make_manager(Bare())
    with pytest.raises(LoRAError, match=r"hold it in an nnx.Module"):
        make_manager(nnx.Linear(6, 6, rngs=nnx.Rngs(0)))


def test_layers_left_out_are_plain_and_adapters_for_them_refused():
    model = Model()
    manager = make_manager(model, target_modules=["q_proj"])
    assert type(model.proj) is nnx.Linear
    with pytest.raises(AdapterMismatchError, match=r"'proj' is not wrapped: it is not among the configured"):
        manager.add_adapter(make_adapter("one", [Target("proj", 6, 6, "")], 2))
    x = np.ones((1, 2, 6), np.float32)
    model.proj(x)  # needs no scope
    with pytest.raises(LoRAError, match=r"outside `jlora.use`"):
        model.layers[0].q_proj(x)


def test_lookup_alone_leaves_the_logits_alone():
    model = Model()
    adapter = make_adapter("one", [Target("embed", 11, 6, "", kind="embedding")], 2)
    manager = make_manager(model, [adapter], target_modules=["lm_head", "embed"])
    query = np.ones((1, 2, 6), np.float32)
    plain = np.asarray(query @ np.asarray(model.embed.embedding[...]).T)
    with manager.prepare(["one"]) as batch, use(batch, partial=True):
        np.testing.assert_allclose(model.embed.attend(query), plain, rtol=1e-5)
        changed = np.asarray(model.embed(np.zeros((1, 2), np.int32))) - np.asarray(model.embed.embedding[...])[0]
    module = adapter.modules["embed"]
    np.testing.assert_allclose(
        np.asarray(changed)[0, 1], module.scaling * module.b @ module.a[:, 0], rtol=1e-4, atol=1e-5
    )


def test_fully_sharded_is_refused_while_no_mesh_is_served():
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(LoRAError, match="fully_sharded"):
        LoRAManager(model, LoRAConfig(max_loras=1, max_lora_rank=1, fully_sharded=True))
    assert type(model.layers[0]) is nnx.Linear
