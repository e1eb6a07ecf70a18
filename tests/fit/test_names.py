"""Slices of layers that checkpoint names fill."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jlora
from tests.manager.tiny import Model, make_adapter


def make_manager(model, *, rank=4, slots=2, dtype=None, **kwargs):
    return jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=slots, max_lora_rank=rank, dtype=dtype), **kwargs)


def factors(rng, rank, k, n, *, dtype=np.float32, scaling=1.0, kind="linear"):
    a, b = rng.normal(size=(rank, k)).astype(dtype), rng.normal(size=(n, rank)).astype(dtype)
    return jlora.ModuleLoRA(a=a, b=b, kind=kind, alpha=scaling * rank, scaling=scaling)


class Merged(nnx.Module):
    """One projection of 12 outputs."""

    def __init__(self, **attributes):
        self.proj = nnx.Linear(3, 12, use_bias=False, rngs=nnx.Rngs(0))
        for name, value in attributes.items():
            setattr(self.proj, name, value)


def placed(manager, modules):
    """A [n, R, K], B [R, N] and ranks [n] of slot 0 of `proj`, after loading these modules."""
    manager.add_adapter(jlora.Adapter(name="x", modules=modules))
    manager.prepare(["x"]).close()
    layer = manager.model.proj
    return np.asarray(layer.jlora_a[0]), np.asarray(layer.jlora_b[0]), layer.jlora_ranks[0, :, 0].tolist()


def test_a_name_may_cover_several_slices(rng):
    manager = make_manager(Merged(), packed_modules={"proj": {"qk": (2, 4), "v": 6}})
    qk, v = factors(rng, 2, 3, 6), factors(rng, 4, 3, 6)
    a, b, ranks = placed(manager, {"qk": qk, "v": v})
    assert ranks == [2, 2, 4]
    np.testing.assert_array_equal(a[0, :2], qk.a)
    np.testing.assert_array_equal(a[1, :2], qk.a)
    np.testing.assert_array_equal(a[2], v.a)
    np.testing.assert_array_equal(b[:2, :6], qk.b.T)
    np.testing.assert_array_equal(b[:, 6:], v.b.T)


@pytest.mark.parametrize(
    ("attributes", "packed", "message"),
    [
        ({"output_sizes": (6, 6)}, {"proj": ("p", "q", "r")}, "names 3 parts .* output_sizes"),
        ({}, {"proj": ("p", "q", "r", "s", "t")}, "give the sizes"),
        ({}, {"proj": {"p": 6, "q": 5}}, "sum to 11, but the layer has 12"),
    ],
)
def test_packed_modules_that_do_not_add_up(attributes, packed, message):
    with pytest.raises(jlora.LoRAError, match=message):
        make_manager(Merged(**attributes), packed_modules=packed)


@pytest.mark.parametrize(
    ("name_map", "name"),
    [
        ({r"^model\.": ""}, "model.layers.1.o_proj"),
        ({r"^h\.(\d+)\.attn\.out$": r"layers.\1.o_proj"}, "h.1.attn.out"),
        ({"^never": "x", "^h": "layers", "^layers": "y"}, "h.1.o_proj"),  # the first that is found, and that one alone
        ({}, "layers.1.o_proj"),
    ],
)
def test_name_map(rng, name_map, name):
    model = Model()
    manager = make_manager(model, name_map=name_map)
    module = factors(rng, 2, 16, 16)
    manager.add_adapter(jlora.Adapter(name="x", modules={name: module}))
    manager.prepare(["x"]).close()
    assert model.layers[1].o_proj.jlora_ranks[0].tolist() == [[2, 1]]
    np.testing.assert_array_equal(model.layers[1].o_proj.jlora_a[0, 0, :2], module.a)
    assert model.layers[0].o_proj.jlora_ranks[0].tolist() == [[0, 0]]


@pytest.mark.usefixtures("unchecked_calls")
def test_a_name_map_that_cannot_work_is_refused_at_once():
    for name_map in ({"(": ""}, {"a": r"\1"}, {"a": r"\g<x>"}, {"a": None}, {3: "a"}):
        with pytest.raises(jlora.LoRAError, match="name_map"):
            make_manager(Model(), name_map=name_map)


class Stacked(nnx.Module):
    """Two layers in one module, as `nnx.vmap` makes them."""

    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(key):
            return nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(key))

        self.layers = make(jax.random.split(jax.random.key(0), 2))


def test_a_layer_has_one_name_and_one_number(rng):
    """Canonical ASCII decimals alone: no second name of a layer, in a list or in a stack."""
    for manager, pattern, k, n in (
        (make_manager(Model()), "layers.{}.o_proj", 16, 16), (make_manager(Stacked()), "layers.{}", 3, 4),
    ):  # fmt: skip
        wrong = [pattern.format(i) for i in ("01", "\u0661", "+1", "1_0", " 1", "00", "2", "-1", "\u00b2")]
        wrong += ["o_proj", "0.o_proj", "layers.0.o_pro", "xlayers.0.o_proj", "layers.0.o_proj.x", "Layers.0"]
        for name in wrong:
            with pytest.raises(jlora.AdapterMismatchError, match=r"no module|the name has no layer index"):
                manager.add_adapter(jlora.Adapter(name="x", modules={name: factors(rng, 2, k, n)}))
        assert manager.add_adapter(jlora.Adapter(name="x", modules={pattern.format(1): factors(rng, 2, k, n)}))


class Fused(nnx.Module):
    """Attention that holds its matrices itself."""

    def __init__(self):
        self.q_proj, self.k_proj = nnx.Param(jnp.ones((3, 3))), nnx.Param(jnp.ones((3, 3)))


class OwnExperts(nnx.Module):
    def __init__(self):
        self.w13, self.w2 = nnx.Param(jnp.ones((5, 3, 8))), nnx.Param(jnp.ones((5, 4, 3)))


class Served(OwnExperts):
    grouped_products = {"gate_up": "w13", "down": "w2"}


def odd(**mlp):
    """A model of two layers of modules that are not wrapped, and the modules `mlp` in each."""
    rngs = nnx.Rngs(0)
    tower = nnx.bridge.ToNNX(linen.Dense(3), rngs=rngs).lazy_init(np.ones((1, 3), np.float32))

    def layer():
        own = nnx.Dict(**{name: make() for name, make in mlp.items()})
        return nnx.Dict(attn=Fused(), mlp=own, tower=tower, o_proj=nnx.Linear(3, 3, rngs=rngs))

    return nnx.Dict(layers=nnx.List([layer() for _ in range(2)]))


def shared_experts():
    return nnx.Dict(gate_proj=nnx.Linear(3, 3, rngs=nnx.Rngs(0)))


def refusal(model, modules):
    manager = make_manager(model)
    with pytest.raises(jlora.AdapterMismatchError) as raised:
        manager.add_adapter(jlora.Adapter(name="x", modules=modules, task_type="CAUSAL_LM"))
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.1.attn.q_proj", "'layers.1.attn' is not wrapped: Fused is not .* it holds q_proj, k_proj: make each"),
        ("layers.0.tower.Dense_0", r"'layers.0.tower' is not wrapped: it is a Linen module: .* jlora\.LinenModule"),
        ("layers.1.mlp.experts.3.gate_proj", "'layers.1.mlp.experts' is not wrapped: OwnExperts .*ExpertsSpec"),
        ("model.layers.1.o_proj", "nearest is 'layers.1.o_proj'$"),
        ("model.layers.1.attn", "nearest is 'layers.1.attn', which is not wrapped: Fused is not"),
    ],
)
def test_name_of_an_unwrapped_module_is_refused(rng, name, expected):
    found = refusal(odd(experts=OwnExperts, shared_experts=shared_experts), {name: factors(rng, 2, 3, 3)})
    assert re.search(f"no module '{name}'.*{expected}", found)


def test_a_request_for_another_base_model_is_refused(world, tmp_path):
    make_adapter("x", base_model_name="org/base").save_pretrained(tmp_path)
    with pytest.raises(jlora.AdapterMismatchError, match=r"'sql'.*base_model_name_or_path is .*'org/other'"):
        world.manager.add_adapter(jlora.LoRARequest("sql", tmp_path, base_model_name="org/other"))
    assert world.manager.list_adapters() == {}


class Trunk(nnx.Module):
    """A layer named with or without the trunk's name `model.`, or both."""

    def __init__(self, *paths):
        self.score = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
        for path in paths:
            node = self
            if path == "model.proj":
                self.model = node = nnx.Module()
            node.proj = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0))


def trunk_adapter(name, task_type, rng):
    heads = {"score": jlora.SavedHead(rng.normal(size=(2, 3)).astype(np.float32))}
    arrays = {name: (rng.normal(size=(1, 3)).astype(np.float32), rng.normal(size=(4, 1)).astype(np.float32))}
    return jlora.Adapter.from_arrays("x", arrays, alpha=1, heads=heads, task_type=task_type)


def trunk_manager(*paths):
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=2, saved_heads={"score": 2})
    return jlora.LoRAManager(Trunk(*paths), config)


@pytest.mark.parametrize(
    ("path", "name", "task_type"),
    [
        *(("model.proj", "proj", "SEQ_CLS"), ("proj", "model.proj", "FEATURE_EXTRACTION"), ("proj", "proj", "SEQ_CLS")),
        *(("model.proj", "proj", None), ("proj", "model.proj", None)),
    ],
)
def test_names_with_and_without_the_trunk(rng, path, name, task_type):
    manager = trunk_manager(path)
    adapter = trunk_adapter(name, task_type, rng)
    manager.add_adapter(adapter)
    manager.prepare(["x"]).close()
    layer = manager.model.model.proj if path == "model.proj" else manager.model.proj
    np.testing.assert_array_equal(np.asarray(layer.jlora_a[0])[0, :1], adapter.modules[name].a)
    assert list(manager.export_adapter("x").modules) == [name]


@pytest.mark.parametrize("name", ["proj", "model.proj"])
def test_names_that_fit_without_a_task_type_are_read_as_they_are(rng, name):
    manager = trunk_manager("proj", "model.proj")
    manager.add_adapter(adapter := trunk_adapter(name, None, rng))
    manager.prepare(["x"]).close()
    layer = manager.model.model.proj if name == "model.proj" else manager.model.proj
    np.testing.assert_array_equal(np.asarray(layer.jlora_a[0])[0, :1], adapter.modules[name].a)


def test_ambiguous_and_unknown_readings(rng):
    manager = trunk_manager("proj", "model.proj")
    for name in ("proj", "model.proj"):
        with pytest.raises(jlora.AdapterMismatchError, match=r"fit the model both with and without 'model\.'"):
            manager.add_adapter(trunk_adapter(name, "SEQ_CLS", rng))
    with pytest.raises(jlora.AdapterMismatchError, match="no module 'other'"):
        manager.add_adapter(trunk_adapter("other", "SEQ_CLS", rng))
    with pytest.raises(jlora.AdapterMismatchError, match="no module 'proj'"):  # the trunk's name counts
        trunk_manager("model.proj").add_adapter(trunk_adapter("proj", "CAUSAL_LM", rng))


class Sharing(nnx.Module):
    """Two layers, the second with the keys and values of the first."""

    def __init__(self):
        def make(*names):
            return nnx.Dict({f"{name}_proj": nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for name in names})

        self.layers = nnx.List([nnx.Dict(self_attn=make(*names)) for names in ("qkvo", "qo")])


def test_weights_for_shared_keys_and_values_name_the_cause_and_the_pattern_to_skip(rng):
    names = [f"layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkvo"]
    adapter = jlora.Adapter(name="x", modules={name: factors(rng, 2, 8, 8) for name in names})
    manager = make_manager(Sharing())
    with pytest.raises(jlora.AdapterMismatchError) as raised:
        manager.add_adapter(adapter)
    for problem, name in zip(raised.value.problems, ("k", "v"), strict=True):
        assert f"no module 'layers.1.self_attn.{name}_proj'" in problem
        assert "or that has no effect, such as keys and values which another layer computes" in problem
        assert f"the nearest is 'layers.0.self_attn.{name}_proj'" in problem
    manager.unwrap()
    manager = make_manager(Sharing(), skip=[r"^layers\.1\.self_attn\.[kv]_proj$"])
    assert manager.add_adapter(adapter)
    assert manager.list_adapters()["x"].modules == 6
