"""Wrapping in place: paths, attributes, classes and aliases stay as they are, and unwrap restores the model."""

import copy
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.layers.site import SlotParam
from tests.layers.merging import Target, check_against_merged, make_adapter, make_manager, normal, serve, wrapped_paths

pytestmark = pytest.mark.device


class Block(nnx.Module):
    def __init__(self, rngs):
        self.q_proj = nnx.Linear(6, 6, rngs=rngs)
        self.proj = nnx.Einsum("BTD,DF->BTF", (6, 6), rngs=rngs)

    def __call__(self, x):
        width = self.q_proj.kernel.shape[1]  # a neighbour's kernel is read, as attention code does
        return self.proj(self.q_proj(x) / width)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.dropout = nnx.Dropout(0.0)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x


def modules_of(model):
    return {path: module for path, module in nnx.iter_modules(model)}


def test_paths_attributes_and_classes_stay_and_unwrap_gives_the_very_same_model():
    """Unwrap restores attributes, classes and the bookkeeping of Flax, so compiled functions are reused."""
    model = Model()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def forward(model, tokens):
        return model(tokens)

    tokens = np.arange(6, dtype=np.int32).reshape(3, 2)
    before = np.asarray(forward(model, tokens))
    paths = set(nnx.to_flat_state(nnx.state(model)).paths)
    modules = modules_of(model)
    classes = {path: type(module) for path, module in modules.items()}
    attributes = {path: dict(vars(module)) for path, module in modules.items()}
    structure, graphdef = jax.tree.structure(model), nnx.graphdef(model)
    manager = make_manager(model, [make_adapter("one", [Target("blocks.0.q_proj", 6, 6, "")], 2)])
    assert {path for path, v in nnx.to_flat_state(nnx.state(model)) if not isinstance(v, SlotParam)} == paths
    for path, module in modules_of(model).items():
        assert module is modules[path]
        assert isinstance(module, classes[path])
        assert attributes[path].keys() <= vars(module).keys()
    assert model.blocks[1].q_proj.in_features == 6
    chex.assert_trees_all_equal_structs(manager.slots, nnx.state(model, SlotParam))
    with manager.prepare(["one"] * 3) as batch:
        assert not np.array_equal(serve(model, tokens, batch), before)
    assert manager.unwrap() is model
    assert {path: type(module) for path, module in modules_of(model).items()} == classes
    assert {path: dict(vars(module)) for path, module in modules_of(model).items()} == attributes
    assert jax.tree.structure(model) == structure
    assert nnx.graphdef(model) == graphdef
    np.testing.assert_array_equal(forward(model, tokens), before)


def test_wrapping_twice_is_refused_until_unwrap():
    model = Model()
    first = make_manager(model)
    with pytest.raises(LoRAError, match=r"embed: this model is wrapped already; call unwrap\(\)"):
        make_manager(model)
    first.unwrap()
    check_against_merged(
        model, [Target("blocks.1.q_proj", 6, 6, "blocks.1.q_proj.kernel")], np.arange(6, dtype=np.int32).reshape(3, 2)
    )


class Aliased(nnx.Module):
    """A model with one layer under three paths."""

    def __init__(self):
        self.first = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.again = self.first
        self.bank = nnx.Dict({"a": self.first, "b": nnx.Linear(6, 6, rngs=nnx.Rngs(1))})

    def __call__(self, x):
        return self.bank["b"](self.again(jnp.tanh(self.first(x))))


@pytest.mark.parametrize("name", ["again", "bank.a"])
def test_an_alias_is_wrapped_once_and_served_under_every_name(name):
    manager = check_against_merged(Aliased(), [Target(name, 6, 6, "first.kernel")], normal(3, 2, 6))
    assert wrapped_paths(make_manager(manager.model, target_modules=[name])) == ["first"]


def test_an_alias_named_twice_by_one_adapter_is_refused():
    manager = make_manager(Aliased())
    both = [Target("first", 6, 6, ""), Target("again", 6, 6, "")]
    with pytest.raises(AdapterMismatchError, match="again: fills slice 0 of 'first', which first fills too"):
        manager.add_adapter(make_adapter("both", both, 2))


def test_reference_cycles_are_walked_once():
    class Child(nnx.Module):
        def __init__(self, parent):
            self.parent = parent
            self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

    class Parent(nnx.Module):
        def __init__(self):
            self.child = Child(self)

        def __call__(self, x):
            return self.child.proj(x)

    model = Parent()
    manager = make_manager(model, [make_adapter("one", [Target("child.proj", 6, 6, "")], 2)])
    assert [(layer.path, layer.aliases) for layer in manager.layers()] == [("child.proj", ())]


def test_containers_of_modules():
    class Boxes(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.several = nnx.List([nnx.Linear(6, 6, rngs=rngs)])
            self.pair = nnx.data((nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)))
            self.named = nnx.data({"x": [nnx.Linear(6, 6, rngs=rngs)]})
            self.chain = nnx.Sequential(nnx.Linear(6, 6, rngs=rngs), jnp.tanh, nnx.Linear(6, 6, rngs=rngs))

        def __call__(self, x):
            return self.chain(self.pair[1](self.pair[0](self.several[0](x))) + self.named["x"][0](x))

    paths = ["several.0", "pair.0", "pair.1", "named.x.0", "chain.layers.0", "chain.layers.2"]
    targets = [Target(path, 6, 6, f"{path}.kernel") for path in paths]
    check_against_merged(Boxes(), targets, normal(3, 2, 6))
    manager = make_manager(Boxes())
    assert sorted(wrapped_paths(manager)) == sorted(paths)


def test_a_copy_that_no_manager_writes_is_refused():
    model = Model()
    manager = make_manager(model, [make_adapter("one", [Target("blocks.0.q_proj", 6, 6, "")], 2)])
    with pytest.raises(LoRAError, match="cannot be deep-copied"):
        copy.deepcopy(model)
    clone = nnx.clone(model)  # shares the slot arrays, which the next write donates
    with manager.prepare(["one"]) as batch, pytest.raises(RuntimeError, match="deleted"):
        serve(clone, np.zeros((1, 2), np.int32), batch)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_wrapped_model_cannot_be_pickled(protocol):
    model = Model()
    manager = make_manager(model)
    for part in (model, model.blocks[0].q_proj):
        with pytest.raises(LoRAUsageError, match=r"a wrapped model cannot be pickled.*manager\.unwrap\(\)"):
            pickle.dumps(part, protocol)
    manager.unwrap()
    found = pickle.loads(pickle.dumps(model, protocol))
    tokens = np.zeros((1, 2), np.int32)
    np.testing.assert_array_equal(found(tokens), model(tokens))


def test_a_shallow_copy_of_a_wrapped_layer_is_wrapped():
    layer = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
    model = nnx.List([layer])
    make_manager(model)
    twin = copy.copy(layer)
    assert type(twin) is type(layer) is not nnx.Linear
    assert vars(twin).keys() == vars(layer).keys()
    assert all(vars(twin)[name] is value for name, value in vars(layer).items() if name != "_pytree__state")


# --- Failed wrapping -----------------------------------------------------------------------------------------------


def held(model):
    """Return the class and the attributes of every module, by identity."""
    return {
        path: (type(module), {name: id(value) for name, value in vars(module).items() if name != "_pytree__nodes"})
        for path, module in modules_of(model).items()
    }


def test_slots_that_do_not_fit_leave_the_model_as_it_was():
    model = Model()
    before = held(model)
    with pytest.raises(LoRAError, match=r"do not fit on the device: [0-9,]{16,} bytes are needed, .* max_loras=3"):
        make_manager(model, max_lora_rank={"*": 4, "blocks.1.q_proj": 10**11})
    assert held(model) == before
    make_manager(model)


def test_slots_larger_than_the_device_memory_are_refused(monkeypatch):
    model = Model()
    before = held(model)
    # 6 sites: embed (11 -> 6), its logits (6 -> 11) and 4 of 6 -> 6; 3 slots of rank 4 in float32, and 8 bytes each.
    needed = 3 * (4 * 4 * (17 + 17 + 4 * 12) + 6 * 8)
    monkeypatch.setattr("jlora.layers.site.device_bytes", lambda device: needed - 1)
    found = (
        f"{needed:,} bytes are needed, {needed // 3:,} for each of max_loras=3 .*on a device that has {needed - 1:,}"
    )
    with pytest.raises(LoRAError, match=found):
        make_manager(model)
    assert held(model) == before
    monkeypatch.setattr("jlora.layers.site.device_bytes", lambda device: needed)
    make_manager(model)
